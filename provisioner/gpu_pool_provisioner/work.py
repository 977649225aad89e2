"""What a session's effects take that need time: the pool, the kernel, and what is between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Protocol

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
from gpu_pool_provisioner.kernel_slice import NOT_NOW
from gpu_pool_provisioner.launchers.base import KernelRun, Launch, NotReadyError, ProxiedKernel
from gpu_pool_provisioner.launchers.pod import NotStartedError, PodRun, pod_connection
from gpu_pool_provisioner.launchers.process import ProcessRun
from gpu_pool_provisioner.lease_client import LeaseClient, retry
from gpu_pool_provisioner.proxy.backend import BackendConnection, PortStolenError
from gpu_pool_provisioner.proxy.channels import Channel
from gpu_pool_provisioner.proxy.hold_back import HoldBack
from gpu_pool_provisioner.proxy.pending import PendingKernel
from gpu_pool_provisioner.session import (
    Session,
    State,
    effects,
    events,
    idling,
    texts,
)
from gpu_pool_provisioner.session.session import MARGIN
from gpu_pool_provisioner.wait_log import WaitLog

#: How often a kernel is launched whose ports others take before it: whoever does it goes on.
_LAUNCHES: Final = 20
_PORTS_TAKEN: Final = (
    "Another user of this machine took the ports on which this kernel was to listen, again and again. "
    "Tell whoever runs this machine."
)
#: What a kernel publishes to say that it is in use, see gpu_pool_kernels.inkernel.slice_requests.
KEEP: Final = "gpu_pool_keep"
#: Seconds in which an idle kernel answers; one that does not is left alone.
_ANSWERS_WITHIN: Final = 5.0
#: What a Python kernel that has not initialised CUDA sees of its devices.
_VISIBLE: Final = "__import__('os').environ.update({!r})"
#: The variables that say so, the first of them always.
_NAMING: Final = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
#: Changes the variables of a Python kernel's slice, by what the kernel's extension has for that.
_CHANGE: Final = (
    "__import__('importlib').import_module('.resize', get_ipython().find_line_magic('gpu').__module__"
    ".rpartition('.')[0]).apply({!r})"
)
_AT_WORK: Final = "The size of a kernel's GPU slice cannot change while it runs a cell."
_WHEN_ENDED: Final = "Try again when its cells have ended."


class Resizing:
    """A change of a running kernel's size, and what came of it."""

    def __init__(self, grant: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self.grant = grant
        self.answer: Mapping[str, Any] | None = None
        self.error: GpuPoolError | None = None


def _on_our_clock(lease: Lease) -> Lease:
    """Return the lease with the end of its terms by ``time.monotonic()``, which nobody sets."""
    if lease.terms.ends_at is None:
        return lease
    ends_at = lease.terms.ends_at - time.time() + time.monotonic()
    return replace(lease, terms=replace(lease.terms, ends_at=ends_at))


def at_work() -> NotAllowed:
    """Return why the size of a kernel that runs a cell stays as it is."""
    return NotAllowed(_AT_WORK, _WHEN_ENDED)


class Driver(Protocol):
    """What work needs of the session's driver."""

    @property
    def session(self) -> Session:
        """The session as it is now."""

    def post(self, event: events.Event) -> None:
        """Let something have happened."""

    def request(self, event: events.Event) -> str:
        """Let a user's request happen; return what they read. Raises ``NotAllowed``."""

    def show(self, text: str) -> None:
        """Show a text in the waiting cell."""


class SessionWork:
    """Does one session's work: what each coroutine returns is the event that comes of it."""

    messages: MessageSession
    pending: PendingKernel
    launch: Launch

    def __init__(self, driver: Driver, kernel: ProxiedKernel, lease_client: LeaseClient) -> None:
        """Do nothing yet: the attributes of the proxy are set first, and ``launch`` at each start."""
        self._driver = driver
        self._kernel = kernel
        self._lease_client = lease_client
        self.front: dict[str, Channel] = {}
        self.wait_log: WaitLog | None = None
        self.somebody_looks = asyncio.Event()
        self.run: KernelRun | None = None
        self.backend: BackendConnection | None = None
        #: The change of size that is under way.
        self.resizing: Resizing | None = None
        #: Held while the size of what the kernel waits for changes.
        self.sizing = asyncio.Lock()
        #: Whether it has changed since the lease was last read.
        self.is_resized = False
        self._telling: set[asyncio.Task[None]] = set()

    def begin(self, work: effects.Work) -> Coroutine[Any, Any, events.Event]:
        """Return the coroutine that does it."""
        match work:
            case effects.Ask():
                return self._ask()
            case effects.AwaitGrant():
                return self._await_grant(work.lease)
            case effects.AskLastTime():
                return self._ask_last_time()
            case effects.Launch():
                return self._launched(work.lease)
            case effects.Look():
                return self._look()
            case effects.CheckIdle():
                return self._check_idle()
            case effects.Park():
                return self._park()
            case effects.ParkAgain():
                return self._park_again()
            case effects.Resume():
                return self._resume()
            case effects.Resize():
                return self._resize()
            case effects.EndKernel():
                return self._end_kernel(work)
        raise AssertionError(f"Nobody knows how to do {work}.")

    def give_back(self, reason: EndReason, *, ask_anew: bool) -> None:
        """Give the slice back, or leave the queue; :meth:`settled` returns when the pool has been told."""
        task = asyncio.create_task(self._lease_client.give_up(reason, ask_anew=ask_anew))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def settled(self) -> None:
        """Return once what was to be told to the pool has been told."""
        if self._telling:
            await asyncio.wait(set(self._telling))

    def hold_back(self) -> None:
        """Hold what would make the kernel work, and pass on the rest."""
        assert self.run is not None

        def waits() -> bool:
            return self._driver.session.state is State.RESUMING

        submitted = lambda: self._driver.post(events.WorkSubmitted())  # noqa: E731
        HoldBack(self.run.relay, self.pending, submitted, waits).begin(self.front)

    def show_devices(self, lease: Lease | None) -> None:
        """Let the kernel see the devices of its lease; with None, none."""
        language = self.pending.introduction.get("language_info", {}).get("name")
        if language == "python" and self.run is not None:
            environment = lease.environment if lease is not None else {_NAMING[0]: "-1"}
            visible = {name: environment[name] for name in _NAMING if name in environment}
            self.run.relay.run_silently(_VISIBLE.format(visible))

    def let_go(self) -> None:
        """Close the connection to a kernel that has ended."""
        if self.run is not None:
            self.run.close()
            self.run = None
        self.close_backend()  # the next one listens where nobody has seen it yet

    def close_backend(self) -> None:
        """Let go of where the kernel listened. May be repeated."""
        if self.backend is not None:
            self.backend.close()
            self.backend = None

    # -- The pool ---------------------------------------------------------------

    async def _ask(self) -> events.Event:
        await self.settled()  # what goes back counts against its user's quota until it is back
        try:
            lease = await self._lease_client.ask()
        except GpuPoolError as error:
            return events.Refused(error)
        return events.Queued(lease) if lease.state is LeaseState.WAITING else events.Granted(lease)

    async def _await_grant(self, lease: Lease) -> events.Event:
        try:
            while lease.state is LeaseState.WAITING:
                lease = await self._lease_client.granted(lease.id, self._driver.show, self.somebody_looks)
                lease = await self._as_resized(lease)
        except GpuPoolError as error:
            return events.Refused(error)
        return events.Granted(lease)

    async def _as_resized(self, lease: Lease) -> Lease:
        """Return the lease as it is once nobody changes its size any more."""
        async with self.sizing:
            if self.is_resized:
                self.is_resized = False
                lease = await retry(self._lease_client.lease, self._show_fault)
            return lease

    def _show_fault(self, error: GpuPoolError) -> None:
        self._driver.show(texts.unreachable(self._lease_client.size, error))

    async def _ask_last_time(self) -> events.Event:
        try:
            return events.Granted(await self._lease_client.granted_now())
        except TimedOut as error:
            limit = format_duration(self.wait_log.limit) if self.wait_log and self.wait_log.limit else ""
            message = f"{texts.too_long(self._lease_client.size, limit)} {error.message}"
            return events.Refused(TimedOut(message, error.remedy, largest_now=error.largest_now))
        except GpuPoolError as error:
            return events.Refused(error)

    async def _look(self) -> events.Event:
        assert self.run is not None
        relay, client, known = self.run.relay, self._lease_client, self._driver.session.idling
        assert known is not None
        try:
            lease = _on_our_clock(await client.lease())
            if lease.state is LeaseState.ENDED:
                reason = lease.end_reason.value if lease.end_reason else None
                return events.TermsOver(idling.taken(reason, lease.notice))
            await client.report_busy(relay.busy_times.due())
            activity = None
            if idling.needs_device(known, lease, *relay.seen, time.monotonic()):
                activity = await client.activity()
        except LeaseGone as error:
            return events.TermsOver(idling.taken(error.reason))
        except NOT_NOW as error:
            get_logger().warning("The GPU pool of a running kernel cannot answer: %s", error)
            return events.NotLooked()
        # Cells may have begun and ended meanwhile.
        return events.Looked(lease, *relay.seen, activity)

    async def _park(self) -> events.Event:
        try:
            is_moved = await self._initialised()
            return events.Parked(await self._lease_client.park(), is_moved)
        except LeaseGone as error:
            return await self._taken(error)
        except (NotAllowed, *NOT_NOW) as error:
            get_logger().info("The slice of an idle kernel is kept: %s", error)
            return events.NotParked(isinstance(error, NotAllowed), isinstance(error, PoolUnreachable))

    async def _park_again(self) -> events.Event:
        try:
            await retry(self._lease_client.park, self._show_parked_fault)
        except LeaseGone as error:
            return await self._taken(error)
        except NotAllowed:  # it was granted, and used, in the same moment
            return events.Resumed(
                _on_our_clock(await retry(self._lease_client.lease, self._show_parked_fault))
            )
        return events.ParkedAgain()

    async def _resume(self) -> events.Event:
        parking = self._driver.session.parking
        assert parking is not None
        looked_at = asyncio.Event()
        looked_at.set()
        try:
            lease = await retry(self._lease_client.resume, self._show_parked_fault)
            if lease.state is LeaseState.WAITING:
                lease = await self._lease_client.granted(lease.id, self._show_parked, looked_at)
            # What had used CUDA before has had its state moved away and back.
            is_poisoned = not parking.is_moved and await self._initialised()
        except LeaseGone as error:
            return await self._taken(error)
        return events.Resumed(_on_our_clock(lease), is_poisoned)

    def _show_parked(self, text: str) -> None:
        parking = self._driver.session.parking
        self._driver.show(f"{parking.why} {text}" if parking is not None else text)

    def _show_parked_fault(self, error: GpuPoolError) -> None:
        """Show why the pool does not answer. It is asked again: there are variables to be kept."""
        self._show_parked(texts.unreachable(self._lease_client.size, error))

    async def _initialised(self) -> bool:
        try:
            return bool((await self._lease_client.activity()).initialised)
        except NOT_NOW:
            return False

    async def _taken(self, error: LeaseGone) -> events.Event:
        """Say who took a parked kernel's lease, and why."""
        try:
            message = (await self._lease_client.lease()).notice
        except (LeaseGone, *NOT_NOW):
            message = ""
        return events.TermsOver(idling.taken(error.reason, message))

    # -- The kernel -------------------------------------------------------------

    async def _launched(self, lease: Lease) -> events.Event:
        if self.wait_log is not None:
            self.wait_log.say_is_over(self._lease_client.size)
        # Of a start without a wait there is nothing to say, unless its pod takes long.
        self._driver.show(self._lease_client.starting() if self._lease_client.has_waited else "")
        try:
            await self._launch_until_ready(lease)
        except (NotStartedError, PoolUnreachable) as error:
            get_logger().error("No kernel was started for the GPU lease %s: %s", lease.id, error)
            return events.NotStarted(error)
        except (NotReadyError, OSError, GpuPoolError) as error:
            get_logger().error("The kernel with the GPU lease %s is not running: %s", lease.id, error)
            return events.NotReady(error)
        assert self.run is not None
        self._follow(self.run)
        return events.Ready(_on_our_clock(lease))

    async def _launch_until_ready(self, lease: Lease) -> None:
        """Launch the real kernel and return once it answers; elsewhere where its ports were taken."""
        launches = 0
        while True:
            launches += 1
            run = self.run = await self._new_run(lease)
            self._driver.post(events.Launched())
            if self._driver.session.is_stopped:
                run.kill()
            try:
                self.pending.introduction = await run.until_ready(self._kernel)
            except PortStolenError as error:
                get_logger().warning("Another user took a kernel's ports before it; it is launched again.")
                await self._lease_client.attach(Process.current(), ready_within=MARGIN, grace=0.0)
                run.kill()
                await run.end
                self.let_go()
                if self._driver.session.is_stopped or launches == _LAUNCHES:
                    await self._lease_client.give_up(EndReason.NOT_READY, ask_anew=False)
                    raise NotReadyError(_PORTS_TAKEN) from error
            except BaseException:
                run.kill()
                raise
            else:
                return

    async def _new_run(self, lease: Lease) -> KernelRun:
        sides = self.messages, self.front
        if lease.terms.in_pod:
            connection = pod_connection(self._kernel.connection())
            return PodRun(self.launch, connection, self._lease_client, *sides, self._driver.show)
        try:
            if self.backend is None:
                file, command = self._kernel.connection_file, self.launch.command
                self.backend = self.launch.continues or BackendConnection(file, command)
            return await ProcessRun.launched(self.launch, lease, self.backend, self._lease_client, *sides)
        except OSError as error:
            await self._lease_client.give_up(EndReason.NOT_READY, ask_anew=False)
            raise NotReadyError(f"The kernel could not be launched: {error}.") from error

    def _follow(self, run: KernelRun) -> None:
        """Hear what a kernel that has answered says of its slice, and of its end."""
        run.relay.messages[KEEP] = lambda content: self._keep_as_said(run, content)

        def ended(end: asyncio.Future[None]) -> None:
            if end.cancelled() or run is not self.run:
                return
            message = "" if self._kernel.ending() else run.exit_message
            self._driver.post(events.TermsOver(run.taken) if run.taken is not None else events.Died(message))

        run.end.add_done_callback(ended)

    def _keep_as_said(self, run: KernelRun, content: Mapping[str, Any]) -> None:
        seconds = content.get("seconds")
        if isinstance(seconds, int) and seconds > 0:
            with suppress(NotAllowed):
                run.relay.tell(self._driver.request(events.KeepRequested(seconds)))

    async def _check_idle(self) -> events.Event:
        assert self.run is not None
        relay = self.run.relay
        before = relay.last_activity
        if await relay.is_idle(_ANSWERS_WITHIN):
            return events.FoundIdle()
        is_silent = not relay.busy and not relay.unanswered() and relay.last_activity == before
        return events.FoundAtWork(is_silent)

    async def _resize(self) -> events.Event:
        assert self.run is not None
        relay, change = self.run.relay, self.resizing
        assert change is not None
        try:
            if not await relay.is_idle(_ANSWERS_WITHIN) or self.pending.holds_work:
                raise at_work()
            change.answer = await change.grant()
            if change.answer.get("variables"):
                relay.run_silently(_CHANGE.format(dict(change.answer["variables"])))
        except GpuPoolError as error:
            change.error = error
        self.resizing = None
        return events.Resized()

    async def _end_kernel(self, work: effects.EndKernel) -> events.Event:
        if self.run is not None:
            await asyncio.wait({self.run.end}, timeout=work.within)
            self.run.kill()
            await asyncio.wait({self.run.end}, timeout=work.at_most)
        return events.Gone()
