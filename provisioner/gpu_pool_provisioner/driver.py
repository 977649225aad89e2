"""Drives a kernel's session: takes its events in order, and performs what comes of them.

The promise: no submitted cell runs without its slice. So what is submitted is held in the proxy until the
slice is held and the kernel answers; where that comes to nothing, the cells are answered with an error. What
is decided, and when, is in ``session``; here is what it takes.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from gpu_pool_client import (
    EndReason,
    GpuPoolError,
    Holder,
    Lease,
    NotAllowed,
    Outlook,
    SliceRequest,
    parse_request,
)
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.environment import SliceEnvironment
from gpu_pool_provisioner.launchers.base import LaunchPlan, NotReadyError, ProxiedKernel
from gpu_pool_provisioner.pool_work import PoolWork
from gpu_pool_provisioner.ports import PortReservation
from gpu_pool_provisioner.proxy.channels import Channel, close_all
from gpu_pool_provisioner.proxy.front import bind_front
from gpu_pool_provisioner.proxy.messages import session_of
from gpu_pool_provisioner.proxy.pending import PendingKernel
from gpu_pool_provisioner.resize_pipe import ResizeRequests
from gpu_pool_provisioner.session import (
    TABLE,
    ImpossibleEventError,
    Session,
    State,
    effects,
    events,
    step,
    texts,
)
from gpu_pool_provisioner.session.events import SizeChange
from gpu_pool_provisioner.session.view import SlicePhase, SliceView, phase_of, view
from gpu_pool_provisioner.wait_log import WaitLog
from gpu_pool_provisioner.work import KernelWork, at_work

if TYPE_CHECKING:  # few kernels sleep
    from gpu_pool_provisioner.hibernation.kept import KeptKernel

_WITH_SLICE: Final = (State.RUNNING, State.ASKED_BACK)
_RESIZING: Final = (State.RESIZING, State.QUEUED_RESIZING)
#: Before whoever starts a kernel knows whether there is a slice for it.
_UNKNOWN: Final = (State.ASKING, State.ENDING)
#: Seconds for which a start whose slice is held waits for the kernel's process.
_LAUNCHED_WITHIN: Final = 5.0
_AT_WORK: Final = "It was at work."
_NOT_PARKED: Final = "It was at work, or it keeps something on the GPU, or its pool did not answer."
_NO_KERNEL: Final = "It had ended, or was about to be started again."
#: Kernels that are named at most to one that waits, and those of this process that may be, whose
#: provisioners know nothing of each other.
_MOST_NAMED: Final = 3
_named: Final[weakref.WeakSet[SessionDriver]] = weakref.WeakSet()


def _not_now(state: State) -> NotAllowed:
    """Return why a user's request is none in this state."""
    if state in _RESIZING:
        return NotAllowed("This kernel's size is being changed already.", "Try again in a moment.")
    if state.has_kernel:
        return NotAllowed("This kernel's GPU slice is lent to others.", "Run a cell to ask for it again.")
    return NotAllowed("This kernel has no GPU slice now.", "Run a cell to ask for one.")


