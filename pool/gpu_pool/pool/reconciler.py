"""What keeps a pool in order: named steps that make true what was decided, one after the other, for ever.

Whatever happens by itself, such as the death of a process or the loss of a node, is noticed and followed up
here and nowhere else, so that looking at a pool changes nothing of it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from gpu_pool.pool.backend import Backend, ExternalQueue, LeasesObserved, Taken
from gpu_pool.pool.registry import DeviceRegistry
from gpu_pool.store import burst, leases, reclaim, yielding
from gpu_pool.store.context import StoreContext
from gpu_pool.store.errors import OtherDevices
from gpu_pool.store.reclaim import Findings
from gpu_pool.store.thread import StoreThread
from gpu_pool_client import GpuPoolError, Lease, LeaseGone, LeaseState, Process
from gpu_pool_client._log import get_logger

# After a pass the reconciler rests, so that many changes are followed up by one pass:
#: for so many times as long as the pass took,
_REST_TIMES: Final = 9.0
#: so many seconds at least,
_LEAST_REST: Final = 0.02
#: and so many at most: a pass may have taken long because its machine was suspended.
_MOST_REST: Final = 2.0
#: Seconds in which the last pass ends when the pool is closed.
_LAST_PASS_WITHIN: Final = 5.0


@dataclass(slots=True)
class Facts:
    """What one pass has seen so far, for its later steps."""

    #: Whether it is for this process to decide: of those that share a store one does.
    leads: bool = False
    findings: Findings = field(default_factory=Findings)
    #: What the backend knows of the leases.
    seen: LeasesObserved = field(default_factory=LeasesObserved)
    #: Whether nothing can happen by itself until somebody asks for something.
    may_rest: bool = False


class Step(NamedTuple):
    """One step of a pass: its name, and what does it and returns whether it changed anything."""

    name: str
    do: Callable[[Facts], Awaitable[bool]]


@dataclass(slots=True)
class StepCount:
    """How often a step was done, how long that took in all, in seconds, and how often it failed."""

    times: int = 0
    seconds: float = 0.0
    failures: int = 0


class Reconciler:
    """Does the steps of a pool: :meth:`once` in any event loop, and again and again from :meth:`begin` on.

    ``every`` is for how many seconds at most nothing is done where nobody asks for it; with None, passes are
    made only by :meth:`once`.
    """

    def __init__(self, steps: Sequence[Step], every: float | None = 1.0) -> None:
        self._steps, self._every = steps, every
        #: By the name of the step.
        self.counts = {step.name: StepCount() for step in steps}
        #: Told after each pass that changed something.
        self.on_change: list[Callable[[], None]] = []
        #: Whether no pass is made until somebody asks for something: nothing can happen by itself.
        self.rests = False
        self._may_rest = False
        #: Whether somebody has asked for something since the last pass began.
        self._was_asked = False
        #: None where this process makes no passes by itself.
        self._running: Future[None] | None = None
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken, self._ending = asyncio.Event(), asyncio.Event()
        #: Whether it is to end, also where it has not begun yet.
        self._is_ending = False
        #: What was last logged of each step that fails.
        self._complaints: dict[str, str] = {}

    @property
    def is_running(self) -> bool:
        """Whether this process makes passes by itself."""
        return self._running is not None

    def begin(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Make passes from now on, in this event loop or in one of their own; go on where they rest."""
        self._was_asked = True
        if self._running is None:
            self._start(loop)
        elif self.rests:
            self.wake()

    def _start(self, loop: asyncio.AbstractEventLoop | None) -> None:
        with self._starting:
            if self._running is not None or self._every is None:
                return
            # What follows by itself is in nobody's name, whoever asks at this moment.
            in_nobodys_name = Context().run
            if loop is not None:
                self._running = in_nobodys_name(asyncio.run_coroutine_threadsafe, self._run(), loop)
            else:
                # A thread that ends with the passes: one that stayed would take signals which are for others.
                self._running = in_nobodys_name(_in_thread, self._run)

    async def end(self) -> None:
        """Make no pass any more, and wait for the one that is under way."""
        running, self._running = self._running, None
        self._is_ending = True
        self._set(self._ending)
        self._set(self._woken)
        if running is not None:
            with suppress(asyncio.TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(asyncio.wrap_future(running), _LAST_PASS_WITHIN)

    async def once(self) -> bool:
        """Make one pass; return whether it changed anything.

        A step that fails keeps no other from being done. Raises what the first of them did.
        """
        facts, changed, failed = Facts(), False, None
        for step in self._steps:
            count, began = self.counts[step.name], time.monotonic()
            try:
                has_changed = await step.do(facts)
            except Exception as error:  # noqa: BLE001 - raised below
                count.failures += 1
                self._complain(step.name, error)
                failed = failed or error
            else:
                self._complaints.pop(step.name, None)
                changed = changed or has_changed
                if has_changed:
                    get_logger().debug("Reconciled: %s", step.name)
            count.times += 1
            count.seconds += time.monotonic() - began
        self._may_rest = facts.may_rest and failed is None
        if failed is not None:
            raise failed
        return changed

    async def _run(self) -> None:
        """Make passes until :meth:`end`: when woken, and often enough unless nothing can happen."""
        self._loop = asyncio.get_running_loop()
        while not self._is_ending:
            began, self._was_asked = time.monotonic(), False
            with suppress(Exception):  # logged, and tried again in the next pass
                if await self.once():
                    for tell in self.on_change:
                        tell()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), rest_after(time.monotonic() - began))
            self.rests = self._may_rest
            # Whoever asks says so first, and then looks whether it rests: one of both sees the other.
            every = None if self.rests and not self._was_asked else self._every
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._woken.wait(), every)
            self.rests = False
            self._woken.clear()

    def wake(self) -> None:
        """Have a pass made soon, since something has changed. May be called in any thread."""
        self._set(self._woken)

    def _set(self, event: asyncio.Event) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # that loop has ended
                self._loop.call_soon_threadsafe(event.set)

    def _complain(self, name: str, error: Exception) -> None:
        """Log why a step fails, once until that changes."""
        text = str(error) if isinstance(error, GpuPoolError) else f"{type(error).__name__}: {error}"
        if self._complaints.get(name) != text:
            self._complaints[name] = text
            exc_info = None if isinstance(error, GpuPoolError) else error
            get_logger().error("Keeping the pool in order failed (%s): %s", name, text, exc_info=exc_info)


