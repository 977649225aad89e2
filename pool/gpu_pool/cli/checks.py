"""What ``health`` and ``doctor`` look at. Each check says what it saw and which command mends it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

import psutil
from jupyter_core.paths import jupyter_path

from gpu_pool.cli.formatting import no_jupyter_folders, safe
from gpu_pool.cli.kernels import refusals
from gpu_pool.cli.session import CommandSession, shows_all
from gpu_pool.devices import Inventory, discover
from gpu_pool.devices.inventory import VARIABLE
from gpu_pool.embedded import allocation
from gpu_pool.embedded.allocation import Allocation
from gpu_pool.embedded.pool import store_path
from gpu_pool.store import files
from gpu_pool.store.database import Database
from gpu_pool_client import (
    SIMULATED,
    BadRequest,
    GpuPoolError,
    Pool,
    PoolStatus,
    PreparedStatus,
    SliceRequest,
    format_duration,
    format_share,
    parse_request,
)

if TYPE_CHECKING:
    from gpu_pool_kernels.installer import InstalledKernel

State = Literal["ok", "note", "broken"]

#: Free space on the store's disk below which a note is made. A store takes some MiB.
_LITTLE_SPACE: Final = 64 * 1024 * 1024
#: Characters of what is said of a course's prepared pods.
_MOST_WORDS: Final = 400
#: Bytes of a store above which a note is made.
_MUCH: Final = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    #: ``broken`` keeps slices from working; ``note`` is worth knowing.
    state: State
    #: What was seen.
    text: str
    #: What to do about it: a command, where one does.
    remedy: str = ""


def check_pool(session: CommandSession) -> Iterator[Check]:
    """Ask the pool for its status, which on a store is also a write."""
    try:
        found, is_all = session.ask(_status)
    except GpuPoolError as error:
        yield Check("pool", "broken", error.message, error.remedy)
        return
    if found.note:
        yield Check("pool", "broken", found.note)
    else:
        yield Check("pool", "ok", f"{found.url} answers")
    yield from _devices(found)
    held, waiting = len(found.leases), len(found.queue)
    yield Check("leases", "ok", f"{held} held, {waiting} waiting")
    if found.store_bytes is not None:
        yield from _size(found.store_bytes)
    yield from check_prepared(found.prepared)
    yield from _limits(found)
    yield from _lost(found)
    if is_all:
        yield from _unmanaged(found)


def check_prepared(prepared: Iterable[PreparedStatus]) -> Iterator[Check]:
    """Say of each course how many of its kernels could begin in pods that wait for them, and why no more."""
    for each in prepared:
        words = f"{safe(each.course)}: {safe(str(each), _MOST_WORDS)}"
        why = f". {safe(each.why, _MOST_WORDS)}" if each.why else ""
        yield Check("prepared pods", "note" if each.why else "ok", words + why)


def check_machine(*, is_client: bool = False) -> Iterator[Check]:
    """Look for this machine's GPUs, and for what keeps them from being used.

    A client, whose slices are of the GPUs that a service has found, needs none. In a Slurm job of several
    nodes those of the others count as well; in a shell of ``salloc`` on none of them, those alone.
    """
    job = None if is_client else Allocation.of(os.environ)
    if job is not None and job.has_others:
        yield from _other_nodes(job)
        if not job.node:
            return
    try:
        inventory = discover()
    except GpuPoolError as error:
        yield Check("gpus", "broken", error.message, error.remedy)
        return
    count = len(inventory.devices)
    if count:
        yield Check("gpus", "ok", f"{count} found by {inventory.source}")
        for problem in inventory.problems:
            yield Check("gpus", "note", problem)
        yield from _hidden(inventory)
        yield from check_allocation(inventory)
    elif is_client:
        *problems, _ = inventory.problems
        yield Check(
            "gpus", "note", f"none on this machine, but the pool's service has some: {' '.join(problems)}"
        )
        return
    else:
        # The last says how to go on without a GPU.
        *problems, way_out = inventory.problems
        yield Check("gpus", "broken", " ".join(problems), way_out)
    smi = shutil.which("nvidia-smi")
    if smi:
        yield Check("nvidia-smi", "ok", smi)
    elif not any(device.simulated for device in inventory.devices):
        yield Check(
            "nvidia-smi",
            "note",
            "not on the PATH",
            "Install the NVIDIA driver's utilities, or extend the PATH.",
        )


def check_allocation(inventory: Inventory) -> Iterator[Check]:
    """Say which Slurm job this runs in, what that was given of the GPUs, and when it ends."""
    job = Allocation.of(os.environ)
    if job is None or not inventory.by_driver:
        return
    try:
        end = allocation.end_of(job.job)
        shares = job.shares(inventory.devices, "" if job.shares is None else allocation.gres_of(job.node))
    except allocation.SlurmSilent as error:
        yield Check(
            "slurm", "broken", f"{job} on {job.node}: {error}", "See whether Slurm answers: scontrol ping"
        )
        return
    parts = ", ".join(f"{format_share(shares[each.uuid])} of GPU {each.index}" for each in inventory.devices)
    given = [f"{job.shards} shards" if job.shards is not None else "", parts]
    left = "" if end is None else f"; it ends in {format_duration(max(0.0, end - time.time()))}"
    yield Check("slurm", "ok", f"{job} on {job.node}: {', '.join(filter(None, given)) or 'no GPU'}{left}")


def _other_nodes(job: Allocation) -> Iterator[Check]:
    """Say what a Slurm job has on its other nodes, where its kernels can run in steps."""
    # Imported here because only few jobs have several nodes.
    from gpu_pool.slurm.steps import find_other_nodes

    try:
        found = find_other_nodes(job.job, job.node)
    except GpuPoolError as error:
        yield Check("slurm nodes", "broken", f"{job}: {safe(error.message, _MOST_WORDS)}", "scontrol ping")
        return
    for name in found.nodes:
        own = [each for each in found.devices if each.node == name]
        parts = [f"{format_share(found.shares[each.uuid])} of GPU {each.index}" for each in own]
        if problem := found.problems.get(name):
            text, remedy = safe(problem, _MOST_WORDS), f"srun --overlap --nodelist={name} nvidia-smi"
            yield Check("slurm nodes", "broken", f"{job} on {name}: {text}", remedy)
        else:
            yield Check("slurm nodes", "ok", f"{job} on {name}: {', '.join(parts)}")
    if not found.nodes:
        yield Check("slurm nodes", "note", f"{job} has no GPU on other nodes for this one")


def _hidden(inventory: Inventory) -> Iterator[Check]:
    """Name the real GPUs behind simulated ones."""
    if any(device.simulated for device in inventory.devices):
        try:
            real = discover({})
        except GpuPoolError as error:
            yield Check("gpus", "note", error.message, error.remedy)
            return
        if real.devices:
            labels = ", ".join(sorted({safe(device.label) for device in real.devices}))
            text = f"{len(real.devices)} real GPUs found by {real.source}, but not used: {labels}"
            yield Check("gpus", "note", text, f"To use the real GPUs, unset {VARIABLE}.")


def check_store(session: CommandSession) -> Iterator[Check]:
    """Look at the file of an embedded pool: where it is, who can read it, what version it is."""
    if session.is_served:
        return
    try:
        path = store_path(session.address)
        database = Database(path)
    except GpuPoolError as error:
        yield Check("store", "broken", error.message, error.remedy)
        return
    schema = database.version
    database.close()
    mounts = ((part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True))
    kind = files.file_system(path.parent.resolve(), mounts) or "unknown file system"
    yield Check("store", "ok", f"{path} ({kind}, schema {schema})")
    for each in (path, path.parent):
        mode = stat.S_IMODE(each.stat().st_mode)
        allowed = 0o755 if each.is_dir() else 0o600
        if mode & ~allowed:
            yield Check(
                "store", "note", f"others have access to {each} ({mode:04o})", f"chmod {allowed:o} {each}"
            )
    free = shutil.disk_usage(path.parent).free
    if free < _LITTLE_SPACE:
        yield Check("store", "note", f"only {free // 2**20} MiB are free on its disk", "Free some space.")


def check_jupyter(session: CommandSession) -> Iterator[Check]:
    """Look at Python, Jupyter, the provisioner's entry point and the kernelspecs."""
    yield Check("python", "ok", f"{sys.version.split()[0]}, {sys.executable}")
    yield Check("jupyter_client", "ok", version("jupyter_client"))
    yield from _ipykernel()
    if entry_points(group="jupyter_client.kernel_provisioners", name="gpu-pool"):
        yield Check("provisioner", "ok", "Jupyter finds the provisioner gpu-pool")
    else:
        yield Check(
            "provisioner",
            "broken",
            "Jupyter does not find the gpu-pool provisioner, and hides its kernels",
            f"{sys.executable} -m pip install --force-reinstall --no-deps jupyter-gpu-pool",
        )
    try:
        jupyter_path("kernels")
    except RuntimeError:
        error = no_jupyter_folders()
        yield Check("kernels", "broken", error.message, error.remedy)
        return
    yield from _kernels(session)


