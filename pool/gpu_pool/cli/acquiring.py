"""Asking for a slice and waiting in the queue for it, with word of the place on standard error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import uuid
from typing import TYPE_CHECKING

from gpu_pool.cli.formatting import duration, granted, waiting
from gpu_pool.cli.screen import console, note
from gpu_pool_client import (
    BadRequest,
    EndReason,
    GpuPoolError,
    Holder,
    Lease,
    LeaseGone,
    LeaseState,
    Pool,
    Process,
    SliceRequest,
)
from gpu_pool_client.pool import COURSE_VARIABLE
from gpu_pool_client.processes import account_of

if TYPE_CHECKING:
    from rich.status import Status


def new_key(verb: str) -> str:
    """Make a key of its own for one request; it begins with the verb."""
    return f"{verb}-{uuid.uuid4().hex}"


async def acquire(
    pool: Pool, request: SliceRequest, key: str, purpose: str, keeper: Process, timeout: float | None
) -> Lease:
    """Return a held lease that lives as long as ``keeper``.

    Until it is held it is tied to this process, so that nobody waits in the queue
    for a command that was given up. Waits ``timeout`` seconds (None: however
    long it takes); whatever goes wrong, the request is withdrawn.
    """
    course = os.environ.get(COURSE_VARIABLE)
    lease = await pool.request(request, Holder(account_of(os.getuid()), course, purpose), key)
    try:
        if lease.state is not LeaseState.HELD:
            lease = await _wait_in_queue(pool, lease, timeout)
        return await pool.attach(lease.id, keeper)
    except BaseException:
        # Whoever waits behind must not wait for a slice that nobody uses.
        await asyncio.shield(pool.release(lease.id, EndReason.WITHDRAWN))
        raise


async def _wait_in_queue(pool: Pool, lease: Lease, timeout: float | None) -> Lease:
    if timeout == 0:
        return await pool.wait(lease.id, 0)
    since = time.monotonic()
    with _QueueProgress() as progress:
        teller = asyncio.create_task(_tell(pool, lease.id, progress))
        try:
            held = await pool.wait(lease.id, timeout)
        finally:
            teller.cancel()
            # If the pool fails, `wait` says so.
            with contextlib.suppress(asyncio.CancelledError, GpuPoolError):
                await teller
    note(f"got {granted(held)} after {duration(time.monotonic() - since)}")
    return held


async def _tell(pool: Pool, lease_id: str, progress: _QueueProgress) -> None:
    async for lease in pool.watch(lease_id):
        if lease.state is not LeaseState.WAITING:
            return
        # It may be granted, or have ended, in between: the next round says so.
        with contextlib.suppress(BadRequest, LeaseGone):
            progress.say(waiting(lease, (await pool.explain(lease_id)).expected))


class _QueueProgress:
    """The position in the queue: one living line in a terminal, else one line for each change."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._said = ""

    def __enter__(self) -> _QueueProgress:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """Show ``text`` unless it already stands there."""
        if text == self._said:
            return
        self._said = text
        if not sys.stderr.isatty():
            note(text)
        elif self._status is None:
            self._status = console(stderr=True).status(f"{text} (Ctrl-C gives up)")
            self._status.start()
        else:
            self._status.update(f"{text} (Ctrl-C gives up)")
