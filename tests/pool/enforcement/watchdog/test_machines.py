"""Machines, drivers and unmanaged processes, as a watchdog meets them."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool_client import Device
from support import nvml_stub
from support.pools import eventually, identity, running
from support.watchdog import WatchedPool, watched_pool

V100 = Device("GPU-0", 0, "Tesla V100-SXM2-32GB", 32768)
CARD = "gpu GPU-0 Tesla V100-SXM2-32GB"
#: The Unix user of that name.
NOBODY = 65534


def sleeper(user: int, **environment: str) -> subprocess.Popen[bytes]:
    """Start a process of another user that does nothing."""
    return subprocess.Popen(["/bin/sleep", "600"], user=user, env=environment)


async def test_a_process_without_a_lease_is_reported_once_and_left_alone(there: WatchedPool) -> None:
    with running() as kernel, running() as unmanaged:
        await there.hold("2%", identity(kernel))
        there.scene(CARD, f"process {kernel.pid} 300", f"process {unmanaged.pid} 5000")
        assert there.look()["unmanaged"] == []
        said = there.look(10, times=20)
        assert said["unmanaged"] == [unmanaged.pid]
        assert len(said["logged"]) == 1
        assert f"Process {unmanaged.pid} (" in said["logged"][0]
        assert "uses 5000MiB of" in said["logged"][0]
        assert unmanaged.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
async def test_unmanaged_processes_are_ended_where_that_is_wanted_but_for_those_of_root_and_displays(
    tmp_path: Path, nvml: Path
) -> None:
    async with watched_pool(tmp_path, nvml, V100, end_unmanaged=True) as there:
        await there.pool.status()
        nobody, drawing, root = sleeper(NOBODY), sleeper(NOBODY), sleeper(0)
        try:
            there.scene(
                CARD,
                *(f"process {each.pid} 500" for each in (nobody, root)),
                f"process {drawing.pid} 12 graphics",
            )
            there.look(30, times=4)
            await eventually(lambda: nobody.poll() == -signal.SIGTERM)
            there.look(30, times=4)
            assert (root.poll(), drawing.poll()) == (None, None)
        finally:
            for each in (nobody, drawing, root):
                each.kill()
                each.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
async def test_nobody_can_charge_their_memory_to_the_lease_of_another_user(there: WatchedPool) -> None:
    with running() as kernel:
        lease = await there.hold("2%", identity(kernel))
        forger = sleeper(NOBODY, GPU_POOL_LEASE=lease.id)
        try:
            there.scene(CARD, f"process {forger.pid} 9000")
            assert there.look(10, times=3)["unmanaged"] == [forger.pid]
            assert (await there.pool.get_lease(lease.id)).notice == ""
        finally:
            forger.kill()
            forger.wait()


async def test_a_card_that_falls_off_the_bus_is_a_problem_and_nobodys_fault(
    tmp_path: Path, nvml: Path
) -> None:
    other = replace(V100, uuid="GPU-1", index=1)
    async with watched_pool(tmp_path, nvml, V100, other) as there:
        with running() as kernel, running() as neighbour:
            one = await there.hold("1 index=0", identity(kernel), "one")
            two = await there.hold("50% index=1", identity(neighbour), "two")
            lost = CARD, f"process {kernel.pid} 900", "fail * 15"
            there.scene(CARD, f"process {kernel.pid} 900", CARD.replace("-0", "-1"))
            there.look(2, times=2)
            there.scene(*lost, CARD.replace("-0", "-1"), f"process {neighbour.pid} 300")
            said = there.look(2, times=60)
            assert said["problems"][0].startswith(
                "GPU 0 (Tesla V100-SXM2-32GB) is left out: it does not answer"
            )
            for lease in (one, two):
                await there.pool.release(lease.id)
            there.look()
        seconds = [row.device_seconds for row in await there.pool.history()]
        assert seconds == [3.0, 120.0]


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        ("nvmlDeviceGetComputeRunningProcesses_v3", "driver is too old to say which processes use it"),
        ("nvmlDeviceGetHandleByUUID", "driver is too old"),
    ],
)
async def test_a_driver_without_a_function_is_a_problem(tmp_path: Path, absent: str, words: str) -> None:
    library = nvml_stub.build(tmp_path, absent)
    with running() as kernel:
        async with watched_pool(tmp_path, library, V100) as there:
            await there.hold("2%", identity(kernel))
            there.scene(CARD, f"process {kernel.pid} 9000")
            assert words in there.look(10, times=20)["problems"][0]
        assert kernel.poll() is None


async def test_a_driver_without_the_lists_of_graphics_and_mps_will_do(tmp_path: Path) -> None:
    library = nvml_stub.build(
        tmp_path, "nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3"
    )
    with running() as kernel:
        async with watched_pool(tmp_path, library, V100) as there:
            lease = await there.hold("2%", identity(kernel))
            there.scene(CARD, f"process {kernel.pid} 900")
            assert there.look(10, times=2)["problems"] == []
            assert (await there.pool.get_lease(lease.id)).notice


async def test_a_driver_that_comes_back_is_used_again(there: WatchedPool) -> None:
    with running() as kernel:
        lease = await there.hold("2%", identity(kernel))
        there.scene("fail nvmlInitWithFlags 4")
        assert there.look(10)["problems"][0].startswith("This user may not use the NVIDIA driver.")
        there.scene(CARD, f"process {kernel.pid} 300")
        assert there.look()["problems"] != [], "it is not asked at every look"
        assert there.look(30)["problems"] == []
        await there.pool.release(lease.id)
        there.look()
    assert (await there.history()).peak_mib == 300


MACHINES = {
    "one T4": ([Device("GPU-0", 0, "Tesla T4", 15360)], ["gpu GPU-0 Tesla T4"]),
    "an A100 with MIG": (
        [Device(f"MIG-{n}", 0, "NVIDIA A100-SXM4-40GB", 4864, mig_profile="1g.5gb") for n in range(7)],
        [
            "gpu GPU-0 NVIDIA A100-SXM4-40GB",
            "mig 7",
            *(f"instance MIG-{n} NVIDIA A100-SXM4-40GB MIG 1g.5gb" for n in range(7)),
        ],
    ),
    "an H100": ([Device("GPU-0", 0, "NVIDIA H100 80GB HBM3", 81008)], ["gpu GPU-0 NVIDIA H100 80GB HBM3"]),
    "eight mixed cards": (
        [Device(f"GPU-{n}", n, model, 15360 * (1 + n)) for n, model in enumerate(["Tesla T4", "V100"] * 4)],
        [f"gpu GPU-{n} {model}" for n, model in enumerate(["Tesla T4", "V100"] * 4)],
    ),
}


@pytest.mark.parametrize("machine", MACHINES)
async def test_each_lease_is_charged_what_it_uses_of_its_own_device(
    tmp_path: Path, nvml: Path, machine: str
) -> None:
    devices, cards = MACHINES[machine]
    async with watched_pool(tmp_path, nvml, *devices) as there:
        with running() as kernel, running() as neighbour:
            for number, (process, size) in enumerate([(kernel, "50%"), (neighbour, "50%")]):
                await there.hold(f"{size} memory>=4GiB", identity(process), f"key-{number}")
            leases = (await there.pool.status()).leases
            scene = list(cards)
            for lease, process in zip(leases, (kernel, neighbour), strict=True):
                uuid = lease.slices[0].device.uuid
                place = next(n for n, line in enumerate(scene) if f" {uuid} " in line)
                scene.insert(place + 1, f"process {process.pid} {100 * (1 + leases.index(lease))}")
            there.scene(*scene)
            said = there.look(10, times=3)
            assert (said["unmanaged"], said["problems"]) == ([], [])
            for lease in leases:
                await there.pool.release(lease.id)
            there.look()
        assert [row.peak_mib for row in await there.pool.history()] == [100, 200]
