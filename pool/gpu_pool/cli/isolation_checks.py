"""What ``doctor`` looks at where slices are enforced: compute modes, and MPS that is not the pool's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpu_pool.cli.checks import Check
from gpu_pool.devices import discover
from gpu_pool.enforcement import TierFailed
from gpu_pool.enforcement.mps import commands, compute_mode, processes
from gpu_pool.settings import load_settings
from gpu_pool_client import Device, GpuPoolError

_BY_MPS = ("mps", "cgroups")


def check_isolation() -> Iterator[Check]:
    """Look at how slices are to be enforced, and at what stands in the way."""
    try:
        tier = load_settings().tier
        devices = [each for each in discover().devices if not each.simulated and each.mig_profile is None]
    except GpuPoolError:  # told by other checks
        return
    if tier in _BY_MPS:
        yield Check("tier", "ok", f"{tier}, by gpu-pool serve")
    elif tier != "auto":
        yield Check("tier", "ok", tier)
    if devices:
        yield from _programs(tier)
        yield from _modes(tier, devices)


def _programs(tier: str) -> Iterator[Check]:
    """Look for the programs of MPS, where it is wanted, and for MPS where it is not."""
    if tier in _BY_MPS:
        try:
            commands.find(processes.TOOL)
        except TierFailed as failure:
            yield Check("mps", "broken", failure.message, failure.remedy)
        return
    for pid in filter(processes.is_believed, filter(processes.is_daemon, processes.mps_processes())):
        user = processes.user_name_of(pid)
        yield Check(
            "mps",
            "note",
            f"MPS runs, process {pid} of {user}: kernels on its GPUs may be held to limits that the pool "
            "does not know",
            f"Have {user} stop it: echo quit | {processes.TOOL}",
        )


def _modes(tier: str, devices: Sequence[Device]) -> Iterator[Check]:
    """Look at the compute modes, of which all but one keep processes from sharing a device."""
    for device in devices:
        try:
            mode = compute_mode.compute_mode(device)
        except TierFailed:  # no nvidia-smi, or a card that it does not know: other checks say so
            return
        exclusive = mode == compute_mode.EXCLUSIVE and tier in _BY_MPS
        if mode != compute_mode.DEFAULT and not exclusive:
            yield Check(
                "compute mode",
                "broken",
                f"GPU {device.index} is {mode}: kernels cannot share it",
                f"sudo nvidia-smi -i {device.uuid} -c DEFAULT",
            )
