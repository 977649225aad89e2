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

from jupyter_client.session import Session as MessageSession

from gpu_pool_client import (
    EndReason,
    GpuPoolError,
    Lease,
    LeaseGone,
    LeaseState,
    NotAllowed,
    PoolUnreachable,
    Process,
    TimedOut,
    format_duration,
)
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.ports import PortReservation
from gpu_pool_provisioner.proxy.backend import BackendConnection, PortStolenError
from gpu_pool_provisioner.proxy.channels import Channel, close_all
from gpu_pool_provisioner.proxy.front import bind_front
from gpu_pool_provisioner.proxy.lease_client import LeaseClient, retry
from gpu_pool_provisioner.proxy.pending import PendingKernel, PendingKernelCalls
from gpu_pool_provisioner.proxy.pod_runs import NotStartedError, PodRun, pod_connection
from gpu_pool_provisioner.proxy.runs import KernelRun, Launch, NotReadyError, ProcessRun, ProxiedKernel
from gpu_pool_provisioner.proxy.signed import session_of
from gpu_pool_provisioner.proxy.supervisor import IdleCuller, RunSupervisor
from gpu_pool_provisioner.session import ImpossibleEventError, Session, State, effects, events, step, texts
from gpu_pool_provisioner.session.table import MARGIN
from gpu_pool_provisioner.slice_state import IdleState, ProxyState, SlicePhase
from gpu_pool_provisioner.wait_log import WaitLog

