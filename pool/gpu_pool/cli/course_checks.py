"""What ``health`` and ``doctor`` say of course files, and of the modules that courses and kernels preload.

Of a file: what is wrong, and what holds meanwhile. Each list of modules is imported once.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jupyter_core.paths import jupyter_path

from gpu_pool.cli.checks import Check, State, kernel_made_again
from gpu_pool.cli.courses import CheckedFile, read_files
from gpu_pool.cli.formatting import safe
from gpu_pool.cli.session import CommandSession
from gpu_pool.courses.access import NOT_IN_COURSE
from gpu_pool_client import GpuPoolError, Holder, NotAllowed, Pool

if TYPE_CHECKING:
    from gpu_pool_kernels.installer import InstalledKernel


#: Files at most that are reported.
_MOST_FILES: Final = 20
#: Mistakes at most that are reported of each.
_MOST_OF_FILE: Final = 5
_LONGEST = 600


def check_courses(session: CommandSession) -> Iterator[Check]:
    """Read the course files, and ask the pool what it does without those that are wrong."""
    from gpu_pool.settings import load_settings

    try:
        settings = load_settings()
        if not settings.courses_dir:
            return
        found = read_files((), settings)
    except GpuPoolError as error:
        is_ours = not session.is_served or not isinstance(error.__cause__, PermissionError)
        remedy = error.remedy or "Correct c.PoolSettings.courses_dir, or the folder's permissions."
        yield Check("courses", "broken" if is_ours else "note", error.message, remedy)
        return
    found = [each for each in found if each.course or _is_ours_to_read(each.path, session)]
    wrong = [each for each in found if each.course is None]
    if len(wrong) < len(found):
        names = ", ".join(safe(each.name) for each in found if each.course is not None)
        yield Check("courses", "ok", safe(names, _LONGEST))
    offered = _offered(session, [each.name for each in wrong[:_MOST_FILES]])
    for each, is_offered in zip(wrong, offered, strict=False):
        yield from _of_file(each, is_offered)
    if len(wrong) > _MOST_FILES:
        yield Check(
            "courses", "broken", f"and {len(wrong) - _MOST_FILES} more files", "gpu-pool courses check"
        )
    for each in found:
        for warning in each.warnings[:_MOST_OF_FILE]:
            what = f"{warning.field}: {warning.message}" if warning.field else warning.message
            told = safe(f"{each.path.name}{_line(warning.line)}: {what}", _LONGEST)
            yield Check("courses", "note", told, safe(warning.remedy, _LONGEST))


def _of_file(checked: CheckedFile, is_offered: bool | None) -> Iterator[Check]:
    meanwhile = {
        True: "its last good version is in force until the service ends",
        False: "the course is not offered",
        None: "",
    }[is_offered]
    state: State = "note" if is_offered else "broken"
    for problem in checked.problems[:_MOST_OF_FILE]:
        what = f"{problem.field}: {problem.message}" if problem.field else problem.message
        told = f"{checked.path.name}{_line(problem.line)}: {what.removesuffix('.')}"
        remedy = f"{problem.remedy} To check it: gpu-pool courses check {safe(str(checked.path), 300)}"
        yield Check("courses", state, safe(f"{told}; {meanwhile}" if meanwhile else told, _LONGEST), remedy)


def _line(number: int | None) -> str:
    return "" if number is None else f", line {number}"


def _is_ours_to_read(path: Path, session: CommandSession) -> bool:
    """Whether we should be able to read this: what a service alone may read is not wrong."""
    return not session.is_served or os.access(path, os.R_OK)


def _offered(session: CommandSession, names: Sequence[str]) -> list[bool | None]:
    """Return of each course whether the pool offers it all the same; None where it cannot be asked."""

    async def ask(pool: Pool) -> list[bool | None]:
        return [await _is_offered(pool, name) for name in names]

    try:
        return session.ask(ask) if names else []
    except GpuPoolError:  # told by other checks
        return [None] * len(names)


async def _is_offered(pool: Pool, name: str) -> bool | None:
    try:
        return await pool.offers(Holder(getpass.getuser(), name)) is not None
    except NotAllowed as error:
        # Of a course that cannot be used nobody is told whether they are in it.
        return True if error.message == NOT_IN_COURSE else None


#: Prints those of the packages named in its arguments that a Python does not have.
_FIND: Final = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if not u.find_spec(n)])"
#: Seconds for that.
_FOUND_WITHIN: Final = 20.0
#: Seconds in which the modules of one list are imported, with a look after each.
_IMPORTED_WITHIN: Final = 120.0
_MOST_TOLD: Final = 500
_MAX_MESSAGE: Final = 1 << 16


def check_preloads() -> Iterator[Check]:
    """Name the modules that cannot be preloaded: they are not there, or no kernel can be forked with them."""
    try:
        jupyter_path("kernels")
    except RuntimeError:  # told by other checks
        return
    # Imported here because health, which is asked often, does not need it.
    from gpu_pool_kernels.installer import installed

    for kernel in installed():
        if kernel.preload:
            yield from _of_kernel(kernel, kernel.preload)
    yield from _of_courses()


def _of_kernel(kernel: InstalledKernel, modules: tuple[str, ...]) -> Iterator[Check]:
    try:
        spec = json.loads((kernel.path / "kernel.json").read_text(encoding="utf-8"))
        python, environment = str(spec["argv"][0]), _environment(spec.get("env", {}))
    except (OSError, ValueError, LookupError, TypeError):
        return  # what is wrong with the kernelspec, Jupyter says
    name, again = safe(kernel.name), kernel_made_again(kernel.name)
    if missing := _missing(python, modules):
        yield Check(
            "kernels",
            "note",
            f"{name} preloads {safe(', '.join(missing))}, which its Python does not have: "
            "its kernels start without anything preloaded",
            f"Install what is missing there, or: {again}",
        )
    elif why := _tried(python, modules, environment):
        yield Check(
            "kernels",
            "note",
            f"{name} preloads {safe(', '.join(modules))}, and yet its kernels start cold: {why}",
            f"Leave that module out of --preload: {again}",
        )


def _of_courses() -> Iterator[Check]:
    from gpu_pool.settings import load_settings
    from gpu_pool_kernels.installer import preloading_bases

    try:
        settings = load_settings()
        found = read_files((), settings) if settings.courses_dir else []
    except GpuPoolError:  # told by other checks
        return
    preloads = {each.path: each.course.preload for each in found if each.course and each.course.preload}
    modules = sorted({name for names in preloads.values() for name in names})
    for base, python in preloading_bases().items() if modules else ():
        missing = _missing(python, modules)
        for path, names in preloads.items():
            course, file = safe(path.stem), safe(str(path), 300)
            if lacks := [name for name in names if name in missing]:
                yield Check(
                    "courses",
                    "note",
                    f"course {course} preloads {safe(', '.join(lacks))}, which the Python of the "
                    f"kernel {safe(base)} does not have: its kernels start without anything preloaded",
                    f"Install what is missing there, or leave it out of {file}.",
                )
            elif why := _tried(python, tuple(names), _environment({})):
                yield Check(
                    "courses",
                    "note",
                    f"course {course} preloads {safe(', '.join(names))}, and yet its kernels made from "
                    f"{safe(base)} start cold: {why}",
                    f"Leave that module out of preload in {file}.",
                )


def _missing(python: str, modules: Collection[str]) -> list[str]:
    """Return those of the modules that a Python does not have; none where that cannot be told."""
    # Packages alone are looked for: to look for what is in one would import it.
    packages = {name: name.partition(".")[0] for name in modules}
    command = [_executable(python), "-c", _FIND, *packages.values()]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_FOUND_WITHIN, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    missing = found.stdout.split()
    return [name for name, package in packages.items() if package in missing]


# Of the process, which is one command: two courses may preload the same, and to import it takes long.
@functools.cache
def _tried(python: str, modules: tuple[str, ...], environment: frozenset[tuple[str, str]]) -> str:
    """Import modules as a template does; return why it could fork no kernel, and nothing if it could."""
    from gpu_pool_kernels.launching import trial_argv

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        try:
            with theirs:
                process = subprocess.Popen(
                    trial_argv(_executable(python), modules, theirs.fileno()),
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except (OSError, ValueError):  # that Python cannot be run, which its kernels say
            return ""
        try:
            return safe(_why(ours), _MOST_TOLD)
        finally:
            # With what the modules have started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _why(answers: socket.socket) -> str:
    answers.settimeout(_IMPORTED_WITHIN)
    try:
        content = answers.recv(_MAX_MESSAGE)
    except TimeoutError:
        return f"their import takes longer than {_IMPORTED_WITHIN:.0f} s"
    except OSError as error:
        return str(error)
    told: Any = json.loads(content or b'{"failed": "the process that imports them has ended"}')
    return str(told.get("failed", ""))


def _environment(of_kernel: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset({**os.environ, **of_kernel}.items())


def _executable(python: str) -> str:
    return sys.executable if python in ("python", "python3") else python
