"""One MPS control daemon of ours: started, found again after a crash, asked, and stopped.

It is recognised by the folder that it was given for its pipes, by its user and
by its name; the file with its pid may be written by anybody (mode 0666).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from gpu_pool.enforcement.mps.commands import find, inherited, run
from gpu_pool.enforcement.mps.processes import (
    TOOL,
    environment_of,
    is_believed,
    is_daemon,
    is_server,
    kill,
    mps_processes,
)
from gpu_pool.enforcement.tiers import TierFailed
from gpu_pool_client import _procfs as procfs
from gpu_pool_client._processes import owner_of

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
            raise TierFailed(f"The MPS daemon ended at once. {self.last_words()}".strip())

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

    def last_words(self) -> str:
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