def rest_after(took: float) -> float:
    """Return for how many seconds to rest after a pass, or a look, that took so many."""
    return min(max(_LEAST_REST, _REST_TIMES * took), _MOST_REST)


def _in_thread(run: Callable[[], Coroutine[Any, Any, None]]) -> Future[None]:
    """Run a coroutine to its end in an event loop, and a thread, of its own."""
    done: Future[None] = Future()

    def begin() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the end
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=begin, name="gpu-pool-reconciler", daemon=True).start()
    return done


#: How old, in seconds, what is known of the devices may be where nobody asks for any.
SELDOM: Final = 10.0
#: The same while somebody waits for one.
SOON: Final = 3.0
#: Seconds without a sign of the process that keeps the pool in order after which another one does it.
_STANDS_STILL: Final = 2.5
#: The queue is served, although nothing has ended, whenever so many times as long has passed as that takes.
_SERVE_TIMES: Final = 20.0


class OrderedPool(Protocol):
    """What is asked of the pool that is kept in order."""

    url: str
    store: StoreThread
    backend: Backend
    registry: DeviceRegistry

    async def refresh(self, max_age: float) -> None:
        """Write down which devices there are, by a look that is not older."""

    async def end_taken(self, lease_id: str, taken: Taken) -> bool:
        """End a lease since what it needs is gone; return whether it had not ended yet."""


