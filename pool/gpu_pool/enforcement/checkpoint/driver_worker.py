"""The processes that call the driver for a pool: one for each device, which stays for the next call."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

#: By its path: importing this package first would take longer than the rest of its start.
_PROGRAM: Final = str(Path(__file__).with_name("program.py"))
#: Seconds that a process may take to start and to end, beside its work.
_GRACE: Final = 10
#: Bytes that the program may say about one job. A line of it has fewer than a hundred.
_MOST_SAID: Final = 1 << 20
_CHUNK: Final = 1 << 16
#: The most that is repeated of what is not in its words, such as a traceback.
_MOST_REPEATED: Final = 300
#: Its words, and what may follow each.
_WORDS: Final[Mapping[str, type]] = {
    "begun": bool,
    "pid": int,
    "step": str,
    "state": str,
    "used": dict,
    "computing": list,
    "error": str,
    "done": int,
}


@dataclass(frozen=True, slots=True)
class DriverAnswer:
    """What the program said of one job."""

    #: 0 if all was done, otherwise see :mod:`.program`; None if it was ended, or could not be started.
    code: int | None
    lines: Sequence[Mapping[str, Any]]
    #: Why it did not do all it was asked for; empty if it did.
    problem: str
    #: Whether it has begun; else nothing has been done, nor found out.
    has_begun: bool = True

    def states(self) -> dict[int, str]:
        """Return the last state of each process that it told of."""
        return {line["pid"]: line["state"] for line in self.lines if "pid" in line}


class DriverWorker:
    """Asks the program for one device, in a process that is started when it is needed.

    CUDA is initialised there once, and not for each call. That process ends when it has had nothing to do
    for ``idle`` seconds, and when this one ends. If it does not answer in time it is killed, and the next
    job has a new one. Threads may share a worker; its jobs are done one after the other.
    """

    def __init__(self, idle: float) -> None:
        self._idle = idle
        self._one_at_a_time = threading.Lock()
        self._running: _Running | None = None

    def ask(self, verb: str, *arguments: object, limit: int, keep_open: Iterable[int] = ()) -> DriverAnswer:
        """Have a job done in ``limit`` seconds at most; never raises.

        ``keep_open`` are file descriptors that stay open for as long as it is at
        work, even if this process ends: the lock on a record.
        """
        job = json.dumps([verb, "--limit", str(limit), *map(str, arguments)]).encode()
        files = list(keep_open)
        with self._one_at_a_time:
            try:
                # One that had nothing to do may just have ended; it has not begun with this then.
                answer = self._answer(job, files, limit) or self._answer(job, files, limit)
            except (OSError, RuntimeError) as error:  # no process, or no thread
                why = getattr(error, "strerror", None) or error
                return DriverAnswer(None, (), f"a process could not be started: {why}", has_begun=False)
        return answer or DriverAnswer(None, (), "its process ends before it begins", has_begun=False)

    def stop(self) -> None:
        """End the process, after the job that it is doing. Another job starts a new one."""
        with self._one_at_a_time:
            if self._running is not None:
                self._running.end()
                self._running = None

    def _answer(self, job: bytes, files: Sequence[int], limit: int) -> DriverAnswer | None:
        """Return what the process says of a job; None if it has ended before it began with it."""
        # Forgotten unless it answers: whatever cuts this off, nobody reads the rest of it as another answer.
        running, self._running = self._running or _start(self._idle), None
        said = _JobOutput()
        why = ""
        try:
            running.have_done(job, files, said, time.monotonic() + limit + _GRACE)
        except TimeoutError:
            why = f"the driver did not answer in {limit} s"
        except _TooMuch:
            why = "what it says makes no sense"
        except OSError:  # it has ended
            pass
        if said.code is not None:
            self._running = running
            return DriverAnswer(said.code, said.lines, said.problem() if said.code else "")
        code = running.end(at_once=bool(why))
        if not (why or said.begun or said.other):
            return None
        why = "the driver hangs" if code is None else why
        if code is not None and code < 0 and not why:
            why = f"the driver did not answer in {limit} s, or who asked it was ended"
        return DriverAnswer(None, said.lines, why or said.problem())


class DriverWorkers:
    """The workers of a pool, by the UUID of the device that each is for; threads may share them."""

    def __init__(self, idle: float) -> None:
        self._idle = idle
        self._workers: dict[str, DriverWorker] = {}

    def of(self, device: str) -> DriverWorker:
        """Return the worker of a device. None of its jobs waits for those of another device."""
        return self._workers.setdefault(device, DriverWorker(self._idle))

    def stop(self) -> None:
        """End their processes, each after the job that it is doing."""
        for worker in self._workers.values():
            worker.stop()


# ---- The process ----


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    #: Jobs go there, each in one packet, and what the process says comes from there.
    connection: socket.socket

    def have_done(self, job: bytes, files: Sequence[int], said: _JobOutput, give_up_at: float) -> None:
        """Have a job done, and take down what is said of it until all is, or the process ends."""
        socket.send_fds(self.connection, [job], files)
        while said.code is None:
            self.connection.settimeout(max(give_up_at - time.monotonic(), 0.001))
            if not (chunk := self.connection.recv(_CHUNK)):
                return
            said.take(chunk)

    def end(self, *, at_once: bool = False) -> int | None:
        """End the process, by force if it must be; return its exit status, or None if nothing ends it."""
        if at_once:
            self.process.kill()
        with contextlib.suppress(OSError):  # it has ended
            # Whoever was forked from this process may have it open, too.
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        try:
            return self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
        try:
            return self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:  # not even SIGKILL ends it while the driver holds it
            return None


def _start(idle: float) -> _Running:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            # In a session of its own, so that an interrupt from the terminal does not reach it. It says all
            # in one place, which is read while it works: no full pipe holds it up.
            process = subprocess.Popen(
                [sys.executable, _PROGRAM, "--idle", str(idle)],
                cwd="/",
                env=_environment(),
                start_new_session=True,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=theirs.fileno(),
            )
        # It may end by itself, and somebody has to ask for its exit status then.
        threading.Thread(target=process.wait, name="gpu-pool-driver", daemon=True).start()
    except BaseException:
        ours.close()
        raise
    return _Running(process, ours)


def _environment() -> dict[str, str]:
    """Return the environment without what CUDA reads, and what counts a process among those of a lease.

    The program must see all devices, outside of MPS, and is no process of a lease even where the pool is.
    """
    apart = ("CUDA_", "GPU_POOL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(apart)}


# ---- What it says ----


class _TooMuch(Exception):
    """It has said more than it could have to say."""


class _JobOutput:
    """What a process says of one job, as it comes."""

    def __init__(self) -> None:
        self.begun = False
        #: How it ended; None until it has.
        self.code: int | None = None
        self.lines: list[Mapping[str, Any]] = []
        self._rest = b""
        self._size = 0
        self._other = b""

    def take(self, chunk: bytes) -> None:
        """Read on. Raises ``_TooMuch``."""
        self._size += len(chunk)
        if self._size > _MOST_SAID:
            raise _TooMuch
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._take_line(line)

    def _take_line(self, line: bytes) -> None:
        read = _read(line)
        if read is None:
            self._other = (self._other + line + b"\n")[-_MOST_REPEATED:]
        elif "begun" in read:
            self.begun = True
        elif "done" in read:
            self.code = read["done"]
        else:
            self.lines.append(read)

    def problem(self) -> str:
        """Return why not all was done."""
        errors = [line["error"] for line in self.lines if "error" in line]
        return "; ".join(errors) or self.other or "it does not say why"

    @property
    def other(self) -> str:
        """The end of what is not in the program's words, such as a traceback."""
        return (self._other + self._rest)[-_MOST_REPEATED:].decode(errors="replace").strip()


def _read(line: bytes) -> Mapping[str, Any] | None:
    """Return a line as an object; None for what was cut off, or is somebody else's."""
    with contextlib.suppress(ValueError, RecursionError):
        read = json.loads(line)
        if isinstance(read, dict) and all(isinstance(read[key], _WORDS.get(key, ())) for key in read):
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
