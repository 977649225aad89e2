"""The main process of a kernel's pod: it starts the kernel, restarts it in place, and ends with it.

Run as ``python3 launch.py supervisor --connection FILE [--preload a,b] -- python3 -m ipykernel ...``:
what follows ``--`` is the kernel's command, and ``FILE`` its connection file. The standard library is enough.

A Python kernel is forked from a template (``template.py``), which is a child of this process; whatever is in
doubt, and what is no Python kernel, is started as a process. At the port 9750 whoever has the key of the
connection file may ask (``control.py``)::

    → {"n", "verb": "state"}              ← {"n", "to", "start", "status", "importing"}
    → {"n", "verb": "restart"}            ← {"n", "to", "start", "cold"} once it listens, or {"to", "failed"}
    → {"n", "verb": "signal", "number"}   ← {"n", "to"}
    → {"n", "verb": "change", "variables"} ← {"n", "to"}: of its slice, {name: [before, now]}
    → {"n", "verb": "begin", "sealed"}    ← as for restart: the first kernel of a pod that was prepared
                                          ← {"n", "exited": start, "status", "out_of_memory", "last"}, unasked

``start`` counts the kernels of this pod; ``status`` is an exit status, or minus a signal, and None as long as
the kernel runs. ``cold`` says why it was not forked, ``importing`` whether the template is not ready yet,
``last`` what was written last to standard error.

With ``--prepared SECONDS`` no kernel starts before it is told by ``begin`` which one, and where it listens:
the command after ``--`` is that of the template. ``FILE`` has the key alone until then, which stays the key
of this port. After so many seconds without it this process ends, with status 0.

With ``--alone SECONDS`` the kernel ends once nobody who may ask has been connected for so long.

Once the kernel has ended, this process ends with the same status, unless it is restarted within ``--linger``
seconds. It waits for that only where somebody is connected, or was just before.
"""

import argparse
import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Mapping, Sequence  # noqa: UP035 - for Python 3.8

from . import free_memory
from .commands import PLACE, given_variables, launched, module_option
from .connection import ConnectionFile, FirstKernel, Ports, SliceChanges, are_changes
from .control import ControlConnection, ControlPort
from .last_words import LastWords
from .warm import Fork, PodTemplates, WarmStarts

PORT = 9750
#: Seconds after which a kernel that neither ends nor listens is said to have started all the same.
_LISTENS_WITHIN = 60.0
#: Seconds for which the ports of a kernel that has ended may still be kept, by what it has forked.
_PORTS_FREE_WITHIN = 2.0
#: Seconds between two looks at what tells nobody: at ports, at what is soon due, and at nothing special.
_LOOK_OFTEN, _LOOK_SELDOM, _LOOK_RARELY = 0.01, 0.5, 60.0
#: Seconds from a kernel's start to that of a template with what is preloaded, and for which it is put off
#: while the kernel computes: its imports would slow its cells.
_PRELOADS_AFTER, _PAUSES_WITHIN = 3.0, 60.0
#: The part of a processor below which a kernel does not compute.
_PAUSE_BELOW = 0.2
#: Signals that a pod's main process is sent, and that are the kernel's.
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# prctl(2)
_PR_SET_CHILD_SUBREAPER = 36


