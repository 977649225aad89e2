"""``gpu-pool``: jupyter_client's local provisioner, with a slice of a GPU for every kernel.

The order in which a kernel manager calls the hooks below::

    start     pre_launch → launch_kernel → post_launch
    restart   … the process ends → cleanup(True) → the three again, on the same object
    shutdown  … the process ends → cleanup(False)

``cleanup(False)`` is not called on every path on which a kernel ends (a failed
start, a crash loop, a killed server). So the lease always stands on a process
whose death ends it, and, while that process has yet to show that it works, it
has a deadline as well.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import psutil
from jupyter_client.connect import KernelConnectionInfo, port_names
from jupyter_client.localinterfaces import is_local_ip
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from traitlets import CUnicode, Float, Unicode, default

from gpu_pool_client import EndReason, GpuPoolError, Holder, Lease, Pool, Process, TimedOut, parse_request
from gpu_pool_client.pool import URL_VARIABLE
from gpu_pool_provisioner import advice, ports
from gpu_pool_provisioner.environment import kernel_command, slice_environment
from gpu_pool_provisioner.pools import resolve_url
from gpu_pool_provisioner.readiness import ReadinessWatch
from gpu_pool_provisioner.slices import KernelSlice

#: Names the slice of kernels whose kernelspec says nothing about one.
DEFAULT_SLICE_VARIABLE: Final = "GPU_POOL_DEFAULT_SLICE"
#: Seconds for which the death of a kernel that nobody restarts by itself is forgiven:
#: enough for its manager, which looks ten times a second, to see it and restart it on request.
_BRIEF_GRACE: Final = 1.5
#: Seconds by which the pool's deadline is later than ours, which ends the kernel before its lease;
#: also what a relaunch may take.
_MARGIN: Final = 5.0
#: Seconds in which a killed process is gone, unless the system holds it.
_KILLED_WITHIN: Final = 5.0


class GPUPoolProvisioner(LocalProvisioner):
    """Launches a kernel on a slice of a GPU, and gives the slice back when the kernel ends.

    Without a ``slice`` it is exactly the stock provisioner. Errors of the pool
    pass to the caller: their text is what a student reads.
    """

    slice = CUnicode(
        config=True,
        help="""The slice of a GPU a kernel gets, such as 2%, 1.5GiB, 2x50% or 4 (whole GPUs); empty for none.

        Set in a kernelspec: metadata.kernel_provisioner.config.slice. Kernels
        whose kernelspec says nothing get the slice of $GPU_POOL_DEFAULT_SLICE.
        Whatever is asked for, the pool's rules decide.
        """,
    )
    pool_url = Unicode(
        config=True,
        help="The URL of the pool. Empty: $GPU_POOL_URL, or else this machine's own pool, embedded:",
    )
    wait_timeout = Float(
        5.0,
        min=0,
        max=30,
        config=True,
        help="""Seconds to wait for a slice before a start fails. At most 30:

        a start that waits can be neither seen nor cancelled in JupyterLab.
        """,
    )
    ready_timeout = Float(
        120.0,
        min=1,
        config=True,
        help="""Seconds in which a kernel must answer once it has been launched.

        A kernel that does not is ended, and its slice goes back to the pool.
        Twice what Jupyter's own programs wait for, so that nothing is ended
        that somebody still waits for.
        """,
    )
    restart_grace = Float(
        10.0,
        min=0,
        config=True,
        help="""Seconds for which a kernel that died keeps its slice, so that it can be restarted on it.

        Used where kernels are restarted automatically, as JupyterLab does:
        it looks for dead kernels every 3 seconds.
        """,
    )
    contact = Unicode(
        "the person who runs this Jupyter server",
        config=True,
        help="Who a student should ask when no slice is free, in words that end a sentence. May be empty.",
    )

    _slice: KernelSlice | None = None
    #: Whether a start went through. Then only cleanup(False) makes the slice forgotten.
    _started = False
    _ports: ports.PortReservation | None = None
    _watch: ReadinessWatch | None = None

    @default("slice")
    def _default_slice(self) -> str:
        return os.environ.get(DEFAULT_SLICE_VARIABLE, "")

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Take a slice, or keep the one of before a restart, and prepare the launch.

        Called first in every start. Raises the pool's errors, ``TimedOut`` with
        advice, and ``LeaseGone`` when a restarted kernel has lost its slice.
        """
        if not self.slice:
            return await super().pre_launch(**kwargs)
        async with self._undone_on_failure():
            taken, lease = await self._take_slice()
            self._reserve_ports()
            kwargs = await super().pre_launch(**kwargs)
            # Last, so that nothing in the kernelspec's own environment overrides it.
            kwargs["env"].update(
                self._slice_environment(lease, taken.pool.url, kwargs["cmd"][0], kwargs["env"])
            )
            kwargs["cmd"] = kernel_command(kwargs["cmd"])
            return kwargs

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Launch the kernel and tie its slice to the new process. Called after ``pre_launch``."""
        if self._slice is None or self._slice.lease_id is None:
            return await super().launch_kernel(cmd, **kwargs)
        async with self._undone_on_failure():
            info = await super().launch_kernel(cmd, **kwargs)
            await self._attach_kernel(self._slice.pool, self._slice.lease_id)
            return info

    async def post_launch(self, **kwargs: Any) -> None:
        """Let the kernel's first reply confirm its lease. Called when the manager's start is through."""
        if self._slice is None:
            await super().post_launch(**kwargs)
            return
        async with self._undone_on_failure():
            await super().post_launch(**kwargs)
            self._started = True
            if self._watch is not None:
                self._watch.adopt()

    async def cleanup(self, restart: bool = False) -> None:
        """Give slice and ports back, or keep them for a restart. Called when the process has ended."""
        await self._stop_watch()
        if self._slice is not None and restart:
            await self._slice.stand_in(self.restart_grace + _MARGIN)
        elif self._slice is not None:
            # A process that the system does not let die still has its slice, until the pool sees it gone.
            if await self.poll() is not None:
                await self._slice.give_back()
            self._slice.forget()
            self._started = False
            self._close_ports()
        await super().cleanup(restart=restart)

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Return what another process needs to manage this kernel: jupyter_client's way to persist it."""
        info = await super().get_provisioner_info()
        return {**info, "lease_id": self._slice.lease_id} if self._slice else info

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """Continue the lease that :meth:`get_provisioner_info` named."""
        await super().load_provisioner_info(provisioner_info)
        if provisioner_info.get("lease_id"):
            self._slice = self._new_slice()
            self._slice.lease_id = provisioner_info["lease_id"]
            self._started = True

    @property
    def _manager(self) -> Any:
        """The kernel manager. jupyter_client gives every provisioner one."""
        return self.parent

    def _new_slice(self) -> KernelSlice:
        return KernelSlice(resolve_url(self.pool_url), parse_request(self.slice))

    async def _take_slice(self) -> tuple[KernelSlice, Lease]:
        self._slice = self._slice or self._new_slice()
        name = f"{self.kernel_spec.display_name} [{str(self.kernel_id)[:8]}]"
        holder = Holder(psutil.Process().username(), kernel=name, process=Process.current())
        try:
            return self._slice, await self._slice.take(holder, self.wait_timeout)
        except TimedOut as error:
            raise advice.for_dialog(await self._advised(error, self._slice)) from error
        except GpuPoolError as error:
            raise advice.for_dialog(error) from error

    async def _advised(self, error: TimedOut, wanted: KernelSlice) -> TimedOut:
        devices = (await wanted.pool.status()).devices
        fitting = advice.kernels_that_fit(
            self._manager.kernel_spec_manager.get_all_specs(),
            self.kernel_spec.language,
            error.largest_now,
            device_mib=min(status.device.memory_mib for status in devices),
        )
        return advice.with_advice(error, fitting, self.contact)

    def _slice_environment(
        self, lease: Lease, pool_url: str, python: str, environment: dict[str, str]
    ) -> dict[str, str]:
        return {
            **slice_environment(lease, python, environment),
            URL_VARIABLE: pool_url,
            "GPU_POOL_KERNEL_DIRS": os.pathsep.join(self._manager.kernel_spec_manager.kernel_dirs),
        }

    async def _attach_kernel(self, pool: Pool, lease_id: str) -> None:
        restarter = getattr(self._manager, "restarter_class", None)
        grace = self.restart_grace if restarter and self._manager.autorestart else _BRIEF_GRACE
        process = Process.of(self.process.pid) if self.process else None
        if process is None:
            # It has died already. The manager will notice, and may restart it within the grace.
            await pool.attach(lease_id, Process.current(), ready_within=grace)
            return
        await pool.attach(lease_id, process, ready_within=self.ready_timeout + _MARGIN, grace=grace)
        self._watch = ReadinessWatch(
            process,
            self.connection_info,
            self._manager.session.clone(),
            timeout=self.ready_timeout,
            # Unlike renew, this holds even if somebody has seen the process dead meanwhile.
            confirm=partial(pool.attach, lease_id, process, grace=grace),
            give_back=partial(pool.release, lease_id, EndReason.NOT_READY),
        )
        self._watch.start()

    async def _stop_watch(self) -> None:
        while self._watch and not self._watch.stop():  # noqa: ASYNC110 - what it waits for is a thread
            await asyncio.sleep(0.01)
        self._watch = None

    def _reserve_ports(self) -> None:
        """Choose the kernel's ports where the stock provisioner would, and keep them reserved."""
        manager = self._manager
        theirs = manager.transport != "tcp" or not manager.cache_ports or not is_local_ip(manager.ip)
        if theirs or not ports.SUPPORTED or (self._ports and 0 not in manager.ports):
            return
        self._close_ports()
        manager.cleanup_connection_file()  # of a start that failed, with other ports in it
        self._ports = ports.PortReservation(manager.ip, len(port_names))
        for name, port in zip(port_names, self._ports.ports, strict=True):
            setattr(manager, name, port)
        self.ports_cached = True

    def _close_ports(self) -> None:
        if self._ports is not None:
            self._ports.close()
            self._ports = None
            self.ports_cached = False

    @asynccontextmanager
    async def _undone_on_failure(self) -> AsyncIterator[None]:
        """Leave nothing behind when a start fails or is cancelled: its manager is just dropped."""
        try:
            yield
        except BaseException:
            await asyncio.shield(self._undo_start())
            raise

    async def _undo_start(self) -> None:
        await self._stop_watch()
        await self.kill()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.wait(), _KILLED_WITHIN)
        if self._slice is not None:
            await self._slice.give_back()
            if not self._started:
                self._slice.forget()
        self._close_ports()
