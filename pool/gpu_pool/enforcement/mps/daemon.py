"""One MPS control daemon of ours: started, found again after a crash, asked, and stopped.

It is recognised by the folder that it was given for its pipes, by its user and
by its name; the file with its pid may be written by anybody (mode 0666).

What is known of classic MPS by card, driver and slice is here too; the sources
are named in docs/explanation/isolation-mps.md.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpu_pool.enforcement.mps.programs import (
    TOOL,
    NotAnswered,
    NotRun,
    environment_of,
    find,
    inherited,
    is_believed,
    is_daemon,
    is_memory,
    is_percentage,
    is_server,
    kill,
    mps_processes,
    run,
)
from gpu_pool.enforcement.tiers import TierFailed
from gpu_pool_client import WHOLE, Device, Slice
from gpu_pool_client import _procfs as procfs
from gpu_pool_client._processes import owner_of

#: CUDA contexts at once: before Volta, from Volta on, and from CUDA 13.1 (driver R590) on.
_BEFORE_VOLTA: Final = 16
_SINCE_VOLTA: Final = 48
_SINCE_R590: Final = 60
_R590: Final = 590

#: Models of Fermi, Kepler, Maxwell and Pascal, the last of which came out in 2018: the list is complete.
_OLD_MODEL: Final = re.compile(
    r"\b(?:[CKMP][0-9]{1,4}[A-Z]{0,2}|GP100|GT[XS]? ?(?:[1-9][0-9]{2}|10[0-9]{2})[A-Z]*|TITAN X[Pp]?|"
    r"TITAN Black|TITAN Z|GTX TITAN)\b",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class MpsSize:
    """What each process on a device may use at most."""

    memory_mib: int
    #: Of the device's threads, 1 to 100.
    percent: int


#: While nobody holds a slice of a device, nobody can use it either: no context fits.
SHUT: Final = MpsSize(1, 1)


def is_old(device: Device) -> bool:
    """Whether the card is older than Volta: MPS then limits neither memory nor threads."""
    return _OLD_MODEL.search(device.model) is not None


def contexts(device: Device) -> int:
    """Return how many CUDA contexts one MPS server admits on this card with this driver."""
    if is_old(device):
        return _BEFORE_VOLTA
    branch = re.match(r"[0-9]+", device.driver)
    return _SINCE_R590 if branch and int(branch[0]) >= _R590 else _SINCE_VOLTA


def size_of(part: Slice) -> MpsSize:
    """Return the limits of a slice. Percentages are whole: 2.5% is held to 2%, 0.5% to 1%."""
    return MpsSize(part.memory_mib, max(1, part.milli * 100 // WHOLE))


_PID_FILE: Final = "nvidia-cuda-mps-control.pid"
PIPES: Final = "CUDA_MPS_PIPE_DIRECTORY"
#: The longest path of a Unix socket (unix(7)), and the longest name the daemon gives to one of its own.
_SOCKET_PATH: Final = 107
_SOCKET_NAME: Final = "/control_privileged"
#: How often a process that ends is looked at, in seconds.
_LOOK: Final = 0.02


class MpsDaemon:
    """A control daemon whose files are in ``folder``.

    ``options`` are given to the daemon at its start, ``visible`` are the
    devices it sees. With ``public`` other users' processes can reach it. No
    question waits longer than ``timeout`` seconds for its answer.
    """

    def __init__(
        self, folder: Path, *, options: Sequence[str], visible: str, public: bool, timeout: float
    ) -> None:
        self.folder, self.pipe, self.log = folder, folder / "pipe", folder / "log"
        self._options, self._visible, self._public, self._timeout = options, visible, public, timeout

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment of the daemon, and of the tool that talks to it."""
        devices = {"CUDA_VISIBLE_DEVICES": self._visible} if self._visible else {}
        return {**inherited(), **devices, PIPES: f"{self.pipe}", "CUDA_MPS_LOG_DIRECTORY": f"{self.log}"}

    def running(self) -> bool:
        """Whether the daemon runs."""
        try:
            hint = [int((self.pipe / _PID_FILE).read_text())]
        except (OSError, ValueError):
            hint = []
        # Looking at all processes takes long, and is for when the file is wrong or lost.
        return any(map(is_daemon, self._ours(hint))) or any(map(is_daemon, self._processes()))

    def start(self) -> None:
        """Start the daemon, after making an end of what is left of an earlier one."""
        tool = find(TOOL)
        self.kill()
        _remove(self.pipe)  # the sockets of one that was killed
        self._make_folders()
        run([tool, "-d", *self._options], timeout=self._timeout, environ=self.environ)
        if not wait_until(self.running, self._timeout):
            raise TierFailed(f"The MPS daemon ended at once. {self.log_tail()}".strip())

    def ask(self, question: str = "", *arguments: str) -> str:
        """Put a question to the daemon, on its standard input or as arguments; return its answer."""
        return run(
            [find(TOOL), *arguments], timeout=self._timeout, text=question + "\n", environ=self.environ
        )

    def quit(self, *arguments: str) -> None:
        """Stop the daemon with its servers, by force where it does not stop, and remove its files."""
        if self.running():
            try:
                self.ask("" if arguments else "quit", *arguments)
            except TierFailed:
                pass  # it hangs, and is killed
            else:
                wait_until(lambda: not self._processes(), self._timeout)
        self.kill()
        _remove(self.pipe)
        _remove(self.log)

    def kill(self) -> None:
        """Kill the daemon and its servers, if there are any."""
        for pid in self._processes():
            kill(pid)
        if not wait_until(lambda: not self._processes(), self._timeout):
            raise TierFailed(f"An MPS process of {self.pipe} does not end, though it was killed.")

    def log_tail(self) -> str:
        """Return the end of what the daemon and its server wrote down, for a message."""
        files = [self.log / name for name in ("control.log", "server.log")]
        contents = [file.read_bytes() for file in files if file.exists()]
        last = (line for content in contents for line in procfs.lines_of(content)[-2:])
        lines = [procfs.printable(line, most=300) for line in last]
        return f"It wrote: {' / '.join(lines)[-300:]}" if lines else ""

    def _processes(self) -> list[int]:
        """Return the pids of the daemon, and of the servers it has started, that still run."""
        return self._ours(mps_processes())

    def _ours(self, pids: Iterable[int]) -> list[int]:
        mark = f"{PIPES}={self.pipe}"
        # A server runs as the user of its clients; nobody else's is taken for our daemon. It is the real
        # user that counts: whoever starts a set-user-ID program names it, and writes its environment.
        mine = (pid for pid in pids if owner_of(pid) == os.geteuid() or (is_server(pid) and is_believed(pid)))
        return [pid for pid in mine if mark in environment_of(pid)]

    def _make_folders(self) -> None:
        if len(f"{self.pipe}{_SOCKET_NAME}") > _SOCKET_PATH:
            raise TierFailed(
                f"{self.pipe} is too long a name for the pipes of MPS.",
                "Choose a shorter folder, such as /run/gpu-pool.",
            )
        try:
            for folder in (self.folder, self.pipe):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder.chmod(0o711 if self._public else 0o700)
            self.log.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise TierFailed(f"The folder for MPS cannot be made: {error}.") from None


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Wait for a condition, ``timeout`` seconds at most; return whether it came true."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK)
    return True


