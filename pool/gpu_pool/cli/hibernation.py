"""``hibernated``: the kernels that sleep on this machine's disk; and what other verbs say of them.

What this needs is imported where it is used: ``status`` is asked often, and mostly nobody sleeps.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from gpu_pool.cli import screen
from gpu_pool.cli.formatting import Plain, no_jupyter_folders, safe
from gpu_pool.cli.session import CommandSession, json_option, verb
from gpu_pool_client import BadRequest, GpuPoolError, NotAllowed, PoolStatus, format_duration, format_memory

if TYPE_CHECKING:
    from gpu_pool.cli.checks import Check
    from gpu_pool_provisioner.hibernation.images import Header

#: What to read about it.
_HOW: Final = "See what it needs: Kernels that sleep on disk, in the documentation."
_MIB: Final = 1 << 20
_COLUMNS: Final = ("Lease", "User", "For", "Asleep for", "Size")


def folder() -> str:
    """Return where kernels sleep unless a setting of theirs says otherwise."""
    from jupyter_core.paths import jupyter_data_dir

    return str(Path(jupyter_data_dir(), "gpu-pool", "asleep"))


def images(parent: str) -> list[tuple[Path, Header]]:
    """Return the images in a folder, with what each says, oldest first. Raises ``NotAllowed``."""
    from gpu_pool_provisioner.hibernation.images import found

    try:
        return found(parent)
    except OSError as error:
        what = f"The folder where kernels sleep, {parent}, cannot be read: {error.strerror}."
        raise NotAllowed(what, "They are root's: run this as root.") from error


def asleep(status: PoolStatus) -> dict[str, Header]:
    """Return the images of parked leases in the usual folder, by their ids; none where it can't be read."""
    parked = {lease.id for lease in status.leases if not lease.slices}
    try:
        if not parked or not Path(folder()).exists():
            return {}
        return {header.lease: header for _, header in images(folder()) if header.lease in parked}
    except (NotAllowed, OSError, RuntimeError):
        return {}


def in_words(header: Header) -> str:
    """Say what a lease's state is whose kernel sleeps: ``asleep, 320 MiB``."""
    return f"asleep, {_size(header)}"