class Kernel:
    """One run of the kernel."""

    def __init__(self, pid: int, start: int, channel: "socket.socket | None", cold: str) -> None:
        self.pid = pid
        #: How many there were in this pod before it, and itself.
        self.start = start
        #: Why it was not forked; empty if it was.
        self.cold = cold
        self.began_at = time.monotonic()
        #: How it has ended: its exit status, or minus the signal; and what was not told of that yet.
        self.status = None  # type: int | None
        self.untold = None  # type: dict[str, Any] | None
        self.is_bound = False
        #: When it had bound its ports, of ``time.monotonic()``.
        self.bound_at = float("inf")
        self._channel = channel
        #: When it was last looked at how much it computes, and for how long it had until then.
        self._seen = None  # type: tuple[float, float] | None

    def sockets(self) -> "list[socket.socket]":
        """Return what can be read once it has bound its ports."""
        return [self._channel] if self._channel is not None else []

    def read(self, readable: "Any", ports: "Ports") -> None:
        """Take note of whether it has bound its ports."""
        if self.is_bound or self.status is not None:
            return
        if self._channel is None:
            self.is_bound = ports.are_bound()
        elif self._channel in readable:
            with contextlib.suppress(OSError), self._channel:
                self.is_bound = self._channel.recv(1) == b"1"  # else it is about to end
            self._channel = None
        self.is_bound |= time.monotonic() > self.began_at + _LISTENS_WITHIN

    def note_end(self, status: int) -> None:
        """Take note of how it has ended. What can be read then, for good, is to be read no more."""
        self.status = status
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def signal(self, number: int) -> None:
        """Send a signal to it and what it has started, unless it has ended."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def processor_time(self) -> float:
        """Return the seconds for which it has run or waited for a processor; 0 where nobody can tell."""
        try:
            with open(f"/proc/{self.pid}/schedstat", "rb") as file:
                ran, waited, _ = map(int, file.read().split())
        except (OSError, ValueError):
            return 0.0
        return (ran + waited) / 1e9

    def pauses(self) -> bool:
        """Whether it runs and does not compute, or has for long."""
        now = time.monotonic()
        if not self.is_bound or now < self.began_at + _PRELOADS_AFTER:
            return False
        if self._seen is not None and now < self._seen[0] + _LOOK_SELDOM:
            return False
        before, self._seen = self._seen, (now, self.processor_time())
        if before is None:
            return False
        is_quiet = self._seen[1] - before[1] < _PAUSE_BELOW * (now - before[0])
        return is_quiet or now > self.began_at + _PAUSES_WITHIN


class Supervisor:
    """The kernel of this pod, from its first start to its last end."""

    def __init__(
        self,
        argv: "Sequence[str]",
        preload: "Sequence[str]",
        settings: argparse.Namespace,
        environment: "Mapping[str, str]",
        warm: "WarmStarts | None",
        words: LastWords,
    ) -> None:
        """Supervise a kernel with this command, of which there may be a template already."""
        self._words = words
        self._settings = settings
        self._file = ConnectionFile(settings.connection)
        self._argv = launched(list(argv))
        self._environment = dict(environment)
        self._changes = SliceChanges(os.path.dirname(settings.connection), self._environment)  # noqa: PTH120
        #: Where kernels start; None for where this process does.
        self._folder = None  # type: str | None
        self._ports = Ports(self._file.content)
        self._ended_at = float("-inf")
        self._killed_at = None  # type: float | None
        #: Who waits for a restart; and whether there is to be another kernel.
        self._asked = []  # type: list[tuple[ControlConnection, int]]
        #: Until when it is waited to be told which kernel to start; None once that is known.
        self._prepared_until = None  # type: float | None
        if settings.prepared is not None:
            self._prepared_until = time.monotonic() + settings.prepared
        self._is_wanted = self._prepared_until is None
        #: Whether its template was asked for it, and what came of that.
        self._is_asked = False
        self._fork = None  # type: Fork | None
        self._kernel = None  # type: Kernel | None
        self._kills = free_memory.memory_kills()
        self._woken = _wake_at_signals()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._templates = PodTemplates(self._argv, preload, self._environment, warm)
        if warm is None and self._argv != list(argv):  # it is a kernel of Python
            self._templates.start(preloads=self._prepared_until is not None)
        self._control = self._listen()

    def _listen(self) -> "ControlPort | None":
        address, key = (str(self._file.content.get(name) or "") for name in ("ip", "key"))
        if not key:  # everybody could ask
            return None
        try:
            return ControlPort(address, self._settings.port, key.encode())
        except OSError as error:
            if self._settings.alone is not None:  # its server could not be heard, and it would end by that
                sys.exit(
                    f"gpu-pool: the port {self._settings.port} for the kernel's server is taken: {error}"
                )
            print(f"gpu-pool: this kernel does not restart in place: {error}", file=sys.stderr)
            return None

    # -- The loop ------------------------------------------------------------

    def run(self) -> int:
        """Return the status to end with, once that is due."""
        readable = []  # type: list[Any]
        while True:
            self._pass_on_signals(readable)
            self._wait_for_ended()
            self._tell_end()
            for connection, message in self._control.asked(readable) if self._control else ():
                self._answer(connection, message)
            self._follow_templates(readable)
            self._follow_kernel(readable)
            if self._is_over():
                break
            readable = _readable(self._sockets(), self._wait())
            self._words.read()
        self._templates.end("its supervisor ends")
        status = 0 if self._kernel is None else self._kernel.status or 0
        if self._kernel is None and self._killed_at is not None:
            status = 128 + signal.SIGTERM
        return status if status >= 0 else 128 - status

    def _sockets(self) -> "list[Any]":
        found = [self._woken, self._words]  # type: list[Any]
        for each in (self._kernel, self._templates, self._control):
            found += each.sockets() if each is not None else []
        return found

    def _wait(self) -> float:
        """Return after how many seconds there is something to do that no descriptor tells."""
        kernel = self._kernel
        if self._killed_at is not None or (kernel is not None and kernel.untold is not None):
            return _LOOK_OFTEN
        if self._prepared_until is not None:
            left = max(0.0, self._prepared_until - time.monotonic())
            is_awaited = self._control is not None and self._control.awaits_somebody()
            return min(left, _LOOK_SELDOM if is_awaited else _LOOK_RARELY)
        if self._is_wanted or kernel is None or kernel.status is not None:
            return _LOOK_OFTEN if self._fork is not None else _LOOK_SELDOM
        if not (kernel.is_bound or kernel.sockets()):
            return _LOOK_OFTEN
        is_awaited = self._control is not None and self._control.awaits_somebody()
        is_soon = is_awaited or not kernel.is_bound or self._templates.are_to_change(kernel.start)
        return _LOOK_SELDOM if is_soon else min(_LOOK_RARELY, self._settings.alone or _LOOK_RARELY)

    def _is_over(self) -> bool:
        now = time.monotonic()
        if self._kernel is None or self._kernel.status is not None:
            if self._killed_at is not None:
                return True
            if self._prepared_until is not None:
                return now >= self._prepared_until
            lingers = self._control is not None and self._control.was_asked_within(self._settings.linger)
            return not self._is_wanted and not (lingers and now < self._ended_at + self._settings.linger)
        if self._killed_at is None and self._is_alone(now):
            print("gpu-pool: the kernel ends, since its server has not been heard of", file=sys.stderr)
            self._killed_at, self._is_wanted = now, False
            self._kernel.signal(signal.SIGTERM)
        if self._killed_at is not None and now > self._killed_at + self._settings.grace:
            self._kernel.signal(signal.SIGKILL)
        return False

    def _is_alone(self, now: float) -> bool:
        """Whether nobody who may ask is connected, or was lately, where the kernel is to end then."""
        seconds = self._settings.alone
        # Its server connects once the kernel listens, which may take long.
        if seconds is None or self._kernel is None or now < self._kernel.bound_at + seconds:
            return False
        return self._control is None or not self._control.was_asked_within(seconds)

    def _pass_on_signals(self, readable: "Sequence[Any]") -> None:
        for number in os.read(self._woken, 1024) if self._woken in readable else b"":
            if number not in _PASSED_ON:
                continue
            if self._kernel is not None and self._kernel.status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._kernel.pid, number)
            if number == signal.SIGTERM:
                self._killed_at = self._killed_at or time.monotonic()
                self._is_wanted = False

    def _wait_for_ended(self) -> None:
        """Wait for all children that have ended, and all orphans, which are children by then."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            kernel = self._kernel
            is_kernel = kernel is not None and kernel.pid == found.si_pid
            if kernel is not None and is_kernel:
                # What it has started may keep its ports; until it was waited for, its group is nobody else's.
                kernel.signal(signal.SIGKILL)
            _, code = os.waitpid(found.si_pid, 0)
            self._templates.note_end(found.si_pid)
            if self._fork is not None and self._fork.pid == found.si_pid:
                self._fork = Fork(why="it has ended")
            if is_kernel:
                self._note_end(-os.WTERMSIG(code) if os.WIFSIGNALED(code) else os.WEXITSTATUS(code))

    def _note_end(self, status: int) -> None:
        kernel = self._kernel
        assert kernel is not None
        kernel.note_end(status)
        self._ended_at = time.monotonic()
        before, self._kills = self._kills, free_memory.memory_kills()
        # Memory that was used up ends a process by this signal, and perhaps only one that the kernel started.
        out_of_memory = status == -signal.SIGKILL and self._kills > before
        told = {
            "exited": kernel.start,
            "status": status,
            "out_of_memory": out_of_memory,
            "last": self._words.told(),
        }  # type: dict[str, Any]
        kernel.untold = told
        self._tell_end()
        if not kernel.is_bound and not self._is_wanted:
            self._reply({"failed": f"it ended with status {status} before it listened"})

    def _tell_end(self) -> None:
        """Tell how the kernel has ended, unless it ends with its pod: whoever has ended that knows why.

        Who ends all processes of a job may send the kernel its SIGTERM a moment before this process.
        """
        kernel = self._kernel
        if kernel is None or kernel.untold is None or self._killed_at is not None:
            return
        if kernel.status == -signal.SIGTERM and time.monotonic() < self._ended_at + self._settings.settle:
            return
        if self._control is not None:
            self._control.tell(kernel.untold)
        kernel.untold = None

    # -- The kernel ----------------------------------------------------------

    def _follow_kernel(self, readable: "Sequence[Any]") -> None:
        kernel = self._kernel
        if self._is_wanted:
            self._prepare_next()
        if kernel is not None and kernel.status is None:
            was_bound = kernel.is_bound
            kernel.read(readable, self._ports)
            if kernel.is_bound and not was_bound:
                kernel.bound_at = time.monotonic()
                self._reply({"start": kernel.start, "cold": kernel.cold})
        elif self._is_wanted and self._fork is not None and self._has_ports():
            self._start(self._fork)

    def _prepare_next(self) -> None:
        """Let the kernel end, and the next one be forked meanwhile, which does not begin before that."""
        if self._kernel is not None:
            self._kernel.signal(signal.SIGKILL)
        template = self._templates.current
        if template is None or (template.why and not self._is_asked):
            self._fork = self._fork or Fork()
        elif not self._is_asked:
            self._is_asked = True
            self._changes.forget()
            template.ask(self._argv, self._environment, self._folder)
        else:
            self._fork = self._fork or template.forked()

    def _has_ports(self) -> bool:
        is_late = time.monotonic() > self._ended_at + _PORTS_FREE_WITHIN
        return is_late or self._ports.are_free()

    def _next_start(self) -> int:
        return 1 if self._kernel is None else self._kernel.start + 1

    def _start(self, fork: Fork) -> None:
        """Let the kernel begin that was forked, or start one as a process."""
        self._is_wanted = self._is_asked = False
        self._fork = None
        self._words.forget()
        start = self._next_start()
        self._file.restore()
        if fork.channel is not None:
            with contextlib.suppress(OSError):  # it has ended, and is waited for
                fork.channel.send(b"1")
            self._kernel = Kernel(fork.pid, start, fork.channel, "")
            return
        self._changes.forget()
        try:
            process = subprocess.Popen(
                self._argv, env=self._environment, cwd=self._folder, start_new_session=True
            )
        except OSError as error:
            print(f"gpu-pool: {self._argv[0]} could not be started: {error}", file=sys.stderr)
            self._kernel = Kernel(0, start, None, "")
            self._kernel.status, self._ended_at = 127, time.monotonic()
            self._reply({"failed": f"it could not be started: {error}"})
            return
        process.returncode = 0  # all children are waited for here
        self._kernel = Kernel(process.pid, start, None, fork.why)

    def _reply(self, content: "dict[str, Any]") -> None:
        for connection, number in self._asked:
            connection.send({"to": number, **content})
        self._asked.clear()

    def _answer(self, connection: ControlConnection, message: "dict[str, Any]") -> None:
        verb, number, kernel = message.get("verb"), message["n"], self._kernel
        if verb == "begin":
            failed = self._begin(connection, message)
            if failed:
                connection.send({"to": number, "failed": failed})
            return
        if verb == "restart" and self._killed_at is None and self._prepared_until is None:
            self._asked.append((connection, number))
            self._is_wanted = True
            return
        reply = {"to": number}
        if verb == "state":
            # Of the kernel that is about to run, where there is to be another one.
            known = None if self._is_wanted else kernel
            reply["start"] = self._next_start() if known is None else known.start
            reply["status"] = None if known is None else known.status
            reply["last"] = self._words.told() if reply["status"] else ""
            reply["importing"] = self._templates.are_importing
        elif verb == "signal" and type(message.get("number")) is int and 0 < message["number"] < signal.NSIG:
            if kernel is not None:
                kernel.signal(message["number"])
        elif verb == "change" and are_changes(message.get("variables")):
            self._changes.tell(message["variables"])
        else:
            reply["failed"] = "that is not understood"
            if verb == "restart":
                reply["failed"] = (
                    "its supervisor ends" if self._killed_at is not None else "no kernel has begun yet"
                )
        connection.send(reply)

    def _begin(self, connection: ControlConnection, message: "dict[str, Any]") -> str:
        """Start the first kernel of a pod that was prepared; return why not, empty if it starts."""
        if self._prepared_until is None or self._killed_at is not None:
            return "a kernel has begun already" if self._killed_at is None else "its supervisor ends"
        try:
            told = FirstKernel.read(connection.unsealed(message))
        except ValueError:
            return "that is not understood"
        self._prepared_until, self._is_wanted = None, True
        self._asked.append((connection, message["n"]))
        self._file.write(told.connection)
        self._ports = Ports(self._file.content)
        self._argv = launched(list(told.argv))
        self._environment.update(told.environment)
        self._folder = told.folder
        self._templates.take_command(self._argv)
        return ""

    # -- Templates -----------------------------------------------------------

    def _follow_templates(self, readable: "Sequence[Any]") -> None:
        self._templates.read(readable, is_prepared=self._prepared_until is not None)
        # Not before the other one has answered, of which a kernel was asked: nobody would answer then.
        if not self._is_asked:
            self._templates.take_next()
        kernel = self._kernel
        if kernel is not None and self._templates.lack_one_for(kernel.start) and kernel.pauses():
            self._templates.begin_next(kernel.start)


