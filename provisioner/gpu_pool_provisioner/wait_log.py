"""What a program's log says of a kernel that nobody watches, while its start waits for its slice.

nbclient, and with it papermill, nbconvert, jupyter-scheduler and nbgrader, count a cell's time from when
they submit it. A wait in the first cell would use that up, and nobody would read there that it waits. Of
a start nothing is counted: such a program begins to count once it has a kernel.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Final

from gpu_pool_client import format_duration
from gpu_pool_client._log import EscapingLogger, escaped
from gpu_pool_provisioner.session import texts

#: Seconds from one line in the log to the next while a start waits: as long as it has waited so far,
#: within these.
_SOON: Final = 60.0
_SELDOM: Final = 600.0

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


class WaitLog:
    """Writes how one start waits, at first and then once in a while."""

    def __init__(self, log: Log, began: float, limit: float) -> None:
        """``began`` is when it began, by ``time.monotonic()``; ``limit`` is how many seconds it may last."""
        self._log = log
        self._began, self.limit = began, limit
        self._said_at: float | None = None

    @property
    def ends_at(self) -> float:
        """When the wait has lasted as long as it may, by ``time.monotonic()``."""
        return self._began + self.limit

    def say(self, text: str) -> None:
        """Write how things stand, unless that was done lately."""
        now = time.monotonic()
        pause = min(max(_SOON, now - self._began), _SELDOM)
        if text and (self._said_at is None or now >= self._said_at + pause):
            self._said_at = now
            left = format_duration(max(0.0, self.ends_at - now))
            self._write(f"{texts.in_log(text)} It may wait for {left} more.")

    def say_is_over(self, size: str) -> None:
        """Write that the wait is over, if anything was written of it."""
        if self._said_at is not None:
            self._write(texts.starting(size))

    def _write(self, text: str) -> None:
        EscapingLogger(self._log).warning("%s", text)
        # Where a program has not set up logging, traitlets' log goes nowhere.
        if not _is_heard(self._log):
            print(escaped(text), file=sys.stderr, flush=True)


def _is_heard(log: Log) -> bool:
    """Whether anything that is written to a log is shown or kept."""
    logger: logging.Logger | None = log.logger if isinstance(log, logging.LoggerAdapter) else log
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False