async def _status(pool: Pool) -> tuple[PoolStatus, bool]:
    """Return the pool's status, and whether it is known to tell of everybody's leases."""
    found = await pool.status()
    return found, await _tells_all(pool, found)


async def _tells_all(pool: Pool, found: PoolStatus) -> bool:
    """Whether we are told of all leases on GPUs of this machine, whose processes can be seen."""
    scheme = urlsplit(found.url).scheme
    if scheme != "unix" or all(each.device.simulated for each in found.devices):
        return scheme == "embedded"
    return await shows_all(pool) is True


def _devices(status: PoolStatus) -> Iterator[Check]:
    if not status.devices:
        yield Check("devices", "broken", "the pool has no GPU", "gpu-pool doctor says why, under gpus.")
        return
    labels = ", ".join(f"{each.device.index}: {safe(each.device.label)}" for each in status.devices)
    yield Check("devices", "ok", labels)
    if status.simulated:
        text = f"{SIMULATED}: slices are counted, but there is no real GPU"
        yield Check("devices", "note", text, _way_to_real_devices(status))


def _size(size: int) -> Iterator[Check]:
    """Say how much the store takes, nearly all of which is history; and what to do where that is much."""
    text = f"the store takes {max(1, size // 2**20)} MiB of disk"
    if size < _MUCH:
        yield Check("history", "ok", text)
        return
    yield Check(
        "history",
        "note",
        f"{text}, nearly all of it for leases that have ended (gpu-pool report --by user says whose)",
        "To keep less, set c.PoolSettings.history_days (400 by default). The file does not shrink by that, "
        "but what it frees is used again.",
    )


