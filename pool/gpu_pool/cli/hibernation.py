"""``hibernated``: the kernels that sleep on this machine's disk; and what other verbs say of them.

What this needs is imported where it is used: ``status`` is asked often, and mostly nobody sleeps.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gpu_pool.cli import screen
from gpu_pool.cli.formatting import Plain, no_jupyter_folders, safe
from gpu_pool.cli.session import CommandSession, json_option, verb
from gpu_pool_client import BadRequest, GpuPoolError, NotAllowed, PoolStatus, format_duration, format_memory

if TYPE_CHECKING:
    from gpu_pool.cli.checks import Check
    from gpu_pool_provisioner.hibernation.calling import Program

#: What to read about it.
_HOW: Final = "See what it needs: Kernels that sleep on disk, in the documentation."
_MIB: Final = 1 << 20
#: Where other users' kernels sleep, unless the program's settings say otherwise.
_OF_ALL: Final = "/var/lib/gpu-pool/asleep"
_COLUMNS: Final = ("Lease", "User", "For", "Asleep for", "Size")


@dataclass(frozen=True, slots=True)
class Image:
    """A kernel on disk, as the program lists it that keeps it there."""

    #: Who removes it, and by which ID.
    program: Program
    id: str
    #: Its lease, whose it is, and what that user calls it.
    lease: str
    user: str
    kernel: str
    #: When it fell asleep, in Unix seconds, and its bytes.
    since: float
    size: int

    @classmethod
    def of(cls, program: Program, said: dict[str, Any]) -> Image:
        """Return one of what a program lists. Raises ``KeyError`` and ``TypeError`` where it is none."""
        note, image = said["note"], said["image"]
        lease, user, kernel = (str(note[name]) for name in ("lease", "user", "kernel"))
        since, size = float(image["since"]), int(image["bytes"])
        return cls(program, said["id"], lease, user, kernel, since, size)


def folder() -> str:
    """Return where root's kernels sleep unless a setting of theirs says otherwise."""
    from jupyter_core.paths import jupyter_data_dir

    return str(Path(jupyter_data_dir(), "gpu-pool", "asleep"))


def _programs(parent: str = "") -> list[Program]:
    """Return how kernels on disk are listed: by root those in ``parent``, or all of this machine's."""
    from gpu_pool_provisioner.hibernation.calling import INSTALLED, Program

    if os.geteuid() != 0:
        return [Program()] if Path(INSTALLED).exists() else []
    if parent:
        return [Program(folder=parent)]
    return [Program(folder=each) for each in (folder(), "") if Path(each or _OF_ALL).exists()]


def images(programs: Iterable[Program]) -> list[Image]:
    """Return the images that programs list, oldest first. Raises ``NotAllowed``."""
    from gpu_pool_provisioner.hibernation.calling import ProgramRefused, kernels

    found = []
    for program in programs:
        try:
            said = kernels(program)
        except ProgramRefused as error:
            what = f"The kernels on disk are not known: {safe(str(error), 600)}"
            raise NotAllowed(what, "To see what is missing do: gpu-pool doctor --hibernation criu") from error
        for each in said:
            with suppress(KeyError, TypeError):  # nobody has noted whose it is, or it does not sleep
                found.append(Image.of(program, each))
    return sorted(found, key=lambda each: each.since)


def asleep(status: PoolStatus) -> dict[str, Image]:
    """Return the images of parked leases by their ids; none where they can't be read."""
    parked = {lease.id for lease in status.leases if not lease.slices}
    try:
        return {each.lease: each for each in images(_programs()) if each.lease in parked} if parked else {}
    except (NotAllowed, OSError, RuntimeError):
        return {}


def in_words(image: Image) -> str:
    """Say what a lease's state is whose kernel sleeps: ``asleep, 320 MiB``."""
    return f"asleep, {_size(image)}"


