"""The lease of a running command: its user is warned of the end, and the command ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from gpu_pool.cli import formatting
from gpu_pool.cli.screen import note
from gpu_pool.cli.session import CommandSession
from gpu_pool_client import EndReason, GpuPoolError, Lease, LeaseGone, LeaseState, Pool, Process

#: The exit status of ``run`` where the command was ended with its lease: that of timeout(1).
LEASE_ENDED: Final = 124
#: Seconds between SIGTERM and SIGKILL. The pool waits for longer than that before it gives a slice
#: that has come to the end of its longest lease to somebody else.
GRACE: Final = 10.0
#: Seconds between two looks for processes that are to end, and after which those that do not are left.
_LOOK_EVERY: Final = 0.2
_GIVE_UP_AFTER: Final = GRACE + 10.0
#: Seconds for which a look that is under way is waited for when the command has ended.
_TO_CLOSE: Final = 2.0
#: How a lease is over that the pool does not know any more.
_UNKNOWN: Final = "unknown"


class LeaseFollower:
    """Follows one lease in a thread of its own, while its command runs.

    A pool that does not answer for a while ends nothing; the end of the longest
    lease, which is known beforehand, holds all the same.
    """

    def __init__(
        self,
        session: CommandSession,
        lease: Lease,
        end: Callable[[], Awaitable[object]],
        beside: Callable[[Pool], Awaitable[object]] | None = None,
        *,
        every: float = 2.0,
        end_again_after: float = 0.2,
    ) -> None:
        """``end`` ends the command. ``beside`` is also done, once, with the same pool.

        ``every`` is the seconds between two looks at the lease, and ``end_again_after`` those after which
        it is tried again to end a command that could not be ended.
        """
        self._every, self._end_again_after = every, end_again_after
        self._session, self._lease, self._end, self._beside = session, lease, end, beside
        #: Why the command was ended with its lease; None as long as it was not.
        self.over: str | None = None
        #: When the lease ends at the latest, by ``time.monotonic()``; None for no limit.
        self._ends_at = _by_our_clock(lease)
        left = _left(self._ends_at)
        # Of a lease that is shorter than that, in the middle: what was said at its start is no warning.
        self._warn_before = 0.0 if left is None else min(lease.terms.warn_before, left / 2)
        self._notice, self._is_away = lease.notice, False
        #: Held while it is settled which came first: the end of the lease or of its command.
        self._settling, self._has_ended = threading.Lock(), False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.Task[str | None] | None = None
        self._thread = threading.Thread(target=self._run, name="gpu-pool-lease", daemon=True)

    def start(self) -> None:
        """Begin. The thread takes the signals that are not blocked now."""
        self._thread.start()

    def finish(self) -> None:
        """Follow no more, since the command has ended; where it was ended, wait for what it has started."""
        if self._thread.ident is None:
            return
        with self._settling:
            self._has_ended = True
            loop = self._loop if self.over is None else None
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                loop.call_soon_threadsafe(self._stop)
        self._thread.join(_TO_CLOSE if self.over is None else None)

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._follow())

    async def _follow(self) -> None:
        with self._settling:
            if self._has_ended:
                return
            self._loop = asyncio.get_running_loop()
            self._watch = asyncio.create_task(self._until_over())
        reason = await self._watch
        with self._settling:
            if reason is None or self._has_ended:
                return
            self.over = reason
        _say(formatting.lease_over(reason, self._lease.notice, GRACE))
        await self._end_command()

    async def _end_command(self) -> None:
        """End the command; try again for a while where that fails, for want of open files, say."""
        give_up_at = time.monotonic() + _GIVE_UP_AFTER
        while True:
            try:
                await self._end()
            except Exception as error:  # noqa: BLE001 - it belongs to nobody but this thread
                if time.monotonic() >= give_up_at:
                    _say(f"the command cannot be ended: {error}")
                    return
            else:
                return
            await asyncio.sleep(self._end_again_after)

    async def _until_over(self) -> str | None:
        """Return why the lease is over; None if that is because its command has ended."""
        while True:
            try:
                async with self._session.connect() as pool:
                    reason = await self._until_over_at(pool)
                    return None if reason == EndReason.PROCESS_GONE.value else reason
            except Exception as error:  # noqa: BLE001 - the command would go on without its lease
                self._tell_away(error)
            if (over := self._by_the_clock()) is not None:
                return over
            await asyncio.sleep(self._pause())

    async def _until_over_at(self, pool: Pool) -> str:
        beside = asyncio.ensure_future(self._beside(pool)) if self._beside else None
        self._beside = None
        try:
            while True:
                reason = await self._ask_lease(pool)
                if reason is not None:
                    return reason
                await asyncio.sleep(self._pause())
        finally:
            if beside is not None:
                beside.cancel()
                await asyncio.gather(beside, return_exceptions=True)

    async def _ask_lease(self, pool: Pool) -> str | None:
        """Ask the pool for the lease once; return why it is over, None if it is not."""
        try:
            # A service that restarts is asked again for some seconds: not beyond what is due here.
            self._lease = await asyncio.wait_for(pool.get_lease(self._lease.id), self._next_due())
            self._ends_at, self._is_away = _by_our_clock(self._lease), False
        except LeaseGone as error:
            return error.reason or _UNKNOWN
        except Exception as error:  # noqa: BLE001 - such as too many open files: as a pool that is away
            self._tell_away(error)
        if self._lease.state is LeaseState.ENDED:
            return self._lease.end_reason.value if self._lease.end_reason else _UNKNOWN
        self._pass_on(self._lease.notice)
        return self._by_the_clock()

    def _by_the_clock(self) -> str | None:
        """Warn when it is time for that; return why the lease is over, None if it is not."""
        left = _left(self._ends_at)
        if left is None:
            return None
        if left <= 0:
            return EndReason.TOO_LONG.value
        if left <= self._warn_before:
            _say(formatting.lease_ends(left, self._lease.terms.why_it_ends))
            self._warn_before = 0.0
        return None

    def _pass_on(self, notice: str) -> None:
        """Tell what the pool has to say, such as that too much memory is used, once."""
        if notice and notice != self._notice:
            _say(formatting.safe(notice, 1_000))
        self._notice = notice

    def _tell_away(self, error: Exception) -> None:
        """Say once that the pool does not answer, and what becomes of the command."""
        if not self._is_away and not isinstance(error, asyncio.TimeoutError):
            why = str(error) if isinstance(error, GpuPoolError) else f"{type(error).__name__}: {error}"
            _say(f"cannot tell at the moment whether the slice is still held; the command goes on. {why}")
            self._is_away = True

    def _next_due(self) -> float | None:
        left = _left(self._ends_at)
        if left is None:
            return None
        return max(0.1, left - self._warn_before if left > self._warn_before else left)

    def _pause(self) -> float:
        due = self._next_due()
        return self._every if due is None else min(self._every, due)


def _say(text: str) -> None:
    """Tell the person; where nobody reads that any more, the command ends with its lease all the same."""
    with contextlib.suppress(OSError):
        note(text)


def _by_our_clock(lease: Lease) -> float | None:
    """Return the end of the longest lease by ``time.monotonic()``, which nobody sets."""
    ends_at = lease.terms.ends_at
    return None if ends_at is None else ends_at - time.time() + time.monotonic()


def _left(ends_at: float | None) -> float | None:
    return None if ends_at is None else ends_at - time.monotonic()


async def end_processes(command: Process, lease_id: str) -> None:
    """End a command and what it has started: SIGTERM, and SIGKILL for those that go on.

    They are not signalled as a process group: that is the terminal's or the script's, and also
    has this program in it, and whatever else stands in the same line of a shell.
    """
    # Imported here because it costs some 40 ms, which most commands never need.
    from gpu_pool.enforcement.watchdog.processes import ProcessEnding, send

    owner = os.getuid()
    ending = ProcessEnding(time.monotonic(), owner, to_tidy_up=GRACE)
    ending.begin(_processes(command, lease_id, owner))
    for process in ending.processes:  # one that is stopped gets its SIGTERM when it goes on
        with contextlib.suppress(PermissionError):
            send(process, signal.SIGCONT, owner)
    while not ending.go_on(time.monotonic(), _processes(command, lease_id, owner)):
        if time.monotonic() - ending.began_at > _GIVE_UP_AFTER:
            _say("some processes of the command cannot be ended; they go on without being counted")
            return
        await asyncio.sleep(_LOOK_EVERY)


def _processes(command: Process, lease_id: str, owner: int) -> Iterable[Process]:
    """Return the processes that descend from the command, and those that are marked with its lease."""
    from gpu_pool.devices.activity import marked
    from gpu_pool.enforcement.watchdog.processes import descendants

    found = {each for pid in marked(lease_id, owner) if (each := Process.of(pid)) is not None}
    return found.union(descendants(command)) - {Process.current()}
