"""What ``doctor`` says of moving what idle kernels keep on a GPU to host memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from gpu_pool.cli.checks import Check
from gpu_pool.cli.session import CommandSession
from gpu_pool.embedded.pool import store_path
from gpu_pool_client import Device, GpuPoolError

if TYPE_CHECKING:
    from gpu_pool.enforcement.checkpoint import Hindrance

#: The part of the host memory for parked kernels above which a note is made.
_MUCH: Final = 0.9


def check_checkpoint(session: CommandSession) -> Iterator[Check]:
    """Say whether what idle kernels keep on each GPU can be moved; where not, name every reason.

    The driver is asked where nothing else stands in the way, which takes a second.
    """
    # Imported here because health, which is asked often, does not need it.
    from gpu_pool.devices import discover
    from gpu_pool.enforcement.checkpoint import Checkpoint, CheckpointProbe, DriverWorkers, folder_beside
    from gpu_pool.settings import load_settings

    try:
        settings = load_settings()
        devices = [each for each in discover().devices if not each.simulated]
        store = None if session.is_served else store_path(session.address)
    except GpuPoolError:  # told by other checks
        return
    if not devices:
        return
    if settings.checkpoint == "off":
        text = (
            "off (c.PoolSettings.checkpoint): an idle kernel that keeps anything on its GPU keeps its slice"
        )
        yield Check("checkpoint", "ok", text)
        return
    workers = DriverWorkers(settings.tuning.driver_idle)
    probe = CheckpointProbe(settings, workers)
    alike: defaultdict[tuple[Hindrance, ...], list[Device]] = defaultdict(list)
    for device in devices:
        tier = "mig" if device.mig_profile else settings.tier
        alike[tuple(probe.hindrances(device, tier))].append(device)
    workers.stop()
    for found, its_devices in alike.items():
        yield from _told(found, its_devices)
    if store is not None and any(_is_done(found) for found in alike):
        memory = Checkpoint(folder_beside(store), settings).host_memory()
        yield _check_budget(memory.leases, memory.taken_mib, memory.budget_mib)


def _told(found: Sequence[Hindrance], devices: Sequence[Device]) -> Iterator[Check]:
    which = "GPU " + ", ".join(dict.fromkeys(str(each.index) for each in devices))
    if _is_done(found):
        yield Check("checkpoint", "ok", f"{which}: what idle kernels keep there can be moved to host memory")
    for each in found:
        begins = "an idle kernel keeps its slice, since" if each.decisive else "it is tried as is set, though"
        yield Check("checkpoint", "note", f"{which}: {begins} {each.why}", each.remedy)


def _is_done(found: Sequence[Hindrance]) -> bool:
    return not any(each.decisive for each in found)


def _check_budget(kernels: int, taken_mib: int, budget_mib: int) -> Check:
    """Say how much of the host memory for parked kernels is taken, and note where little is left."""
    text = f"{taken_mib} of {budget_mib} MiB of host memory for parked kernels are taken (parked: {kernels})"
    if taken_mib < _MUCH * budget_mib:
        return Check("checkpoint", "ok", text)
    return Check(
        "checkpoint",
        "note",
        f"{text}: idle kernels that hold more than is left keep their slice",
        "Raise c.PoolSettings.checkpoint_host_mib, if the machine has the memory.",
    )
