"""A cluster as a pool when many ask, start and end at once, over a small served fake of the API."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpu_pool.cluster.settings import ClusterTimes
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import EndReason, PodPhase
from support.fake_kubernetes import FakeKubernetes, trouble
from support.kernel_pods import backend_of, command, held, running
from support.pools import eventually, take


async def test_of_many_requests_at_once_few_are_before_the_store(
    pool: GpuPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, now, most = pool.backend.adapt, 0, 0

    async def counted(*asked: Any) -> Any:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        found = await look(*asked)
        now -= 1
        return found

    monkeypatch.setattr(pool.backend, "adapt", counted)
    leases = await asyncio.gather(*(take(pool, "2%", f"key-{number}") for number in range(80)))
    assert len(set(leases)) == 80
    assert most <= 32


@pytest.mark.parametrize("times", [ClusterTimes(placed_within=0.0)])  # nothing places them here
async def test_of_many_kernels_at_once_no_pod_waits_long_for_its_secret(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    leases = [await held(pool) for _ in range(40)]
    await asyncio.gather(*(pool.launch(lease.id, command()) for lease in leases))
    ahead, most = 0, 0
    for asked in fake.requests:
        ahead += (asked == ("POST", "pods")) - (asked == ("POST", "secrets"))
        most = max(most, ahead)
    assert (fake.asked("POST", "secrets"), ahead) == (40, 0)
    assert most <= 16


async def test_a_lease_is_not_given_up_while_its_kernel_waits_for_its_turn(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    fake.before_write = lambda *_: trouble(503, "ServiceUnavailable", "too many")
    lease = await held(pool)
    launch = asyncio.create_task(pool.launch(lease.id, command()))
    await eventually(lambda: pool.get_lease(lease.id), lambda seen: seen.process is not None)
    await eventually(lambda: fake.asked("POST", "pods") > 0)
    assert not launch.done()
    fake.before_write = lambda *_: None
    assert (await launch).phase is PodPhase.STARTING


@pytest.mark.parametrize("times", [ClusterTimes(placed_within=0.0)])  # nothing places them here
async def test_many_kernels_that_are_evicted_at_once_take_few_looks_at_the_cluster(
    pool: GpuPool, fake: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = [(await held(pool)).id for _ in range(40)]
    pods = [f"gpu-pool-{lease}-1" for lease in leases]
    for lease, pod in zip(leases, pods, strict=True):
        await pool.launch(lease, command())
        fake.run(pod)
        await running(pool, lease)
    looks, others = [], backend_of(pool).view.others

    def counted(live: frozenset[str], parked: frozenset[str]) -> Any:
        looks.append(live)
        return others(live, parked)

    monkeypatch.setattr(backend_of(pool).view, "others", counted)
    for pod in pods:
        fake.change("pods", pod, phase="Failed", reason="Evicted", message="The node was low on memory.")
    await eventually(pool.status, lambda status: not status.leases)
    assert {(await pool.get_lease(lease)).end_reason for lease in leases} == {EndReason.TAKEN}
    assert len(looks) <= 10
