"""How far a command has come that takes long, on standard error."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

from gpu_pool.cli.screen import console, note

if TYPE_CHECKING:
    from rich.status import Status

#: Seconds in which most commands are done, and nothing is said.
_SILENT: Final = 2.0
#: Seconds between two words in a terminal, where one line changes, and elsewhere, where each is a line.
_LIVE_EVERY: Final = 0.2
_PLAIN_EVERY: Final = 10.0


class Progress:
    """Says how far it has come once it takes long: in a terminal in one line, else in a line now and then."""

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()
        self._due = time.monotonic() + _SILENT
        self._status: Status | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._status is not None:
            self._status.stop()

    def tell(self, what: str, part: float) -> None:
        """Say what is done now, and which part of it (0 to 1) has been done."""
        now = time.monotonic()
        if now < self._due:
            return
        text = f"{what}: {part:.0%}"
        if not self._is_live:
            self._due = now + _PLAIN_EVERY
            note(text)
            return
        self._due = now + _LIVE_EVERY
        if self._status is None:
            self._status = console(stderr=True).status(text)
            self._status.start()
        else:
            self._status.update(text)
