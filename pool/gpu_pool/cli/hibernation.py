"""``hibernated``: the kernels that sleep on this machine's disk; and what the doctor says of them."""

from __future__ import annotations

import os
import pwd
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from gpu_pool.cli import screen
from gpu_pool.cli.formatting import Plain, no_jupyter_folders, safe
from gpu_pool.cli.session import CommandSession, json_option, verb
from gpu_pool_client import BadRequest, GpuPoolError, NotAllowed, format_duration, format_memory

if TYPE_CHECKING:
    from gpu_pool.cli.checks import Check
    from gpu_pool_provisioner.hibernation.calling import Program

#: What to read about it.
_HOW: Final = "See what it needs: Kernels that sleep on disk, in the documentation."
_MIB: Final = 1 << 20
#: Kinds of values of the settings that are read here.
_PLAIN: Final = (str, int, float)
#: The settings by which kernels are to sleep.
_ASKS_FOR_SLEEP: Final = ("hibernate_after", "hibernate_with_server")
_COLUMNS: Final = ("ID", "Lease", "User", "For", "Asleep for", "Size")


@dataclass(frozen=True, slots=True)
class Image:
    """A kernel on disk, as the program lists it that keeps it there."""

    #: Who removes it, and by which ID.
    program: Program
    id: str
    #: The account whose it is, which the program says.
    user: str
    #: Its lease and what it is called, as that user has noted it; either may be anything, and empty.
    lease: str
    kernel: str
    #: When it fell asleep, in Unix seconds, and its bytes.
    since: float
    size: int

    @classmethod
    def of(cls, program: Program, said: dict[str, Any]) -> Image:
        """Return one of what a program lists. Raises ``KeyError`` and ``TypeError`` where it is none."""
        note, image = said["note"], said["image"]
        lease, kernel = (
            str(note.get(name, "") if isinstance(note, dict) else "") for name in ("lease", "kernel")
        )
        return cls(
            program,
            said["id"],
            _account(said["uid"]),
            lease,
            kernel,
            float(image["since"]),
            int(image["bytes"]),
        )