def _size(header: Header) -> str:
    return format_memory(-(-header.size // _MIB))


def plain(header: Header) -> Plain:
    """Return an image: whose it is, since when, and what it takes."""
    return {
        "lease": header.lease,
        "user": header.user,
        "kernel": header.kernel,
        "asleep_since": header.since,
        "image_bytes": header.size,
    }


def check_hibernation(criu: str) -> Iterator[Check]:
    """Say whether kernels can sleep on this machine's disk, where kernelspecs say so or it is asked for.

    With ``criu``, a program's name or path, that they cannot is broken; else it is worth a note.
    """
    from gpu_pool.cli.checks import Check

    wanted = [(criu, "")] if criu else _settings()
    for program, parent in dict.fromkeys(wanted):
        from gpu_pool_provisioner.hibernation.kept import why_not

        if why := why_not(program):
            text = f"kernels do not sleep on disk (hibernate_after): {safe(why, 600)}"
            yield Check("hibernation", "broken" if criu else "note", text, _HOW)
            continue
        yield Check("hibernation", "ok", f"kernels can sleep on disk, by {shutil.which(program)}")
        yield from _disk(parent or folder())


def _settings() -> list[tuple[str, str]]:
    """Return the programs and folders of the kernelspecs whose kernels sleep, or the usual ones."""
    from jupyter_client.kernelspec import KernelSpecManager

    found = [("criu", "")] if _is_of_a_course() else []
    try:
        specs = KernelSpecManager().get_all_specs()
    except RuntimeError:  # without a home there is no folder of Jupyter's, which other checks say
        return []
    for each in specs.values():
        config = (each["spec"].get("metadata", {}).get("kernel_provisioner") or {}).get("config") or {}
        if config.get("hibernate_after") or config.get("hibernate_with_server"):
            found.append((str(config.get("criu") or "criu"), str(config.get("hibernation_folder") or "")))
    return found


def _is_of_a_course() -> bool:
    """Whether a course, or the terms of who names none, say after how long a kernel sleeps."""
    from gpu_pool.cli.courses import read_files
    from gpu_pool.settings import load_settings

    try:
        settings = load_settings()
        files = read_files((), settings) if settings.courses_dir else []
        sharing = settings.sharing
    except GpuPoolError:  # told by other checks
        return False
    said = [each.course.hibernate_after for each in files if each.course is not None]
    return any((*said, *(each.hibernate_after for each in (sharing.default, *sharing.courses.values()))))


def _disk(parent: str) -> Iterator[Check]:
    """Say how much sleeps in a folder, and note where its disk is smaller than this machine's memory."""
    import psutil

    from gpu_pool.cli.checks import Check

    there = Path(parent)
    while not there.exists():
        there = there.parent
    free, memory = shutil.disk_usage(there).free // _MIB, psutil.virtual_memory().total // _MIB
    found = [header for _, header in images(parent)]
    taken = format_memory(-(-sum(each.size for each in found) // _MIB))
    text = (
        f"{safe(parent, 300)}: {len(found)} kernels sleep there ({taken}), {format_memory(free)} are free; "
        f"this machine has {format_memory(memory)} of memory"
    )
    remedy = "Set hibernation_folder to a larger disk: a kernel takes there what it has of memory."
    yield Check("hibernation", *(("ok", text) if free >= memory else ("note", text, remedy)))


@verb(
    "hibernated",
    "gpu-pool hibernated",
    "gpu-pool hibernated --remove 7-c01dcafe",
    "gpu-pool hibernated --json | jq '[.images[].image_bytes] | add'",
)
@click.option(
    "--folder",
    "parent",
    metavar="PATH",
    default="",
    help="Where they sleep: their hibernation_folder. By default gpu-pool/asleep in Jupyter's data.",
)
@click.option(
    "--remove",
    metavar="LEASE",
    multiple=True,
    help="Remove the image of this lease: all variables of its kernel are lost. May be repeated.",
)
@json_option
def hibernated(session: CommandSession, parent: str, remove: tuple[str, ...]) -> int:
    """List the kernels that sleep on this machine's disk, oldest first, or remove some.

    A kernel whose image was removed says so below its next cell; restarted, it
    begins afresh.
    """
    try:
        parent = parent or folder()
    except RuntimeError as error:
        raise no_jupyter_folders() from error
    found = images(parent)
    if remove:
        return _remove(found, remove, parent)
    if session.as_json:
        screen.show_json({"folder": parent, "images": [plain(header) for _, header in found]})
        return 0
    if not found:
        screen.show(f"No kernel sleeps in {safe(parent, 300)}.")
        return 0
    now = time.time()
    rows = [
        [
            *(safe(header.lease), safe(header.user), safe(header.kernel)),
            *(format_duration(now - header.since), _size(header)),
        ]
        for _, header in found
    ]
    screen.show(screen.table(_COLUMNS, rows))
    return 0


def _remove(found: Sequence[tuple[Path, Header]], wanted: Sequence[str], parent: str) -> int:
    """Remove images, all or none of those that are named."""
    images = {header.lease: (path, header) for path, header in found}
    unknown = [each for each in wanted if each not in images]
    if unknown:
        what = f"No kernel of the lease {safe(unknown[0])} sleeps in {safe(parent, 300)}."
        raise BadRequest(what, "To see which do: gpu-pool hibernated")
    for lease in dict.fromkeys(wanted):
        path, header = images[lease]
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise NotAllowed(f"{path} was not removed: {error.strerror}.", "Run this as root.") from error
        kernel = safe(header.kernel or "-")
        click.echo(f"Removed {_size(header)} of the kernel {kernel} (lease {safe(lease)}).")
    return 0
