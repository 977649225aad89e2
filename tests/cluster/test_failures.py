"""How a kernel failed in its pod is kept: by the service that sees it, or by the next one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import Failure, PodPhase
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import backend_of, cluster_pool, start, until_pod
from support.pools import eventually

HUB = "hub"
WORDS = "It ended with status 1. Its last output: ModuleNotFoundError: No module named 'ipykernel'"


def fail(fake: FakeKubernetes, lease_id: str) -> None:
    """Let a lease's kernel end by itself, with words of its own."""
    message = (
        "Traceback\x1b[0m\n  File ...\n" + "y" * 400 + "\nModuleNotFoundError: No module named 'ipykernel'\n"
    )
    state: dict[str, Any] = {"terminated": {"exitCode": 1, "reason": "Error", "message": message}}
    statuses = [{"state": state}]
    fake.change("pods", f"gpu-pool-{lease_id}-1", phase="Failed", containerStatuses=statuses)


async def failure_of(pool: GpuPool, lease_id: str) -> Failure:
    found: list[Failure] = []

    async def is_known() -> bool:
        failure = (await pool.get_lease(lease_id)).failure
        found.extend([failure] if failure else [])
        return bool(found)

    await eventually(is_known)
    return found[0]


async def test_the_last_output_of_a_kernel_are_kept_with_its_lease_and_in_the_history(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await start(pool, fake)
    fail(fake, lease_id)
    assert (await until_pod(pool, lease_id, lambda pod: pod.phase is PodPhase.ENDED)).message == WORDS
    failure = await failure_of(pool, lease_id)
    assert failure == Failure(failure.at, WORDS, f"gpu-pool-{lease_id}-1", "n1", "example.org/notebook:1")
    await pool.release(lease_id)
    (row,) = await pool.history()
    assert row.failure is not None
    assert row.failure.message == WORDS
    assert (await pool.get_lease(lease_id)).failure == failure


async def test_what_failed_while_no_service_was_there_is_kept_by_the_next(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    store, config = tmp_path / "store.db", fake.kubeconfig(tmp_path / "kubeconfig")
    async with cluster_pool(store, config, HUB) as pool:
        lease_id = await start(pool, fake)
    fail(fake, lease_id)
    async with cluster_pool(store, config, HUB) as pool:
        before = await failure_of(pool, lease_id)
        assert before.message == WORDS
    async with cluster_pool(store, config, HUB) as pool:
        await asyncio.gather(*backend_of(pool).kernels._tasks)
        assert (await pool.get_lease(lease_id)).failure == before
