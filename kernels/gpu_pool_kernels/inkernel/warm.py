"""The templates of a pod's kernels, as their supervisor asks them.

The supervisor is to it what a Jupyter server is on one machine: the kernels that it forks are children of the
supervisor. The protocol is that of ``template.py``.
"""

import array
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any, Mapping, NamedTuple, Sequence  # noqa: UP035 - for Python 3.8

from .commands import PLACE, starts_alike, template_argv

#: Bytes in which a kernel's own variables are shown: few are not the template's as well.
_PLACE_FOR = 16_384
#: Seconds in which a template must acknowledge that it was asked for a kernel.
_HEARS_WITHIN = 5.0
#: Seconds in which it must have forked it then.
_FORKS_WITHIN = 5.0
#: Seconds for which it may import.
_IMPORTS_WITHIN = 300.0
#: Seconds without a question after which it would end: never.
_IDLE = 1e9
_MAX_MESSAGE = 1 << 16


class Fork(NamedTuple):
    """What came of a question for a kernel."""

    #: The kernel's process; 0 if none was forked.
    pid: int = 0
    #: One byte says by it that the kernel may begin, and one comes once it has bound its ports.
    channel: "socket.socket | None" = None
    #: Why none was forked.
    why: str = ""


class WarmStarts:
    """A process from which the kernels of one command are forked."""

    def __init__(self, pid: int, control: socket.socket, modules: "Sequence[str]") -> None:
        """Ask this process by this socket."""
        self._control = control
        self._control.setblocking(False)
        self.pid = pid
        self.modules = tuple(modules)
        self.is_importing = True
        #: Whether what it has imported keeps kernels from being forked.
        self.is_refused = False
        self._has_ended = False
        #: Why nothing is forked from it; empty as long as that may be.
        self.why = ""
        #: The channel of the kernel that it was asked for, and when it must have said something.
        self._channel = None  # type: socket.socket | None
        self._give_up_at = time.monotonic() + _IMPORTS_WITHIN
        self._fork = None  # type: Fork | None
        #: Whether it has: what it still imports after its first kernel takes a moment.
        self._has_answered = False

    @classmethod
    def start(
        cls, argv: "Sequence[str]", modules: "Sequence[str]", environment: "Mapping[str, str]"
    ) -> "WarmStarts":
        """Start one; ``argv`` is the kernels' command as :func:`commands.launched` returns it.

        Raises ``OSError``.
        """
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made = template_argv(list(argv), modules, theirs.fileno(), _IDLE)
        assert made is not None
        with theirs:
            process = subprocess.Popen(
                made[1],
                env={PLACE: "-" * _PLACE_FOR, **environment},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        process.returncode = 0  # its end is waited for by who waits for all children
        return cls(process.pid, control, modules)

    @classmethod
    def fork(
        cls, argv: "Sequence[str]", modules: "Sequence[str]", environment: "Mapping[str, str]"
    ) -> "WarmStarts | None":
        """Fork one of this process, which must be as Python has started it; in the template return None.

        That spares the start of another Python, and the imports of what both need.
        """
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made = template_argv(list(argv), modules, theirs.fileno(), _IDLE)
        assert made is not None
        pid = os.fork()
        if pid:
            theirs.close()
            return cls(pid, control, modules)
        control.close()
        theirs.detach()
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.environ.update(environment)
        sys.argv[:] = made[1][len(made[0]) :]
        return None

    @property
    def is_ready(self) -> bool:
        """Whether kernels can be forked from it."""
        return not self.is_importing and not self.why

    def sockets(self) -> "list[socket.socket]":
        """Return what is to be read once there is something."""
        return [self._control] if not self.why else []

    def ask(self, argv: "Sequence[str]", environment: "Mapping[str, str]", folder: "str | None") -> None:
        """Ask for a kernel, which has this process' standard streams; :meth:`forked` returns what came of it.

        It starts in ``folder``; None for where this process did. The template may still import.
        """
        self._channel, theirs = socket.socketpair()
        with theirs:
            content = json.dumps({"argv": list(argv), "env": dict(environment), "cwd": folder}).encode()
            passed = array.array("i", [theirs.fileno(), 0, 1, 2])
            try:
                self._control.sendmsg([content], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
            except OSError as error:  # it has ended, or these are more variables than one message can have
                self._drop_question(str(error))
        if self._has_answered:
            self._give_up_at = time.monotonic() + _HEARS_WITHIN

    def forked(self) -> "Fork | None":
        """Return what came of the question, once; None as long as that is not known."""
        found, self._fork = self._fork, None
        return found

    def read(self, readable: "Any") -> None:
        """Take note of what it has told."""
        while self._control in readable and not self.why:
            try:
                content = self._control.recv(_MAX_MESSAGE)
            except BlockingIOError:
                break
            except OSError:
                content = b""
            self._note(json.loads(content) if content else {})
        if (self.is_importing or self._channel is not None) and time.monotonic() > self._give_up_at:
            self._give_up("it does not answer")

    def _note(self, told: "Mapping[str, Any]") -> None:
        self._has_answered = True
        if "heard" in told:
            self._give_up_at = max(self._give_up_at, time.monotonic() + _FORKS_WITHIN)
        elif "pid" in told:
            self._fork, self._channel = Fork(int(told["pid"]), self._channel), None
        elif "cold" in told:
            self._drop_question(str(told["cold"]))
        elif "ready" in told:
            self.is_importing = False
        elif "short" in told:
            self.end("memory is short")
        else:
            self._give_up(str(told.get("failed", "it has ended")))

    def _give_up(self, why: str) -> None:
        self.is_refused = self.is_importing
        self.end(why)

    def _drop_question(self, why: str) -> None:
        if self._channel is not None:
            # Whatever is still forked finds that nobody wants it, and ends.
            self._channel.close()
            self._fork, self._channel = Fork(why=why), None

    def end(self, why: str) -> None:
        """End it. The kernels that it has forked go on. May be repeated."""
        self.is_importing = False
        self.why = self.why or why
        self._drop_question(self.why)
        self._control.close()
        if not self._has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def note_end(self) -> None:
        """Take note that its process has ended, and was waited for."""
        self._has_ended = True
        self.read(self.sockets())  # what it has told before
        self.end("it has ended")


class PodTemplates:
    """What the kernels of a pod are forked from: one template, and one that is to take its place."""

    def __init__(
        self,
        argv: "Sequence[str]",
        preload: "Sequence[str]",
        environment: "Mapping[str, str]",
        first: "WarmStarts | None",
    ) -> None:
        """Fork kernels of this command, in this environment as it is then; ``first`` may be there already."""
        self._argv, self._environment = argv, environment
        self._preload = tuple(preload)
        #: That which is asked for kernels.
        self.current = first
        #: One that imports what is preloaded, or anew, while the other may still be of use; and for the how
        #: manieth kernel one was begun.
        self._next = None  # type: WarmStarts | None
        self._begun_for = 0

    @property
    def are_importing(self) -> bool:
        """Whether that which is asked for kernels is not ready yet."""
        return self.current is not None and self.current.is_importing

    def start(self, *, preloads: bool) -> None:
        """Start the first one, with what is preloaded or without."""
        self.current = self._started(self._preload if preloads else ())

    def _started(self, modules: "Sequence[str]") -> "WarmStarts | None":
        try:
            return WarmStarts.start(self._argv, modules, self._environment)
        except OSError:  # no such program, or no process can be started
            return None

    def sockets(self) -> "list[socket.socket]":
        """Return what is to be read once there is something."""
        return [each for template in self._all() for each in template.sockets()]

    def _all(self) -> "list[WarmStarts]":
        return [each for each in (self.current, self._next) if each is not None]

    def read(self, readable: "Any", *, is_prepared: bool) -> None:
        """Take note of what they have told; before the first kernel of a pod that ``is_prepared`` begins.

        One that cannot import what is preloaded is followed by one that does not have to.
        """
        for each in self._all():
            each.read(readable)
        if is_prepared and self._preload and self.current is not None and self.current.is_refused:
            self._refuse_preload(self.current)
            self.current = self._started(())

    def take_command(self, argv: "Sequence[str]") -> None:
        """Fork kernels of another command from now on, than that for which the pod was prepared."""
        prepared, self._argv = self._argv, argv
        if self.current is not None and not starts_alike(prepared, argv):
            self.current.end("another command was prepared")
            self.current = None
        elif self.are_importing and self._preload:
            # Its first kernel does not wait for that; the next ones have it.
            self.current, self._next = None, self.current

    def take_next(self) -> None:
        """Fork from the next one that has imported everything, from now on; or never import that again."""
        found = self._next
        if found is None or found.is_importing:
            return
        self._next = None
        if found.is_ready:
            if self.current is not None:
                self.current.end("there is another one")
            self.current = found
        elif found.is_refused:
            self._refuse_preload(found)

    def _refuse_preload(self, found: WarmStarts) -> None:
        print(f"gpu-pool: kernels restart without what is preloaded: {found.why}", file=sys.stderr)
        self._preload = ()

    def lack_one_for(self, start: int) -> bool:
        """Whether none has imported what is preloaded, and none was begun for the kernel of this number."""
        current = self.current
        if current is None or self._next is not None or start <= self._begun_for:
            return False
        return current.modules != self._preload or (bool(current.why) and not current.is_refused)

    def begin_next(self, start: int) -> None:
        """Start one that imports what is preloaded, while the kernel of this number runs."""
        self._begun_for, self._next = start, self._started(self._preload)

    def are_to_change(self, start: int) -> bool:
        """Whether another one is to take the place of that which is asked for kernels."""
        return self._next is not None or self.lack_one_for(start)

    def note_end(self, pid: int) -> None:
        """Take note that a process has ended, and was waited for."""
        for each in self._all():
            if each.pid == pid:
                each.note_end()

    def end(self, why: str) -> None:
        """End all. The kernels that they have forked go on."""
        for each in self._all():
            each.end(why)
