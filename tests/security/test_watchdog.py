"""No process hides from the watchdog by its name, and none charges its memory to another's lease."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_pool_client import Device, EndReason, Lease, LeaseState, Process
from support import nvml_stub
from support.disguises import OTHER, STUDENT, disguised, needs_root, with_disguised_child
from support.pools import eventually
from support.watchdog import WatchedPool, watched_pool

pytestmark = needs_root
V100 = Device("GPU-0", 0, "Tesla V100-SXM2-32GB", 32768)
CARD = "gpu GPU-0 Tesla V100-SXM2-32GB"


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the NVML stub; give its folder."""
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))


async def is_ended(there: WatchedPool, lease: Lease, worker: Process) -> bool:
    """Whether a process is its lease's, whose user is warned, and is ended with it."""
    there.scene(CARD, f"process {worker.pid} 30000")
    assert there.look(10, times=2)["unmanaged"] == []
    assert "uses 30000MiB" in (await there.pool.get_lease(lease.id)).notice
    there.look(10, times=14)
    await eventually(lambda: not worker.is_alive())
    there.look()
    return (await there.pool.get_lease(lease.id)).end_reason is EndReason.OVER_MEMORY


#: Of a part of the driver that is root's, and root's by itself.
@pytest.mark.parametrize("name", [b"dcgm\rUid:\t0", b"dcgm\x85Uid:\t0", b"Uid:\t0\t0\t0\t0"])
async def test_a_child_of_a_lease_does_not_hide_behind_a_name(
    tmp_path: Path, nvml: Path, name: bytes
) -> None:
    async with watched_pool(tmp_path, nvml, V100) as there:
        with with_disguised_child(name) as (kernel, worker):
            assert await is_ended(there, await there.hold("2%", kernel), worker)


async def test_what_was_started_on_a_lease_does_not_hide_behind_a_name(tmp_path: Path, nvml: Path) -> None:
    async with watched_pool(tmp_path, nvml, V100) as there:
        with disguised(b"kernel") as kernel:
            lease = await there.hold("2%", kernel)
            with disguised(b"dcgm\rUid:\t0", environ={"GPU_POOL_LEASE": lease.id}) as worker:
                assert await is_ended(there, lease, worker)


@pytest.mark.parametrize("name", [b"dcgm\rUid:\t0", b"Uid:\t0\t0\t0\t0"])
async def test_a_process_without_a_lease_is_unmanaged_by_whatever_name(
    tmp_path: Path, nvml: Path, name: bytes
) -> None:
    async with watched_pool(tmp_path, nvml, V100, end_unmanaged=True) as there:
        await there.pool.status()
        with disguised(name) as unmanaged:
            there.scene(CARD, f"process {unmanaged.pid} 30000")
            found = there.look(10, times=3)
            assert found["unmanaged"] == [unmanaged.pid]
            (logged,) = found["logged"]
            assert "of nobody uses" in logged
            assert logged.isprintable()
            for _ in range(3):
                there.look(30)
            await eventually(lambda: not unmanaged.is_alive())


async def test_memory_is_not_charged_to_the_lease_of_another_user(tmp_path: Path, nvml: Path) -> None:
    async with watched_pool(tmp_path, nvml, V100) as there:
        with disguised(b"kernel", OTHER) as victims:
            lease = await there.hold("2%", victims)
            name = b"a\rUid:\t%d" % OTHER
            with disguised(name, STUDENT, environ={"GPU_POOL_LEASE": lease.id}) as attacker:
                there.scene(CARD, f"process {victims.pid} 300", f"process {attacker.pid} 30000")
                assert there.look(10, times=20)["unmanaged"] == [attacker.pid]
                assert victims.is_alive()
            found = await there.pool.get_lease(lease.id)
            assert (found.state, found.notice) == (LeaseState.HELD, "")
