"""Running the program, for a bounded time, and reading what it says."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

#: By its path: importing this package first would take longer than the rest of its start.
_PROGRAM: Final = str(Path(__file__).with_name("program.py"))
#: Seconds that a process may take to start and to end, beside its work.
_GRACE: Final = 10
#: The most that is repeated of what the program said on its standard error.
_MOST: Final = 300


@dataclass(frozen=True, slots=True)
class DriverAnswer:
    """What the program said."""

    #: Its exit status; None if it was ended, or could not be started.
    code: int | None
    lines: Sequence[Mapping[str, Any]]
    #: Why it did not do all it was asked for; empty if it did.
    problem: str

    def states(self) -> dict[int, str]:
        """Return the last state of each process that it told of."""
        return {line["pid"]: line["state"] for line in self.lines if "pid" in line}


def ask(verb: str, *arguments: object, limit: int, keep_open: Iterable[int] = ()) -> DriverAnswer:
    """Run the program with a verb for ``limit`` seconds at most; never raises.

    ``keep_open`` are file descriptors that stay open for as long as it runs,
    even if this process ends: the lock on a record.
    """
    command = [sys.executable, _PROGRAM, verb, "--limit", str(limit), *map(str, arguments)]
    try:
        # In a session of its own, so that an interrupt from the terminal does not reach it.
        process = subprocess.Popen(
            command,
            cwd="/",
            env=_environment(),
            start_new_session=True,
            pass_fds=tuple(keep_open),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        return DriverAnswer(None, (), f"a process could not be started: {error.strerror}")
    return _answer(process, limit)


def _environment() -> dict[str, str]:
    """Return the environment without what CUDA reads: the program must see all devices, outside of MPS."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}


def _answer(process: subprocess.Popen[bytes], limit: int) -> DriverAnswer:
    try:
        said, complaint = process.communicate(timeout=limit + _GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            said, complaint = process.communicate(timeout=_GRACE)
        except subprocess.TimeoutExpired:  # not even SIGKILL ends it while the driver holds it
            return DriverAnswer(None, (), "the driver hangs")
    lines = [line for line in map(_read, said.split(b"\n")) if line is not None]
    if process.returncode < 0:
        return DriverAnswer(None, lines, f"the driver did not answer in {limit} s, or who asked it was ended")
    errors = [str(line["error"]) for line in lines if "error" in line]
    if process.returncode and not errors:
        errors = [complaint.decode(errors="replace").strip()[-_MOST:] or "it does not say why"]
    return DriverAnswer(process.returncode, lines, "; ".join(errors))


def _read(line: bytes) -> Mapping[str, Any] | None:
    """Return a line as an object; None for what was cut off, or is somebody else's."""
    with contextlib.suppress(ValueError):
        read = json.loads(line)
        if isinstance(read, dict):
            return read
    return None


_IN_WORDS: Final = {
    "CUDA_ERROR_NOT_READY": "it was busy on its GPU",
    "CUDA_ERROR_NOT_SUPPORTED": "the driver does not support it, as with managed (UVM) or shared memory",
    "CUDA_ERROR_NOT_PERMITTED": "the driver does not permit it to this user",
}


def in_words(problem: str) -> str:
    """Return what the program said, with an error that is known explained; empty if it said nothing."""
    return next((f"{words} ({problem})" for name, words in _IN_WORDS.items() if name in problem), problem)


@dataclass(frozen=True, slots=True)
class Suspended:
    """The processes of a lease were suspended: they hold no device memory any more."""

    #: Host memory in MiB that is counted for them; as much as they held on devices.
    host_mib: int


class NotSuspended(Exception):
    """Nothing was suspended, and nothing has changed: the processes run, with all they had."""


class NotRestored(Exception):
    """The processes are still suspended, unharmed. Restoring them can be tried again."""


class Broken(Exception):
    """Processes are in a state from which they cannot be brought back. The caller must end them.

    ``pids`` are theirs; the other processes of the lease run.
    """

    def __init__(self, pids: Collection[int], reason: str) -> None:
        self.pids = frozenset(pids)
        names = ", ".join(str(pid) for pid in sorted(self.pids))
        super().__init__(f"Process {names} could not be brought back to its GPU: {reason}")