class PoolSteps:
    """What is done to one pool in each pass of its :class:`Reconciler`, in this order."""

    def __init__(self, pool: OrderedPool) -> None:
        self._pool, self._store, self._backend = pool, pool.store, pool.backend
        #: When the queue is served next although nothing has happened (``time.monotonic()``).
        self._serve_at = 0.0
        #: And when it is seen next who may give way to those who wait.
        self._ask_at = 0.0
        #: What was held at the last pass, and is bound.
        self._bound: Sequence[Lease] = ()
        #: Whether any of it may have a burst.
        self.may_burst = False

    def all(self) -> tuple[Step, ...]:
        """Return the steps by their names."""
        return (
            Step("observe", self._observe),
            Step("end what is gone", self._end_gone),
            Step("end what expired", self._end_expired),
            Step("serve the queue", self._serve_queue),
            Step("ask back", self._ask_back),
            Step("bind", self._bind),
            Step("set bursts", self._set_bursts),
            Step("unbind leftovers", self._unbind),
        )

    async def _observe(self, facts: Facts) -> bool:
        """See devices, processes and what the backend knows of leases. One bad node hides no dead process."""
        try:
            if self._backend.is_owner:
                await self._pool.refresh(SELDOM)
        finally:
            await self._store.run(self._read_facts, facts)
        if facts.leads:
            facts.seen = await self._backend.observe(self._living)
        if facts.leads and not self._backend.is_owner:
            await self._pool.refresh(SOON if facts.findings.somebody_waits else SELDOM)
        return False

    def _read_facts(self, store: StoreContext, facts: Facts) -> None:
        registry = self._pool.registry
        if registry.awaited:
            with suppress(OtherDevices):
                registry.register_awaited(store)
        facts.leads = self._backend.is_owner or reclaim.leads(store, _STANDS_STILL)
        facts.findings = reclaim.find_over(store)
        # Whoever owns the devices follows also what others than leases do.
        is_settled = facts.findings.nothing_lives and not registry.awaited
        facts.may_rest = is_settled and not self._backend.is_owner

    async def _end_gone(self, facts: Facts) -> bool:
        """End what was kept alive by processes that are gone, and what has lost its devices."""
        if not facts.leads:
            return False
        changed = bool(facts.findings.dead)
        if changed:
            await self._store.run(reclaim.end_gone, facts.findings.dead)
        for lease_id, taken in facts.seen.taken.items():
            changed = await self._pool.end_taken(lease_id, taken) or changed
        return changed

    async def _end_expired(self, facts: Facts) -> bool:
        is_due = facts.leads and facts.findings.overdue
        if is_due:
            await self._store.run(reclaim.end_overdue)
        return is_due

    async def _serve_queue(self, facts: Facts) -> bool:
        """Grant to whoever's turn has come: since something has ended, and now and then as time decides."""
        if facts.leads and self._backend.queue is not None:
            await self._follow(self._backend.queue, facts.seen.admitted)
        began = time.monotonic()
        if not (
            facts.leads and facts.findings.somebody_waits and (facts.findings or began >= self._serve_at)
        ):
            return False
        granted = await self._store.run(reclaim.serve_queue, tell=not self._backend.is_owner)
        self._serve_at = began + _SERVE_TIMES * (time.monotonic() - began)
        return granted

    async def _ask_back(self, facts: Facts) -> bool:
        """Ask idle kernels to give way to those who wait."""
        began = time.monotonic()
        if not facts.leads or began < self._ask_at:
            return False
        asked = await self._store.run(yielding.ask_back)
        self._ask_at = began + _SERVE_TIMES * (time.monotonic() - began)
        return asked

    async def _follow(self, queue: ExternalQueue, admitted: Collection[str]) -> None:
        """Count nothing for what waits in somebody else's queue, and hold again what was let in there."""
        for lease in await self._living():
            with suppress(LeaseGone):
                if lease.state is LeaseState.HELD and queue.place(lease.id) is not None:
                    await self._store.run(leases.lend, lease.id, queued=True)
                elif lease.is_queued and lease.id in admitted:
                    await self._store.run(leases.queue_again, lease.id)

    async def _bind(self, _: Facts) -> bool:
        """Make take effect what is held and does not yet, as far as this process is the one to do it.

        One that fails keeps no other from it. Unless it was ended, it is bound at the next pass.
        """
        held = await self._store.run(_held)
        if held is self._bound:
            return False
        known = {(lease.id, lease.held_at) for lease in self._bound}
        new, me = [lease for lease in held if (lease.id, lease.held_at) not in known], Process.current()
        failed: dict[str, GpuPoolError] = {}
        for lease in new:
            if self._backend.is_owner or lease.holder.process == me:
                error = await self._failure_to_bind(lease)
                if error is not None:
                    failed[lease.id] = error
        self.may_burst = any(part.limit_mib for lease in held for part in lease.slices)
        self._bound = [lease for lease in held if lease.id not in failed] if failed else held
        for error in failed.values():
            raise error
        return False

    async def _failure_to_bind(self, lease: Lease) -> GpuPoolError | None:
        """Bind a lease; return why that failed, if it did, and not by its end."""
        try:
            await self._backend.bind(lease)
        except LeaseGone:
            return None
        except GpuPoolError as error:
            return error
        return None

    async def _set_bursts(self, facts: Facts) -> bool:
        """Let memory be used that nobody is granted, and take back what is granted since."""
        if not (facts.leads and self.may_burst):
            return False
        return await self._store.run(burst.update, self._backend.memory_in_use(), self._backend.allows_burst)

    async def _unbind(self, _: Facts) -> bool:
        """Let nothing take effect that is not living any more."""
        await self._backend.unbind(self._living)
        return False

    async def _living(self) -> Sequence[Lease]:
        status = await self._store.run(leases.status, self._pool.url)
        return (*status.leases, *status.queue)


def _held(store: StoreContext) -> Sequence[Lease]:
    return store.measured_use.held()
