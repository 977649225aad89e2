"""What belongs to one process: a child that is forked from it lets go of it at once.

Locks, pipes and sockets are a child's, too (fork(2)), so that they last until the last child has ended:
of a process that was killed others would believe that it lives.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Final, Protocol


class SupportsClose(Protocol):
    """What can be closed, more than once."""

    def close(self) -> object:
        """Let go of it. May be repeated."""


#: Of the process, as that is what is forked.
_not_for_children: Final[weakref.WeakSet[SupportsClose]] = weakref.WeakSet()


def close_in_children(what: SupportsClose) -> None:
    """Have ``what`` closed in every child that is forked from this process, for as long as anybody has it.

    It may not do more than to let go: what it names on disk, say, is still the parent's.
    """
    _not_for_children.add(what)


class OwnFile:
    """An open file of this process alone, until :meth:`close`, or until nobody has this object any more."""

    def __init__(self, descriptor: int) -> None:
        """Take the descriptor."""
        self._descriptor = descriptor
        #: Close it. May be repeated.
        self.close = weakref.finalize(self, os.close, descriptor)
        self.close.atexit = False  # it goes with the process, whose threads may use it until then
        close_in_children(self)

    def fileno(self) -> int:
        """Return its descriptor. Raises ``ValueError`` once that is closed, and may be another file's."""
        if not self.close.alive:
            raise ValueError("The file is closed.")
        return self._descriptor


def _close() -> None:
    for each in list(_not_for_children):
        with suppress(OSError):  # somebody has closed what it names: the others are to be closed all the same
            each.close()
    _not_for_children.clear()


os.register_at_fork(after_in_child=_close)