def _way_to_real_devices(status: PoolStatus) -> str:
    """Say how simulated devices are forgotten, which depends on whose they are."""
    if urlsplit(status.url).scheme != "embedded":
        return f"To use real GPUs, restart the pool's service without {VARIABLE}."
    if os.environ.get(VARIABLE, "").strip():
        return f"To use real GPUs, unset {VARIABLE} here and wherever Jupyter and commands are started."
    return (
        f"They are used by processes that were started with {VARIABLE} and still run, or by leases "
        "(gpu-pool status). Once those have ended, they disappear."
    )


def _limits(status: PoolStatus) -> Iterator[Check]:
    held = (lease.enforcement for lease in status.leases if lease.slices)
    for limits, leases in Counter(held).items():
        many = "1 lease" if leases == 1 else f"{leases} leases"
        yield Check("limits", "ok", f"memory: {limits.memory}; compute: {limits.compute}: {many}")


def _lost(status: PoolStatus) -> Iterator[Check]:
    """Name the leases on devices that are no longer there, such as MIG instances made anew."""
    if urlsplit(status.url).scheme not in ("embedded", "unix"):  # the devices of another machine
        return
    held = [(part.device, lease) for lease in status.leases for part in lease.slices]
    real = [(device, lease) for device, lease in held if not device.simulated and not device.node]
    try:
        found = discover() if real else Inventory((), "")
        there = {device.uuid for device in (*found.devices, *found.hidden)}
    except GpuPoolError:  # told by other checks
        return
    for device, lease in real:
        if there and device.uuid not in there:
            name = f"{safe(device.label)} ({safe(device.uuid)})"
            text = f"{name} of lease {safe(lease.id)} no longer exists"
            remedy = f"Its processes cannot use a GPU. End the lease: gpu-pool release {safe(lease.id)}"
            yield Check("lost", "broken", text, remedy)


def _unmanaged(status: PoolStatus) -> Iterator[Check]:
    devices = [each.device for each in status.devices if not each.device.simulated]
    if not devices:
        return
    try:
        # Imported here because it costs some 40 ms, which simulated devices need not pay.
        from gpu_pool.enforcement.watchdog import find_unmanaged
    except GpuPoolError:  # told by other checks
        return
    for unmanaged in find_unmanaged(devices, status.leases):
        remedy = "Run it on a slice (gpu-pool run 10% -- COMMAND), or end it."
        yield Check("unmanaged processes", "note", safe(str(unmanaged), 300), remedy)


def _ipykernel() -> Iterator[Check]:
    if importlib.util.find_spec("ipykernel") is None:
        install = f"{sys.executable} -m pip install ipykernel"
        yield Check(
            "ipykernel", "note", "not installed here, so there is no Python kernel to build on", install
        )
        return
    try:
        yield Check("ipykernel", "ok", version("ipykernel"))
    except PackageNotFoundError:
        yield Check("ipykernel", "ok", "installed, version unknown")


def _kernels(session: CommandSession) -> Iterator[Check]:
    # Imported here because health, which is asked often, does not need it.
    from gpu_pool_kernels.installer import installed

    kernels = installed()
    if not kernels:
        yield Check("kernels", "note", "none is installed", "gpu-pool kernels install 2% 10% 50% 1")
        return
    yield Check("kernels", "ok", ", ".join(safe(each.name) for each in kernels))
    yield from _refused(session, kernels)


def _refused(session: CommandSession, kernels: Sequence[InstalledKernel]) -> Iterator[Check]:
    """Name the kernels that could never start, since the pool would refuse their slice."""
    asked = {each.name: _request(each.slice) for each in kernels}
    refused = refusals(session, {request for request in asked.values() if request is not None})
    for name, request in asked.items():
        if request is None:
            yield Check(
                "kernels", "note", f"{safe(name)} has no valid slice request", kernel_made_again(name)
            )
        elif request in refused:
            error = refused[request]
            text = f"the pool would refuse {safe(name)}: {safe(error.message, 400)}"
            yield Check("kernels", "note", text, f"{error.remedy} Then: {kernel_made_again(name)}")


def _request(text: str) -> SliceRequest | None:
    try:
        return parse_request(text)
    except BadRequest:
        return None


def kernel_made_again(name: str) -> str:
    """Return the commands that replace a kernelspec."""
    return f"gpu-pool kernels remove {safe(name)}; gpu-pool kernels install SIZE"