def _size(image: Image) -> str:
    return format_memory(-(-image.size // _MIB))


def plain(image: Image) -> Plain:
    """Return an image: whose it is, since when, and what it takes."""
    return {
        "lease": image.lease,
        "user": image.user,
        "kernel": image.kernel,
        "asleep_since": image.since,
        "image_bytes": image.size,
    }


def check_hibernation(criu: str) -> Iterator[Check]:
    """Say whether kernels can sleep on this machine's disk, where kernelspecs say so or it is asked for.

    With ``criu``, a program's name or path, that they cannot is broken; else it is worth a note.
    """
    from gpu_pool.cli.checks import Check

    wanted = [(criu, "", "")] if criu else _settings()
    for program, parent, called in dict.fromkeys(wanted):
        from gpu_pool_provisioner.hibernation.calling import INSTALLED, why_not

        installed = called or INSTALLED
        if why := why_not(program, installed, parent):
            text = f"kernels do not sleep on disk (hibernate_after): {safe(why, 600)}"
            yield Check("hibernation", "broken" if criu else "note", text, _HOW)
            continue
        if os.geteuid() != 0:
            yield Check("hibernation", "ok", f"kernels can sleep on disk, by {installed}")
            continue
        yield Check("hibernation", "ok", f"kernels can sleep on disk, by {shutil.which(program)}")
        yield from _disk(parent or folder())


def _settings() -> list[tuple[str, str, str]]:
    """Return CRIU, the folder and the program of the kernelspecs whose kernels sleep, or the usual ones."""
    from jupyter_client.kernelspec import KernelSpecManager

    found = [("criu", "", "")] if _is_of_a_course() else []
    try:
        specs = KernelSpecManager().get_all_specs()
    except RuntimeError:  # without a home there is no folder of Jupyter's, which other checks say
        return []
    for each in specs.values():
        config = (each["spec"].get("metadata", {}).get("kernel_provisioner") or {}).get("config") or {}
        if config.get("hibernate_after") or config.get("hibernate_with_server"):
            names = ("criu", "hibernation_folder", "hibernation_program")
            criu, parent, program = (str(config.get(name) or "") for name in names)
            found.append((criu or "criu", parent, program))
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
    found = images(_programs(parent)) if Path(parent).exists() else []
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
    help="Root's: where they sleep, their hibernation_folder. By default gpu-pool/asleep in Jupyter's data.",
)
@click.option(
    "--remove",
    metavar="LEASE",
    multiple=True,
    help="Remove the image of this lease: all variables of its kernel are lost. May be repeated.",
)
@json_option
def hibernated(session: CommandSession, parent: str, remove: tuple[str, ...]) -> int:
    """List your kernels that sleep on this machine's disk, oldest first, or remove some; as root, all.

    A kernel whose image was removed says so below its next cell; restarted, it
    begins afresh.
    """
    if parent and os.geteuid() != 0:
        raise BadRequest(
            "--folder is root's: other users' kernels sleep where the program's settings say.",
            "To see yours do: gpu-pool hibernated",
        )
    try:
        programs, where = _programs(parent), parent or folder()
    except RuntimeError as error:
        raise no_jupyter_folders() from error
    found = images(programs)
    where = safe(where, 300) if os.geteuid() == 0 else "this machine's disk for you"
    if remove:
        return _remove(found, remove, where)
    if session.as_json:
        screen.show_json({"folder": parent or folder(), "images": [plain(each) for each in found]})
        return 0
    if not found:
        screen.show(f"No kernel sleeps in {where}.")
        return 0
    now = time.time()
    rows = [
        [
            *(safe(each.lease), safe(each.user), safe(each.kernel)),
            *(format_duration(now - each.since), _size(each)),
        ]
        for each in found
    ]
    screen.show(screen.table(_COLUMNS, rows))
    return 0


def _remove(found: Sequence[Image], wanted: Sequence[str], where: str) -> int:
    """Remove images, all or none of those that are named."""
    from gpu_pool_provisioner.hibernation.calling import ProgramRefused

    by_lease = {each.lease: each for each in found}
    unknown = [each for each in wanted if each not in by_lease]
    if unknown:
        what = f"No kernel of the lease {safe(unknown[0])} sleeps in {where}."
        raise BadRequest(what, "To see which do: gpu-pool hibernated")
    for lease in dict.fromkeys(wanted):
        image = by_lease[lease]
        try:
            image.program.call("remove", image.id)
        except ProgramRefused as error:
            raise NotAllowed(f"It was not removed: {safe(str(error), 300)}", _HOW) from error
        kernel = safe(image.kernel or "-")
        click.echo(f"Removed {_size(image)} of the kernel {kernel} (lease {safe(lease)}).")
    return 0
