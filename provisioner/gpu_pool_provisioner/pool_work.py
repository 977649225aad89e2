"""What a session's effects take at its pool: the request for a slice, the queue, parking, and other sizes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from gpu_pool_client import (
    Activity,
    BadRequest,
    EndReason,
    GpuPoolError,
    Hibernation,
    Holder,
    Lease,
    LeaseGone,
    LeaseState,
    NotAllowed,
    Outlook,
    OverQuota,
    Pool,
    PoolUnreachable,
    Process,
    SliceRequest,
    TimedOut,
    format_duration,
    parse_request,
)
from gpu_pool_client._log import get_logger
from gpu_pool_client._requests import memory_in_words
from gpu_pool_provisioner.environment import SliceEnvironment
from gpu_pool_provisioner.launchers.lease_pod import LeasePod
from gpu_pool_provisioner.pools import NOT_NOW, queue_watch_of, shared_pool
from gpu_pool_provisioner.proxy.relay import Relay
from gpu_pool_provisioner.session import Session, State, effects, events, idling, texts
from gpu_pool_provisioner.session.events import SizeChange
from gpu_pool_provisioner.wait_log import WaitLog

if TYPE_CHECKING:  # few kernels sleep
    from gpu_pool_provisioner.hibernation.kept import KeptKernel

T = TypeVar("T")

#: Seconds in which it changes a size: the process that used the slice has ended, which is forgiven that long.
_RESIZED_WITHIN: Final = 5.0
#: Seconds between two attempts where the process that has ended is still seen.
_RESIZE_AGAIN: Final = 0.2
#: Seconds in which the pool lends the slice of a kernel whose server ends: it goes to disk in any case.
_PARKED_WITHIN: Final = 3.0
#: Seconds for which what a restart is to have is kept for it.
KEPT_FOR: Final = 60.0


class Driver(Protocol):
    """What work needs of the session's driver."""

    session: Session
    kept: KeptKernel | None
    outlives_server: bool
    wait_log: WaitLog | None
    on_slice: SliceEnvironment | None

    def post(self, event: events.Event) -> None:
        """Let something have happened."""

    def request(self, event: events.Event) -> str:
        """Let a user's request happen; return what they read. Raises ``NotAllowed``."""

    def show(self, text: str) -> None:
        """Show a text in the waiting cell."""

    def let_follow(self, lease: Lease) -> None:
        """Let the kernel that runs hear of its burst, if its lease has got a limit only now."""

    def idle_others(self) -> str:
        """Name the user's other kernels here that hold a slice and do nothing; empty for none."""


