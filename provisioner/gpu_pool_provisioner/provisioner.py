"""``gpu-pool``: jupyter_client's local provisioner, with a slice of a GPU for every kernel.

The order in which a kernel manager calls the hooks below::

    start     pre_launch → launch_kernel → post_launch
    restart   … the process ends → cleanup(True) → the three again, on the same object
    shutdown  … the process ends → cleanup(False)

``cleanup(False)`` is not called on every path on which a kernel ends (a failed
start, a crash loop, a killed server). So the lease is always attached to a process
whose death ends it, and, while that process has yet to show that it works, it
has a deadline as well.

The kernel may be a kernel proxy: it lives, and has no process yet. What the kernel
manager asks about the process, and does to it, concerns the proxy for as long as
that is all there is.

A kernel that is to outlive this process (``independent=True``) has its proxy as a process, see ``wrap``:
that asks for the slice itself and gives it back, and here it is the stock provisioner's kernel.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from jupyter_client.connect import KernelConnectionInfo, port_names
from jupyter_client.localinterfaces import is_local_ip
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from gpu_pool_client import (
    EndReason,
    GpuPoolError,
    KernelCommand,
    Lease,
    PoolUnreachable,
    Process,
    TimedOut,
    parse_request,
)
from gpu_pool_client._background import background_loop, in_background
from gpu_pool_client._home import home_folder
from gpu_pool_client._log import EscapingLogger
from gpu_pool_client._pool import BATCH_VARIABLE, COURSE_VARIABLE, URL_VARIABLE
from gpu_pool_provisioner import advice
from gpu_pool_provisioner.driver import SessionDriver
from gpu_pool_provisioner.environment import (
    NOTICE_VARIABLE,
    SliceEnvironment,
    command_here,
    command_in_pod,
    expected_lease,
    folder_in_pod,
    is_ipython,
    variables_in_pod,
)
from gpu_pool_provisioner.forked import ForkedProcess
from gpu_pool_provisioner.launchers.base import CannotSleepError, LaunchPlan, ProxiedKernel
from gpu_pool_provisioner.launchers.process import ContinuedProcess, die_with_parent
from gpu_pool_provisioner.pools import shared_pool
from gpu_pool_provisioner.ports import SUPPORTED, PortReservation
from gpu_pool_provisioner.proxy.backend import BackendConnection
from gpu_pool_provisioner.proxy.messages import introduction
from gpu_pool_provisioner.resize_pipe import ResizeRequests, accept_resize_requests
from gpu_pool_provisioner.session import Session, SessionTimes, State, events, texts
from gpu_pool_provisioner.session.session import MARGIN
from gpu_pool_provisioner.settings import SESSION_VARIABLE, SliceSettings, kernel_name, notebook_of
from gpu_pool_provisioner.sleeping import Sleep
from gpu_pool_provisioner.templates import TemplateProcess, templates
from gpu_pool_provisioner.wait_log import WaitLog

#: Seconds that a kernel in a pod has to end by itself: its end is heard of through the cluster.
_POD_ENDS_WITHIN: Final = 10.0
#: Seconds in which most kernels end once they are asked to. Their manager looks ten times a second.
_MOSTLY_ENDS_WITHIN: Final = 0.2
#: Where a session has nothing to start.
_SHUT_DOWN: Final = (State.DOWN, State.RESTARTING, State.ENDED)
#: Seconds in which a killed process is gone, unless the system holds it.
_KILLED_WITHIN: Final = 5.0
#: Where :meth:`GPUPoolProvisioner.get_provisioner_info` says which process is the proxy of a kernel.
_PROXY: Final = "gpu_pool_proxy"


class GPUPoolProvisioner(SliceSettings):
    """Launches a kernel on a slice of a GPU, and gives the slice back when the kernel ends.

    Without a ``slice`` it is exactly the stock provisioner. Errors of the pool
    pass to the caller: their text is what a student reads.
    """

    #: Those of its sessions.
    times = SessionTimes()
    #: Drives the session of a kernel with a slice; None where there is none. It answers for the kernel before
    #: that has a process, and relays to it once it has one.
    _driver: SessionDriver | None = None
    #: When the slice was last asked for, by ``time.monotonic()``.
    _asked_at = 0.0
    #: Whether a start succeeded. From then on only cleanup(False) forgets the slice.
    _started = False
    _ports: PortReservation | None = None
    #: Where the running kernel asks for another size of its slice.
    _resize_requests: ResizeRequests | None = None
    #: The ports and keys on which the proxy listens.
    _proxy_connection: KernelConnectionInfo | None = None
    #: The kernel's proxy where that is a process of its own, which outlives this one.
    _proxy: Process | None = None

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Take a slice, or keep the one from before a restart, and prepare the launch.

        Called first in every start. Raises the pool's errors, ``TimedOut`` with
        advice, and ``LeaseGone`` when a restarted kernel has lost its slice.
        """
        if not self.slice:
            return await super().pre_launch(**kwargs)
        self.notebook = self.notebook or notebook_of(kwargs.get("env") or {}, os.environ)
        if kwargs.get("independent"):
            await self._check_slice()
            if not self.ports_cached:  # a restarted kernel has those that its frontends know
                self._reserve_ports()
            return await super().pre_launch(**kwargs)
        async with self._undone_on_failure():
            await self._take_slice((kwargs.get("env") or {}).get(SESSION_VARIABLE, ""))
            self._reserve_ports()
            return await super().pre_launch(**kwargs)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Launch the kernel and tie its slice to the new process, or let it wait for its slice.

        Called after ``pre_launch``.
        """
        if not self.slice:
            return await super().launch_kernel(cmd, **kwargs)
        if kwargs.get("independent"):
            return await self._launch_proxy(cmd, kwargs)
        async with self._undone_on_failure():
            driver = await self._start_in_proxy(cmd, kwargs)
            if self.is_unattended:
                await self._until_running(driver)
            # Its manager, which goes on to connect to it, may fail at that without a word to anybody.
            await in_background(driver.tell(events.ManagerExpected(self.ready_timeout)))
            return self.connection_info

    async def post_launch(self, **kwargs: Any) -> None:
        """Keep the proxy for as long as the kernel lives. Called when the manager's start has succeeded."""
        if self._driver is None:
            await super().post_launch(**kwargs)
            return
        async with self._undone_on_failure():
            await super().post_launch(**kwargs)
            self._started = True
            await in_background(self._driver.tell(events.ManagerCame()))

    async def cleanup(self, restart: bool = False) -> None:
        """Give slice and ports back, or keep them for a restart. Called when the process has ended."""
        driver = self._driver
        if driver is not None and restart:
            # The pool may take its time.
            seconds = self.restart_grace + MARGIN
            await in_background(driver.being_restarted(seconds, self.times.answers_within))
        elif driver is not None:
            in_pod, reason, self._driver = driver.session.in_pod, driver.ends_as, None
            # First: nobody would give back what is still being asked for.
            await in_background(driver.tell(events.CloseRequested()))
            # A process that the system does not let die still has its slice, until the pool sees it gone.
            if in_pod or await self.poll() is not None:
                await self._give_back(driver, reason)
            self._started = False
            self._close_reserved()
        await super().cleanup(restart=restart)

    async def _give_back(self, driver: SessionDriver, reason: EndReason) -> None:
        lease_id = driver.session.lease_id
        if lease_id is not None:
            await shared_pool(driver.pool_work.url).give_back(lease_id, reason)

    @property
    def has_process(self) -> bool:
        """Whether there is something to signal and to wait for. Called before either."""
        return bool(super().has_process) or self._stands_in

    @property
    def _stands_in(self) -> bool:
        """Whether the proxy is all there is of the kernel."""
        return self._driver is not None and self._driver.session.stands_in

    @property
    def _may_end(self) -> bool:
        """Whether there is a kernel, here or in a pod, and not just the proxy that stands in for it."""
        return not self._stands_in or (self._driver is not None and self._driver.session.state.has_kernel)

    async def poll(self) -> int | None:
        """Return None while the kernel lives. Called by ``is_alive``, often."""
        return None if self._stands_in else await super().poll()

    async def wait(self) -> int | None:
        """Return once the kernel has ended. Called at every shutdown and restart."""
        while await self.poll() is None:  # noqa: ASYNC110 - as the stock provisioner does
            await asyncio.sleep(0.1)
        return await super().wait()

    async def shutdown_requested(self, restart: bool = False) -> None:
        """Wait a moment for the kernel's end. Called once it was asked to end, before anybody looks."""
        await super().shutdown_requested(restart=restart)
        give_up_at = time.monotonic() + _MOSTLY_ENDS_WITHIN
        while self._may_end and await self.poll() is None and time.monotonic() < give_up_at:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def send_signal(self, signum: int) -> None:
        """Pass a signal on; an interrupt gives up a wait. Also called by kill and terminate."""
        driver = self._driver
        if driver is not None and signum == signal.SIGINT and driver.takes_interrupts:
            await in_background(driver.interrupt())
        elif driver is not None and driver.session.stands_in:
            if signum in (signal.SIGTERM, signal.SIGKILL, signal.SIGHUP):
                await in_background(driver.tell(events.StopRequested()))
            else:
                await in_background(driver.signal(signum))
        else:
            await super().send_signal(signum)

    async def kill(self, restart: bool = False) -> None:
        """End the kernel at once."""
        if self._driver is not None and self._stands_in:
            await in_background(self._driver.tell(events.StopRequested()))
            return
        if self._proxy is not None and self._proxy.is_alive():
            # Killed itself, it could neither kill what its kernel has started nor give the slice back.
            await self.send_signal(signal.SIGQUIT)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.wait(), _KILLED_WITHIN)
        await super().kill(restart=restart)

    async def terminate(self, restart: bool = False) -> None:
        """Ask the kernel to end."""
        if self._driver is not None and self._stands_in:
            await in_background(self._driver.tell(events.StopRequested()))
        else:
            await super().terminate(restart=restart)

    def get_shutdown_wait_time(self, recommended: float = 5.0) -> float:
        """Return in how many seconds a kernel ends by itself. Called at every graceful shutdown."""
        in_pod = self._driver is not None and self._driver.session.in_pod
        return max(recommended, _POD_ENDS_WITHIN) if in_pod else recommended

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Return what another process needs to manage this kernel: jupyter_client's way to persist it."""
        info = await super().get_provisioner_info()
        if self._proxy is not None:
            return {**info, _PROXY: asdict(self._proxy)}
        return info if self._driver is None else {**info, "lease_id": self._driver.session.lease_id}

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """Go on with the proxy that :meth:`get_provisioner_info` named; of other kernels, with the lease.

        A kernel without a proxy of its own has ended with its server: only its lease is to be given back.
        """
        await super().load_provisioner_info(provisioner_info)
        if provisioner_info.get("lease_id"):
            self._driver = self._new_driver(provisioner_info["lease_id"])
            self._started = True
        elif provisioner_info.get(_PROXY):
            self._proxy = Process(**provisioner_info[_PROXY])
            self.process = ContinuedProcess(self._proxy)  # type: ignore[assignment]

    @property
    def driver(self) -> SessionDriver | None:
        """The kernel's session, for what is done about its slice; None where nothing can be."""
        return self._driver if self._driver is not None and self._driver.is_open else None

    @property
    def session(self) -> Session | None:
        """The kernel's life so far; None where it has no slice."""
        return self._driver.session if self._driver is not None else None

    async def leave_image(self, notebook: str = "") -> str:
        """Let the next server go on with the kernel of a notebook; return why it cannot, empty where it can.

        To be called when the server ends, before kernels are shut down: those go to disk that are idle.
        ``notebook`` is its path, where that may be another one by now. Raises ``OSError``.
        """
        return await self.sleep.leave(self._driver, notebook)

    @property
    def leaves_image(self) -> bool:
        """Whether the kernel is to go to disk at its server's end."""
        return self.sleep.leaves_image(self._driver)

    def leaves_bytes(self) -> int:
        """Return how many bytes it takes then at most. Blocks."""
        return self.sleep.leaves_bytes(self._driver)

    @property
    def goes_to_disk(self) -> bool:
        """Whether the kernel is on disk, or goes there by itself once it has been idle for long enough."""
        return self.sleep.goes_to_disk(self._driver)

    @functools.cached_property
    def sleep(self) -> Sleep:
        """What is done for its kernel to sleep on disk."""
        return Sleep(self)

    async def start_template(self, cmd: list[str]) -> TemplateProcess | None:
        """Start the template of such kernels before there is one; return it, or None where none is started.

        ``cmd`` is a kernel's command. Called by the server's extension. Which variables its slice will
        have is a guess: where it is wrong, the first kernel starts cold, as it would have anyway.
        """
        if not self.slice or self.preload is None:
            return None
        # A kernel's environment without what LocalProvisioner does besides: it would choose ports.
        environment = (await super(LocalProvisioner, self).pre_launch())["env"]
        status = await shared_pool(self.url).status()
        lease = expected_lease(parse_request(self.slice), self.holder(), status)
        on_slice = SliceEnvironment(cmd, environment, lease)
        kwargs = {"env": {**environment, **on_slice.variables}}
        settings = self.template_settings()
        kind = partial(await self.sleep.kind_of_template(), on_slice.command, kwargs, settings)
        return await asyncio.to_thread(templates().start_before_kernels, kind, settings)

    async def _check_slice(self) -> None:
        """Raise, as JupyterLab's dialog is to show it, why the pool could never grant the slice."""
        try:
            pool = shared_pool(self.url).without_retries()
            await pool.forecast(parse_request(self.slice), self.holder())
        except PoolUnreachable as error:
            EscapingLogger(self.log).warning("The kernel's proxy waits for its pool: %s", error)
        except GpuPoolError as error:
            raise await self._in_dialog(error) from error

    async def _launch_proxy(self, cmd: list[str], kwargs: dict[str, Any]) -> KernelConnectionInfo:
        """Launch a kernel that outlives this process: its proxy, which launches it."""
        spec = self.kernel_spec
        if self.sleep.is_asked_for:
            self.sleep.log_awake(texts.AWAKE_WITH_PROXY)
        options = {"--slice": self.slice, "--name": spec.display_name, "--language": spec.language}
        proxy = [sys.executable, "-m", "gpu_pool_provisioner.wrap", "--independent"]
        proxy += [f"{option}={value}" for option, value in options.items()]
        proxy += ["--debugger"] if spec.metadata.get("debugger") else []
        asking = {URL_VARIABLE: self.url, BATCH_VARIABLE: str(bool(self.batch)).lower()}
        course = {COURSE_VARIABLE: self.course_name} if self.course_name else {}
        kwargs = {**kwargs, "env": {**kwargs["env"], **asking, **course}}
        ports, self._ports = self._ports, None  # its sockets are the proxy's from here on
        if ports is not None:
            proxy += [f"--listening={descriptor}" for descriptor in ports.descriptors]
            kwargs["pass_fds"] = ports.descriptors
        try:
            argv = [*proxy, "-f", self.parent.connection_file, "--", *cmd]
            info = await super().launch_kernel(argv, **kwargs)
        finally:
            if ports is not None:
                ports.close()
        self._proxy = Process.of(self.pid or 0)
        return info

    async def _take_slice(self, notebook: str = "") -> None:
        """Ask for the slice; where the pool does not answer, the kernel's proxy waits until it does.

        ``notebook`` is the path of the notebook that the kernel is for, as its server says.
        """
        waits = self.is_unattended or self.kernel_proxy
        try:
            driver = self._driver
            if driver is None or driver.session.state is State.ENDED:
                driver = self._driver = self._new_driver(driver.session.lease_id if driver else None)
                await self.sleep.begin(driver, notebook, is_first=not self._started)
            self._asked_at = time.monotonic()
            asking = driver.ask(self.times.answers_within, within=None if waits else self.wait_timeout)
            await in_background(asking)
        except GpuPoolError as error:
            raise await self._in_dialog(error) from error

    def _new_driver(self, lease_id: str | None) -> SessionDriver:
        """Return the driver of a session that begins, perhaps with a lease. Raises ``BadRequest``."""
        request = parse_request(self.slice)
        session = Session(
            *(request, self._grace, self.outage_timeout),
            times=self.times,
            lease_id=lease_id,
        )
        name = self.notebook or kernel_name(self.kernel_spec.display_name)
        return SessionDriver(session, self.url, self.holder, name)

    async def _until_running(self, driver: SessionDriver) -> None:
        """Wait for a kernel that nobody watches, so that its cells need not. Raises why it does not run."""
        try:
            await in_background(driver.until_running())
        except GpuPoolError as error:
            raise await self._in_dialog(error) from error

    async def _in_dialog(self, error: GpuPoolError) -> GpuPoolError:
        """Return a refusal as JupyterLab's dialog is to show it, with advice where others would start."""
        if isinstance(error, TimedOut):
            fitting = await self._kernels_that_fit(error)
            error = advice.with_advice(error, fitting, self.contact)
        return advice.for_dialog(error)

    async def _kernels_that_fit(self, error: TimedOut) -> list[str]:
        try:
            devices = (await shared_pool(self.url).status()).devices
            return advice.kernels_that_fit(
                self.parent.kernel_spec_manager.get_all_specs(),
                self.kernel_spec.language,
                error.largest_now,
                device_mib=min(status.device.memory_mib for status in devices),
            )
        except Exception as failure:  # noqa: BLE001 - no fault of pool or kernelspecs may hide the refusal
            EscapingLogger(self.log).warning("No other kernels are suggested: %.200s", failure)
            return []

    def _reserve_ports(self) -> None:
        """Choose the kernel's ports where the stock provisioner would, and keep them reserved."""
        manager = self.parent
        theirs = manager.transport != "tcp" or not manager.cache_ports or not is_local_ip(manager.ip)
        if theirs or not SUPPORTED or (self._ports and 0 not in manager.ports):
            return
        if self._ports is not None:
            self._ports.close()
            self._ports, self.ports_cached = None, False
        manager.cleanup_connection_file()  # of a start that failed, with other ports in it
        self._ports = PortReservation(manager.ip, len(port_names), listening=True)
        for name, port in zip(port_names, self._ports.ports, strict=True):
            setattr(manager, name, port)
        self.ports_cached = True

    async def _launch_on(
        self,
        driver: SessionDriver,
        cmd: list[str],
        kwargs: dict[str, Any],
        lease: Lease,
        backend: BackendConnection,
    ) -> tuple[int, events.Launched]:
        """Launch the kernel's process with its slice's environment; see ``LaunchPlan``."""
        environment = kwargs["env"]
        on_slice = driver.on_slice = SliceEnvironment(backend.command(cmd), environment, lease)
        connection_file = self.parent.connection_file
        if self._resize_requests is not None and self._resize_requests.connection_file != connection_file:
            self._resize_requests.close()
            self._resize_requests = None
        if self._resize_requests is None:
            self._resize_requests = accept_resize_requests(connection_file, background_loop())
        if self._resize_requests is not None:
            self._resize_requests.grant = partial(driver.pool_work.answer, on_slice=on_slice)
        driver.resize_requests = self._resize_requests
        # Last, so that nothing in the kernelspec's own environment overrides it.
        ours = {
            **on_slice.variables,
            **(self._resize_requests.variables if self._resize_requests else {}),
            **({NOTICE_VARIABLE: driver.session.notice} if driver.session.notice else {}),
            URL_VARIABLE: driver.pool_work.pool.url,
            "GPU_POOL_KERNEL_DIRS": os.pathsep.join(self.parent.kernel_spec_manager.kernel_dirs),
        }
        await self._end_previous()
        to_disk = await self.sleep.to_disk(lease.terms)
        if self._resize_requests is not None and lease.limit_mib and on_slice.takes_changes:
            self._resize_requests.open_changes()
        kwargs = {**kwargs, "env": {**environment, **ours}}
        told = ""
        if to_disk is not None and backend.connection["transport"] == "ipc":
            try:
                kept = await self.sleep.launch(driver, on_slice.command, kwargs, ours, backend)
            except CannotSleepError as error:
                told = texts.starts_awake(str(error))
            else:
                # Signals go to the process that it has then.
                self.process, self.pid, self.pgid = kept, kept.pid, None  # type: ignore[assignment]
                return kept.pid, events.Launched(to_disk)
        warm = await self._fork_kernel(on_slice.command, kwargs) if self.preload is not None else None
        if warm is None:
            if not is_ipython(cmd):
                # IPython kernels look after their parent themselves. This is on the background loop's thread,
                # which lives as long as the process.
                kwargs["preexec_fn"] = die_with_parent()
            await super().launch_kernel(on_slice.command, **kwargs)
        else:
            self.process, self.pid, self.pgid = warm, warm.pid, warm.pid  # type: ignore[assignment]
        assert self.process is not None
        return int(self.process.pid), events.Launched(message=told)

    async def _end_previous(self) -> None:
        """Reap the previous process; kill it if it lives, as two concurrent restarts would orphan it."""
        previous, give_up_at = self.process, time.monotonic() + _KILLED_WITHIN
        while previous is not None and previous.poll() is None and time.monotonic() < give_up_at:
            previous.kill()
            await asyncio.sleep(0.01)

    async def _fork_kernel(self, cmd: list[str], kwargs: dict[str, Any]) -> ForkedProcess | None:
        """Return a warm kernel's process; None where the kernel must start cold."""
        return await templates().start_kernel(cmd, self._scrub_kwargs(kwargs), self.template_settings())

    async def _start_in_proxy(self, cmd: list[str], kwargs: dict[str, Any]) -> SessionDriver:
        """Let a proxy launch the kernel and answer for it: a new one, or after a restart the same one.

        Raises ``LeaseGone`` where the kernel was shut down meanwhile, and ``OSError`` where it has not begun.
        """
        driver = self._driver
        if driver is not None and driver.is_open and self._proxy_connection != self.connection_info:
            await in_background(driver.tell(events.CloseRequested()))
            await self._take_slice()
            driver = self._driver
        if driver is None or driver.session.state in _SHUT_DOWN:
            raise advice.for_dialog(texts.wait_given_up(parse_request(self.slice).size))
        if not driver.is_open:
            spec = self.kernel_spec
            kernel = ProxiedKernel(
                connection_file=self.parent.connection_file,
                introduction=introduction(spec.language, cmd, debugger=bool(spec.metadata.get("debugger"))),
                ready_timeout=self.ready_timeout,
                grace=self._grace,
                ending=lambda: self.parent.shutting_down,
                start_timeout=self.start_timeout,
            )
            await in_background(driver.open(kernel, reserved=self._ports))
            self._proxy_connection = dict(self.connection_info)  # type: ignore[assignment]
        here, in_pod = partial(self._launch_on, driver, cmd, kwargs), partial(self._for_pod, cmd, kwargs)
        wait_log = WaitLog(self.log, self._asked_at, self.unattended_wait) if self.is_unattended else None
        await in_background(driver.start(LaunchPlan(cmd, here, in_pod), wait_log))
        return driver

    def _for_pod(
        self, cmd: list[str], kwargs: dict[str, Any], connection: Mapping[str, Any]
    ) -> KernelCommand:
        lease = self.session.lease if self.session is not None else None
        if self.sleep.is_asked_for or (lease is not None and lease.terms.hibernate_after):
            self.sleep.log_awake(texts.AWAKE_IN_POD)
        file = os.path.realpath(self.parent.connection_file)
        argv = self.pod_argv or command_in_pod(cmd, file)
        variables = variables_in_pod(self.kernel_spec.env, kwargs["env"], self.pod_environment)
        folder = folder_in_pod(kwargs.get("cwd"), home_folder())
        preload = tuple(self.preload or ())
        here = command_here(cmd, file), kwargs.get("cwd")
        return KernelCommand(tuple(argv), connection, variables, folder, preload, True, *here)

    @property
    def _grace(self) -> float:
        """Seconds for which the kernel's death is forgiven, so that it can be restarted on its slice."""
        restarter = getattr(self.parent, "restarter_class", None)
        return self.restart_grace if restarter and self.parent.autorestart else self.times.brief_grace

    @asynccontextmanager
    async def _undone_on_failure(self) -> AsyncIterator[None]:
        """Leave nothing behind when a start fails or is cancelled: its manager is just dropped."""
        try:
            yield
        except BaseException:
            await asyncio.shield(self._undo_start())
            raise

    async def _undo_start(self) -> None:
        driver = self._driver
        if driver is not None:
            reason = driver.ends_as
            await in_background(driver.tell(events.CloseRequested()))
        await self.kill()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.wait(), _KILLED_WITHIN)
        if driver is not None:
            await self._give_back(driver, reason)
            if not self._started:
                self._driver = None
        self._close_reserved()

    def _close_reserved(self) -> None:
        """Let go of the kernel's ports, and of where it asks for another size. May be repeated."""
        if self._resize_requests is not None:
            self._resize_requests.close()
            self._resize_requests = None
        if self._ports is not None:
            self._ports.close()
            self._ports = None
            self.ports_cached = False
