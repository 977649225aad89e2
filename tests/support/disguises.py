"""Hostile processes: real ones, of other users, in namespaces of their own, with names of their making."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_pool_client import Process

#: Two users who hold nothing on this machine.
STUDENT, OTHER = 65534, 64_998
#: What ends a line for Python and for many tools, and not for the kernel.
ENDS_OF_LINES = (b"\r", b"\x0b", b"\x0c", b"\x1c", b"\x1d", b"\x1e", b"\xc2\x85", b"\n")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be other users")

#: Takes a name as prctl(2) with PR_SET_NAME would, says so, and lives until its standard input closes.
_TAKE_NAME = 'printf "$1" >/proc/$$/comm && echo $$ && read nothing'
#: Has a child that does so.
_HAVE_CHILD = 'sh -c "$2" sh "$1"; read nothing'
#: For Python programs: the same, by prctl itself.
TAKE_NAME = """
import ctypes
assert ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0) == 0
"""
#: Root of a container as Docker starts it, and with less: its own pids, and no capability at all.
_ALONE = ("unshare", "--pid", "--mount", "--fork", "--mount-proc")
_WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")


@contextmanager
def disguised(
    name: bytes,
    uid: int = STUDENT,
    *,
    argv0: str = "sh",
    program: str = "/bin/sh",
    options: Sequence[str] = (),
    words: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Iterator[Process]:
    """Run a shell that has given itself that name, as that user.

    ``argv0`` and ``words`` are what its command line shows first and last, ``environ``
    its environment.
    """
    command = [argv0, *options, "-c", _TAKE_NAME, "sh", _escaped(name), *words]
    with _started(command, uid, program, environ or {}) as (_, named):
        yield named


@contextmanager
def with_disguised_child(name: bytes) -> Iterator[tuple[Process, Process]]:
    """Run a shell as a student, and a child of it that has given itself that name; return both."""
    path = {"PATH": os.defpath}
    with _started(
        ["sh", "-c", _HAVE_CHILD, "sh", _escaped(name), _TAKE_NAME], STUDENT, "/bin/sh", path
    ) as both:
        yield both


def _escaped(name: bytes) -> str:
    assert len(name) <= 15, "the kernel keeps no more"
    return "".join(f"\\{byte:03o}" for byte in name)


@contextmanager
def _started(
    command: Sequence[str], uid: int, program: str, environ: Mapping[str, str]
) -> Iterator[tuple[Process, Process]]:
    """Run a command; return its process, and the one whose pid it says."""
    started = subprocess.Popen(
        command,
        executable=program,
        env=dict(environ),
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        user=uid,
        group=uid,
        extra_groups=[],
    )
    try:
        assert started.stdout is not None
        first, named = Process.of(started.pid), Process.of(int(started.stdout.readline()))
        assert first is not None
        assert named is not None
        yield first, named
    finally:
        started.kill()
        # What it has started reads the end of its standard input then, and ends.
        started.communicate()


@contextmanager
def root_of_a_container(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python as root without any capability, in a pid namespace of its own; skip where there is none."""
    if problem := _no_containers():
        pytest.skip(problem)
    command = [*_ALONE, *_WITHOUT_RIGHTS, sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@functools.cache
def _no_containers() -> str:
    """Return why no namespaces can be made here; empty if they can."""
    missing = [tool for tool in (_ALONE[0], _WITHOUT_RIGHTS[0]) if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)}"
    tried = subprocess.run([*_ALONE, *_WITHOUT_RIGHTS, "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"no pid namespace can be made here: {tried.stderr.strip()}"


def set_user_id_shell(folder: Path) -> Path:
    """Make a shell of root's that anybody runs as root, in a folder that others can come through."""
    shell = Path(shutil.copy(Path("/bin/sh").resolve(), folder / "shell"))
    shell.chmod(0o4755)
    if os.statvfs(folder).f_flag & os.ST_NOSUID:
        pytest.skip(f"{folder} is mounted without set-user-ID programs")
    return shell
