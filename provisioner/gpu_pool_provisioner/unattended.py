"""A kernel that nobody watches: its start waits for its slice, so that its cells need not.

nbclient, and with it papermill, nbconvert, jupyter-scheduler and nbgrader, count a cell's time from when
they submit it. A wait in the first cell would use that up, and nobody would read there that it waits. Of
a start nothing is counted: such a program begins to count once it has a kernel.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from typing import TYPE_CHECKING, Final

from gpu_pool_client import EndReason, Holder, Lease, LeaseGone, LeaseState, TimedOut, format_duration
from gpu_pool_client._log import EscapingLogger, escaped
from gpu_pool_provisioner.kernel_slice import KernelSlice, note_error
from gpu_pool_provisioner.proxy import messages
from gpu_pool_provisioner.proxy.kernel_proxy import KernelProxy
from gpu_pool_provisioner.proxy.lease_client import LeaseClient
from gpu_pool_provisioner.proxy.runs import MARGIN, NotReadyError

if TYPE_CHECKING:
    from gpu_pool_provisioner.settings import SliceSettings

#: Seconds from one line in the log to the next while a start waits: as long as it has waited so far,
#: within these.
_SOON: Final = 60.0
_SELDOM: Final = 600.0


class UnattendedStart:
    """One start of a kernel that nobody watches. Use it on the proxies' event loop."""

    def __init__(self, settings: SliceSettings, kernel_slice: KernelSlice, holder: Holder) -> None:
        self._slice = kernel_slice
        self._client = LeaseClient(kernel_slice, holder, settings.outage_timeout)
        self._client.tell = self._say
        self._limit = settings.unattended_wait
        self._ready_timeout, self._start_timeout = settings.ready_timeout, settings.start_timeout
        self._log = settings.log
        self._began = time.monotonic()
        self._said_at: float | None = None
        self._waiting: asyncio.Task[Lease] | None = None

    async def until_held(self) -> Lease:
        """Ask for the slice and return its lease once it is held.

        Raises what ``Pool.request`` raises, ``PoolUnreachable`` after the outage's timeout, ``TimedOut``
        after ``unattended_wait``, and ``LeaseGone`` after :meth:`give_up`. Then, and when cancelled,
        the request is withdrawn.
        """
        self._waiting = asyncio.create_task(self._held())
        self._waiting.add_done_callback(note_error)
        try:
            await asyncio.wait({self._waiting})
        except asyncio.CancelledError:
            await self.give_up()
            raise
        if self._waiting.cancelled():
            size = messages.slice_of(self._client.size)
            raise LeaseGone(f"The wait for {size} was given up.", "Start it again to wait again.")
        return self._waiting.result()

    async def _held(self) -> Lease:
        try:
            lease = await self._client.ask()
            if lease.state is LeaseState.WAITING:
                lease = await self._waited_for(lease.id)
        except BaseException:
            await self._slice.give_back(EndReason.WITHDRAWN)
            raise
        if self._said_at is not None:
            self._write(messages.starting(self._client.size))
        return lease

    async def _waited_for(self, lease_id: str) -> Lease:
        looked_at = asyncio.Event()
        looked_at.set()
        try:
            wait = self._client.granted(lease_id, self._say, looked_at)
            return await asyncio.wait_for(wait, max(0.0, self._left))
        except asyncio.TimeoutError:
            pass
        try:
            return await self._slice.pool.wait(lease_id, 0)
        except TimedOut as error:
            raise self._too_long(error) from error

    def _too_long(self, error: TimedOut) -> TimedOut:
        size, most = messages.slice_of(self._client.size), format_duration(self._limit)
        waited = f"waited for {size} for {most}, as long as it may" if self._limit else f"needs {size}"
        message = f"This kernel {waited}, and was not started. {error.message}"
        return TimedOut(message, error.remedy, largest_now=error.largest_now)

    async def until_running(self, proxy: KernelProxy) -> None:
        """Return once the kernel behind its proxy answers: its cells' time is then theirs alone.

        Raises ``NotReadyError``, saying why it does not, and ``TimedOut`` where that takes too long.
        """
        within = max(self._left, self._ready_timeout + MARGIN)
        if proxy.in_pod:
            within += self._start_timeout  # for its node and its image, which the proxy itself limits
        try:
            await asyncio.wait_for(proxy.until_running(), within)
        except NotReadyError as error:
            size = messages.slice_of(self._client.size)
            raise NotReadyError(f"The kernel with {size} was not started. {error}") from error
        except asyncio.TimeoutError:
            size = messages.slice_of(self._client.size)
            raise TimedOut(
                f"The kernel with {size} did not start within {format_duration(within)}."
            ) from None

    async def give_up(self) -> None:
        """Leave the queue, if it is in there. The kernel's shutdown while it starts."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.wait({self._waiting})

    @property
    def _left(self) -> float:
        return self._began + self._limit - time.monotonic()

    def _say(self, text: str) -> None:
        """Write into the program's log how things stand, at first and then once in a while."""
        now = time.monotonic()
        pause = min(max(_SOON, now - self._began), _SELDOM)
        if text and (self._said_at is None or now >= self._said_at + pause):
            self._said_at = now
            left = f"It may wait for {format_duration(max(0.0, self._left))} more."
            self._write(f"{messages.in_log(text)} {left}")

    def _write(self, text: str) -> None:
        EscapingLogger(self._log).warning("%s", text)
        # Where a program has not set up logging, traitlets' log goes nowhere.
        if not _is_heard(self._log):
            print(escaped(text), file=sys.stderr, flush=True)


def _is_heard(log: logging.Logger | logging.LoggerAdapter[logging.Logger]) -> bool:
    """Whether anything that is written to a log is shown or kept."""
    logger: logging.Logger | None = log.logger if isinstance(log, logging.LoggerAdapter) else log
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False
