"""A kernel's process that another process has started, and that this one goes on to manage."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import IO

from gpu_pool_client import Process

#: Seconds between two looks at whether it has ended: it is nobody's child here.
_LOOK_EVERY = 0.05


class ContinuedProcess:
    """Of :class:`subprocess.Popen`'s methods those that jupyter_client uses, for a process that is no child.

    How it has ended is not known, so its status is 0.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None

    def poll(self) -> int | None:
        """Return None while it runs."""
        return None if self._process.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int:
        """Return its status once it has ended. Raises ``subprocess.TimeoutExpired``."""
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while self._process.is_alive():
            if give_up_at is not None and time.monotonic() > give_up_at:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_LOOK_EVERY)
        return 0

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless it has ended."""
        if self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)