#: How often a kernel is launched whose ports others take before it: whoever does it goes on.
_LAUNCHES: Final = 20
_PORTS_TAKEN: Final = (
    "Another user of this machine took the ports on which this kernel was to listen, again and again. "
    "Tell whoever runs this machine."
)


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
        self._events: deque[events.Event] = deque()
        #: What goes on for as long as the session is in its state, and all else that is under way.
        self._work: asyncio.Task[events.Event] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._somebody_looks = asyncio.Event()
        self._front: dict[str, Channel] = {}
        self._launch: Launch
        self._wait_log: WaitLog | None = None
        self._messages: MessageSession
        self._pending: PendingKernel
        self._run: KernelRun | None = None
        self._backend: BackendConnection | None = None
        self._supervisor: RunSupervisor | None = None
        #: Held while the size of what the kernel waits for changes.
        self._sizing = asyncio.Lock()
        #: Whether it has changed since the lease was last read.
        self._is_resized = False

    # -- What is told and asked ----------------------------------------------

    async def open(
        self, front: dict[str, Channel] | None = None, reserved: PortReservation | None = None
    ) -> None:
        """Listen on the kernel's ports, unless somebody has done so already and passes them as ``front``.

        Those that are ``reserved`` are listened on already, too. Raises what :func:`bind_front` raises.
        """
        connection = self._kernel.connection()
        self._messages = session_of(connection)
        self._front = front or bind_front(connection, self._messages, reserved)
        calls = PendingKernelCalls(
            submitted=lambda: self._post(events.CodeSubmitted()),
            interrupted=self._interrupt,
            ended=lambda: self._post(events.StopRequested()),
        )
        self._pending = PendingKernel(self._messages, self._front, calls, self._kernel.introduction)
        self._lease_client.tell = self._show

    async def start(
        self, lease: Lease | None, launch: Launch, asked_at: float, wait_log: WaitLog | None = None
    ) -> None:
        """Begin to answer for the kernel, or go on after a restart.

        ``lease`` is in the queue or held; without one, it is asked for, and a refusal is what the first cell
        reads. ``asked_at`` is when it was asked for first, by ``time.monotonic()``. With a ``wait_log``, its
        limit is the wait's.
        """
        self._launch, self._wait_log = launch, wait_log
        if wait_log is not None:
            self._somebody_looks.set()
        self._lease_client.away_since = asked_at if lease is None else None
        self._post(events.StartRequested(lease, wait_log.ends_at if wait_log is not None else None))

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
        await self._settled()

    async def stop(self) -> None:
        """End the kernel, as a signal would end a process. Its position stays until :meth:`close`."""
        self._post(events.StopRequested())

    async def close(self) -> None:
        """Close the ports and kill what still runs. The lease is the caller's to release."""
        self._post(events.CloseRequested())

    async def close_unless_kept(self, seconds: float) -> None:
        """Close so many seconds from now unless :meth:`keep_open` is called: its manager may have failed."""
        self._post(events.ManagerExpected(seconds))

    async def keep_open(self) -> None:
        """Stay open for as long as the kernel lives: whoever started it goes on to manage it."""
        self._post(events.ManagerCame())

    async def being_restarted(self, *, within: float | None = None) -> None:
        """Stay open while the kernel is restarted, until :meth:`start` or for so many seconds more."""
        self._post(events.RestartBegan() if within is None else events.RestartExpected(within))

    def somebody_looks(self) -> None:
        """Find out why the kernel waits, and for how long, also before a cell does."""
        self._somebody_looks.set()

    async def keep(self, seconds: int) -> str:
        """Count the kernel as in use for so long; return what its user reads. Raises ``NotAllowed``."""
        return self._culler().keep(seconds)

    async def give_back(self) -> str:
        """Let the slice go as soon as the kernel is idle; return what its user reads, as :meth:`keep`."""
        return self._culler().give_back(self._lease_client.last_activity)

    def _culler(self) -> IdleCuller:
        if self._supervisor is None:
            raise NotAllowed("This kernel has no GPU slice now.", "Run a cell to ask for one.")
        return self._supervisor.culler

    async def resize(self, grant: Callable[[], Awaitable[Mapping[str, Any]]]) -> Mapping[str, Any]:
        """Let a running kernel have another size, which ``grant`` asks for; return what that returns.

        Raises ``NotAllowed`` where the kernel is at work, or has no slice now.
        """
        if self._supervisor is None:
            raise NotAllowed("This kernel has no GPU slice now.", "Run a cell to ask for one.")
        return await self._supervisor.resize(grant)

    async def resize_waiting(self, change: Callable[[], Awaitable[Lease]]) -> Lease:
        """Let what the kernel waits for have another size, which ``change`` asks for; return its lease.

        Raises ``NotAllowed`` where it does not wait any more, and what ``change`` raises.
        """
        async with self._sizing:
            if self._session.state is not State.QUEUED:
                raise NotAllowed("This kernel does not wait for a GPU slice any more.", "Try again.")
            self._is_resized = True  # also where the answer is lost
            return await change()

    async def resume(self) -> str:
        """Ask for a parked kernel's slice again; return what its user reads. Raises ``NotAllowed``."""
        parking = self._supervisor.parking if self._supervisor is not None else None
        if parking is None or not parking.is_parked:
            raise NotAllowed("This kernel's GPU slice is not lent to others.")
        parking.resume()
        return texts.asks_again(self._lease_client.size)

    async def leave_queue(self) -> str:
        """Give up the wait, as an interrupt does; return what its user reads. Raises ``NotAllowed``."""
        if self._session.state not in (State.ASKING, State.QUEUED) and not self._resuming:
            raise NotAllowed("This kernel does not wait for a GPU slice.")
        await self.interrupt()
        return texts.left_queue(self._lease_client.size)

    # -- What is seen of it; any thread may look -------------------------------

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
        return self._session.stands_in or self._resuming

    @property
    def _resuming(self) -> bool:
        return self._supervisor is not None and self._supervisor.resuming

    @property
    def is_looked_at(self) -> bool:
        """Whether somebody has looked, or run a cell."""
        return self._somebody_looks.is_set()

    @property
    def state(self) -> ProxyState:
        """How things stand. Costs next to nothing."""
        session, supervisor, client = self._session, self._supervisor, self._lease_client
        phase = self._slice_phase(session, supervisor)
        return ProxyState(
            phase,
            self._message(session, phase),
            client.position,
            client.outlook,
            supervisor.idle_state if supervisor is not None else IdleState(),
            session.end if phase is not SlicePhase.HELD else None,
            session.in_pod,
            given_back=supervisor is not None
            and supervisor.parking is not None
            and supervisor.parking.is_given_back,
        )

    def _slice_phase(self, session: Session, supervisor: RunSupervisor | None) -> SlicePhase:
        lease = self._lease_client.seen
        is_held = lease is not None and lease.state is LeaseState.HELD
        if session.state is State.ASKING:
            return SlicePhase.STARTING if is_held else SlicePhase.ASKING
        if session.state is State.DOWN:
            # For as long as its end is forgiven.
            return SlicePhase.HELD if is_held and session.end is None else SlicePhase.NONE
        parking = supervisor.parking if supervisor is not None else None
        if session.state is State.RUNNING and parking is not None:
            if parking.resuming:
                return SlicePhase.RESUMING
            return SlicePhase.PARKED if parking.is_parked else SlicePhase.HELD
        return {
            State.QUEUED: SlicePhase.WAITING,
            State.STARTING: SlicePhase.STARTING,
            State.RESTARTING: SlicePhase.STARTING,
            State.RUNNING: SlicePhase.HELD,
        }.get(session.state, SlicePhase.NONE)

    def _message(self, session: Session, phase: SlicePhase) -> str:
        """Return what the kernel's user should read now."""
        lease = self._lease_client.seen
        if phase is SlicePhase.NONE:
            return session.end.message if session.end is not None else ""
        parking = self._supervisor.parking if self._supervisor is not None else None
        if phase is SlicePhase.PARKED and parking is not None:
            return parking.why
        if phase in (SlicePhase.HELD, SlicePhase.PARKED) and lease is not None:
            return lease.message or self._lease_client.notice
        outlook = self._lease_client.outlook
        waits = phase in (SlicePhase.WAITING, SlicePhase.RESUMING)
        return outlook.why if waits and outlook is not None else self._pending.text

    # -- Events, in order ------------------------------------------------------

    def _post(self, event: events.Event) -> None:
        """Let something have happened. What comes of it is done when this returns, but for what takes time.

        While an effect is performed, its own events wait for those that are next to it.
        """
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            try:
                self._happen(self._events[0])
            finally:
                self._events.popleft()

    def _happen(self, event: events.Event) -> None:
        if isinstance(event, events.CodeSubmitted):
            self._somebody_looks.set()
        before = self._session
        try:
            self._session, due = step(before, event, time.monotonic())
        except ImpossibleEventError as error:
            get_logger().error("%s", error)
            return
        if self._session.state is not before.state:
            self._give_up_work()
        for effect in due:
            self._perform(effect)
        self._set_alarm()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _interrupt(self) -> None:
        if self._resuming and self._supervisor is not None:
            self._supervisor.give_up_resuming()
        elif self._session.state is State.RUNNING or not self._kernel.ending():
            self._post(events.InterruptRequested())

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        at = self._session.wakes_at
        if at is not None:
            loop = asyncio.get_running_loop()
            left = max(0.0, at - time.monotonic())
            self._alarm = loop.call_later(left, lambda: self._post(events.TimePassed()))

    async def _until(self, holds: Callable[[Session], bool]) -> None:
        while not holds(self._session):
            await self._changed.wait()

    async def _settled(self) -> None:
        """Return once what was to be told to the pool has been told."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    # -- Effects ---------------------------------------------------------------

    def _perform(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Work():
                self._begin(self._working(effect))
            case effects.Answer():
                self._pending.receive_all()
            case effects.HoldSilently():
                self._pending.hold_all(answering=False)
            case effects.HoldUnanswered():
                self._hold_unanswered()
            case effects.Relay():
                self._relay(effect.tell)
            case effects.Refuse():
                self._pending.refuse(effect.text, effect.error_name)
            case effects.Show():
                self._show(effect.text)
            case effects.Drop():
                self._pending.drop()
            case effects.ReportHeldCode():
                if self._pending.holds_code:
                    self._post(events.CodeSubmitted())
            case effects.KillKernel():
                if self._run is not None:
                    self._run.kill()
            case effects.InterruptKernel():
                if self._run is not None:
                    self._run.relay.interrupt()
            case effects.LetGo():
                self._let_go()
            case effects.GiveBack():
                self._soon(self._lease_client.give_up(effect.reason, ask_anew=effect.ask_anew))
            case effects.Close():
                self._close()

    def _working(self, work: effects.Work) -> Coroutine[Any, Any, events.Event]:
        match work:
            case effects.Ask():
                return self._ask()
            case effects.AwaitGrant():
                return self._await_grant(work.lease)
            case effects.AskLastTime():
                return self._ask_last_time()
            case effects.Launch():
                return self._launched(work.lease)
            case effects.Watch():
                return self._watch(work.lease)
            case effects.EndKernel():
                return self._end_kernel(work)
        raise AssertionError(f"Nobody knows how to do {work}.")

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
        self._post(events.Failed(error) if error is not None else work.result())

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task, and keep a reference to it: the loop itself has only weak ones."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _show(self, text: str) -> None:
        self._pending.show(text)
        if self._wait_log is not None and self._session.state in (State.ASKING, State.QUEUED):
            self._wait_log.say(text)

    def _hold_unanswered(self) -> None:
        self._pending.hold_all()
        for frames in self._run.unanswered() if self._run is not None else ():
            self._pending.hold("shell", frames)

    def _relay(self, tell: str) -> None:
        assert self._run is not None
        self._run.relay.begin()
        if tell:
            self._run.relay.tell(tell)
        self._pending.hand_over(self._run.relay.pass_on)

    def _let_go(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None
        self._close_backend()  # the next one listens where nobody has seen it yet

    def _close(self) -> None:
        close_all(self._front)
        if self._run is not None:
            self._run.leave()
        self._close_backend()

    def _close_backend(self) -> None:
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    # -- Work: each returns what came of it ------------------------------------

    async def _ask(self) -> events.Event:
        await self._settled()  # what goes back counts against its user's quota until it is back
        try:
            lease = await self._lease_client.ask()
        except GpuPoolError as error:
            return events.Refused(error)
        return events.Queued(lease) if lease.state is LeaseState.WAITING else events.Granted(lease)

    async def _await_grant(self, lease: Lease) -> events.Event:
        try:
            while lease.state is LeaseState.WAITING:
                lease = await self._lease_client.granted(lease.id, self._show, self._somebody_looks)
                lease = await self._as_resized(lease)
        except GpuPoolError as error:
            return events.Refused(error)
        return events.Granted(lease)

    async def _as_resized(self, lease: Lease) -> Lease:
        """Return the lease as it is once nobody changes its size any more."""
        async with self._sizing:
            if self._is_resized:
                self._is_resized = False
                lease = await retry(self._lease_client.lease, self._show_fault)
            return lease

    def _show_fault(self, error: GpuPoolError) -> None:
        self._show(texts.unreachable(self._lease_client.size, error))

    async def _ask_last_time(self) -> events.Event:
        try:
            return events.Granted(await self._lease_client.granted_now())
        except TimedOut as error:
            limit = format_duration(self._wait_log.limit) if self._wait_log and self._wait_log.limit else ""
            message = f"{texts.too_long(self._lease_client.size, limit)} {error.message}"
            return events.Refused(TimedOut(message, error.remedy, largest_now=error.largest_now))
        except GpuPoolError as error:
            return events.Refused(error)

    async def _launched(self, lease: Lease) -> events.Event:
        if self._wait_log is not None:
            self._wait_log.say_is_over(self._lease_client.size)
        # Of a start without a wait there is nothing to say, unless its pod takes long.
        self._show(self._lease_client.starting() if self._lease_client.has_waited else "")
        try:
            await self._launch_until_ready(lease)
        except (NotStartedError, PoolUnreachable) as error:
            get_logger().error("No kernel was started for the GPU lease %s: %s", lease.id, error)
            return events.NotStarted(error)
        except (NotReadyError, OSError, GpuPoolError) as error:
            get_logger().error("The kernel with the GPU lease %s is not running: %s", lease.id, error)
            return events.NotReady(error)
        return events.Ready(lease)

    async def _launch_until_ready(self, lease: Lease) -> None:
        """Launch the real kernel and return once it answers; elsewhere where its ports were taken."""
        launches = 0
        while True:
            launches += 1
            run = self._run = await self._new_run(lease)
            self._post(events.Launched())
            if self._session.is_stopped:
                run.kill()
            try:
                self._pending.introduction = await run.until_ready(self._kernel)
            except PortStolenError as error:
                get_logger().warning("Another user took a kernel's ports before it; it is launched again.")
                await self._lease_client.attach(Process.current(), ready_within=MARGIN, grace=0.0)
                run.kill()
                await run.end
                self._let_go()
                if self._session.is_stopped or launches == _LAUNCHES:
                    await self._lease_client.give_up(EndReason.NOT_READY, ask_anew=False)
                    raise NotReadyError(_PORTS_TAKEN) from error
            except BaseException:
                run.kill()
                raise
            else:
                return

    async def _new_run(self, lease: Lease) -> KernelRun:
        sides = self._messages, self._front
        if lease.terms.in_pod:
            connection = pod_connection(self._kernel.connection())
            return PodRun(self._launch, connection, self._lease_client, *sides, self._show)
        try:
            if self._backend is None:
                self._backend = BackendConnection(self._kernel.connection_file, self._launch.command)
            return await ProcessRun.launched(self._launch, lease, self._backend, self._lease_client, *sides)
        except OSError as error:
            await self._lease_client.give_up(EndReason.NOT_READY, ask_anew=False)
            raise NotReadyError(f"The kernel could not be launched: {error}.") from error

    async def _watch(self, lease: Lease) -> events.Event:
        assert self._run is not None
        run = self._run
        self._supervisor = RunSupervisor(run, self._lease_client, self._front, self._pending)
        try:
            over = await self._supervisor.until_over(lease)
        finally:
            self._supervisor = None
        if over is not None:
            return events.TermsOver(over)
        return events.Died("" if self._kernel.ending() else run.exit_message)

    async def _end_kernel(self, work: effects.EndKernel) -> events.Event:
        if self._run is not None:
            await asyncio.wait({self._run.end}, timeout=work.within)
            self._run.kill()
            await asyncio.wait({self._run.end}, timeout=work.at_most)
        return events.Gone()
