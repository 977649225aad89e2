"""Whether what processes keep on a device can be moved to host memory: decided from facts alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from gpu_pool_client import Device

#: The first driver that can do it to a PyTorch process, and has it in its library.
_FIRST_DRIVER: Final = 570
#: The drivers under which it is known to work: it was seen with 580, and is not reported to fail below 610,
#: which has crashed a process by locking it (https://github.com/NVIDIA/cuda-checkpoint/issues/58).
_PROVEN_DRIVERS: Final = range(580, 610)
#: The architecture as Linux names it; NVIDIA's notes list no other.
_MACHINE: Final = "x86_64"
#: The tiers whose processes reach their device through MPS.
BY_MPS: Final = ("mps", "cgroups")
_TRY: Final = "Try make test-gpu on a GPU that nobody uses; if that works: c.PoolSettings.checkpoint = 'on'"


@dataclass(frozen=True, slots=True)
class Hindrance:
    """One reason why processes on a device are not moved."""

    #: A clause that can follow "since".
    why: str
    #: What an administrator can do, in a sentence.
    remedy: str
    #: Whether they are kept for it. Otherwise it is not known to work, and the administrator has it tried.
    decisive: bool = True


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What is known of a device and its machine."""

    device: Device
    #: The name of the tier that enforces its slices.
    tier: str
    #: The architecture of the machine, as ``uname -m`` has it.
    machine: str
    #: Whether NVIDIA's cuda-bindings are installed.
    has_bindings: bool
    #: Host memory in MiB that one parked kernel may have now.
    host_mib: int


def hindrances(facts: CheckpointFacts, *, insisted: bool, under_mps: bool) -> list[Hindrance]:
    """Return all that keeps processes on a device from being moved, what is decisive first.

    Parameters
    ----------
    facts:
        What is known. What only the driver knows is not among it.
    insisted:
        Whether the administrator has it tried where it is not known to work.
    under_mps:
        Whether the administrator has seen it work under MPS.
    """
    found = [*_of_device(facts.device), *_of_machine(facts)]
    if facts.tier in BY_MPS and not under_mps:
        found.append(
            Hindrance(
                "it is not proven on devices shared by MPS (c.PoolSettings.checkpoint_under_mps)",
                "Set c.PoolSettings.checkpoint_under_mps = True once you have seen that the driver does it.",
            )
        )
    if not insisted:
        return [replace(each, decisive=True) for each in found]
    return sorted(found, key=lambda each: not each.decisive)


def _of_device(device: Device) -> Iterator[Hindrance]:
    if device.simulated:
        yield Hindrance("the device is simulated", "Use a real GPU.")
    if device.mig_profile is not None:
        yield Hindrance(
            "the device is a MIG instance, for which NVIDIA does not support it",
            "Divide whole GPUs, without MIG, for courses whose kernels are to lend their slice.",
        )
    if device.unified:
        yield Hindrance(
            "the device has no memory of its own, so nothing would become free", "There is nothing to do."
        )
    yield from _of_driver(device.driver)


def _of_driver(driver: str) -> Iterator[Hindrance]:
    major = driver.partition(".")[0]
    number = int(major) if major.isascii() and major.isdigit() else None
    if number is None:
        yield Hindrance("the version of its driver is not known", _TRY, decisive=False)
    elif number < _FIRST_DRIVER:
        yield Hindrance(
            f"it needs driver {_FIRST_DRIVER} or newer, and this is {driver}",
            f"Install driver {_PROVEN_DRIVERS.start} of NVIDIA, or a newer one of its kind.",
        )
    elif number not in _PROVEN_DRIVERS:
        yield Hindrance(
            f"it is known to work with drivers from {_PROVEN_DRIVERS.start} to below {_PROVEN_DRIVERS.stop}, "
            f"and this is {driver}",
            _TRY,
            decisive=False,
        )


def _of_machine(facts: CheckpointFacts) -> Iterator[Hindrance]:
    if not facts.has_bindings:
        yield Hindrance(
            "cuda-bindings is missing",
            "pip install 'jupyter-gpu-pool[checkpoint]'",
        )
    if facts.host_mib < facts.device.context_mib:
        yield Hindrance(
            f"{facts.host_mib} MiB of host memory are left for parked kernels, "
            f"and CUDA alone takes {facts.device.context_mib}",
            "Raise c.PoolSettings.checkpoint_host_mib, or see what takes the machine's memory.",
        )
    if facts.machine != _MACHINE:
        yield Hindrance(
            f"NVIDIA names no architecture but {_MACHINE} for it, and this is {facts.machine}",
            _TRY,
            decisive=False,
        )
