"""Pods of one node are placed a few at a time where the cluster stumbles over many: HAMi."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cluster.dialects.hami import Hami
from gpu_pool.cluster.pod_builder import is_placed
from gpu_pool.cluster.settings import ClusterTimes
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import Lease, PoolUnreachable
from support.clusters import plain
from support.fake_kubernetes import FakeKubernetes, trouble
from support.kernel_pods import backend_of, cluster_pool, command, held
from support.pools import eventually

HUB = "hub"
AT_ONCE = Hami.table.at_once


def pods(fake: FakeKubernetes) -> list[str]:
    return [name for name in fake.named("pods") if name != "jupyter-ada"]


async def launching(pool: GpuPool, count: int) -> tuple[list[Lease], list[asyncio.Task[object]]]:
    leases = [await held(pool) for _ in range(count)]
    return leases, [asyncio.ensure_future(pool.launch(each.id, command())) for each in leases]


@pytest.mark.parametrize("times", [ClusterTimes(placed_within=600.0)])
async def test_the_next_pod_is_created_when_one_has_its_gpu(pool: GpuPool, fake: FakeKubernetes) -> None:
    _, tasks = await launching(pool, AT_ONCE + 2)
    await eventually(lambda: sum(task.done() for task in tasks) == AT_ONCE)
    first, second = pods(fake)[:2]
    fake.run(first)
    await eventually(lambda: len(pods(fake)) == AT_ONCE + 1)
    fake.remove("pods", second)
    await asyncio.wait_for(asyncio.gather(*tasks), 120)


@pytest.mark.parametrize("times", [ClusterTimes(placed_within=0.2)])
async def test_a_pod_that_is_not_placed_keeps_the_others_back_for_a_while_only(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    _, tasks = await launching(pool, 2 * AT_ONCE + 1)
    await asyncio.wait_for(asyncio.gather(*tasks), 120)
    assert len(pods(fake)) == 2 * AT_ONCE + 1


@pytest.mark.parametrize("times", [ClusterTimes(slot_within=0.1)])
async def test_whoever_waits_for_long_is_told_and_keeps_the_slice(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    leases, tasks = await launching(pool, AT_ONCE + 1)
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    (late,) = (lease for lease, answer in zip(leases, answers, strict=True) if isinstance(answer, Exception))
    with pytest.raises(PoolUnreachable, match="a few at a time.*Your slice is kept"):
        await pool.launch(late.id, command())
    fake.run(pods(fake)[0])
    await eventually(lambda: len(backend_of(pool).kernels._placement_rate._placing) < AT_ONCE)
    await pool.launch(late.id, command())


async def test_what_is_refused_keeps_nobody_back(pool: GpuPool, fake: FakeKubernetes) -> None:
    def refuse(method: str, _: str) -> Any:
        return trouble(403, "Forbidden", "exceeded quota") if method == "POST" else None

    fake.before_write = refuse
    _, tasks = await launching(pool, 2 * AT_ONCE)
    answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 120)
    assert all("exceeded quota" in str(each) for each in answers)


async def test_where_it_does_not_matter_nobody_waits(fake: FakeKubernetes, tmp_path: Path) -> None:
    times = ClusterTimes(placed_within=600.0)
    fake.put("nodes", plain("n1", gpus=AT_ONCE + 2))
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    async with cluster_pool(tmp_path / "store.db", config, HUB, times=times) as pool:
        leases = [await held(pool, "1") for _ in range(AT_ONCE + 2)]
        launches = (pool.launch(each.id, command()) for each in leases)
        await asyncio.wait_for(asyncio.gather(*launches), 120)
        assert len(pods(fake)) == AT_ONCE + 2


@pytest.mark.parametrize(
    ("node", "phase", "expected"),
    [("", "", False), ("n1", "", True), ("n1", "allocating", False), ("n1", "success", True)],
)
def test_a_node_is_free_for_the_next_once_hami_has_given_out_the_gpu(
    node: str, phase: str, expected: bool
) -> None:
    annotations = {"hami.io/bind-phase": phase} if phase else {}
    assert is_placed({"metadata": {"annotations": annotations}, "spec": {"nodeName": node}}) is expected
