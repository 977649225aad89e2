"""What a course offers, followed while a server of the course runs.

The server was started with the slices of then. Its teacher may have changed the
course file since, and the pool refuses what the file does not offer any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Final

from gpu_pool_client import Holder, SliceRequest, connect
from gpu_pool_client.processes import account_of

#: Seconds for which an answer of the pool holds, and for which a pool that gave none is left alone.
_EVERY: Final = 5.0
_LATER: Final = 60.0
#: Seconds for which the first answer is waited for. Any other serves whoever asks next.
_PATIENCE: Final = 1.0


class CourseOffers:
    """The slices that a course offers now, as far as its pool says; else those of before.

    Parameters
    ----------
    known:
        What it offered when the server was started.
    url:
        The pool's.
    course:
        Its name.
    """

    def __init__(self, known: Sequence[SliceRequest], url: str, course: str, log: logging.Logger) -> None:
        self._known = tuple(known)
        self._url = url
        self._course = course
        self._log = log
        #: Set while nobody asks.
        self._answered = threading.Event()
        self._answered.set()
        self._next = 0.0
        self._patience = _PATIENCE

    def now(self) -> tuple[SliceRequest, ...]:
        """Return the slices as they are known, and have the pool asked anew if that is due.

        Only the first call waits for the answer, for a second at most: the server's event loop,
        and with it everybody's kernels, waits for whoever calls this.
        """
        if self._answered.is_set() and time.monotonic() >= self._next:
            self._answered.clear()
            # In a thread of its own, since an event loop runs in this one; and nobody waits for it
            # when the server ends.
            threading.Thread(target=self._ask, name="gpu-pool-offers", daemon=True).start()
            self._answered.wait(self._patience)
            self._patience = 0.0
        return self._known

    def _ask(self) -> None:
        pause = _EVERY
        try:
            found = asyncio.run(self._offers())
            if found is not None:
                self._known = found
        except Exception as error:  # noqa: BLE001 - whatever it is, the kernels of before are shown
            pause = _LATER
            self._log.warning("The pool does not say what %s offers now: %.300s", self._course, error)
        finally:
            self._next = time.monotonic() + pause
            self._answered.set()

    async def _offers(self) -> tuple[SliceRequest, ...] | None:
        async with connect(self._url) as pool:
            return await pool.offers(Holder(account_of(os.getuid()), self._course))
