"""A device plugin or driver that is away for a moment, over the fake of the API: nobody is refused for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import EndReason, Holder, Lease, LeaseState, NeverFits, parse_request
from support.clusters import plain
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import backend_of, claim, cluster_pool, command, notebook, start
from support.pools import eventually, key

HUB = "hub"


@pytest.fixture
def fake(fake: FakeKubernetes) -> FakeKubernetes:
    """One node of NVIDIA's device plugin, each of whose GPUs is handed out in fifty parts."""
    fake.put("nodes", shown())
    return fake


def shown(name: str = "n1") -> dict[str, Any]:
    return plain(name, replicas=50, strategy="time-slicing")


def silent() -> dict[str, Any]:
    """Return the node as it is while its device plugin is being replaced."""
    found = shown()
    found["status"]["allocatable"]["nvidia.com/gpu"] = "0"
    return found


async def asked(pool: GpuPool) -> Lease:
    return await pool.request(parse_request("2%"), Holder("ada"), key())


async def until_away(pool: GpuPool, *, away: bool) -> None:
    async def is_so() -> bool:
        (status,) = (await pool.status()).devices
        return status.drained is away

    await eventually(is_so)


async def test_whoever_asks_meanwhile_waits_and_is_told_for_what(pool: GpuPool, fake: FakeKubernetes) -> None:
    kernel = await start(pool, fake)
    held = await asked(pool)
    fake.put("nodes", silent())
    await until_away(pool, away=True)
    waiting = await asked(pool)
    assert waiting.state is LeaseState.WAITING
    assert "cannot provide any at the moment, for instance because their driver is being replaced" in str(
        await pool.explain(waiting.id)
    )
    # A kernel that runs is not touched, and one on a slice that is held is started: its pod waits.
    assert (await pool.get_lease(kernel)).state is LeaseState.HELD
    await pool.launch(held.id, command())
    (container,) = fake.get("pods", f"gpu-pool-{held.id}-1")["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    fake.put("nodes", shown())
    assert (await pool.wait(waiting.id, 60)).state is LeaseState.HELD
    await until_away(pool, away=False)


async def test_after_the_time_that_is_set_those_who_wait_are_refused_and_those_who_ask(
    fake: FakeKubernetes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    async with cluster_pool(tmp_path / "store.db", config, HUB, gpus_away_for=1) as pool:
        waiting = [await asked(pool) for _ in range(51)][-1]
        assert waiting.state is LeaseState.WAITING
        fake.put("nodes", silent())
        await eventually(lambda: pool.get_lease(waiting.id), lambda lease: lease.state is LeaseState.ENDED)
        ended = await pool.get_lease(waiting.id)
        assert ended.end_reason is EndReason.DEVICE_LOST
        assert ended.notice == "You asked for 2%; this pool has no GPU. That has not changed for 1s."
        assert f"Lease '{waiting.id}' no longer waits" in caplog.text
        with pytest.raises(NeverFits):
            await asked(pool)


async def test_who_waits_for_what_another_node_has_is_not_refused(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    fake.put("nodes", shown("n2"))
    fake.put("persistentvolumeclaims", claim("bob", HUB))
    fake.put("pods", notebook("bob", HUB, node="n2"))
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    async with cluster_pool(tmp_path / "store.db", config, HUB, gpus_away_for=1) as pool:
        leases = [await asked(pool) for _ in range(101)]
        waiting = leases[-1]
        assert waiting.state is LeaseState.WAITING
        fake.put("nodes", silent())

        await eventually(lambda: backend_of(pool).view.away == {"n1"})
        await pool.core.reconciler.once()
        assert backend_of(pool)._hopeless == {}
        await eventually(lambda: not backend_of(pool).view.away)
        on_n2 = next(each for each in leases if each.slices and each.slices[0].device.node == "n2")
        await pool.release(on_n2.id)
        assert (await pool.wait(waiting.id, 60)).state is LeaseState.HELD


async def test_who_asks_as_soon_as_another_node_has_come_is_not_refused(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    fake.remove("nodes", "n1")
    await eventually(lambda: not backend_of(pool).view.devices())
    await pool.core.reconciler.once()
    with pytest.raises(NeverFits):
        await asked(pool)
    fake.put("nodes", shown("n2"))
    await eventually(lambda: bool(backend_of(pool).view.devices()))
    assert await pool.forecast(parse_request("2%"), Holder("ada")) is None
    assert (await asked(pool)).slices[0].device.node == "n2"
