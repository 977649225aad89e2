"""Drives a kernel's session: takes its events in order, and performs what comes of them.

The promise: no submitted cell runs without its slice. So what is submitted is held in the proxy until the
slice is held and the kernel answers; where that comes to nothing, the cells are answered with an error. What
is decided, and when, is in ``session``; here is what it takes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

from gpu_pool_client import (
    Lease,
    LeaseGone,
    NotAllowed,
)
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.launchers.base import Launch, NotReadyError, ProxiedKernel
from gpu_pool_provisioner.lease_client import LeaseClient
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
from gpu_pool_provisioner.session_view import view
from gpu_pool_provisioner.slice_state import ProxyState
from gpu_pool_provisioner.wait_log import WaitLog
from gpu_pool_provisioner.work import Resizing, SessionWork, at_work

_WITH_SLICE: Final = (State.RUNNING, State.ASKED_BACK)


def _not_now(state: State) -> NotAllowed:
    """Return why a user's request is none in this state."""
    if state is State.RESIZING:
        return NotAllowed("This kernel's size is being changed already.", "Try again in a moment.")
    if state.has_kernel:
        return NotAllowed("This kernel's GPU slice is lent to others.", "Run a cell to ask for it again.")
    return NotAllowed("This kernel has no GPU slice now.", "Run a cell to ask for one.")


def wait_given_up(size: str) -> LeaseGone:
    """Return what a start is told that nobody waits for any longer."""
    return LeaseGone(f"The wait for {texts.slice_of(size)} was given up.", "Start it again to wait again.")