def _remove(folder: Path) -> None:
    """Remove a folder and what is in it; nothing that is outside of it, whatever links there are."""
    if folder.exists():
        shutil.rmtree(folder)


#: The daemon sees one device, which is number 0 for it and its clients. A limit set for a
#: uuid and one set for a number are two, of which the later counts: so it is always the number.
_DEVICE: Final = 0
_ACTIVE: Final = "ACTIVE"
_FAULT: Final = "FAULT"
#: What terminate_client prints once the client's contexts are destroyed.
_TERMINATED: Final = "0"
#: So many questions without an answer, one after the other, and a daemon hangs. To start it again ends all
#: that its clients have on the device.
_ASKED_IN_VAIN: Final = 3


class MpsControl:
    """A control daemon that divides one device, and its server.

    Every method may raise ``TierFailed``: the daemon is gone, hangs, refuses,
    or says one thing and does another.
    """

    def __init__(self, control: MpsDaemon, timeout: float) -> None:
        self._control, self._timeout = control, timeout
        #: How many questions in a row it has left without an answer: it may be slow.
        self.unanswered = 0

    def works(self) -> bool:
        """Whether the daemon runs and answers, or may be slow: it was not asked in vain too often in a row.

        Raises ``NotRun`` where it cannot be asked: of it nothing is known then.
        """
        if not self._control.running():
            return False
        try:
            self._control.ask("get_default_active_thread_percentage")
        except NotAnswered:
            self.unanswered += 1
            return self.unanswered < _ASKED_IN_VAIN
        except NotRun:
            raise
        except TierFailed:
            return False
        self.unanswered = 0
        return True

    def servers(self) -> list[int]:
        """Return the pids of its servers: one, or none."""
        return _numbers(self._control.ask("get_server_list"))

    def clients(self, server: int) -> list[int]:
        """Return the pids of a server's clients, as this daemon's pid namespace has them."""
        return _numbers(self._control.ask(f"get_client_list {server}"))

    def faulty(self) -> list[int]:
        """Return the servers that a client's fatal fault blocks."""
        return [server for server in self.servers() if _FAULT in self._status(server)]

    def start_server(self, uid: int) -> None:
        """Start a server for a user; in exclusive mode it holds the device from then on."""
        if not self.servers():
            self._control.ask(f"start_server -uid {uid}")
        if not wait_until(self._serves, self._timeout):
            raise TierFailed(f"The MPS server did not start. {self._control.log_tail()}".strip())

    def limit(self, size: MpsSize) -> None:
        """Limit every process that becomes a client from now on; raise if that is not what it then is.

        A default is read by the next server only, and a server outlives its
        clients: so both are set.
        """
        self._set("default_device_pinned_mem_limit", f"{_DEVICE}", size.memory_mib)
        self._set("default_active_thread_percentage", "", size.percent)
        for server in self.servers():
            self._set("device_pinned_mem_limit", f"{server} {_DEVICE}", size.memory_mib)
            self._set("active_thread_percentage", f"{server}", size.percent)

    def terminate(self, pids: set[int]) -> None:
        """End these clients' work on the device, and return when they are off it and may be killed."""
        for server in self.servers():
            for pid in sorted(pids.intersection(self.clients(server))):
                if not wait_until(lambda: self._is_off(server, pid), self._timeout):  # noqa: B023 - called at once
                    raise TierFailed(
                        f"MPS did not take process {pid} off the GPU within {self._timeout:g} s.",
                        "Killing it now may stop all other processes on this GPU.",
                    )

    def _is_off(self, server: int, pid: int) -> bool:
        said = self._control.ask(f"terminate_client {server} {pid}")
        return said.split()[-1:] == [_TERMINATED] or pid not in self.clients(server)

    def _serves(self) -> bool:
        return any(_ACTIVE in self._status(server) for server in self.servers())

    def _status(self, server: int) -> str:
        return self._control.ask(f"get_server_status {server}").upper()

    def _set(self, what: str, whom: str, value: int) -> None:
        memory = what.endswith("mem_limit")
        self._control.ask(" ".join(f"set_{what} {whom} {value}{'M' if memory else ''}".split()))
        answer = self._control.ask(f"get_{what} {whom}".strip())
        if not (is_memory(answer, value) if memory else is_percentage(answer, value)):
            raise TierFailed(
                f"MPS was told to limit processes to {value}{' MiB' if memory else '%'}, "
                f"and says that the limit is {answer[:60]!r}."
            )


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdigit()]
