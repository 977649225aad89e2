"""``health`` and ``doctor``: whether the pool works, and what to do where it does not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import click

from gpu_pool.cli import screen
from gpu_pool.cli.checks import Check, check_jupyter, check_machine, check_pool, check_store
from gpu_pool.cli.course_checks import check_courses, check_preloads
from gpu_pool.cli.hibernation import check_hibernation
from gpu_pool.cli.session import CommandSession, json_option, verb
from gpu_pool.embedded.pool import store_path
from gpu_pool_client import BadRequest, Device, GpuPoolError
from gpu_pool_client._log import escaped

if TYPE_CHECKING:
    from gpu_pool.enforcement.checkpoint import Hindrance

_STYLES = {"ok": "green", "note": "yellow", "broken": "bold red"}


@verb("health", "gpu-pool health && echo all is well")
@json_option
def health(session: CommandSession) -> int:
    """Say in a few lines whether the pool works. Exit status 1 if it does not."""
    return _report(session, chain(check_pool(session), check_courses(session)))


@verb(
    "doctor",
    "gpu-pool doctor",
    "gpu-pool doctor --json",
    "gpu-pool doctor --cluster",
    "gpu-pool doctor --hibernation /usr/local/sbin/criu",
)
@click.option(
    "--cluster",
    "--kubernetes",
    "cluster",
    is_flag=True,
    help="Check the cluster in KUBECONFIG instead: whether it can share its GPUs.",
)
@click.option(
    "--namespace",
    default="",
    metavar="NAME",
    help="With --cluster: also what the installation in this namespace lacks, step by step.",
)
@click.option(
    "--hibernation",
    "criu",
    is_flag=False,
    flag_value="criu",
    default="",
    metavar="[CRIU]",
    help="Check instead whether kernels can sleep on this machine's disk, by this program; by default criu.",
)
@json_option
def doctor(session: CommandSession, cluster: bool, namespace: str, criu: str) -> int:
    """Find out what is broken, and how to fix it.

    Checks everything that a slice needs: Python and Jupyter, driver and
    GPUs, the store, the pool, the kernels; of a pool slurm: what Slurm lacks
    for it. Exit status 1 if something is broken.
    """
    if namespace and not cluster:
        raise BadRequest("--namespace is of a cluster.", "gpu-pool doctor --cluster --namespace NAME")
    if cluster:
        from gpu_pool.cli.cluster import check_cluster

        return _report(session, check_cluster(namespace))
    if criu:
        return _report(session, check_hibernation(criu))
    pool = [*check_pool(session)]
    if urlsplit(session.address).scheme == "slurm":
        from gpu_pool.cli.slurm_checks import check_course_limits, check_slurm

        # The GPUs, and what is enforced, are those of nodes: this machine's say nothing of them.
        found = chain(
            check_jupyter(session), check_slurm(), pool, check_courses(session), check_course_limits()
        )
        return _report(session, found)
    has_gpus = any(check.name == "devices" and check.state == "ok" for check in pool)
    machine = check_machine(is_client=session.is_served and has_gpus)
    return _report(
        session,
        chain(
            check_jupyter(session),
            check_preloads(),
            machine,
            check_isolation(),
            check_checkpoint(session),
            check_hibernation(""),
            check_store(session),
            pool,
            check_courses(session),
        ),
    )


def _report(session: CommandSession, checks: Iterable[Check]) -> int:
    found = list(checks)
    healthy = all(check.state != "broken" for check in found)
    if session.as_json:
        screen.show_json({"healthy": healthy, "checks": [asdict(check) for check in found]})
    else:
        _show(found)
    return 0 if healthy else 1


def _show(checks: list[Check]) -> None:
    from rich.text import Text

    out = screen.console()
    for check in checks:
        mark = Text(f"{check.state:<7}", _STYLES[check.state])
        out.print(Text.assemble(mark, f"{check.name}: {escaped(check.text)}"))
        if check.remedy:
            out.print(Text(f"       -> {escaped(check.remedy)}"))


_BY_MPS = ("mps", "cgroups")


def check_isolation() -> Iterator[Check]:
    """Look at how slices are to be enforced, and at what stands in the way."""
    # Imported here, as below, because health, which is asked often, does not need it.
    from gpu_pool.devices import discover
    from gpu_pool.settings import load_settings

    try:
        settings = load_settings()
        tier, real = settings.tier, [each for each in discover().devices if not each.simulated]
        devices = [each for each in real if each.mig_profile is None]
    except GpuPoolError:  # told by other checks
        return
    if tier != "auto":
        yield _check_tier(tier)
    if settings.device_names == "index":
        yield from _names(tier, real)
    if devices:
        yield from _programs(tier)
        yield from _modes(tier, devices)


def _check_tier(name: str) -> Check:
    """Say by whom a tier is offered, and on what hardware it was seen; or why it cannot be used."""
    from gpu_pool.enforcement import NOT_ON_HARDWARE
    from gpu_pool.enforcement.machine import find_tier

    try:
        tier = find_tier(name)
    except GpuPoolError as error:
        return Check("tier", "broken", error.message, error.remedy)
    text = f"{name}{', by gpu-pool serve' if tier.needs_owner else ''}; {tier.seen}"
    return Check("tier", "note" if tier.seen == NOT_ON_HARDWARE else "ok", text)


def _names(tier: str, devices: Sequence[Device]) -> Iterator[Check]:
    """Name the devices that programs find by uuid all the same, where the settings want numbers."""
    from gpu_pool.enforcement.machine import find_tier, why_uuid

    try:
        kind = find_tier(tier)
    except GpuPoolError:  # told by other checks
        return
    for device in devices:
        if why := why_uuid(device, kind):
            text = f"programs find GPU {device.index} ({device.label}) by uuid, and not by number: {why}"
            yield Check("device names", "note", text)


def _programs(tier: str) -> Iterator[Check]:
    """Look for the programs of MPS, where it is wanted, and for MPS where it is not."""
    from gpu_pool.enforcement import TierFailed
    from gpu_pool.enforcement.mps import programs

    if tier in _BY_MPS:
        try:
            programs.find(programs.TOOL)
        except TierFailed as failure:
            yield Check("mps", "broken", failure.message, failure.remedy)
        return
    for pid in filter(programs.is_believed, filter(programs.is_daemon, programs.mps_processes())):
        user = programs.user_name_of(pid)
        yield Check(
            "mps",
            "note",
            f"MPS runs, process {pid} of {user}: kernels on its GPUs may have limits that the pool does not "
            "know",
            f"Have {user} stop it: echo quit | {programs.TOOL}",
        )


def _modes(tier: str, devices: Sequence[Device]) -> Iterator[Check]:
    """Look at the compute modes, of which all but one keep processes from sharing a device."""
    from gpu_pool.enforcement import TierFailed
    from gpu_pool.enforcement.mps import classic

    for device in devices:
        try:
            mode = classic.compute_mode(device)
        except TierFailed:  # no nvidia-smi, or a card that it does not know: NVML has told
            mode = classic.EXCLUSIVE if device.exclusive else classic.DEFAULT
        if mode == classic.DEFAULT or (mode == classic.EXCLUSIVE and tier in _BY_MPS):
            continue
        admits = "it admits one process at a time, and " if mode == classic.EXCLUSIVE else ""
        yield Check(
            "compute mode",
            "broken",
            f"GPU {device.index} is {mode}: {admits}kernels cannot share it",
            f"sudo nvidia-smi -i {device.uuid} -c DEFAULT",
        )


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
