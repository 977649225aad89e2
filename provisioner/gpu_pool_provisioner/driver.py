"""Drives a kernel's session: takes its events in order, and performs what comes of them.

The promise: no submitted cell runs without its slice. So what is submitted is held in the proxy until the
slice is held and the kernel answers; where that comes to nothing, the cells are answered with an error. What
is decided, and when, is in ``session``; here is what it takes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from gpu_pool_client import EndReason, Holder, NotAllowed, Outlook, SliceRequest, parse_request
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.environment import SliceEnvironment
from gpu_pool_provisioner.launchers.base import LaunchPlan, NotReadyError, ProxiedKernel
from gpu_pool_provisioner.pool_work import PoolWork
from gpu_pool_provisioner.pools import NOT_NOW
from gpu_pool_provisioner.ports import PortReservation
from gpu_pool_provisioner.proxy.channels import Channel, close_all
from gpu_pool_provisioner.proxy.front import bind_front
from gpu_pool_provisioner.proxy.pending import PendingKernel, PendingKernelCalls
from gpu_pool_provisioner.proxy.signed import session_of
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

_WITH_SLICE: Final = (State.RUNNING, State.ASKED_BACK)
_RESIZING: Final = (State.RESIZING, State.QUEUED_RESIZING)
#: Before whoever starts a kernel knows whether there is a slice for it.
_UNKNOWN: Final = (State.ASKING, State.ENDING)


def _not_now(state: State) -> NotAllowed:
    """Return why a user's request is none in this state."""
    if state in _RESIZING:
        return NotAllowed("This kernel's size is being changed already.", "Try again in a moment.")
    if state.has_kernel:
        return NotAllowed("This kernel's GPU slice is lent to others.", "Run a cell to ask for it again.")
    return NotAllowed("This kernel has no GPU slice now.", "Run a cell to ask for one.")


