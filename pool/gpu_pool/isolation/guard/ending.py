"""Signals to processes, each to the very process that is meant and to no later one of its pid."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from gpu_pool.inventory.activity import family
from gpu_pool_client import Process

#: Seconds between asking processes to end and ending them.
_TO_TIDY_UP: Final = 5.0


def may_signal(process: Process) -> bool:
    """Whether this process may send signals to that one."""
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:  # nothing to be refused
        return True
    except PermissionError:
        return False
    return True


def send(process: Process, signum: signal.Signals) -> None:
    """Send a signal, if that process still runs. Raises ``PermissionError`` where that is not for us."""
    with contextlib.suppress(ProcessLookupError):
        if not hasattr(os, "pidfd_open"):
            if process.is_alive():
                os.kill(process.pid, signum)
            return
        handle = os.pidfd_open(process.pid)
        try:
            # Asked after the handle was taken: it stays with that process, whatever becomes of the pid.
            if process.is_alive():
                signal.pidfd_send_signal(handle, signum)
        finally:
            os.close(handle)


def descendants(process: Process) -> list[Process]:
    """Identify a living process and all that descends from it."""
    if not process.is_alive():
        return []
    found = (Process.of(pid) for pid in family(process.pid))
    return [each for each in found if each is not None]


@dataclass(slots=True)
class Ending:
    """Processes that were asked to end, and are ended if they do not."""

    began_at: float
    processes: set[Process] = field(default_factory=set)

    def begin(self, processes: Iterable[Process]) -> None:
        """Ask these to end."""
        for process in processes:
            self.processes.add(process)
            _try(process, signal.SIGTERM)

    def go_on(self, now: float, others: Iterable[Process] = ()) -> bool:
        """End what is still there after a while, ``others`` included; return whether all have ended."""
        self.processes.update(others)
        self.processes = {process for process in self.processes if process.is_alive()}
        if now - self.began_at >= _TO_TIDY_UP:
            for process in self.processes:
                _try(process, signal.SIGKILL)
        return not self.processes


def _try(process: Process, signum: signal.Signals) -> None:
    # One that has changed its user meanwhile cannot be ended by us, the others can.
    with contextlib.suppress(PermissionError):
        send(process, signum)