def _readable(descriptors: "Sequence[Any]", within: float) -> "list[Any]":
    """Return those that can be read, or have ended, once there is one, or after so many seconds."""
    waiting, known = select.poll(), {}  # not select(2), which takes none from the 1,024th on
    for each in descriptors:
        known[each if isinstance(each, int) else each.fileno()] = each
    for number in known:
        waiting.register(number, select.POLLIN)
    return [known[number] for number, _ in waiting.poll(within * 1000)]


def _wake_at_signals() -> int:
    """Return a descriptor from which the numbers of signals can be read that came."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGCHLD, *_PASSED_ON):
        signal.signal(number, lambda *_: None)
    return reading


def is_same_python(argv: "Sequence[str]") -> bool:
    """Whether a kernel's command starts this Python, with the options with which it was started itself."""
    position = module_option(argv)
    words = os.fsdecode(Path("/proc/self/cmdline").read_bytes()).split("\0")
    return position is not None and list(argv[:position]) == words[: words.index(sys.argv[0])]


def main(variables: "Mapping[str, str] | None" = None) -> None:
    """Supervise the kernel that the command line names; ``variables`` are its own, besides this process'."""
    parser = argparse.ArgumentParser(
        prog="supervisor", description="Start a kernel, and restart it in place."
    )
    parser.add_argument("--connection", required=True, metavar="FILE")
    parser.add_argument("--preload", default="", metavar="MODULE,MODULE")
    parser.add_argument(
        "--prepared", type=float, metavar="SECONDS", help="how long to wait until a kernel is to begin"
    )
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--linger", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--alone", type=float, metavar="SECONDS", help="without its server until it ends")
    parser.add_argument(
        "--settle", type=float, default=0.5, metavar="SECONDS", help="from the kernel's SIGTERM to this one's"
    )
    parser.add_argument("--grace", type=float, default=1.5, metavar="SECONDS", help="from SIGTERM to SIGKILL")
    words = sys.argv[2:]
    place = words.index("--") if "--" in words else len(words)
    settings, argv = parser.parse_args(words[:place]), words[place + 1 :]
    if not argv:
        parser.error("after -- the kernel's command is missing")
    preload = list(filter(None, settings.preload.split(",")))
    environment, warm, last_words = given_variables(), None, LastWords()
    environment.update(variables or {})
    environment.pop(PLACE, None)  # the template's
    if os.getpid() != 1:
        # As on one machine it ends with its parent, and says nothing to a terminal that is not there.
        environment["JPY_PARENT_PID"] = str(os.getpid())
    if is_same_python(argv):
        modules = () if settings.prepared is None else preload
        warm = WarmStarts.fork(launched(argv), modules, environment)
        if warm is None:
            last_words.leave()
            importlib.import_module(__package__ + ".template").main()
            return
    try:
        status = Supervisor(argv, preload, settings, environment, warm, last_words).run()
    finally:
        last_words.end()
    sys.exit(status)