class SessionDriver:
    """One kernel's session, from its first start to its end, restarts included.

    All methods but the properties belong to the event loop on which :meth:`open` was called.
    """

    def __init__(
        self,
        session: Session,
        url: str,
        holder: Callable[[], Holder],
        hint: Callable[[], str] = str,
    ) -> None:
        """Take where the session begins, and the URL of its pool; see :class:`PoolWork` for the others."""
        self._session = session
        #: Set, and replaced, whenever the session changes.
        self._changed = asyncio.Event()
        #: What has happened while something else did, and whether something does.
        self._events: deque[events.Event] = deque()
        self._is_happening = False
        #: What goes on for as long as the session is in its state.
        self._work: dict[asyncio.Task[events.Event], effects.Work] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self.pool_work = PoolWork(self, url, holder, hint)
        self._do = KernelWork(self, self.pool_work)
        self.wait_log: WaitLog | None = None
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
            await asyncio.wait_for(self._until(_is_answered), waits)
        if self._session.state is State.DOWN and self._session.error is not None:
            raise self._session.error

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
        calls = PendingKernelCalls(
            submitted=lambda: self.post(events.WorkSubmitted()),
            interrupted=self._interrupt,
            ended=lambda: self.post(events.StopRequested()),
        )
        self._do.pending = PendingKernel(self._do.messages, self._do.front, calls, kernel.introduction)

    @property
    def is_open(self) -> bool:
        """Whether it listens on the kernel's ports."""
        return bool(self._do.front) and self._session.state is not State.ENDED

    async def begin(self, plan: LaunchPlan) -> None:
        """Ask for the slice and answer for the kernel at once; a refusal is what the first cell reads."""
        self.post(events.StartRequested())
        self.start(plan)

    def start(self, plan: LaunchPlan, wait_log: WaitLog | None = None) -> None:
        """Begin to answer for the kernel, or go on after a restart; launch it once its slice is held.

        With a ``wait_log``, its limit is the wait's.
        """
        self._do.plan, self.wait_log = plan, wait_log
        self.post(events.LaunchPrepared(wait_log.ends_at if wait_log is not None else None))

    async def until_launched(self) -> None:
        """Return once the real kernel has a process, or is not to have one yet. Raises ``OSError``."""
        await self._until(lambda session: session.is_launched or session.is_over)
        error = self._session.error
        if isinstance(error, NotReadyError) and isinstance(error.__cause__, OSError):
            raise error.__cause__

    async def until_running(self) -> None:
        """Return once the real kernel answers.

        Raises what the pool refused its slice with, ``NotReadyError``, which says why it does not run, and
        ``LeaseGone`` where the wait was given up.
        """
        await self._until(lambda session: session.has_run or session.is_over)
        session = self._session
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
        await self._until(lambda session: session.state in (State.DOWN, State.RESTARTING, State.ENDED))

    async def interrupt(self) -> None:
        """Give up the wait, or what was submitted to a kernel that is just starting; or interrupt a pod's."""
        self._interrupt()
        await self.pool_work.settled()

    async def stop(self) -> None:
        """End the kernel, as a signal would end a process. Its position stays until :meth:`close`."""
        self.post(events.StopRequested())

    async def close(self) -> None:
        """Close the ports and kill what still runs. The lease is the caller's to release."""
        self.post(events.CloseRequested())

    async def close_unless_kept(self, seconds: float) -> None:
        """Close so many seconds from now unless :meth:`keep_open` is called: its manager may have failed."""
        self.post(events.ManagerExpected(seconds))

    async def keep_open(self) -> None:
        """Stay open for as long as the kernel lives: whoever started it goes on to manage it."""
        self.post(events.ManagerCame())

    async def being_restarted(self, seconds: float, answers_within: float) -> None:
        """Keep the slice over a restart for so many seconds; the pool may take its time.

        The start must come within ``answers_within`` seconds after this.
        """
        self.post(events.RestartBegan())
        try:
            await self.pool_work.keep_for_restart(seconds)
        finally:
            self.post(events.RestartExpected(answers_within))

    def somebody_looks(self) -> None:
        """Find out why the kernel waits, and for how long, also before a cell does."""
        self.post(events.SomebodyLooked())

    async def keep(self, seconds: int) -> str:
        """Count the kernel as in use for so long; return what its user reads. Raises ``NotAllowed``."""
        return self.request(events.KeepRequested(seconds))

    async def give_back(self) -> str:
        """Let the slice go as soon as the kernel is idle; return what its user reads, as :meth:`keep`."""
        return self.request(events.GiveBackRequested())

    async def resume(self) -> str:
        """Ask for a parked kernel's slice again; return what its user reads. Raises ``NotAllowed``."""
        if self._session.state not in (State.PARKED, State.RESUMING):
            raise NotAllowed("This kernel's GPU slice is not lent to others.")
        return self.request(events.ResumeRequested())

    async def resize(self, size: str) -> SizeChange:
        """Change the size, at once or at the next restart, as ``%gpu use`` does.

        Raises ``BadRequest`` where ``size`` is none, ``NotAllowed`` while the kernel works or its slice is
        lent, and the pool's other refusals, unless a running kernel reads them.
        """
        wanted, phase = parse_request(size), phase_of(self._session)
        if self._session.state is State.QUEUED:
            return await self._resized(wanted)
        if phase is SlicePhase.ASKING:
            raise NotAllowed("The GPU pool has not answered this kernel yet.", "Try again once it has.")
        if self._session.lease_id is None:
            return await self.pool_work.resize_next(wanted)
        if self.state.resizes_live:
            try:
                if (
                    self._session.state in _WITH_SLICE
                    and self._do.run is not None
                    and self._do.run.relay.busy
                ):
                    raise at_work()
                return await self._resized(wanted)
            except NotAllowed:
                await self.pool_work.check_size(wanted)  # nobody waits for a cell's end for that
                raise
        if phase is SlicePhase.NONE:  # its lease has ended, or goes on without a kernel
            lease = await self.pool_work.resize(wanted)
            return SizeChange(True, False, f"This kernel now has {lease.request.of_gpus}.")
        return await self.resize_at_restart(wanted, None)

    async def _resized(self, wanted: SliceRequest) -> SizeChange:
        """Let the session change the size of what is waited for, or of a kernel that runs.

        Nothing is passed on to the kernel meanwhile, so that no code runs with the variables of a slice that
        it has no more.
        """
        before = self._session.changes
        self.request(events.ResizeRequested(wanted))
        await self._until(lambda session: session.state not in _RESIZING)
        change = self._session.change
        if self._session.changes == before or change is None:
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
        phase = phase_of(self._session)
        if phase in (SlicePhase.PARKED, SlicePhase.RESUMING):
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
        if self._session.state not in (State.ASKING, State.QUEUED, State.RESUMING):
            raise NotAllowed("This kernel does not wait for a GPU slice.")
        await self.interrupt()
        return texts.left_queue(self._session.size)

    # -- What is seen of it; any thread may look -------------------------------

    @property
    def session(self) -> Session:
        """The session as it is now."""
        return self._session

    @property
    def closed(self) -> bool:
        """Whether its ports are closed for good."""
        return self._session.state is State.ENDED

    @property
    def standing_in(self) -> bool:
        """Whether the proxy is all there is of the kernel: it lives, and has no process."""
        return self._session.stands_in

    @property
    def in_pod(self) -> bool:
        """Whether the kernel runs in a pod, as far as its lease is known."""
        return self._session.in_pod

    @property
    def was_granted(self) -> bool:
        """Whether the slice was granted since the last start."""
        return self._session.is_granted

    @property
    def takes_interrupts(self) -> bool:
        """Whether an interrupt is for :meth:`interrupt`, and not for the kernel's process."""
        return self._session.stands_in or self._session.state is State.RESUMING

    @property
    def ends_as(self) -> EndReason:
        """How the lease ends if it ends now: withdrawn where this start has never held it."""
        was_held = self._session.is_held or self._session.is_granted
        return EndReason.RELEASED if was_held else EndReason.WITHDRAWN

    @property
    def state(self) -> SliceView:
        """How things stand. Costs next to nothing."""
        session, run, told = self._session, self._do.run, self._do.on_slice
        seen = run.relay.seen if run is not None and session.state.has_kernel else (False, 0.0)
        shown = self._do.pending.text if self._do.front else ""
        is_told = told is not None and told.takes_changes
        return view(session, seen, shown, time.monotonic(), is_told=is_told)

    def told(self, on_slice: SliceEnvironment) -> None:
        """Take note of what the kernel that is being launched is told of its slice."""
        self._do.on_slice = on_slice

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
        before = self._session
        try:
            self._session, due = step(before, event, time.monotonic())
        except ImpossibleEventError as error:
            get_logger().error("%s", error)
            return
        if self._session.state is not before.state:
            self._give_up_work()
        for effect in due:
            self._attempt(effect, event)
        self._set_alarm()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def request(self, event: events.Event) -> str:
        """Let a user's request happen; return what they read. Raises ``NotAllowed`` where it is none now."""
        state = self._session.state
        if type(event) not in TABLE[state]:
            raise _not_now(state)
        self._reply = ""
        self.post(event)
        return self._reply

    def _interrupt(self) -> None:
        is_alive = self._session.state.has_kernel and self._session.state is not State.RESUMING
        if is_alive or not self._do.kernel.ending():
            self.post(events.InterruptRequested())

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        at = self._session.wakes_at
        if at is not None:
            loop = asyncio.get_running_loop()
            left = max(0.0, at - time.monotonic())
            self._alarm = loop.call_later(left, lambda: self.post(events.TimePassed()))

    async def _until(self, holds: Callable[[Session], bool]) -> None:
        while not holds(self._session):
            await self._changed.wait()

    # -- Effects ---------------------------------------------------------------

    def _attempt(self, effect: effects.Effect, event: events.Event) -> None:
        """Perform an effect; let no mistake of ours leave cells waiting for ever."""
        try:
            self._perform(effect)
        except Exception as error:  # noqa: BLE001 - whatever it is, the session ends what it was about
            get_logger().error("A kernel's session failed at %s.", effect, exc_info=error)
            if not isinstance(event, events.Failed):
                self._events.append(events.Failed(error))

    def _perform(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Work():
                self._begin(effect)
            case effects.Answer():
                self._do.pending.receive_all()
            case effects.HoldSilently():
                if self._do.front:
                    self._do.pending.hold_all(answering=False)
            case effects.HoldUnanswered():
                self._hold_unanswered()
            case effects.PassOn():
                self._pass_on(effect.tell)
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
                    self._do.run.relay.interrupt()
            case effects.Tell():
                if self._do.run is not None:
                    self._do.run.relay.tell(effect.text)
            case effects.ShowDevices():
                self._do.show_devices(effect.lease)
            case effects.LetGo():
                self._do.let_go()
            case effects.ReleaseLease():
                self.pool_work.release(effect.lease_id, effect.reason)
            case effects.Unreserve():
                self.pool_work.unreserve(effect.lease_id, effect.request)
            case effects.Close():
                self._close()

    def _begin(self, work: effects.Work) -> None:
        task = asyncio.create_task(self.pool_work.begin(work) or self._do.begin(work))
        self._work[task] = work
        task.add_done_callback(self._worked)

    def _give_up_work(self) -> None:
        given_up, self._work = self._work, {}
        for task in given_up:
            task.cancel()

    def _worked(self, task: asyncio.Task[events.Event]) -> None:
        work = self._work.pop(task, None)
        if task.cancelled():
            return
        error = task.exception()
        if work is None:
            self._came_too_late(error, None if error is not None else task.result())
        elif isinstance(error, NOT_NOW):
            get_logger().warning("The GPU pool at %s does not answer a kernel: %s", self.pool_work.url, error)
            self.post(events.PoolAway(error, work))
        elif error is not None:
            get_logger().error("A kernel proxy failed.", exc_info=error)
            self.post(events.Failed(error))
        else:
            self.post(task.result())

    def _came_too_late(self, error: BaseException | None, event: events.Event | None) -> None:
        """See to what comes of work that the session has given up: a lease that it does not know of."""
        if error is not None and not isinstance(error, NOT_NOW):
            get_logger().warning("What a kernel's session had given up failed: %r", error)
        if isinstance(event, (events.Queued, events.Granted)) and event.lease.id != self._session.lease_id:
            self.pool_work.release(event.lease.id, EndReason.WITHDRAWN)

    def show(self, text: str) -> None:
        """Show a text in the waiting cell, and in the log of a program that waits."""
        if self._do.front:
            self._do.pending.show(text)
        if self.wait_log is not None and self._session.state in (State.ASKING, State.QUEUED):
            self.wait_log.say(text)

    def _hold_unanswered(self) -> None:
        self._do.pending.hold_all()
        for frames in self._do.run.unanswered() if self._do.run is not None else ():
            self._do.pending.hold("shell", frames)

    def _pass_on(self, tell: str) -> None:
        assert self._do.run is not None
        self._do.run.relay.begin()
        if tell:
            self._do.run.relay.tell(tell)
        self._do.pending.hand_over(self._do.run.relay.pass_on)

    def _close(self) -> None:
        close_all(self._do.front)
        if self._do.run is not None:
            self._do.run.leave()
        self._do.close_backend()


def _is_answered(session: Session) -> bool:
    """Whether whoever starts the kernel need not wait for the pool any longer."""
    return session.state not in _UNKNOWN or bool(session.away)
