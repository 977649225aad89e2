"""Whether something can be read, in a process that may have more files open than select(2) takes."""

from __future__ import annotations

import select
from typing import Protocol


class HasDescriptor(Protocol):
    """A socket, or an open file."""

    def fileno(self) -> int:
        """Return its descriptor."""


def is_readable(file: HasDescriptor | int, within: float = 0.0) -> bool:
    """Whether there is something to read, or an end, or that comes within so many seconds."""
    waiting = select.poll()
    waiting.register(file, select.POLLIN)
    return bool(waiting.poll(within * 1000))
