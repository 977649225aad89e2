"""The template of a pod's kernels, as their supervisor asks it.

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
import time
from typing import Any, Mapping, NamedTuple, Sequence  # noqa: UP035 - for Python 3.8

from .commands import PLACE, template_argv

#: Bytes in which a kernel's own variables are shown: all are the template's as well.
_PLACE_FOR = 64
#: Seconds in which a template must say that it has heard, and then that it has forked.
_HEARS_WITHIN, _FORKS_WITHIN = 2.0, 5.0
#: Seconds for which it may import.
_IMPORTS_WITHIN = 300.0
#: Seconds without a question after which it would end: never.
_IDLE = 1e9
_MAX_MESSAGE = 1 << 16


class Fork(NamedTuple):
    """What came of a question for a kernel."""

    #: The kernel's process; 0 if none was forked.
    pid: int = 0
    #: One byte comes by it once the kernel has bound its ports.
    channel: "socket.socket | None" = None
    #: Why none was forked.
    why: str = ""


class WarmStarts:
    """A process from which the kernels of one command are forked."""

    def __init__(
        self, argv: "Sequence[str]", modules: "Sequence[str]", environment: "Mapping[str, str]"
    ) -> None:
        """Start it; ``argv`` is the kernels' command as :func:`commands.launched` returns it."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
        self.pid = process.pid
        self.modules = tuple(modules)
        self._environment = dict(environment)
        self._give_up_at = time.monotonic() + _IMPORTS_WITHIN
        self.is_importing = True
        #: Whether what it has imported keeps kernels from being forked.
        self.is_refused = False
        self._has_ended = False
        #: Why nothing is forked from it; empty as long as that may be.
        self.why = ""

    @property
    def is_ready(self) -> bool:
        """Whether kernels can be forked from it."""
        return not self.is_importing and not self.why

    def sockets(self) -> "list[socket.socket]":
        """Return what is to be read once there is something."""
        return [self._control] if not self.why else []

    def look(self, readable: "Any") -> None:
        """Take note of what it has told."""
        if self._control in readable and not self.why:
            told = self._told(0.0)
            self._note(told, str(told.get("failed", "it has ended")))
        elif self.is_importing and time.monotonic() > self._give_up_at:
            self._note({}, "its imports take too long")

    def _note(self, told: "Mapping[str, Any]", why: str) -> None:
        """Take note of what has come of its imports; end it unless it is ready."""
        self.is_refused = self.is_importing and not {"ready", "short"} & set(told)
        self.is_importing = False
        if "ready" not in told:
            self.end("memory is short" if "short" in told else why)

    def fork(self, argv: "Sequence[str]") -> Fork:
        """Ask for a kernel, which has this process' standard streams."""
        ours, theirs = socket.socketpair()
        with theirs:
            content = json.dumps({"argv": list(argv), "env": self._environment, "cwd": None}).encode()
            passed = array.array("i", [theirs.fileno(), 0, 1, 2])
            try:
                self._control.sendmsg([content], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
            except OSError:
                told = {}  # type: dict[str, Any]
            else:
                told = self._told(_HEARS_WITHIN)
                told = self._told(_FORKS_WITHIN) if "heard" in told else told
        if "pid" in told:
            ours.sendall(b"1")
            return Fork(int(told["pid"]), ours)
        ours.close()
        if "cold" not in told:
            # Whatever it still forks finds that nobody wants it, and ends.
            self.end("its template did not answer")
        return Fork(why=str(told.get("cold", self.why)))

    def _told(self, within: float) -> "dict[str, Any]":
        self._control.settimeout(within)
        try:
            content = self._control.recv(_MAX_MESSAGE)
        except OSError:
            return {}
        return dict(json.loads(content)) if content else {}

    def end(self, why: str) -> None:
        """End it. The kernels that it has forked go on. May be repeated."""
        self.is_importing = False
        self.why = self.why or why
        self._control.close()
        if not self._has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def note_end(self) -> None:
        """Take note that its process has ended, and was waited for."""
        self._has_ended = True
        self.look(self.sockets())  # what it has told before
        self.end("it has ended")
