"""The pauses between attempts at what a pool, a cluster or a service could not do now."""

from __future__ import annotations

import asyncio
import random


class Backoff:
    """Pauses in seconds, each twice as long as the one before: from ``first``, to ``longest`` at most.

    With ``spread``, each is up to that part shorter, by chance, so that many who failed at the same moment
    do not come back at the same moment.
    """

    def __init__(self, first: float, longest: float, *, spread: float = 0.0) -> None:
        self._first, self._longest, self._spread = first, longest, spread
        self.reset()

    def reset(self) -> None:
        """Begin again with the first pause: an attempt has succeeded."""
        self._next = self._first
        #: Whether there was no pause since the last success.
        self.is_fresh = True

    def pause(self) -> float:
        """Return the next pause."""
        now, self._next = self._next, min(2 * self._next, self._longest)
        self.is_fresh = False
        return self.shortened(now)

    def shortened(self, seconds: float) -> float:
        """Return a pause of another length, spread like the others."""
        return seconds * random.uniform(1 - self._spread, 1)  # noqa: S311 - no secret

    async def wait(self) -> None:
        """Sleep for the next pause."""
        await asyncio.sleep(self.pause())