class SessionDriver:
    """One kernel's session, from its first start to its end, restarts included.

    All methods belong to the event loop on which :meth:`open` was called; any thread may look at the rest.
    """

    def __init__(
        self,
        session: Session,
        url: str,
        holder: Callable[[], Holder],
        name: str = "",
    ) -> None:
        """Take where the session begins, the URL of its pool, and who asks there for the slice.

        ``name`` is what the kernel's user calls it; without, it is not named to those who wait.
        """
        #: The session as it is now.
        self.session = session
        self._name = name
        #: Set, and replaced, whenever the session changes.
        self._changed = asyncio.Event()
        #: What has happened while something else did, and whether something does.
        self._events: deque[events.Event] = deque()
        self._is_happening = False
        #: What goes on for as long as the session is in its state.
        self._work: dict[asyncio.Task[events.Event], effects.Work] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self.pool_work = PoolWork(self, url, holder)
        self._do = KernelWork(self, self.pool_work)
        self.wait_log: WaitLog | None = None
        #: The kernel's process where it may sleep on disk.
        self.kept: KeptKernel | None = None
        #: Whether its image may go on with another server.
        self.outlives_server = False
        #: What the running kernel was told of its slice.
        self.on_slice: SliceEnvironment | None = None
        #: By which it is told of what changes while cells run; None where it cannot be.
        self.resize_requests: ResizeRequests | None = None
        #: What the last request is answered with.
        self._reply = ""

    # -- What is told and asked ----------------------------------------------

    async def ask(self, answers_within: float, *, within: float | None = None) -> None:
        """Ask for the slice, or look at the one of before a restart. Raises what it is refused with.

        With ``within`` it must be held within so many seconds; else it may be in the queue when this returns,
        or the pool may not have answered within ``answers_within`` seconds.
        """
        self.post(events.StartRequested(within))
        waits = None if within is not None else answers_within
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._until_answered(), waits)
        if self.session.state is State.DOWN and self.session.error is not None:
            raise self.session.error

    async def _until_answered(self) -> None:
        """Return once whoever starts the kernel need not wait for the pool any longer."""
        while self.session.state in _UNKNOWN and not self.session.away:
            await self._changed.wait()

    async def open(
        self,
        kernel: ProxiedKernel,
        front: dict[str, Channel] | None = None,
        reserved: PortReservation | None = None,
    ) -> None:
        """Listen on a kernel's ports, unless somebody has done so already and passes them as ``front``.

        Those that are ``reserved`` are listened on already, too. Raises what :func:`bind_front` raises.
        """
        connection = kernel.connection()
        self._do.kernel, self._do.messages = kernel, session_of(connection)
        self._do.front = front or bind_front(connection, self._do.messages, reserved)
        self._do.pending = PendingKernel(
            self._do.messages, self._do.front, kernel.introduction, self.post, self._interrupt
        )
        if self._name:
            _named.add(self)

    @property
    def is_open(self) -> bool:
        """Whether it listens on the kernel's ports."""
        return bool(self._do.front) and self.session.state is not State.ENDED

    async def start(self, plan: LaunchPlan, wait_log: WaitLog | None = None) -> None:
        """Begin to answer for the kernel, or go on after a restart; launch it once its slice is held.

        With a ``wait_log``, its limit is the wait's. Where the slice is held, its process is waited for, so
        that whoever starts it hears why there is none. Raises ``OSError``.
        """
        self._do.plan, self.wait_log = plan, wait_log
        self.post(events.LaunchPrepared(wait_log.ends_at if wait_log is not None else None))
        if self.session.is_granted:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._until_launched(), _LAUNCHED_WITHIN)

    async def _until_launched(self) -> None:
        """Return once the real kernel has a process, or is not to have one yet. Raises ``OSError``."""
        while not (self.session.is_launched or self.session.is_over):
            await self._changed.wait()
        error = self.session.error
        if isinstance(error, NotReadyError) and isinstance(error.__cause__, OSError):
            raise error.__cause__

    async def until_running(self) -> None:
        """Return once the real kernel answers.

        Raises what the pool refused its slice with, ``NotReadyError``, which says why it does not run, and
        ``LeaseGone`` where the wait was given up.
        """
        while not (self.session.has_run or self.session.is_over):
            await self._changed.wait()
        session = self.session
        if session.has_run:
            return
        size = texts.slice_of(session.size)
        if not session.is_granted:
            if session.error is not None:
                raise session.error
            raise texts.wait_given_up(session.size)
        why = session.error or "It was ended while it was starting."
        raise NotReadyError(f"The kernel with {size} was not started. {why}")

    async def ended(self) -> None:
        """Return once the kernel has ended, or has been stopped while it waited."""
        while self.session.state not in (State.DOWN, State.RESTARTING, State.ENDED):
            await self._changed.wait()

    async def interrupt(self) -> None:
        """Give up the wait, or what was submitted to a kernel that is just starting; or interrupt a pod's."""
        self._interrupt()
        await self.pool_work.settled()

    async def signal(self, number: int) -> None:
        """Pass a signal on to a kernel that has no process here."""
        if self._do.run is not None and self.session.state.has_kernel:
            self._do.run.signal(number)

    async def tell(self, event: events.Event) -> None:
        """Let something have happened, as :meth:`post`, for a thread that waits until that is done.

        Done is also that what a kernel which has ended had on disk is removed.
        """
        self.post(event)
        await self._do.removed()

    async def being_restarted(self, seconds: float, answers_within: float) -> None:
        """Keep the slice over a restart for so many seconds; the pool may take its time.

        The start must come within ``answers_within`` seconds after this.
        """
        self.post(events.RestartBegan())
        try:
            if self.session.pending is not None and not await self.pool_work.resized_in_pod():
                await self._do.end_pod_before_next()  # a pod has the size that it was made with
            await self.pool_work.keep_for_restart(seconds)
        finally:
            self.post(events.RestartExpected(answers_within))

    def want_explanation(self) -> None:
        """Find out why the kernel waits, and for how long, also before a cell does."""
        self.post(events.ExplanationWanted())

    async def keep(self, seconds: int) -> str:
        """Count the kernel as in use for so long; return what its user reads. Raises ``NotAllowed``."""
        return self.request(events.KeepRequested(seconds))

    async def give_back(self) -> str:
        """Let the slice go as soon as the kernel is idle; return what its user reads, as :meth:`keep`."""
        return self.request(events.GiveBackRequested())

    async def resume(self) -> str:
        """Ask for a parked kernel's slice again; return what its user reads. Raises ``NotAllowed``."""
        if events.ResumeRequested not in TABLE[self.session.state]:
            raise NotAllowed("This kernel's GPU slice is not lent to others.")
        return self.request(events.ResumeRequested())

    async def resize(self, size: str) -> SizeChange:
        """Change the size, at once or at the next restart, as ``%gpu use`` does.

        Raises ``BadRequest`` where ``size`` is none, ``NotAllowed`` while the kernel works or its slice is
        lent, and the pool's other refusals, unless a running kernel reads them.
        """
        wanted, phase = parse_request(size), phase_of(self.session)
        if self.session.state is State.QUEUED:
            return await self._resized(wanted)
        if phase is SlicePhase.ASKING:
            raise NotAllowed("The GPU pool has not answered this kernel yet.", "Try again once it has.")
        if self.session.lease_id is None:
            return await self.pool_work.resize_next(wanted)
        works = self.session.state in _WITH_SLICE and self._do.run is not None and self._do.run.relay.busy
        state = self.state
        if phase is SlicePhase.HELD and (works or not state.resizes_live) and state.takes_at_once(wanted):
            return await self._resized_alone(wanted)
        if state.resizes_live:
            try:
                if works:
                    raise at_work()
                return await self._resized(wanted)
            except NotAllowed:
                await self.pool_work.check_size(wanted)  # nobody waits for a cell's end for that
                raise
        if phase is SlicePhase.NONE:  # its lease has ended, or goes on without a kernel
            return await self._resized_alone(wanted)
        return await self.resize_at_restart(wanted, None)

    async def _resized_alone(self, wanted: SliceRequest) -> SizeChange:
        """Change the lease's size, and nothing of a kernel, which knows of it once it is restarted."""
        lease = await self.pool_work.resize(wanted)
        return SizeChange(True, False, f"This kernel now has {lease.request.of_gpus}.")

    async def _resized(self, wanted: SliceRequest) -> SizeChange:
        """Let the session change the size of what is waited for, or of a kernel that runs.

        Nothing is passed on to the kernel meanwhile, so that no code runs with the variables of a slice that
        it has no more.
        """
        before = self.session.changes
        self.request(events.ResizeRequested(wanted))
        while self.session.state in _RESIZING:
            await self._changed.wait()
        change = self.session.change
        if self.session.changes == before or change is None:
            raise NotAllowed("This kernel has ended.", "Change the size of the next one.")
        if change.error is not None:
            raise change.error
        return change

    async def resize_at_restart(self, size: SliceRequest, outlook: Outlook | None) -> SizeChange:
        """Take another size for a restart, whether or not it could be had at once; only then is it granted.

        What is taken is kept for a minute. ``outlook`` is what a request for that size would meet, for
        whoever cannot have it. Raises ``NotAllowed`` where the kernel has no slice now, and the pool's
        other refusals.
        """
        phase = phase_of(self.session)
        if phase in (SlicePhase.PARKED, SlicePhase.ASLEEP, SlicePhase.RESUMING):
            await self.pool_work.check_size(size)
            raise NotAllowed(
                "This kernel's GPU slice is lent to others, and its variables are kept.",
                "Take the slice again first, or run a cell; then change the size.",
            )
        if phase not in (SlicePhase.HELD, SlicePhase.STARTING):
            return await self.resize(str(size))  # there are no variables to lose, nor a slice to keep
        return await self.pool_work.reserve(size, outlook)

    async def leave_queue(self) -> str:
        """Give up the wait, as an interrupt does; return what its user reads. Raises ``NotAllowed``."""
        if self.session.state not in (State.ASKING, State.QUEUED, State.RESUMING):
            raise NotAllowed("This kernel does not wait for a GPU slice.")
        await self.interrupt()
        return texts.left_queue(self.session.size)

    async def leave_image(self) -> str:
        """Let the next server go on with the kernel, which goes to disk if it is idle.

        Return why it cannot, in sentences; empty where it can.
        """
        if self.resize_requests is not None:
            self.resize_requests.close()  # what a kernel has open must be there when it comes back
        is_tried = False
        while not is_tried or self.session.state is State.RESUMING:  # for a cell that has come meanwhile
            while self.session.state.is_transient:
                await self._changed.wait()
            if self._do.run is not None and self._do.run.relay.busy:
                return _AT_WORK
            if self.kept is not None:
                self.kept.would_be_lost = True
            is_tried, self._do.why_awake = True, ""
            if events.SleepRequested in TABLE[self.session.state]:
                self.post(events.SleepRequested())
            while self._goes_to_sleep:
                await self._changed.wait()
        if self.kept is not None and self.kept.leave_image():
            await self.kept.note_use()
            return ""
        return self._do.why_awake or (_NOT_PARKED if self.session.state.has_kernel else _NO_KERNEL)

    @property
    def _goes_to_sleep(self) -> bool:
        session, at = self.session, self.session.hibernates_at
        leaves_queue = session.parking is not None and session.parking.leaves_queue
        is_due = leaves_queue or (at is not None and at <= time.monotonic())
        return session.state.is_transient or (session.state is State.PARKED and is_due)

    # -- What is seen of it; any thread may look -------------------------------

    @property
    def takes_interrupts(self) -> bool:
        """Whether an interrupt is for :meth:`interrupt`, and not for the kernel's process."""
        return self.session.stands_in or self.session.state is State.RESUMING

    @property
    def ends_as(self) -> EndReason:
        """How the lease ends if it ends now: withdrawn where this start has never held it."""
        was_held = self.session.is_held or self.session.is_granted
        return EndReason.RELEASED if was_held else EndReason.WITHDRAWN

    @property
    def state(self) -> SliceView:
        """How things stand. Costs next to nothing."""
        session, run, told = self.session, self._do.run, self.on_slice
        seen = run.relay.seen if run is not None and session.state.has_kernel else (False, 0.0)
        shown = self._do.pending.text if self._do.front else ""
        is_told = told is not None and told.takes_changes
        is_told = is_told or self._do.takes_changes_in_pod
        return view(session, seen, shown, time.monotonic(), is_told=is_told)

    def idle_others(self) -> str:
        """Name the other kernels of this process that hold what this one may wait for, and do nothing.

        They are its user's own, and the nearest remedy: nobody else needs to end anything.
        """
        found = []
        for other in list(_named):
            if other is self or not other.is_open or other.pool_work.url != self.pool_work.url:
                continue
            state = other.state
            if state.phase is SlicePhase.HELD and state.lease and state.idle.idle_since is not None:
                found.append((other._name, state.lease.request.size))
        return texts.idle_others(sorted(found)[:_MOST_NAMED])

    # -- Events, in order ------------------------------------------------------

    def post(self, event: events.Event) -> None:
        """Let something have happened. What comes of it is done when this returns, but for what takes time.

        While an effect is performed, its own events wait for those that are next to it.
        """
        self._events.append(event)
        if self._is_happening:
            return
        self._is_happening = True
        try:
            while self._events:
                self._happen(self._events.popleft())
        finally:
            self._is_happening = False

    def _happen(self, event: events.Event) -> None:
        before = self.session
        try:
            self.session, due = step(before, event, time.monotonic())
        except ImpossibleEventError as error:
            get_logger().error("%s", error)
            self._let_unknown_go(event)
            return
        except Exception as error:  # noqa: BLE001 - a mistake of ours: no cell waits for ever for what is lost
            get_logger().error("A kernel's session failed at %s.", type(event).__name__, exc_info=error)
            self._let_unknown_go(event)
            if not isinstance(event, events.Failed):
                self._events.append(events.Failed(error))
            return
        if self.session.state is not before.state:
            given_up, self._work = self._work, {}
            for task in given_up:
                task.cancel()
        for effect in due:
            try:
                self._perform(effect)
            except Exception as error:  # noqa: BLE001, PERF203 - none of ours leaves cells waiting for ever
                get_logger().error("A kernel's session failed at %s.", effect, exc_info=error)
                if not isinstance(event, events.Failed):
                    self._events.append(events.Failed(error))
        self._set_alarm()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def request(self, event: events.Event) -> str:
        """Let a user's request happen; return what they read. Raises ``NotAllowed`` where it is none now."""
        state = self.session.state
        if type(event) not in TABLE[state]:
            raise _not_now(state)
        self._reply = ""
        self.post(event)
        return self._reply

    def _interrupt(self) -> None:
        is_alive = self.session.state.has_kernel and self.session.state is not State.RESUMING
        if is_alive or not self._do.kernel.ending():
            self.post(events.InterruptRequested())

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        at = self.session.wakes_at
        if at is not None:
            loop = asyncio.get_running_loop()
            left = max(0.0, at - time.monotonic())
            self._alarm = loop.call_later(left, lambda: self.post(events.TimePassed()))

    # -- Effects ---------------------------------------------------------------

    def _perform(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Work():
                task = asyncio.create_task(self.pool_work.begin(effect) or self._do.begin(effect))
                self._work[task] = effect
                task.add_done_callback(self._worked)
            case effects.Answer():
                self._do.pending.receive_all()
            case effects.HoldSilently():
                if self._do.front:
                    self._do.pending.hold_all(answering=False)
            case effects.HoldAll():
                self._do.pending.hold_all()
            case effects.HoldUnanswered():
                self._hold_unanswered()
            case effects.PassOn():
                assert self._do.run is not None
                self._do.run.relay.begin()
                self._do.pending.hand_over(self._do.run.relay.pass_on)
            case effects.Refuse():
                if self._do.front:
                    self._do.pending.refuse(effect.text, effect.error_name)
            case effects.Show():
                self.show(effect.text)
            case effects.Drop():
                if self._do.front:
                    self._do.pending.drop()
            case effects.HoldWork():
                self._do.hold_work()
            case effects.Reply():
                self._reply = effect.text
            case effects.ReportHeldCode():
                if self._do.pending.holds_code:
                    self.post(events.WorkSubmitted())
            case effects.KillKernel():
                if self._do.run is not None:
                    self._do.run.kill()
            case effects.InterruptKernel():
                if self._do.run is not None:
                    self._do.run.interrupt()
            case effects.Tell():
                if self._do.run is not None:
                    self._do.run.relay.tell(effect.text)
            case effects.ShowDevices():
                self._do.show_devices(effect.lease)
            case effects.ShowBurst():
                self._show_burst(effect.lease)
            case effects.LetGo():
                self._do.let_go(leaves_image=effect.leaves_image)
            case effects.ReleaseLease():
                self.pool_work.release(effect.lease_id, effect.reason)
            case effects.ReportHibernation():
                self.pool_work.report_hibernation(effect.hibernation)
            case effects.StayBusy():
                self._give_up(effects.GiveWay)
                self.pool_work.stay_busy()
            case effects.Unreserve():
                self.pool_work.unreserve(effect.lease_id, effect.request)
            case effects.Close():
                close_all(self._do.front)
                self._do.close()

    def _give_up(self, kind: type[effects.Work]) -> None:
        """Give up what is done of one kind."""
        for task, work in list(self._work.items()):
            if isinstance(work, kind):
                del self._work[task]
                task.cancel()

    def _worked(self, task: asyncio.Task[events.Event]) -> None:
        work = self._work.pop(task, None)
        if task.cancelled():
            if work is not None:  # by something in it: the session waits for what comes of it
                get_logger().error("A kernel's session was left alone by %s.", type(work).__name__)
                self.post(events.Failed(asyncio.CancelledError(f"{type(work).__name__} was cancelled")))
            return
        error = task.exception()
        if work is None:
            self._came_too_late(error, None if error is not None else task.result())
        elif isinstance(error, GpuPoolError):
            self.pool_work.note_fault(work, error)
            self.post(events.PoolAway(error, work))
        elif error is not None:
            get_logger().error("A kernel proxy failed.", exc_info=error)
            self.post(events.Failed(error))
        else:
            self.pool_work.note_answer(work)
            self.post(task.result())

    def _came_too_late(self, error: BaseException | None, event: events.Event | None) -> None:
        """See to what comes of work that the session has given up: a lease that it does not know of."""
        if error is not None and not isinstance(error, GpuPoolError):
            get_logger().warning("What a kernel's session had given up failed: %r", error)
        self._let_unknown_go(event)

    def _let_unknown_go(self, event: events.Event | None) -> None:
        """Give a lease back that came to a session which has not taken it."""
        if isinstance(event, (events.Queued, events.Granted)) and event.lease.id != self.session.lease_id:
            self.pool_work.release(event.lease.id, EndReason.WITHDRAWN)

    def show(self, text: str) -> None:
        """Show a text in the waiting cell, and in the log of a program that waits."""
        if self._do.front:
            self._do.pending.show(text)
        if self.wait_log is not None and self.session.state in (State.ASKING, State.QUEUED):
            self.wait_log.say(text)

    def _hold_unanswered(self) -> None:
        if self._do.run is not None:
            self._do.run.end_halves()
            self._do.pending.hold_first(self._do.run.unanswered())

    def let_follow(self, lease: Lease) -> None:
        """Let the kernel that runs hear of its burst, if its lease has got a limit only now."""
        pipe = self.resize_requests
        if pipe is not None and lease.limit_mib and not pipe.tells_changes:
            pipe.open_changes()

    def _show_burst(self, lease: Lease) -> None:
        told, pipe = self.on_slice, self.resize_requests
        if lease.terms.parks_in_pod:
            self._do.show_in_pod(lease)
        if told is None or pipe is None or not told.takes_changes:
            return
        changed = told.change(lease)
        if pipe.tells_changes:
            pipe.tell(changed)
        elif changed:  # it has got its limit while a cell ran, and listens once that has ended
            self.let_follow(lease)
            self._do.change(changed)
