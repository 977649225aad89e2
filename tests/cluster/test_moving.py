"""The service of a cluster moves to another node, with its store: kernels must not notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fake_kubernetes import FakeKubernetes
from support.hub import Hub, serving_hub
from support.pools import eventually
from support.service import ForkServer

#: Run by the service first: it sees another boot, of a machine that is up for a month longer.
ANOTHER_NODE = """
import pathlib, time
from gpu_pool_client import _processes as processes
read, uptime = pathlib.Path.read_text, time.clock_gettime
pathlib.Path.read_text = lambda path, *how, **more: (
    "another" if path.name == "boot_id" else read(path, *how, **more)
)
time.clock_gettime = lambda clock: uptime(clock) + 30 * 86400
processes.boot_id.cache_clear()
assert processes.boot_id() == "another"
"""


@pytest.mark.long
async def test_leases_are_kept_on_another_node(
    cluster_children: ForkServer, hub: Hub, fake: FakeKubernetes, tmp_path: Path
) -> None:
    token = await hub.token("ada")
    settings = (
        "c.PoolSettings.default_course = {'longest_lease': '2h'}\nc.KubernetesSettings.namespace = 'hub'"
    )
    config = str(fake.kubeconfig(tmp_path / "kubeconfig"))
    serving = serving_hub(
        cluster_children, hub, tmp_path / "pool", settings, "--kubernetes", kubeconfig=config
    )
    async with serving as behind:
        holds = await behind.take(token, "60%", "holds", Gpu_Pool_Client="0123456789abcdef")
        waits = await behind.take(token, "60%", "waits", Gpu_Pool_Client="0123456789abcdef")
        assert (holds["state"], waits["state"]) == ("held", "waiting")
        await behind.service.end()
        behind.service.prelude = ANOTHER_NODE
        await behind.service.start()
        another = await behind.take(token, "10%", "new", Gpu_Pool_Client="0123456789abcdef")

        async def was_looked_at() -> bool:
            """A lease that begins and ends after the start ends only in a look at all of them."""
            _, lease = await behind.ask(token, "GET", f"/leases/{another['id']}")
            return bool(lease["state"] == "ended")

        await behind.ask(token, "POST", f"/leases/{another['id']}/renew", {"ttl": 0})
        await eventually(was_looked_at)
        for lease, state in ((holds, "held"), (waits, "waiting")):
            _, now = await behind.ask(token, "GET", f"/leases/{lease['id']}")
            assert (now["state"], now["end_reason"]) == (state, None)