class SessionDriver:
    """One kernel's session, from its first start to its end, restarts included.

    All methods but the properties belong to the event loop on which :meth:`open` was called.
    """

    def __init__(self, kernel: ProxiedKernel, lease_client: LeaseClient) -> None:
        self._kernel = kernel
        self._lease_client = lease_client
        self._session = Session(lease_client.size, kernel.grace)
        #: Set, and replaced, whenever the session changes.
        self._changed = asyncio.Event()
        #: What has happened while something else did, and whether something does.
        self._events: deque[events.Event] = deque()
        self._is_happening = False
        #: What goes on for as long as the session is in its state, and all else that is under way.
        self._work: asyncio.Task[events.Event] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._do = SessionWork(self, kernel, lease_client)
        #: What the last request is answered with.
        self._reply = ""

    # -- What is told and asked ----------------------------------------------

    async def open(
        self, front: dict[str, Channel] | None = None, reserved: PortReservation | None = None
    ) -> None:
        """Listen on the kernel's ports, unless somebody has done so already and passes them as ``front``.

        Those that are ``reserved`` are listened on already, too. Raises what :func:`bind_front` raises.
        """
        connection = self._kernel.connection()
        self._do.messages = session_of(connection)
        self._do.front = front or bind_front(connection, self._do.messages, reserved)
        calls = PendingKernelCalls(
            submitted=lambda: self.post(events.WorkSubmitted()),
            interrupted=self._interrupt,
            ended=lambda: self.post(events.StopRequested()),
        )
        self._do.pending = PendingKernel(self._do.messages, self._do.front, calls, self._kernel.introduction)
        self._lease_client.tell = self.show

    async def start(
        self, lease: Lease | None, launch: Launch, asked_at: float, wait_log: WaitLog | None = None
    ) -> None:
        """Begin to answer for the kernel, or go on after a restart.

        ``lease`` is in the queue or held; without one, it is asked for, and a refusal is what the first cell
        reads. ``asked_at`` is when it was asked for first, by ``time.monotonic()``. With a ``wait_log``, its
        limit is the wait's.
        """
        self._do.launch, self._do.wait_log = launch, wait_log
        if wait_log is not None:
            self._do.somebody_looks.set()
        self._lease_client.away_since = asked_at if lease is None else None
        self.post(events.StartRequested(lease, wait_log.ends_at if wait_log is not None else None))

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
            raise wait_given_up(session.size)
        why = session.error or "It was ended while it was starting."
        raise NotReadyError(f"The kernel with {size} was not started. {why}")

    async def ended(self) -> None:
        """Return once the kernel has ended, or has been stopped while it waited."""
        await self._until(lambda session: session.state in (State.DOWN, State.RESTARTING, State.ENDED))

    async def interrupt(self) -> None:
        """Give up the wait, or what was submitted to a kernel that is just starting; or interrupt a pod's."""
        self._interrupt()
        await self._do.settled()

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

    async def being_restarted(self, *, within: float | None = None) -> None:
        """Stay open while the kernel is restarted, until :meth:`start` or for so many seconds more."""
        self.post(events.RestartBegan() if within is None else events.RestartExpected(within))

    def somebody_looks(self) -> None:
        """Find out why the kernel waits, and for how long, also before a cell does."""
        self._do.somebody_looks.set()

    async def keep(self, seconds: int) -> str:
        """Count the kernel as in use for so long; return what its user reads. Raises ``NotAllowed``."""
        return self.request(events.KeepRequested(seconds))

    async def give_back(self) -> str:
        """Let the slice go as soon as the kernel is idle; return what its user reads, as :meth:`keep`."""
        return self.request(events.GiveBackRequested(self._lease_client.last_activity))

    async def resume(self) -> str:
        """Ask for a parked kernel's slice again; return what its user reads. Raises ``NotAllowed``."""
        if self._session.state not in (State.PARKED, State.RESUMING):
            raise NotAllowed("This kernel's GPU slice is not lent to others.")
        return self.request(events.ResumeRequested())

    async def resize(self, grant: Callable[[], Awaitable[Mapping[str, Any]]]) -> Mapping[str, Any]:
        """Let a running kernel have another size, which ``grant`` asks for; return what that returns.

        Nothing is passed on to the kernel meanwhile, so that no code runs with the variables of a slice that
        it has no more. Raises ``NotAllowed`` where the kernel is at work, or has no slice now.
        """
        if self._session.state in _WITH_SLICE and self._do.run is not None and self._do.run.relay.busy:
            raise at_work()
        change = self._do.resizing = Resizing(grant)
        self.request(events.ResizeRequested())
        await self._until(
            lambda session: session.state is not State.RESIZING or self._do.resizing is not change
        )
        if change.error is not None:
            raise change.error
        if change.answer is None:
            raise NotAllowed("This kernel has ended.", "Change the size of the next one.")
        return change.answer

    async def resize_waiting(self, change: Callable[[], Awaitable[Lease]]) -> Lease:
        """Let what the kernel waits for have another size, which ``change`` asks for; return its lease.

        Raises ``NotAllowed`` where it does not wait any more, and what ``change`` raises.
        """
        async with self._do.sizing:
            if self._session.state is not State.QUEUED:
                raise NotAllowed("This kernel does not wait for a GPU slice any more.", "Try again.")
            self._do.is_resized = True  # also where the answer is lost
            return await change()

    async def leave_queue(self) -> str:
        """Give up the wait, as an interrupt does; return what its user reads. Raises ``NotAllowed``."""
        if self._session.state not in (State.ASKING, State.QUEUED, State.RESUMING):
            raise NotAllowed("This kernel does not wait for a GPU slice.")
        await self.interrupt()
        return texts.left_queue(self._lease_client.size)

    # -- What is seen of it; any thread may look -------------------------------

    @property
    def session(self) -> Session:
        """The session as it is now."""
        return self._session

    @property
    def kernel_connection(self) -> str | None:
        """The connection file that the kernel's own process was told; None where it has none here."""
        backend = self._do.backend
        return backend.file if backend is not None else None

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
    def is_looked_at(self) -> bool:
        """Whether somebody has looked, or run a cell."""
        return self._do.somebody_looks.is_set()

    @property
    def state(self) -> ProxyState:
        """How things stand. Costs next to nothing."""
        run = self._do.run
        seen = run.relay.seen if run is not None and self._session.state.has_kernel else (False, 0.0)
        return view(self._session, self._lease_client, seen, self._do.pending.text)

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
        if isinstance(event, events.WorkSubmitted):
            self._do.somebody_looks.set()
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
        if is_alive or not self._kernel.ending():
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
                self._begin(self._do.begin(effect))
            case effects.Answer():
                self._do.pending.receive_all()
            case effects.HoldSilently():
                self._do.pending.hold_all(answering=False)
            case effects.HoldUnanswered():
                self._hold_unanswered()
            case effects.Relay():
                self._relay(effect.tell)
            case effects.Refuse():
                self._do.pending.refuse(effect.text, effect.error_name)
            case effects.Show():
                self.show(effect.text)
            case effects.Drop():
                self._do.pending.drop()
            case effects.HoldBack():
                self._do.hold_back()
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
            case effects.GiveBack():
                self._do.give_back(effect.reason, ask_anew=effect.ask_anew)
            case effects.Close():
                self._close()

    def _begin(self, work: Coroutine[Any, Any, events.Event]) -> None:
        self._give_up_work()
        self._work = asyncio.create_task(work)
        self._work.add_done_callback(self._worked)

    def _give_up_work(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.cancel()

    def _worked(self, work: asyncio.Task[events.Event]) -> None:
        if work.cancelled():
            return
        error = work.exception()
        if work is not self._work:
            if error is not None:
                get_logger().warning("What a kernel's session had given up failed: %r", error)
            return
        self._work = None
        if error is not None:
            get_logger().error("A kernel proxy failed.", exc_info=error)
        self.post(events.Failed(error) if error is not None else work.result())

    def show(self, text: str) -> None:
        """Show a text in the waiting cell, and in the log of a program that waits."""
        self._do.pending.show(text)
        if self._do.wait_log is not None and self._session.state in (State.ASKING, State.QUEUED):
            self._do.wait_log.say(text)

    def _hold_unanswered(self) -> None:
        self._do.pending.hold_all()
        for frames in self._do.run.unanswered() if self._do.run is not None else ():
            self._do.pending.hold("shell", frames)

    def _relay(self, tell: str) -> None:
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
