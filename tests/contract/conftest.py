"""Every implementation of the contract, by name."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gpu_pool.audit.callers import Caller, Peer
from gpu_pool.devices.inventory import parse_devices
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import Device, Pool, Process, connect
from support.clusters import hami
from support.fake_kubernetes import fake_kubernetes
from support.hub import ADMIN, Hub, serving_hub
from support.kernel_pods import CARD, serving_cluster
from support.pools import embedded
from support.racks import open_racks
from support.service import DEVICES, ForkServer, serving
from support.whole_devices import WHOLE_CARD, has_dra

_SETTINGS = 'c.PoolSettings.courses = {"cs101": {}}'
#: What a pool promises of processes that it sees: over TCP none (tests/pool/service/test_heartbeats.py).
_OF_PROCESSES_SEEN = {
    "test_the_attached_process_keeps_the_lease",
    "test_a_killed_but_unreaped_process_counts_as_gone",
    "test_attaching_while_waiting_is_legal",
    "test_the_requesters_death_ends_what_nothing_was_attached_to",
    "test_the_kernel_outlives_the_requester",
    "test_grace_lets_the_holder_bring_another_process",
}


@pytest.fixture(
    params=[
        *("embedded", "caller", "racks", "unix"),
        pytest.param("http", marks=pytest.mark.long),
        pytest.param("kubernetes", marks=pytest.mark.long),
        pytest.param("whole-devices", marks=pytest.mark.long),
    ]
)
def backend(request: pytest.FixtureRequest) -> str:
    """What is behind the pool."""
    found: str = request.param
    return found


@pytest.fixture
def is_remote(backend: str) -> bool:
    """Whether the pool is a service's, which leaves some operations to its web pages."""
    return backend not in ("embedded", "caller", "racks")


@pytest.fixture
def device(backend: str) -> Device:
    """The pool's one device."""
    clusters = {"kubernetes": CARD, "whole-devices": WHOLE_CARD}
    (device,) = [clusters[backend]] if backend in clusters else parse_devices(DEVICES)
    return device


@pytest.fixture
async def pool(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    backend: str,
    device: Device,
    children: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Pool]:
    """An empty pool over one V100 with 32 GiB, simulated or a cluster's."""
    if backend == "http" and request.node.originalname in _OF_PROCESSES_SEEN:
        pytest.skip("over TCP a process is only claimed, and its lease lives by heartbeats")
    async with AsyncExitStack() as stack:
        if backend == "embedded":
            opened: Pool = embedded(tmp_path / "store.db", device, courses={"cs101": {}})
        elif backend == "caller":
            inner = embedded(tmp_path / "store.db", device, courses={"cs101": {}})
            opened = _for_caller(await stack.enter_async_context(inner))
        elif backend == "racks":
            opened = open_racks(f"racks:{tmp_path}/store.db")
        elif backend in ("kubernetes", "whole-devices"):
            opened = connect(await _cluster(request, stack, tmp_path, backend))
        elif backend == "http":
            hub: Hub = request.getfixturevalue("hub")
            monkeypatch.setenv("GPU_POOL_TOKEN", await hub.token(ADMIN))
            behind = await stack.enter_async_context(
                serving_hub(children, hub, tmp_path / "service", _SETTINGS)
            )
            opened = connect(behind.url)
        else:
            service = await stack.enter_async_context(serving(children, tmp_path / "service", _SETTINGS))
            opened = connect(service.url)
        yield await stack.enter_async_context(opened)


def _for_caller(pool: GpuPool) -> Pool:
    """Return a pool as an administrator sees it who has connected to its socket."""
    mine = Process.current()
    peer = Peer(os.geteuid(), mine, contained=False)
    return pool.for_caller(Caller("ada", True, "ada", mine, peer, groups=frozenset()))


async def _cluster(request: pytest.FixtureRequest, stack: AsyncExitStack, folder: Path, backend: str) -> str:
    """Serve a cluster with one GPU, of which others give slices or which the pool divides; return the URL."""
    pytest.importorskip("kubernetes_asyncio", reason="the extra [kubernetes] is not installed")
    children: ForkServer = request.getfixturevalue("cluster_children")
    fake = await stack.enter_async_context(fake_kubernetes())
    settings = _SETTINGS
    if backend == "whole-devices":
        has_dra(fake, "gpu-0")
        settings += '\nc.KubernetesSettings.dialect = "shared"\n'
    else:
        fake.put("nodes", hami("n1", model="V100-SXM2-32GB"))
    config = fake.kubeconfig(folder / "kubeconfig")
    service = await stack.enter_async_context(serving_cluster(children, folder / "service", config, settings))
    return service.url
