"""What a session's effects take at its kernel: its launch, its end, and what is between it and frontends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from jupyter_client.session import Session as MessageSession

from gpu_pool_client import GpuPoolError, Lease, NotAllowed, PoolUnreachable, Process
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.environment import is_ipython, pod_connection
from gpu_pool_provisioner.launchers.base import (
    CannotWakeError,
    HeldLease,
    ImageGoneError,
    KernelRun,
    LaunchPlan,
    NotReadyError,
    NotStartedError,
    ProxiedKernel,
    StaysAwakeError,
)
from gpu_pool_provisioner.launchers.lease_pod import LeasePod
from gpu_pool_provisioner.launchers.pod import NotRestartedError, PodRequests, PodRun
from gpu_pool_provisioner.launchers.process import ProcessRun
from gpu_pool_provisioner.pool_work import Driver, PoolWork, ahead
from gpu_pool_provisioner.proxy.backend import BackendConnection, PortStolenError
from gpu_pool_provisioner.proxy.channels import Channel
from gpu_pool_provisioner.proxy.pending import PendingKernel
from gpu_pool_provisioner.session import State, effects, events, texts
from gpu_pool_provisioner.session.events import SizeChange
from gpu_pool_provisioner.session.session import MARGIN

if TYPE_CHECKING:  # few kernels sleep
    from gpu_pool_provisioner.hibernation.kept import KeptKernel
    from gpu_pool_provisioner.hibernation.left import KernelRecord

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
_MIB: Final = 1 << 20
#: Seconds in which the last that an ended kernel has sent arrives.
_LAST_WITHIN: Final = 1.0
#: What a Python kernel that has not initialised CUDA sees of its devices.
_VISIBLE: Final = "__import__('os').environ.update({!r})"
#: The variables that say so, the first of them always.
_NAMING: Final = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
#: Changes the variables of a Python kernel's slice, by what the kernel's extension has for that.
_CHANGE: Final = (
    "__import__('importlib').import_module('.extension', get_ipython().find_line_magic('gpu').__module__"
    ".rpartition('.')[0]).take_changes({!r})"
)
#: Code that is run in a kernel with its ``ipython``. It closes before it sleeps, and opens when it wakes, the
#: file of IPython's history, to which others write meanwhile (what is open must not change), and a port of
#: ipykernel's, at which the output of forked children comes in (in a thread of its own): others may get it.
_IN_KERNEL: Final = "exec({!r}, {{'ipython': get_ipython()}})"
_CLOSE: Final = _IN_KERNEL.format(
    "history = ipython.history_manager\n"
    "if history is not None and history.enabled:\n"
    "    if history.save_thread is not None:\n"  # as after a fork
    "        history.save_thread.stop()\n"
    "    history.writeout_cache()\n"
    "    history.db.close()\n"
    "thread = ipython.kernel.iopub_thread\n"
    # Forked children have it as well, and write to it when they come back.
    "of_threads = __import__('glob').glob('/proc/self/task/*/children')\n"
    "if hasattr(thread, '_pipe_in') and not any(open(each).read() for each in of_threads):\n"
    "    closed = __import__('threading').Event()\n"
    "    thread.io_loop.add_callback(lambda: (thread._pipe_in.close(), closed.set()))\n"
    "    closed.wait(2)\n"
)
_OPEN: Final = _IN_KERNEL.format(
    "history = ipython.history_manager\n"
    "if history is not None and history.enabled:\n"
    "    history.init_db()\n"
    "    if history.save_thread is not None:\n"
    "        history.save_thread = type(history.save_thread)(history)\n"
    "        history.save_thread.start()\n"
    "thread = ipython.kernel.iopub_thread\n"
    "if hasattr(thread, '_pipe_in') and thread._pipe_in.closed():\n"
    "    thread.io_loop.add_callback(thread._setup_pipe_in)\n"
)
#: What a kernel publishes to say how many variables its user has made and which libraries they have imported,
#: and the code that lets it.
_VARIABLES: Final = "gpu_pool_variables"
_COUNT_VARIABLES: Final = _IN_KERNEL.format(
    "sys = __import__('sys')\n"
    "named = [value for name, value in ipython.user_ns.items() if name not in ipython.user_ns_hidden\n"
    "         and name[:1] != '_']\n"
    "modules = [str(each.__name__).partition('.')[0] for each in named if type(each) is type(sys)]\n"
    "others = [each for each in modules if each not in getattr(sys, 'stdlib_module_names', ())]\n"
    "own = {'count': len(named) - len(modules), 'libraries': list(dict.fromkeys(others))}\n"
    "kernel = ipython.kernel\n"
    f"kernel.session.send(kernel.iopub_socket, {_VARIABLES!r}, own)\n"
)
_NOT_KEPT: Final = "the folder for its connections has too long a name."
_AT_WORK: Final = "The size of a kernel's GPU slice cannot change while it runs a cell."
_WHEN_ENDED: Final = "Try again when its cells have ended."


def at_work() -> NotAllowed:
    """Return why the size of a kernel that runs a cell stays as it is."""
    return NotAllowed(_AT_WORK, _WHEN_ENDED)


class KernelWork:
    """Does one session's work at its kernel: what each coroutine returns is the event that comes of it."""

    kernel: ProxiedKernel
    messages: MessageSession
    pending: PendingKernel
    plan: LaunchPlan

    def __init__(self, driver: Driver, pool: PoolWork) -> None:
        """Do nothing yet: the kernel and its proxy's parts are set first, and ``plan`` at each start."""
        self._driver = driver
        self._pool = pool
        self.front: dict[str, Channel] = {}
        self.run: KernelRun | None = None
        #: The pod of the last run, which may have the next one as well.
        self._pod: LeasePod | None = None
        #: Hears of the end of the kernel that runs.
        self._following: asyncio.Task[None] | None = None
        self.backend: BackendConnection | None = None
        #: Removes what kernels that have ended had on disk.
        self._removing: set[asyncio.Task[None]] = set()
        #: Why the kernel did not go to disk when that was tried last, in sentences; may be empty.
        self.why_awake = ""

    def begin(self, work: effects.Work) -> Coroutine[Any, Any, events.Event]:
        """Return the coroutine that does it."""
        match work:
            case effects.StartKernel():
                return self._launched(work.lease)
            case effects.Observe():
                assert self.run is not None
                return self._pool.observe(self.run.relay)
            case effects.GiveWay():
                assert self.run is not None
                return self._pool.give_way(work.since, self.run.relay)
            case effects.CheckIdle():
                return self._check_idle()
            case effects.Hibernate():
                return self._hibernate(without_pool=work.without_pool)
            case effects.Wake():
                return self._wake()
            case effects.ResizeKernel():
                return self._resize(str(work.request))
            case effects.EndKernel():
                return self._end_kernel(work)
        raise AssertionError(f"Nobody knows how to do {work}.")

    def hold_work(self) -> None:
        """Hold what would make the kernel work, and pass on the rest."""
        assert self.run is not None
        self.pending.hold_work(self.run.relay, lambda: self._driver.session.state is State.RESUMING)

    def show_devices(self, lease: Lease | None) -> None:
        """Let the kernel see the devices of its lease; with None, none."""
        language = self.pending.introduction.get("language_info", {}).get("name")
        if language == "python" and self.run is not None:
            environment = lease.environment if lease is not None else {_NAMING[0]: "-1"}
            visible = {name: environment[name] for name in _NAMING if name in environment}
            self.run.relay.run_silently(_VISIBLE.format(visible))

    @property
    def takes_changes_in_pod(self) -> bool:
        """Whether a kernel in a pod that runs can be told of another size, which its pod can have."""
        lease, run = self._driver.session.lease, self.run
        stays = lease is not None and lease.terms.parks_in_pod
        return stays and isinstance(run, PodRun) and run.is_supervised and is_ipython(self.plan.command)

    def show_in_pod(self, lease: Lease) -> None:
        """Let a kernel in a pod know its slice as it is now."""
        if isinstance(self.run, PodRun) and self._pod is not None:
            # One that has got its limit only now listens from the end of its cell on.
            if lease.limit_mib and not self.run.follows:
                self.change(self._pod.change(lease))
            self.run.show(lease)

    def change(self, changed: Mapping[str, tuple[str | None, str | None]]) -> None:
        """Change variables of a Python kernel, once the cell that runs has ended."""
        if self.run is not None:
            self.run.relay.run_silently(_CHANGE.format(dict(changed)))

    def let_go(self, *, leaves_image: bool = False) -> None:
        """Close the connection to a kernel that has ended, and remove where it listened. May be repeated.

        What is on disk of it is removed, unless the next server can go on with that and it ``leaves_image``.
        """
        if self.run is not None:
            self.run.close()
            self.run = None
        if self._driver.kept is not None:
            if leaves_image:
                self._driver.kept.leave_image()
            self._driver.kept.end()
            removing = asyncio.create_task(self._driver.kept.remove_image())
            self._removing.add(removing)
            removing.add_done_callback(self._removing.discard)
            self._driver.kept = None
        if self.backend is not None:  # the next one listens where nobody has seen it yet
            self.backend.close()
            self.backend = None

    def close(self) -> None:
        """Have nothing more to do with the kernel, nor with its pod."""
        if self.run is not None:
            self.run.leave()
        self.let_go(leaves_image=True)
        self._let_go_of_pod()

    async def removed(self) -> None:
        """Return once nothing is on disk any more of kernels that were let go of."""
        if self._removing:
            await asyncio.wait(set(self._removing))

    async def end_pod_before_next(self) -> None:
        """End the pod of a kernel that has ended, if it lives and the pool answers: another one is needed."""
        if self._pod is not None and not self._pod.ended.done():
            await self._pod.end_before_next()

    def _let_go_of_pod(self) -> None:
        if self._pod is not None:
            self._pod.close()
            self._pod = None

    # -- The kernel -------------------------------------------------------------

    async def _launched(self, lease: Lease) -> events.Event:
        session = self._driver.session
        if self._driver.wait_log is not None:
            self._driver.wait_log.say_is_over(session.size)
        held = HeldLease(
            self._pool.pool,
            lease.id,
            session.size,
            session.outage_timeout,
            self._driver.show,
            session.has_waited,
        )
        # Of a start without a wait there is nothing to say, unless its pod takes long.
        self._driver.show(held.starting() if session.has_waited else "")
        kept = self._driver.kept
        if kept is not None and kept.image is not None:
            return await self._continued(kept, lease, held)
        try:
            await self._launch_until_ready(lease, held)
        except (NotStartedError, PoolUnreachable) as error:
            get_logger().error("No kernel was started for the GPU lease %s: %s", lease.id, error)
            return events.NotStarted(error)
        except (NotReadyError, OSError, GpuPoolError) as error:
            get_logger().error("The kernel with the GPU lease %s is not running: %s", lease.id, error)
            return events.NotReady(error)
        assert self.run is not None
        self._follow(self.run)
        return events.Ready(lease, ahead())

    async def _launch_until_ready(self, lease: Lease, held: HeldLease) -> None:
        """Launch the real kernel and return once it answers; elsewhere where its ports were taken."""
        launches = 0
        while True:
            launches += 1
            self.run, launched = await self._new_run(lease, held)
            run = self.run
            self._driver.post(launched)
            if self._driver.session.is_stopped:
                run.kill()
            try:
                self.pending.introduction = await run.until_ready(self.kernel)
            except NotRestartedError:
                self.let_go()
                self._let_go_of_pod()
            except PortStolenError as error:
                get_logger().warning("Another user took a kernel's ports before it; it is launched again.")
                await held.attach(Process.current(), ready_within=MARGIN, grace=0.0)
                run.kill()
                await run.end
                self.let_go()
                if self._driver.session.is_stopped or launches == _LAUNCHES:
                    await held.give_back()
                    raise NotReadyError(_PORTS_TAKEN) from error
            except BaseException:
                run.kill()
                raise
            else:
                return

    async def _new_run(self, lease: Lease, held: HeldLease) -> tuple[KernelRun, events.Launched]:
        sides = self.messages, self.front
        if lease.terms.in_pod:
            pool, notice = self._pool, self._driver.session.notice
            shown = lease if lease.terms.parks_in_pod else None
            resize = pool.resize_at_restart if shown is None else self._resize_in_pod
            requests = PodRequests(resize, pool.memory_in_words, notice)
            run = PodRun(self._pod_for(lease, held), held, *sides, requests, shown)
            return run, events.Launched()
        try:
            if self.backend is None:
                kept = self._driver.kept
                again = kept.image.record.sockets if kept is not None and kept.image is not None else ""
                self.backend = BackendConnection(
                    self.kernel.connection_file,
                    self.plan.command,
                    again,
                    outlives_server=self._driver.outlives_server,
                )
            await self.removed()  # what the one before has on disk counts until then
            pid, launched = await self.plan.here(lease, self.backend)
            return ProcessRun(held, pid, self.backend, *sides), launched
        except OSError as error:
            await held.give_back()
            raise NotReadyError(f"The kernel could not be launched: {error}.") from error

    def _pod_for(self, lease: Lease, held: HeldLease) -> LeasePod:
        """Return the pod of the last run, if that is what would be launched now; else a new one."""
        pod = self._pod
        if pod is not None and pod.fits(lease, self.plan.in_pod(pod.command.connection)):
            return pod
        self._let_go_of_pod()
        connection = pod_connection(self.kernel.connection())
        pod = self._pod = LeasePod(held, lease, self.plan.in_pod(connection))
        return pod

    def _follow(self, run: KernelRun) -> None:
        """Hear what a kernel that has answered says of its slice, and of its end."""
        run.relay.messages[KEEP] = lambda content: self._keep_as_said(run, content)

        self._following = asyncio.create_task(self._until_ended(run))

    async def _until_ended(self, run: KernelRun) -> None:
        await asyncio.wait({run.end})  # which goes on where this is given up
        if run.end.cancelled():
            return
        await run.read_last(_LAST_WITHIN)
        if run is self.run:
            message = "" if self.kernel.ending() else run.exit_message
            self._driver.post(events.TermsOver(run.taken) if run.taken is not None else events.Died(message))

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

    # -- To disk and back --------------------------------------------------------

    async def _hibernate(self, *, without_pool: bool) -> events.Event:
        event = await self._hibernated(without_pool=without_pool)
        why = event.why if isinstance(event, events.NotHibernated) else ""
        self.why_awake = texts.stays_awake(why) if why else ""
        return event

    async def _hibernated(self, *, without_pool: bool) -> events.Event:
        kept, run, lease = self._driver.kept, self.run, self._driver.session.lease
        if kept is None or lease is None or not isinstance(run, ProcessRun):
            return events.NotHibernated(_NOT_KEPT)
        try:
            # Where nobody says it, CRIU refuses a kernel that has a GPU's device open (criu's files.c).
            if not without_pool and await self._pool.at_its_end(self._pool.keeps_on_device()):
                return events.NotHibernated(texts.USES_GPU)
        except GpuPoolError as error:
            if not self._sleeps_without_pool(error):
                return events.NotHibernated()
            without_pool = True
        if not await run.relay.is_idle(_ANSWERS_WITHIN):
            return events.NotHibernated()
        try:
            if not without_pool:
                await self._pool.at_its_end(run.keep_lease())
        except GpuPoolError as error:
            if not self._sleeps_without_pool(error):
                return events.NotHibernated()
        if kept.record is not None:
            await self._note(kept, kept.record, run)
        run.relay.run_silently(_CLOSE)
        await run.relay.is_idle(_ANSWERS_WITHIN)
        if self._following is not None:
            self._following.cancel()
        run.relay.close()  # the kernel goes on
        try:
            await kept.closed(run.sockets)
            size = await kept.sleep(lease)
        except StaysAwakeError as error:
            return await self._stays_awake(kept, run, str(error))
        return events.Hibernated(-(-size // _MIB))

    def _sleeps_without_pool(self, error: GpuPoolError) -> bool:
        """Whether a kernel goes to disk whose pool has failed: its server ends, and it would be lost."""
        parking = self._driver.session.parking
        server_ends = parking is not None and parking.server_ends
        does = "goes to disk without its pool" if server_ends else "stays awake"
        get_logger().info("A kernel that was to sleep %s: %s", does, error)
        return server_ends

    async def _note(self, kept: KeptKernel, record: KernelRecord, run: ProcessRun) -> None:
        """Note what another server must know that goes on with the kernel, and what its user reads of it."""
        if self._driver.on_slice is not None:
            record.variables.update(self._driver.on_slice.variables)
        said: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        run.relay.messages[_VARIABLES] = lambda content: None if said.done() else said.set_result(content)
        run.relay.run_silently(_COUNT_VARIABLES)
        with suppress(asyncio.TimeoutError):
            kept.record = record.saying(await asyncio.wait_for(said, _ANSWERS_WITHIN))

    async def _stays_awake(self, kept: KeptKernel, run: ProcessRun, why: str) -> events.Event:
        """Connect again to a kernel that was not written to disk."""
        try:
            await run.answers_again(self.kernel, run.relay, stayed=True)
        except Exception as error:  # noqa: BLE001 - nothing that waits is left waiting
            get_logger().error("A kernel that was to sleep has ended: %s (%r)", why, error)
            kept.end()
            return events.Died(texts.ended_before_sleep(why))
        self._goes_on(run)
        return events.NotHibernated(why)

    async def _continued(self, kept: KeptKernel, lease: Lease, held: HeldLease) -> events.Event:
        """Let a kernel go on that another server has left on disk."""
        try:
            await self._launch_until_ready(lease, held)
        except Exception as error:  # noqa: BLE001 - a mistake of ours must not end what is on disk
            if self._driver.session.is_stopped:
                return events.NotReady(error)
            if self.run is not None:
                self.run.close()
                self.run = None
            return await _sleeps_on(kept, error)
        assert isinstance(self.run, ProcessRun)
        await kept.remove_image()
        self._goes_on(self.run)
        self.change(kept.changed)
        return events.Ready(lease, ahead())

    async def _wake(self) -> events.Event:
        kept, before = self._driver.kept, self.run
        assert kept is not None
        assert isinstance(before, ProcessRun)
        run = None
        try:
            run = before.on(await kept.wake())
            await run.answers_again(self.kernel, before.relay)
        except BaseException as error:
            if run is not None:
                kept.kill()
                run.close()
            if isinstance(error, Exception):  # a mistake of ours must not end what is on disk
                return await _sleeps_on(kept, error)
            raise
        before.close()
        self.run = run
        await kept.remove_image()
        self._goes_on(run)
        return events.Woken()

    def _goes_on(self, run: ProcessRun) -> None:
        run.relay.run_silently(_OPEN)
        self._follow(run)

    async def _resize(self, size: str) -> events.Event:
        assert self.run is not None
        on_slice = self._pod if self._driver.session.in_pod else self._driver.on_slice
        assert on_slice is not None
        relay = self.run.relay
        try:
            if not await relay.is_idle(_ANSWERS_WITHIN) or self.pending.holds_work:
                raise at_work()
            answer = await self._pool.grant(size, on_slice)
        except GpuPoolError as error:
            return events.Resized(SizeChange(False, False, "", error))
        if answer.get("variables"):
            self._change_all(answer["variables"])
        at_restart = self._driver.session.pending is not None
        return events.Resized(SizeChange(bool(answer["granted"]), at_restart, answer["message"]))

    def _change_all(self, changed: Mapping[str, tuple[str | None, str | None]]) -> None:
        """Change variables of a Python kernel, and in a pod those of the kernels after it."""
        self.change(changed)
        lease = self._driver.session.lease
        if isinstance(self.run, PodRun) and lease is not None:
            self.run.show(lease)

    async def _resize_in_pod(self, size: str) -> str:
        """Change the size as a cell of a kernel in a pod asks for; return what its user reads."""
        assert self._pod is not None
        answer = await self._pool.grant(size, self._pod)
        if answer.get("variables"):
            self._change_all(answer["variables"])
        return str(answer["message"])

    async def _end_kernel(self, work: effects.EndKernel) -> events.Event:
        if self.run is not None:
            await asyncio.wait({self.run.end}, timeout=work.within)
            self.run.kill()
            await asyncio.wait({self.run.end}, timeout=work.at_most)
            if work.reads_last:
                await self.run.read_last(_LAST_WITHIN)
        return events.Gone()


async def _sleeps_on(kept: KeptKernel, error: Exception) -> events.Event:
    """Let a kernel sleep on that did not go on: there are never two of it."""
    await kept.sleep_on()
    if isinstance(error, ImageGoneError):
        return events.NotWoken(texts.IMAGE_GONE)
    if isinstance(error, (CannotWakeError, NotReadyError, NotStartedError, GpuPoolError)):
        get_logger().error("A kernel on disk did not go on: %s", error)
        return events.NotWoken(texts.not_woken(str(error)))
    get_logger().error("A kernel on disk did not go on.", exc_info=error)
    why = getattr(error, "strerror", None) or repr(error)
    return events.NotWoken(texts.not_woken(f"it could not be reached ({why})."))
