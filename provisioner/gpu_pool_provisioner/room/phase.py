"""What a waiting room can be about."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """What a room does."""

    WAITING = "its lease is in line"
    GIVEN_UP = "nothing is asked for until code is submitted"
    LAUNCHING = "the real kernel has been launched and has not answered yet"
    RUNNING = "everything is relayed to the real kernel, unless its slice is parked"
    DOWN = "the kernel has ended, and may be launched again behind the same ports"
    CLOSED = "the ports are closed"

    @property
    def is_before_kernel(self) -> bool:
        """Whether the kernel is still to come, and has not answered."""
        return self in (Phase.WAITING, Phase.GIVEN_UP, Phase.LAUNCHING)
