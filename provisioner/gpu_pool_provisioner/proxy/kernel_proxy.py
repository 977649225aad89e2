"""The life of a kernel proxy: in the queue, launching, relaying, down, and up again.

The promise: no submitted cell runs without its slice. So what is submitted is
held here until the slice is held and the real kernel answers; where that comes
to nothing, the cells are answered with an error.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

from jupyter_client.session import Session

from gpu_pool_client import EndReason, GpuPoolError, Lease, LeaseState, NotAllowed, PoolUnreachable, Process
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.ports import PortReservation
from gpu_pool_provisioner.proxy import messages
from gpu_pool_provisioner.proxy.backend import BackendConnection, PortStolenError
from gpu_pool_provisioner.proxy.channels import Channel, close_all
from gpu_pool_provisioner.proxy.events import first_of
from gpu_pool_provisioner.proxy.front import bind_front
from gpu_pool_provisioner.proxy.lease_client import LeaseClient, retry
from gpu_pool_provisioner.proxy.pending import PendingKernel, PendingKernelCalls
from gpu_pool_provisioner.proxy.pod_runs import NotStartedError, PodRun, pod_connection
from gpu_pool_provisioner.proxy.runs import (
    MARGIN,
    KernelRun,
    Launch,
    NotReadyError,
    ProcessRun,
    ProxiedKernel,
)
from gpu_pool_provisioner.proxy.signed import session_of
from gpu_pool_provisioner.proxy.supervisor import IdleCuller, RunSupervisor
from gpu_pool_provisioner.slice_state import IdleState, ProxyState, SliceEnd, SlicePhase

#: Seconds in which the end of a kernel's process is noticed.
_NOTICED_WITHIN: Final = 1.0
#: How often a kernel is launched whose ports others take before it: whoever does it goes on.
_LAUNCHES: Final = 20
_PORTS_TAKEN: Final = (
    "Another user of this machine took the ports on which this kernel was to listen, again and again. "
    "Tell whoever runs this machine."
)


class KernelProxy:
    """Answers for a kernel from its first start to its end, restarts included.

    All methods but the properties belong to the event loop on which
    :meth:`open` was called.
    """

    def __init__(self, kernel: ProxiedKernel, lease_client: LeaseClient) -> None:
        self._kernel = kernel
        self._lease_client = lease_client
        self._ended = asyncio.Event()
        self._somebody_looks = asyncio.Event()
        self._front: dict[str, Channel] = {}
        self._launch: Launch
        self._session: Session
        self._pending: PendingKernel
        self._run: KernelRun | None = None
        self._backend: BackendConnection | None = None
        self._phase = Phase.DOWN
        #: Set once the real kernel has a process, and once it has answered, since the last :meth:`start`.
        self._launched_once, self._runs = asyncio.Event(), asyncio.Event()
        #: Whether it was stopped while it started: then it is not launched once more.
        self._is_stopped = False
        #: Why it could not be launched.
        self._launch_error: OSError | None = None
        #: Whether the proxy is all there is of the kernel: it lives, and has no process.
        self.standing_in = False
        #: Whether the kernel runs in a pod, as far as its lease is known.
        self.in_pod = False
        self._supervisor: RunSupervisor | None = None
        #: Why a cell did not run since the kernel was ended, until somebody has read it.
        self._end_message = ""
        #: How the previous kernel ended, where nobody here ended it.
        self._exit_message = ""
        #: Why it has no slice, until it has one again, however many cells have been told.
        self._end: SliceEnd | None = None
        #: Held while the size of what the kernel waits for changes.
        self._sizing = asyncio.Lock()
        #: Whether it has changed since the lease was last read.
        self._is_resized = False
        self._life: asyncio.Task[None] | None = None
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._closing: asyncio.TimerHandle | None = None
        #: Seconds for which the end of the kernel is that of a restart, until :meth:`start`.
        self._restarted_within = 0.0

    @property
    def closed(self) -> bool:
        """Whether its ports are closed for good."""
        return self._phase is Phase.CLOSED

    @property
    def takes_interrupts(self) -> bool:
        """Whether an interrupt is for :meth:`interrupt`, and not for the kernel's process."""
        in_pod = self._run is not None and not self._run.is_process
        return self._phase.is_before_kernel or self._resuming or in_pod

    @property
    def _resuming(self) -> bool:
        return self._supervisor is not None and self._supervisor.resuming

    @property
    def _is_being_restarted(self) -> bool:
        return self._restarted_within == math.inf

    @property
    def state(self) -> ProxyState:
        """How things stand. May be read by any thread, and costs next to nothing."""
        supervisor, client = self._supervisor, self._lease_client
        phase = self._slice_phase(supervisor)
        return ProxyState(
            phase,
            self._message(phase),
            client.position,
            client.outlook,
            supervisor.idle_state if supervisor is not None else IdleState(),
            self._end if phase is not SlicePhase.HELD else None,
            self.in_pod,
            given_back=supervisor is not None
            and supervisor.parking is not None
            and supervisor.parking.is_given_back,
        )

    def _slice_phase(self, supervisor: RunSupervisor | None) -> SlicePhase:
        lease = self._lease_client.seen
        if self._phase is Phase.WAITING:
            known = {LeaseState.WAITING: SlicePhase.WAITING, LeaseState.HELD: SlicePhase.STARTING}
            return known.get(lease.state, SlicePhase.ASKING) if lease is not None else SlicePhase.ASKING
        if self._phase is Phase.LAUNCHING or (self._phase is Phase.DOWN and self._is_being_restarted):
            return SlicePhase.STARTING
        if self._phase is Phase.DOWN and self._end is None and lease and lease.state is LeaseState.HELD:
            return SlicePhase.HELD  # for as long as its end is forgiven
        if self._phase is not Phase.RUNNING:
            return SlicePhase.NONE
        parking = supervisor.parking if supervisor is not None else None
        if parking is not None and parking.resuming:
            return SlicePhase.RESUMING
        return SlicePhase.PARKED if parking is not None and parking.is_parked else SlicePhase.HELD

    def _message(self, phase: SlicePhase) -> str:
        """Return what the kernel's user should read now."""
        lease = self._lease_client.seen
        if phase is SlicePhase.NONE:
            return self._end.message if self._end is not None else ""
        parking = self._supervisor.parking if self._supervisor is not None else None
        if phase is SlicePhase.PARKED and parking is not None:
            return parking.why
        if phase in (SlicePhase.HELD, SlicePhase.PARKED) and lease is not None:
            return lease.message or self._lease_client.notice
        outlook = self._lease_client.outlook
        waits = phase in (SlicePhase.WAITING, SlicePhase.RESUMING)
        return outlook.why if waits and outlook is not None else self._pending.text

    @property
    def is_looked_at(self) -> bool:
        """Whether somebody has looked, or run a cell. As with :attr:`state`, any thread may ask."""
        return self._somebody_looks.is_set()

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
            if self._phase is not Phase.WAITING:
                raise NotAllowed("This kernel does not wait for a GPU slice any more.", "Try again.")
            self._is_resized = True  # also where the answer is lost
            return await change()

    async def resume(self) -> str:
        """Ask for a parked kernel's slice again; return what its user reads. Raises ``NotAllowed``."""
        parking = self._supervisor.parking if self._supervisor is not None else None
        if parking is None or not parking.is_parked:
            raise NotAllowed("This kernel's GPU slice is not lent to others.")
        parking.resume()
        return messages.asks_again(self._lease_client.size)

    async def leave_queue(self) -> str:
        """Give up the wait, as an interrupt does; return what its user reads. Raises ``NotAllowed``."""
        if self._phase is not Phase.WAITING and not self._resuming:
            raise NotAllowed("This kernel does not wait for a GPU slice.")
        await self.interrupt()
        return messages.left_queue(self._lease_client.size)

    async def open(
        self, front: dict[str, Channel] | None = None, reserved: PortReservation | None = None
    ) -> None:
        """Listen on the kernel's ports, unless somebody has done so already and passes them as ``front``.

        Those that are ``reserved`` are listened on already, too. Raises what :func:`bind_front` raises.
        """
        connection = self._kernel.connection()
        self._session = session_of(connection)
        self._front = front or bind_front(connection, self._session, reserved)
        calls = PendingKernelCalls(
            submitted=self._submitted,
            interrupted=lambda: self._soon(self.interrupt()),
            ended=lambda: self._soon(self.stop()),
        )
        self._pending = PendingKernel(self._session, self._front, calls, self._kernel.introduction)
        self._lease_client.tell = self._pending.show

    async def start(self, lease: Lease | None, launch: Launch, away_since: float | None = None) -> None:
        """Begin to answer for the kernel, or go on after a restart.

        ``lease`` is in the queue or held; without one, it is asked for, and a
        refusal is what the first cell reads. ``away_since`` is when it was asked
        for first, by ``time.monotonic()``, where the pool has not answered since.
        """
        self._launch, self._lease_client.away_since = launch, away_since
        if self._run is not None and self._life is not None:
            # It is about to see that the previous process has ended.
            await asyncio.wait([self._life], timeout=_NOTICED_WITHIN)
            if self._run is not None:  # of two restarts at once, the other has launched it
                self._run.kill()
            await asyncio.wait([self._life])
        if self._life is not None:
            lease = None  # whoever read it may have done so before that life, in its last moment, parked it
        self._close_in(None)
        self._restarted_within = 0.0
        self._is_stopped = False
        self._runs.clear()
        self._launched_once.clear()
        self._launch_error = None
        self.standing_in, self._end_message = True, ""  # whoever restarts it knows that it has ended
        self._ended.clear()
        self._receive(Phase.WAITING)
        if self._life is None or self._life.done():
            self._begin(self._live(lease))

    async def ended(self) -> None:
        """Return once the kernel has ended, or has been stopped while it waited."""
        await self._ended.wait()

    async def until_launched(self) -> None:
        """Return once the real kernel has a process, or is not to have one yet. Raises ``OSError``."""
        if self._life is not None:
            await first_of(self._launched_once.wait(), asyncio.wait([self._life]))
        if self._launch_error is not None:
            raise self._launch_error

    async def until_running(self) -> None:
        """Return once the real kernel answers. Raises ``NotReadyError``, which says why it does not."""
        if self._life is not None:
            await first_of(self._runs.wait(), asyncio.wait([self._life]))
        if not self._runs.is_set():
            raise NotReadyError(self._end.message if self._end else "It was ended while it was starting.")

    async def interrupt(self) -> None:
        """Give up the wait, or what was submitted to a kernel that is just starting; or interrupt a pod's."""
        if self._phase is Phase.RUNNING and self._run is not None and not self._resuming:
            self._run.relay.interrupt()
            return
        if self._kernel.ending():
            return
        if self._phase is Phase.WAITING:
            self._end = SliceEnd(None, messages.left_queue(self._lease_client.size))
            self._receive(Phase.GIVEN_UP)
            self._pending.refuse(messages.gave_up(self._lease_client.size))
            self._pending.show("")
            if self._life is not None:
                self._life.cancel()
            await self._lease_client.give_up(EndReason.WITHDRAWN)
        elif self._phase is Phase.LAUNCHING:
            self._pending.refuse(messages.interrupted(self._lease_client.size), "KeyboardInterrupt")
        elif self._supervisor is not None:
            self._supervisor.give_up_resuming()

    async def stop(self) -> None:
        """End the kernel, as a signal would end a process. Its position stays until :meth:`close`."""
        if self._phase.is_before_kernel:
            self._is_stopped = True
            self._pending.drop()
        if self._run is not None:
            self._run.kill()
        elif self._phase.is_before_kernel:
            self._down()

    async def close(self) -> None:
        """Close the ports and kill what still runs. The lease is the caller's to release."""
        if self._phase is Phase.CLOSED:
            return
        self._phase, self.standing_in = Phase.CLOSED, False
        self._ended.set()
        if self._life is not None:
            self._life.cancel()
        self._pending.drop()
        close_all(self._front)
        if self._run is not None:
            self._run.leave()
        self._close_backend()

    async def _live(self, lease: Lease | None) -> None:
        """Get the slice, launch the kernel, relay to it until it ends."""
        try:
            lease = lease or await self._lease_client.ask()
            self.in_pod = lease.terms.in_pod
            while lease.state is LeaseState.WAITING:
                lease = await self._lease_client.granted(lease.id, self._pending.show, self._somebody_looks)
                lease = await self._as_resized(lease)
        except GpuPoolError as error:
            await self._refused(error)
            return
        if self._phase is not Phase.WAITING:
            return  # a restart is under way, and finds the slice held
        try:
            if await self._launched(lease):
                return
        except (NotStartedError, PoolUnreachable) as error:
            get_logger().error("No kernel was started for the GPU lease %s: %s", lease.id, error)
            self._end = SliceEnd(EndReason.NOT_READY.value, str(error))
            await self._start_over(messages.not_run(str(error)), EndReason.NOT_READY)
            return
        except (NotReadyError, OSError, GpuPoolError) as error:
            get_logger().error("The kernel with the GPU lease %s is not running: %s", lease.id, error)
            self._end = SliceEnd(getattr(error, "reason", None), str(error))
            self._pending.refuse(messages.not_run(str(error)))
        self._down()

    async def _as_resized(self, lease: Lease) -> Lease:
        """Return the lease as it is once nobody changes its size any more."""
        async with self._sizing:
            if self._is_resized:
                self._is_resized = False
                lease = await retry(self._lease_client.lease, self._show_fault)
            return lease

    def _show_fault(self, error: GpuPoolError) -> None:
        self._pending.show(messages.unreachable(self._lease_client.size, error))

    async def _refused(self, error: GpuPoolError) -> None:
        """There is no slice for it: say so, and let the next cell ask again."""
        if self._phase is not Phase.WAITING:
            return
        self._end = SliceEnd(getattr(error, "reason", None), str(error))
        self._receive(Phase.GIVEN_UP)
        self._pending.refuse(messages.not_run(str(error)))
        self._pending.show("")
        await self._lease_client.give_up(EndReason.WITHDRAWN)

    async def _launched(self, lease: Lease) -> bool:
        """Launch the real kernel and relay to it until it ends; return whether the proxy stands in for it."""
        self._phase = Phase.LAUNCHING
        # Of a start without a wait there is nothing to say, unless its pod takes long.
        self._pending.show(self._lease_client.starting() if self._lease_client.has_waited else "")
        run = await self._ready_run(lease)
        try:
            self._phase, self._end = Phase.RUNNING, None
            self._runs.set()
            run.relay.begin()
            if self._exit_message:
                run.relay.tell(self._exit_message)
            self._pending.hand_over(run.relay.pass_on)
            return await self._look_after(run, lease)
        except BaseException:
            run.kill()
            raise

    async def _ready_run(self, lease: Lease) -> KernelRun:
        """Launch the real kernel and return it once it answers; elsewhere where its ports were taken."""
        launches = 0
        while True:
            launches += 1
            run = self._run = await self._new_run(lease)
            self._launched_once.set()
            try:
                self._pending.introduction = await run.until_ready(self._kernel)
            except PortStolenError as error:
                get_logger().warning("Another user took a kernel's ports before it; it is launched again.")
                await self._lease_client.attach(Process.current(), ready_within=MARGIN, grace=0.0)
                run.kill()
                await run.end
                run.close()
                self._close_backend()
                if self._is_stopped or launches == _LAUNCHES:
                    await self._lease_client.lose(EndReason.NOT_READY)
                    raise NotReadyError(_PORTS_TAKEN) from error
            except BaseException:
                run.kill()
                raise
            else:
                # Not sooner: to whoever manages it, a kernel that may be launched again has not ended.
                self.standing_in = not run.is_process
                return run

    async def _new_run(self, lease: Lease) -> KernelRun:
        sides = self._session, self._front
        if lease.terms.in_pod:
            connection = pod_connection(self._kernel.connection())
            return PodRun(self._launch, connection, self._lease_client, *sides, self._pending.show)
        try:
            if self._backend is None:
                self._backend = BackendConnection(self._kernel.connection_file, self._launch.command)
            return await ProcessRun.launched(self._launch, lease, self._backend, self._lease_client, *sides)
        except OSError as error:
            self._launch_error = error
            await self._lease_client.lose(EndReason.NOT_READY)
            raise NotReadyError(f"The kernel could not be launched: {error}.") from error

    def _close_backend(self) -> None:
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    async def _look_after(self, run: KernelRun, lease: Lease) -> bool:
        """Return when the kernel is over: False if it ended by itself, True if by the terms of its lease."""
        self._supervisor = RunSupervisor(run, self._lease_client, self._front, self._pending)
        try:
            step = await self._supervisor.until_over(lease)
        finally:
            self._supervisor = None
        self._exit_message = "" if self._kernel.ending() else run.exit_message
        if step is None:
            return False
        self._end = SliceEnd(step.ended_as or step.reason.value, step.message)
        await self._start_over(messages.gone(step.message), step.reason)
        return True

    async def _start_over(self, message: str, reason: EndReason) -> None:
        """End the kernel and its lease; the next cell is told why, the one after starts anew."""
        self.standing_in, self._end_message = True, message
        run = self._run
        self._pending.hold_all()
        if run is not None:
            for frames in run.unanswered():
                self._pending.hold("shell", frames)
            run.kill()
            await run.end
            run.close()
            self._run = None
            self._close_backend()
        await self._lease_client.give_up(reason)
        self._receive(Phase.GIVEN_UP)
        if self._pending.holds_code:
            self._submitted()
        self._pending.show("")

    def _down(self) -> None:
        """Hold what is submitted for a kernel that may be launched again; close if nobody does."""
        if self._phase in (Phase.CLOSED, Phase.DOWN):
            return
        self._phase, self.standing_in = Phase.DOWN, False
        self._ended.set()
        if self._run is not None:
            self._run.close()
            self._run = None
            self._close_backend()  # the next one listens where nobody has seen it yet
        self._pending.hold_all(answering=False)
        self._close_unless_restarted()

    async def close_unless_kept(self, seconds: float) -> None:
        """Close so many seconds from now unless :meth:`keep_open` is called: its manager may have failed."""
        if self._phase is not Phase.DOWN:
            self._close_in(seconds)

    async def keep_open(self) -> None:
        """Stay open for as long as the kernel lives: whoever started it goes on to manage it."""
        if self._phase is not Phase.DOWN:
            self._close_in(None)

    async def being_restarted(self, *, within: float | None = None) -> None:
        """Stay open while the kernel is restarted, until :meth:`start` or for so many seconds more."""
        self._restarted_within = math.inf if within is None else within
        if self._phase is Phase.DOWN:  # otherwise its process has ended, which is noticed here later
            self._close_unless_restarted()

    def _close_unless_restarted(self) -> None:
        within = None if self._is_being_restarted else self._restarted_within + self._kernel.grace + MARGIN
        self._close_in(within)

    def _close_in(self, seconds: float | None) -> None:
        """Close, so many seconds from now, what nobody launches again; with None, not yet."""
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self._closing = loop.call_later(seconds, lambda: self._soon(self._abandon()))

    async def _abandon(self) -> None:
        """Nobody launches the kernel again, or manages it."""
        if not self.closed:  # otherwise the lease may be another proxy's by now
            if self._run is not None:
                self._run.kill()
                await asyncio.wait([self._run.end], timeout=MARGIN)
            await self.close()
            await self._lease_client.lose(EndReason.WITHDRAWN)

    def _receive(self, phase: Phase) -> None:
        """Answer in the kernel's name."""
        self._phase = phase
        self._pending.receive_all()

    def _submitted(self) -> None:
        self._somebody_looks.set()
        if self._end_message:
            message, self._end_message = self._end_message, ""
            self._pending.refuse(message)
        elif self._phase is Phase.GIVEN_UP:
            self._phase = Phase.WAITING
            self._begin(self._live(None))

    def _begin(self, life: Coroutine[Any, Any, None]) -> None:
        self._life = asyncio.create_task(life)
        self._life.add_done_callback(self._report)

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task, and keep a reference to it: the loop itself has only weak ones."""
        task = asyncio.create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)

    def _report(self, life: asyncio.Task[None]) -> None:
        """Let no mistake of ours leave cells waiting for ever."""
        if life.cancelled() or life.exception() is None:
            return
        get_logger().error("A kernel proxy failed.", exc_info=life.exception())
        self._pending.refuse(messages.not_run(f"The kernel proxy failed: {life.exception()!r}."))
        self._down()


class Phase(enum.Enum):
    """What a proxy does."""

    WAITING = "its lease is in the queue"
    GIVEN_UP = "nothing is asked for until code is submitted"
    LAUNCHING = "the real kernel has been launched and has not answered yet"
    RUNNING = "everything is relayed to the real kernel, unless its slice is parked"
    DOWN = "the kernel has ended, and may be launched again behind the same ports"
    CLOSED = "the ports are closed"

    @property
    def is_before_kernel(self) -> bool:
        """Whether the kernel is still to come, and has not answered."""
        return self in (Phase.WAITING, Phase.GIVEN_UP, Phase.LAUNCHING)