def _account(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def folder() -> str:
    """Return where root's kernels sleep unless a setting of theirs says otherwise."""
    from jupyter_core.paths import jupyter_data_dir

    return str(Path(jupyter_data_dir(), "gpu-pool", "asleep"))


def _programs(parent: str = "") -> list[Program]:
    """Return how kernels on disk are listed: by root those in ``parent``, or all of this machine's."""
    from gpu_pool_provisioner.hibernation.calling import Program

    if os.geteuid() != 0:
        return [Program(installed=each) for each in _installed()]
    if parent:
        return [Program(folder=parent)]
    named = [str(each.get("hibernation_folder") or "") for each in _read().configs]
    # Where those of other users sleep the program knows by its settings.
    return [Program(folder=each) for each in dict.fromkeys((folder(), *filter(os.path.isabs, named), ""))]


def _installed() -> list[str]:
    """Return the programs by which this user's kernels sleep: the kernelspecs', and the usual one."""
    from gpu_pool_provisioner.hibernation.calling import INSTALLED

    said = [str(each.get("hibernation_program") or INSTALLED) for each in _read().configs]
    return [each for each in dict.fromkeys((*said, INSTALLED)) if Path(each).exists()]


class _SleepSettings(NamedTuple):
    """What is said of kernels that sleep: read once, since a server's configuration may be a program."""

    #: For all kernels, by the Jupyter server.
    server: dict[str, Any]
    #: The kernelspecs of our provisioner, each with the settings of its kernels: its own, or the server's.
    kernelspecs: list[tuple[dict[str, Any], dict[str, Any]]]

    @property
    def configs(self) -> list[dict[str, Any]]:
        """Of the server, and of each kernelspec."""
        return [self.server, *(config for _, config in self.kernelspecs)]


def _read() -> _SleepSettings:
    """Read what is said of kernels that sleep, as far as it can be read; what cannot, others say."""
    from jupyter_client.kernelspec import KernelSpecManager

    from gpu_pool.settings import load_config

    server = dict[str, Any]()
    with suppress(GpuPoolError):
        config = load_config("jupyter_config", "jupyter_server_config")
        server = {
            name: value for name, value in config.GPUPoolProvisioner.items() if isinstance(value, _PLAIN)
        }
    specs = list[dict[str, Any]]()
    with suppress(RuntimeError):  # without a home there is no folder of Jupyter's
        specs = [each["spec"] for each in KernelSpecManager().get_all_specs().values()]
    stanzas = [each.get("metadata", {}).get("kernel_provisioner") or {} for each in specs]
    kernelspecs = [
        (spec, {**server, **(stanza.get("config") or {})})
        for spec, stanza in zip(specs, stanzas, strict=True)
        if stanza.get("provisioner_name") == "gpu-pool"
    ]
    return _SleepSettings(server, kernelspecs)


def images(programs: Iterable[Program]) -> tuple[list[str], list[Image]]:
    """Return the folders where programs keep images, and these, oldest first.

    What some of them do not list is noted. Raises ``NotAllowed`` where none lists any.
    """
    from gpu_pool_provisioner.hibernation.calling import ProgramRefused

    folders, found = dict[str, None](), dict[str, Image]()
    troubles: list[NotAllowed] = []
    for program in programs:
        try:
            said = program.call("list")
        except ProgramRefused as error:
            what = f"The kernels on disk are not known: {safe(str(error), 600)}"
            troubles.append(NotAllowed(what, "To see what is missing do: gpu-pool doctor --hibernation criu"))
            continue
        folders[said["folder"]] = None
        for each in said["kernels"]:
            with suppress(KeyError, TypeError):  # it does not sleep
                found.setdefault(each["id"], Image.of(program, each))
    if troubles and not folders:
        raise troubles[0]
    for trouble in troubles:
        screen.note(f"Not all kernels on disk are known. {trouble.message}")
    return list(folders), sorted(found.values(), key=lambda each: each.since)


def _size(image: Image) -> str:
    return format_memory(-(-image.size // _MIB))


def plain(image: Image) -> Plain:
    """Return an image: whose it is, since when, and what it takes."""
    return {
        "id": image.id,
        "lease": image.lease,
        "user": image.user,
        "kernel": image.kernel,
        "asleep_since": image.since,
        "image_bytes": image.size,
    }


def check_hibernation(criu: str) -> Iterator[Check]:
    """Say whether kernels can sleep on this machine's disk, where settings say so or it is asked for.

    With ``criu``, a program's name or path, that they cannot is broken; else it is worth a note.
    """
    from gpu_pool.cli.checks import Check

    said = _read()
    if not criu:
        yield from _other_kernels(said)
    wanted = [(criu, "", each) for each in _called(said)] if criu else _settings(said)
    for program, parent, called in dict.fromkeys(wanted):
        from gpu_pool_provisioner.hibernation.calling import INSTALLED, check

        installed = called or INSTALLED
        found = check(program, installed, parent)
        if found.why_not:
            text = f"kernels do not sleep on disk (hibernate_after): {safe(found.why_not, 600)}"
            yield Check("hibernation", "broken" if criu else "note", text, _HOW)
            continue
        where = parent or folder()
        is_root = os.geteuid() == 0
        by = shutil.which(program) if is_root else installed
        yield Check("hibernation", "ok", f"kernels can sleep on disk, by {by} (CRIU {found.criu})")
        yield from _disk_of_root(where) if is_root else _disk_of_users(installed)


def _settings(said: _SleepSettings) -> list[tuple[str, str, str]]:
    """Return CRIU, the folder and the program of the kernels that sleep, by the server or a kernelspec."""
    wanted = [said.server] if _is_of_a_course() or _is_to_sleep(said.server) else []
    wanted += [config for spec, config in said.kernelspecs if _is_ipython(spec) and _is_to_sleep(config)]
    names = ("criu", "hibernation_folder", "hibernation_program")
    found = [tuple(str(config.get(name) or "") for name in names) for config in wanted]
    return [(criu or "criu", parent, program) for criu, parent, program in found]


def _called(said: _SleepSettings) -> list[str]:
    """Return the programs that settings name for kernels that sleep; "" is the usual one. Root calls none."""
    if os.geteuid() == 0:
        return [""]
    named = [str(each.get("hibernation_program") or "") for each in said.configs if _is_to_sleep(each)]
    return list(dict.fromkeys(named)) or [""]


def _is_to_sleep(config: dict[str, Any]) -> bool:
    return any(config.get(name) for name in _ASKS_FOR_SLEEP)


def _is_ipython(spec: dict[str, Any]) -> bool:
    from gpu_pool_kernels.launching import wrap_argv

    argv = list(spec.get("argv", ()))
    return wrap_argv(argv, installed=True) != argv


def _other_kernels(said: _SleepSettings) -> Iterator[Check]:
    """Name the kernelspecs whose kernels are to sleep, and never do."""
    from gpu_pool.cli.checks import Check

    for spec, _ in said.kernelspecs:
        own = spec["metadata"]["kernel_provisioner"].get("config") or {}
        named = [name for name in _ASKS_FOR_SLEEP if own.get(name)]  # what holds for all is of use to others
        if named and not _is_ipython(spec):
            name, settings = safe(str(spec.get("display_name", ""))), " and ".join(named)
            text = f"kernels of {name} do not sleep on disk ({settings}): only IPython kernels can"
            yield Check("hibernation", "note", text, f"Remove {settings} from that kernelspec.")


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


def _sleep(count: int) -> str:
    return "1 kernel sleeps" if count == 1 else f"{count} kernels sleep"


def _disk_of_users(installed: str) -> Iterator[Check]:
    """Say how much of this user's sleeps in the folder of an installed program."""
    from gpu_pool_provisioner.hibernation.calling import Program

    with suppress(NotAllowed, OSError):
        folders, found = images([Program(installed=installed)])
        yield _disk(folders[0], found)


def _disk_of_root(parent: str) -> Iterator[Check]:
    """Say the same of a folder of root's."""
    yield _disk(parent, images(_programs(parent))[1] if Path(parent).exists() else [])


def _disk(parent: str, found: Sequence[Image]) -> Check:
    """Say how much sleeps in a folder, and note where its disk is smaller than this machine's memory."""
    import psutil

    from gpu_pool.cli.checks import Check

    there = Path(parent)
    while not there.exists():
        there = there.parent
    free, memory = shutil.disk_usage(there).free // _MIB, psutil.virtual_memory().total // _MIB
    taken = format_memory(-(-sum(each.size for each in found) // _MIB))
    text = (
        f"{safe(parent, 300)}: {_sleep(len(found))} there ({taken}), {format_memory(free)} are free; "
        f"this machine has {format_memory(memory)} of memory"
    )
    remedy = "Set folder (hibernation_folder) to a larger disk: a kernel takes there what it has of memory."
    return Check("hibernation", *(("ok", text) if free >= memory else ("note", text, remedy)))


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
    metavar="ID",
    multiple=True,
    help="Remove this image, by its ID or, if only one has it, its lease: all variables of its kernel are "
    "lost. May be repeated.",
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
        programs = _programs(parent)
    except RuntimeError as error:
        raise no_jupyter_folders() from error
    folders, found = images(programs)
    where = f"in {safe(' or '.join(folders), 300)}" if os.geteuid() == 0 else "on this machine's disk for you"
    if remove:
        return _remove(found, remove, where)
    if session.as_json:
        screen.show_json({"folders": folders, "images": [plain(each) for each in found]})
        return 0
    if not found:
        screen.show(f"No kernel sleeps {where}.")
        return 0
    now = time.time()
    rows = [
        [
            *(each.id, safe(each.lease), safe(each.user), safe(each.kernel)),
            *(format_duration(now - each.since), _size(each)),
        ]
        for each in found
    ]
    screen.show(screen.table(_COLUMNS, rows))
    return 0


def _remove(found: Sequence[Image], wanted: Sequence[str], where: str) -> int:
    """Remove images, all or none of those that are named."""
    from gpu_pool_provisioner.hibernation.calling import ProgramRefused

    images = list(dict.fromkeys(_named(found, each, where) for each in wanted))
    for image in images:
        try:
            image.program.call("remove", image.id)
        except ProgramRefused as error:
            raise NotAllowed(f"It was not removed: {safe(str(error), 300)}", _HOW) from error
        kernel, lease = safe(image.kernel or "-"), safe(image.lease or "-")
        click.echo(f"Removed {_size(image)} of the kernel {kernel} of {safe(image.user)} (lease {lease}).")
    return 0


def _named(found: Sequence[Image], name: str, where: str) -> Image:
    """Return the image of an ID, or of a lease that no other has noted. Raises ``BadRequest``."""
    see = "To see which do: gpu-pool hibernated"
    same = [each for each in found if each.id == name] or [each for each in found if each.lease == name]
    if not same:
        raise BadRequest(f"No kernel with the ID or lease {safe(name)} sleeps {where}.", see)
    if len(same) > 1:
        what = f"{len(same)} kernels on disk have noted the lease {safe(name)}: say which by its ID."
        raise BadRequest(what, see)
    return same[0]