class PoolWork:
    """Does one session's work at its pool: what each coroutine returns is the event that comes of it."""

    def __init__(self, driver: Driver, url: str, holder: Callable[[], Holder]) -> None:
        """Ask for nothing yet. ``holder`` is who asks."""
        self._driver = driver
        self.url = url
        self._holder = holder
        #: Names the requests to the pool, so that one whose answer was lost is not made twice.
        self._key = uuid.uuid4().hex
        self._telling: set[asyncio.Task[None]] = set()
        #: What the pool is to know of the kernel's way to disk; it is told one after the other.
        self._to_say: Hibernation | None = None
        self._saying = asyncio.Lock()
        #: What the pool was last asked for in vain, and how it failed then, as far as that was logged.
        self._faults: set[tuple[type[effects.Work], type[GpuPoolError]]] = set()

    @property
    def pool(self) -> Pool:
        """The pool, opened at the first use."""
        return shared_pool(self.url)

    def begin(self, work: effects.Work) -> Coroutine[Any, Any, events.Event] | None:
        """Return the coroutine that does it; None for what is no pool's."""
        match work:
            case effects.Ask():
                return self._ask(work)
            case effects.FollowQueue():
                return self._follow_queue(work.lease_id)
            case effects.AwaitGrant():
                return self._await_grant(work.lease_id)
            case effects.Explain():
                return self._explain(work.lease_id)
            case effects.AskLastTime():
                return self._ask_last_time(work.lease_id)
            case effects.ResizeQueued():
                return self._resize_queued(work.request)
            case effects.Park():
                return self.at_its_end(self._park(yields=work.yields))
            case effects.ParkAgain():
                return self.at_its_end(self._park_again())
            case effects.Resume():
                return self._resume(work.lease)
            case effects.FollowLease():
                return self._follow_lease(work)
        return None

    def release(self, lease_id: str, reason: EndReason) -> None:
        """Give a slice back, or leave the queue; :meth:`settled` returns when the pool has been told."""
        self._tell(self.pool.give_back(lease_id, reason))

    def stay_busy(self) -> None:
        """Tell the pool that the kernel does not give way now."""
        self._tell(self._works(self._lease_id))

    def report_hibernation(self, hibernation: Hibernation) -> None:
        """Tell the pool how the kernel stands that can go to disk, unless it knows."""
        lease = self._driver.session.lease
        self._to_say = hibernation
        if lease is None or lease.hibernation != hibernation:
            self._tell(self._report_hibernation(self._lease_id, hibernation))

    async def _report_hibernation(self, lease_id: str, hibernation: Hibernation) -> None:
        async with self._saying:
            if hibernation is self._to_say:  # what is said last holds
                try:
                    await self.pool.report_hibernation(lease_id, hibernation)
                except GpuPoolError as error:
                    get_logger().info("The pool was not told of a kernel's way to disk: %s", error)

    async def _works(self, lease_id: str) -> None:
        with suppress(GpuPoolError):
            await self.pool.report_busy(lease_id, ())

    def unreserve(self, lease_id: str, request: SliceRequest) -> None:
        """Let others have what was kept for a restart."""
        self._tell(self._unreserve(lease_id, request))

    def note_fault(self, work: effects.Work, error: GpuPoolError) -> None:
        """Log that the pool has not done what it was asked for: once, until it has done that again."""
        if (kind := (type(work), type(error))) not in self._faults:
            self._faults.add(kind)
            does = "does not answer" if isinstance(error, NOT_NOW) else "fails"
            get_logger().warning(
                "The GPU pool at %s %s a kernel, and is asked again: %s", self.url, does, error
            )

    def note_answer(self, work: effects.Work) -> None:
        """Log the next fault again."""
        self._faults = {kind for kind in self._faults if kind[0] is not type(work)}

    def _tell(self, telling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(telling)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def settled(self) -> None:
        """Return once what was to be told to the pool has been told."""
        if self._telling:
            await asyncio.wait(set(self._telling))

    @property
    def _lease_id(self) -> str:
        lease_id = self._driver.session.lease_id
        assert lease_id is not None
        return lease_id

    def see(self, lease: Lease) -> Lease:
        """Let the session know of the lease as it is now; return it."""
        self._driver.post(events.LeaseSeen(lease))
        return lease

    # -- Asking and waiting ----------------------------------------------------

    async def _ask(self, work: effects.Ask) -> events.Event:
        if self._telling:
            await self.settled()  # what goes back counts against its user's quota until it is back
        pool = self.pool.without_retries() if work.at_once else self.pool
        try:
            lease = await (self._earlier(work, pool) if work.lease_id else self._new_lease(work, pool))
        except PoolUnreachable:
            raise
        except GpuPoolError as error:
            return events.Refused(error)
        return events.Queued(lease) if lease.state is LeaseState.WAITING else events.Granted(lease)

    async def _new_lease(self, work: effects.Ask, pool: Pool) -> Lease:
        key, holder = f"{self._key}{work.number}", self._holder()
        while True:
            if work.within is None:
                lease = await pool.request(work.request, holder, key)
            else:
                lease = await pool.acquire(work.request, holder, key, work.within)
            if lease.state is not LeaseState.ENDED:
                return lease
            key = uuid.uuid4().hex  # an earlier call was heard, and nobody came for what it got

    async def _earlier(self, work: effects.Ask, pool: Pool) -> Lease:
        """Return the lease from before a restart. Raises ``LeaseGone`` when it has ended."""
        try:
            lease = await pool.get_lease(work.lease_id or "")
        except LeaseGone as error:
            raise texts.slice_lost(work.request.size, None) from error
        if lease.state is LeaseState.PARKED:
            return await pool.resume(lease.id)
        if lease.state is LeaseState.ENDED:
            raise texts.slice_lost(work.request.size, lease.end_reason)
        return lease

    async def _follow_queue(self, lease_id: str) -> events.Event:
        await queue_watch_of(self.pool).follow(lease_id, self._positioned)
        return events.LeftQueue()

    def _positioned(self, position: int | None, error: GpuPoolError | None) -> None:
        if self._driver.session.wait is not None:
            self._driver.post(events.Positioned(position, error))

    async def _await_grant(self, lease_id: str) -> events.Event:
        is_parked = self._driver.session.parking is not None
        try:
            return events.Granted(await self.pool.wait(lease_id))
        except LeaseGone as error:
            return await self._taken(error) if is_parked else events.Refused(error)
        except BadRequest as error:  # it is parked, and in no queue
            return await self._resume(None) if is_parked else events.Refused(error)

    async def _explain(self, lease_id: str) -> events.Event:
        try:
            return events.Explained(await self.pool.explain(lease_id), self._driver.idle_others())
        except (BadRequest, LeaseGone):  # it has just left the queue
            return events.Explained()
        except GpuPoolError as error:
            return events.Explained(error=error)

    async def _ask_last_time(self, lease_id: str) -> events.Event:
        log = self._driver.wait_log
        try:
            return events.Granted(await self.pool.wait(lease_id, 0))
        except TimedOut as error:
            limit = format_duration(log.limit) if log and log.limit else ""
            message = f"{texts.too_long(self._driver.session.size, limit)} {error.message}"
            return events.Refused(TimedOut(message, error.remedy, largest_now=error.largest_now))
        except GpuPoolError as error:
            return events.Refused(error)

    # -- A slice that is held ----------------------------------------------------

    async def observe(self, relay: Relay) -> events.Event:
        """Look at the lease, and at its device where that decides anything; ``relay`` is the kernel's.

        The pool is told when the kernel worked. What it cannot hear of now is told later.
        """
        known = self._driver.session.idling
        assert known is not None
        try:
            lease = self.see(await self.pool.get_lease(self._lease_id))
            if lease.state is LeaseState.ENDED:
                reason = lease.end_reason.value if lease.end_reason else None
                return events.TermsOver(idling.taken(reason, lease.notice))
            if spans := relay.busy_times.due():
                with suppress(GpuPoolError):
                    await self._report(lease.id, relay, spans, known.gives_way_since)
            activity = None
            if idling.needs_device(known, lease, *relay.seen, time.monotonic()):
                activity = await self._activity(relay)
        except LeaseGone as error:
            return events.TermsOver(idling.taken(error.reason))
        # Cells may have begun and ended meanwhile.
        return events.Observed(lease, *relay.seen, activity, ahead())

    async def give_way(self, since: float, relay: Relay) -> events.Event:
        """Tell the pool since when the kernel gives way, and follow it until it works or is asked.

        The pool hears at once that it works again; nothing that was submitted waits for that.
        """
        lease_id, works = self._lease_id, asyncio.create_task(relay.works())
        seen = self._driver.session.lease
        hibernates = seen is not None and seen.hibernates
        asked = asyncio.create_task(self._until_asked(lease_id, hibernates=hibernates))
        try:
            await self._report(lease_id, relay, relay.busy_times.due(at_once=True), since)
            await asyncio.wait({works, asked}, return_when=asyncio.FIRST_COMPLETED)
            if works.done():
                self._tell(self._works(lease_id))
                return events.Worked()
            await asked
        except LeaseGone:
            pass  # a look at it says how it ended
        finally:
            works.cancel()
            asked.cancel()
        return events.LeaseNews()

    async def _report(
        self, lease_id: str, relay: Relay, spans: Sequence[tuple[float, float]], since: float | None
    ) -> None:
        try:
            await self.pool.report_busy(lease_id, spans, gives_way_since=_unix(since))
        except BaseException:
            relay.busy_times.untold(spans)
            raise

    async def _until_asked(self, lease_id: str, *, hibernates: bool) -> None:
        """Return once a held lease is asked back, is not held any more, or is to hibernate unlike before."""
        async for lease in self.pool.watch(lease_id):
            is_asked = lease.asked_back is not None or lease.hibernates is not hibernates
            if is_asked or lease.state is not LeaseState.HELD:
                return

    async def _follow_lease(self, known: effects.FollowLease) -> events.Event:
        while True:
            try:
                async for lease in self.pool.watch(self._lease_id):
                    self.see(lease)
                    self.note_answer(known)
                    if lease.hibernates is not known.hibernates and lease.state is not LeaseState.ENDED:
                        return events.LeaseNews()
            except LeaseGone:
                pass
            except GpuPoolError as error:
                self.note_fault(known, error)
                await asyncio.sleep(self._driver.session.times.ask_again)
                continue
            # It has ended, which whoever asks for its slice again is told. No drain is of it any more: the
            # next cell must not be kept from asking.
            last = self._driver.session.lease
            if last is not None and last.hibernates:
                self.see(replace(last, hibernates=False))
            if known.hibernates:
                return events.LeaseNews()
            await asyncio.get_running_loop().create_future()

    async def _activity(self, relay: Relay | None = None) -> Activity:
        activity = await self.pool.activity(self._lease_id)
        if relay is not None:
            activity = idling.believed(activity, relay.seen[1], time.monotonic())
        self._driver.post(events.LeaseSeen(activity=activity))
        return activity

    async def memory_in_words(self) -> str:
        """Say how much memory a kernel in a pod uses, as far as the pool knows it."""
        lease = self._driver.session.lease
        try:
            used = (await self._activity()).memory_mib
        except GpuPoolError as error:
            return f"The GPU pool does not say how much memory this kernel uses. {error}"
        return texts.memory_in_use(used, sum(part.allowed_mib for part in lease.slices) if lease else 0)

    async def keeps_on_device(self) -> bool:
        """Whether the kernel keeps state on its device, or may. Raises the pool's errors."""
        return (await self._activity()).initialised is not False

    async def _initialised(self) -> bool:
        try:
            return bool((await self._activity()).initialised)
        except LeaseGone:
            raise
        except GpuPoolError:
            return False

    async def at_its_end(self, asks: Coroutine[Any, Any, T]) -> T:
        """Return what comes of asking; where the kernel's server ends, in time for it to go to disk.

        Raises ``PoolUnreachable`` where the pool has not answered by then.
        """
        parking = self._driver.session.parking
        if parking is None or not parking.server_ends:
            return await asks
        try:
            return await asyncio.wait_for(asks, _PARKED_WITHIN)
        except asyncio.TimeoutError:
            raise PoolUnreachable(f"It did not answer within {_PARKED_WITHIN:g} seconds.") from None

    async def _park(self, *, yields: bool) -> events.Event:
        try:
            if yields and self.see(await self.pool.get_lease(self._lease_id)).asked_back is None:
                return events.NotNeeded()
            is_moved = await self._initialised()
            parking = self._driver.session.parking
            if parking is not None and parking.is_wanted and not parking.step.is_parked:
                return events.FoundAtWork(is_silent=False)
            return await self._lent(yields=yields, is_moved=is_moved)
        except LeaseGone as error:
            return await self._taken(error)

    async def _lent(self, *, yields: bool, is_moved: bool) -> events.Event:
        try:
            lease = self.see(await self.pool.park(self._lease_id, yields=yields))
        except NotAllowed as error:
            # Whom the pool knows no more is refused that as well, and nothing was said of the kernel.
            self.see(await self.pool.get_lease(self._lease_id))
            get_logger().info("The slice of an idle kernel is kept: %s", error)
            return events.NotParked()
        # Whoever waited may have gone meanwhile.
        return events.Parked(lease, is_moved) if lease.state is LeaseState.PARKED else events.NotNeeded()

    async def _park_again(self) -> events.Event:
        try:
            self.see(await self.pool.park(self._lease_id))
        except LeaseGone as error:
            return await self._taken(error)
        except NotAllowed:
            lease = self.see(await self.pool.get_lease(self._lease_id))
            if lease.state is not LeaseState.HELD:
                raise
            return events.Resumed(lease, ahead=ahead())  # it was granted, and used, in the same moment
        return events.ParkedAgain()

    async def _resume(self, lease: Lease | None) -> events.Event:
        parking = self._driver.session.parking
        assert parking is not None
        try:
            lease = lease or self.see(await self.pool.resume(self._lease_id))
            if lease.state is LeaseState.WAITING:
                return events.Queued(lease)
            # What had used CUDA before has had its state moved away and back. In a pod, what is seen of it is
            # what it keeps on its GPU, which it has found then.
            may_be = not (parking.is_moved or self._driver.session.in_pod)
            is_poisoned = may_be and await self._initialised()
        except LeaseGone as error:
            return await self._taken(error)
        return events.Resumed(lease, is_poisoned, ahead())

    async def _taken(self, error: LeaseGone) -> events.Event:
        """Say who took a parked kernel's lease, and why."""
        try:
            message = self.see(await self.pool.get_lease(self._lease_id)).notice
        except GpuPoolError:
            message = ""
        return events.TermsOver(idling.taken(error.reason, message))

    # -- A restart ---------------------------------------------------------------

    async def keep_for_restart(self, seconds: float) -> None:
        """Change to the size that was asked for, and attach the slice to this process for so many seconds."""
        session = self._driver.session
        if session.lease_id is None:
            return
        # Before a living process stands in for the one that used the devices.
        await self._resize_as_requested(session)
        try:
            # The relaunch goes on with the lease also where a pool does not hear of this.
            pool = self.pool.without_retries()
            attach = pool.attach(session.lease_id, Process.current(), ready_within=seconds)
            await asyncio.wait_for(attach, session.times.attached_within)
        except (GpuPoolError, asyncio.TimeoutError) as error:
            # The relaunch that follows looks at the lease, and says what is wrong.
            get_logger().warning("Keeping the kernel's GPU slice over its restart failed: %r", error)
        if self._driver.session.state is State.ENDED:
            # The kernel was shut down during its restart; this process must not keep its slice alive.
            await self.pool.give_back(session.lease_id)

    async def _resize_as_requested(self, session: Session) -> None:
        """Change to the size that was asked for, if any; where it is refused, the next kernel says so."""
        size, notice = session.pending, ""
        if size is None and not session.notice:
            return
        self._driver.post(events.SizePending(None))
        if size is None:
            return
        try:
            await asyncio.wait_for(self._resize_once_ended(size), _RESIZED_WITHIN)
        except asyncio.TimeoutError:
            notice = f"You asked for {size.named}, and the GPU pool did not answer in time: see %gpu."
        except GpuPoolError as error:
            notice = f"You asked for {size.named}. This kernel still has {session.request.of_gpus}. {error}"
        if notice:
            self._driver.post(events.SizePending(None, notice=notice))

    async def resized_in_pod(self) -> bool:
        """Change to the size that was asked for while a kernel's pod stays; return whether it can stay."""
        session = self._driver.session
        if session.pending is None or session.lease is None or not session.lease.terms.parks_in_pod:
            return False
        try:
            resizing = self.resize(session.pending, self.pool.without_retries())
            await asyncio.wait_for(resizing, session.times.attached_within)
        except (NotAllowed, TimedOut, asyncio.TimeoutError):
            return False  # another device may have room, and what the kernel used is gone with its pod
        except GpuPoolError:
            return True  # which is told when it is asked again
        return True

    async def _resize_once_ended(self, size: SliceRequest) -> None:
        give_up_at = time.monotonic() + _RESIZED_WITHIN - 2 * _RESIZE_AGAIN
        # A kernel has its old size at once rather than another one once a pool is back.
        pool = self.pool.without_retries()
        while True:
            try:
                await self.resize(size, pool)
            except NotAllowed:  # noqa: PERF203 - the process has ended, and may be seen for a moment more
                if time.monotonic() > give_up_at:
                    raise
                await asyncio.sleep(_RESIZE_AGAIN)
            else:
                return

    # -- Other sizes -------------------------------------------------------------

    async def resize(self, request: SliceRequest, pool: Pool | None = None) -> Lease:
        """Change the size of the lease at once. Raises what ``Pool.resize`` raises."""
        lease = await (pool or self.pool).resize(self._with_lease(), request)
        self._driver.post(events.SizeChanged(request, lease))
        return lease

    def _with_lease(self) -> str:
        session = self._driver.session
        if session.lease_id is None:
            raise texts.slice_lost(session.size, None)
        return session.lease_id

    async def _resize_queued(self, request: SliceRequest) -> events.Event:
        try:
            lease = await self.resize(request)
        except GpuPoolError as error:
            with suppress(GpuPoolError):  # it may have changed, and the answer was lost
                self.see(await self.pool.get_lease(self._lease_id))
            return events.Resized(SizeChange(False, False, "", error))
        does = "waits for" if lease.state is LeaseState.WAITING else "has"
        return events.Resized(SizeChange(True, False, f"This kernel now {does} {lease.request.of_gpus}."))

    async def resize_next(self, request: SliceRequest) -> SizeChange:
        """Let a kernel that has no lease ask for another size. Raises what ``Pool.forecast`` does."""
        await self.pool.forecast(request, self._holder())
        self._driver.post(events.SizeChanged(request))
        return SizeChange(True, False, f"The next cell asks for {request.of_gpus}.")

    async def check_size(self, request: SliceRequest) -> None:
        """Raise why a kernel that has a slice could never have another size; nothing is changed.

        What it has now counts towards its quotas; so nothing is said of them.
        """
        with suppress(OverQuota):
            await self.pool.forecast(request, self._holder())

    async def reserve(
        self, size: SliceRequest, outlook: Outlook | None, kept_for: float = KEPT_FOR
    ) -> SizeChange:
        """Take what another size needs, so that a restart within so many seconds has it for certain.

        ``outlook`` is what a request for that size would meet, for whoever cannot have it. Raises what
        ``Pool.resize`` raises.
        """
        try:
            self.see(await self.pool.resize(self._with_lease(), size, ahead=True))
        except TimedOut as error:
            return SizeChange(False, True, _not_now(self._driver.session, size, error, outlook))
        self._driver.post(events.SizePending(size, kept_for))
        then = f"Restart the kernel: it then changes to {size.named}."
        return SizeChange(True, True, f"{size.named} is kept for this kernel for a minute. {then}")

    async def _unreserve(self, lease_id: str, request: SliceRequest) -> None:
        try:
            self.see(await self.pool.resize(lease_id, request, ahead=True))
        except GpuPoolError as error:
            get_logger().warning("What was kept for a kernel's restart is still kept: %s", error)

    async def resize_at_restart(self, size: str) -> str:
        """Keep a request for another size until a kernel in a pod restarts; return what its user reads."""
        try:
            wanted = parse_request(size)
            lease_id = self._with_lease()
            with suppress(TimedOut):
                await self.pool.resize(lease_id, wanted, ahead=True)
                # It can be had. Nobody knows when the restart comes, so others may have it meanwhile.
                await self.pool.resize(lease_id, self._driver.session.request, ahead=True)
            self._driver.post(events.SizePending(wanted))
        except GpuPoolError as error:
            return str(_refused(error)["message"])
        return f"Its size cannot change while it runs. Restart the kernel: {_THEN.format(wanted)}"

    async def grant(
        self, size: str, on_slice: SliceEnvironment | LeasePod, *, can_restart: bool = True
    ) -> dict[str, Any]:
        """Change a running kernel's slice; return what the kernel does and says about it.

        ``granted`` is whether it has, or will have, what was asked for; ``message``
        is for its user; ``variables`` is what changes in its environment.
        ``can_restart`` is whether a restart of the kernel keeps its slice.
        """
        try:
            wanted = parse_request(size)
            await self._check_unused(wanted)
            lease = await self.resize(wanted)
        except NotAllowed as error:
            if not await self._is_in_use():
                return _refused(error)
            if not can_restart:
                return {"granted": False, "message": f"{_USED} Start a kernel of that size instead."}
            self._driver.post(events.SizePending(wanted))
            message = f"{_USED} Restart the kernel: {_THEN.format(wanted)}"
            return {"granted": True, "at_restart": True, "message": message}
        except GpuPoolError as error:
            return _refused(error)
        self._driver.let_follow(lease)
        until = "" if can_restart else " A restart brings back the size it was started with."
        return {"granted": True, "message": _has(lease) + until, "variables": on_slice.change(lease)}

    async def answer(
        self, size: str, on_slice: SliceEnvironment, *, can_restart: bool = True
    ) -> dict[str, Any]:
        """Grant it as :meth:`grant`, and return that for a kernel that may have read no answer before.

        ``variables`` is all that has changed since its start, also where nothing is granted now.
        """
        granted = await self.grant(size, on_slice, can_restart=can_restart)
        return {**granted, "variables": on_slice.changed}

    async def _check_unused(self, wanted: SliceRequest) -> None:
        """Raise ``NotAllowed`` where a kernel in a pod has used its device, which only its limit may follow.

        The pool would grant it, for a restart in its pod; but this kernel keeps what it has read.
        """
        session = self._driver.session
        only_limit = session.lease is not None and wanted.changes_only_limit_of(session.lease.request)
        if session.in_pod and not only_limit and await self._is_in_use():
            await self.check_size(wanted)
            raise NotAllowed(_USED)

    async def _is_in_use(self) -> bool:
        """Whether it is the kernel itself that stands in the way."""
        try:
            return (await self.pool.activity(self._with_lease())).initialised is not False
        except GpuPoolError:
            return False


_USED: Final = (
    "The size cannot change while this kernel runs: it has used the GPU, or may have, and what it keeps "
    "there would be in the way."
)
_THEN: Final = "it then changes to {}, if that is free."


def _unix(moment: float | None) -> float | None:
    """Return the Unix time of a moment of the session's clock."""
    return None if moment is None else moment - ahead()


def ahead() -> float:
    """Return by how many seconds the session's clock, which nobody sets, is ahead of Unix time."""
    return time.monotonic() - time.time()


def _refused(error: GpuPoolError) -> dict[str, Any]:
    example = " Write, say, %gpu use 10%." if isinstance(error, BadRequest) else ""
    return {"granted": False, "message": f"{error}{example}"}


def _has(lease: Lease) -> str:
    if not lease.slices:
        return f"This kernel will have {lease.request.of_gpus} when its slice is back."
    names = ", ".join(part.device.label for part in lease.slices)
    memory = f"{memory_in_words(lease.memory_mib)} on " if lease.memory_mib else ""
    return f"This kernel now has {lease.request.of_gpus}: {memory}{names}."


def _not_now(session: Session, size: SliceRequest, error: TimedOut, outlook: Outlook | None) -> str:
    wait = outlook.expected if outlook is not None else ""
    after = f"A wait for {size.named} would take {wait}." if wait else ""
    largest = parse_request(error.largest_now).of_gpus if error.largest_now else ""
    fits = f"At this moment it could have up to {largest}." if largest else ""
    kept = f"The kernel was not restarted: it keeps {session.request.of_gpus} and all its variables."
    return " ".join(filter(None, (error.message, kept, fits, after)))
