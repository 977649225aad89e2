"""A local provisioner whose kernel may be a kernel proxy: it lives, and has no process yet.

What the kernel manager asks about the process, and does to it, concerns the
proxy for as long as that is all there is.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from gpu_pool_client import Lease
from gpu_pool_provisioner.proxy.kernel_proxy import KernelProxy
from gpu_pool_provisioner.proxy.lease_client import LeaseClient
from gpu_pool_provisioner.proxy.loops import on_proxy_thread, proxy_loop
from gpu_pool_provisioner.proxy.runs import Launch, ProxiedKernel
from gpu_pool_provisioner.resizing import Grant, ResizeRequests, accept_resize_requests


class ProxiedProvisioner(LocalProvisioner):
    """The stock provisioner, with a proxy before the process and in front of it."""

    _proxy: KernelProxy | None = None
    #: Asks for the slice, from the first start on.
    _lease_client: LeaseClient | None = None
    #: The ports and keys on which the proxy listens.
    _proxy_connection: KernelConnectionInfo | None = None
    #: Where the running kernel asks for another size of its slice.
    _resize_requests: ResizeRequests | None = None

    async def _enter_proxy(
        self, kernel: ProxiedKernel, lease_client: LeaseClient, lease: Lease | None, launch: Launch
    ) -> None:
        """Let a proxy speak for the kernel: a new one, or after a restart the same one.

        Without a lease, the lease client still asks for it.
        """
        if self._proxy is not None and (self._proxy.closed or self._proxy_connection != self.connection_info):
            await self._leave_proxy()
        if self._proxy is None:
            proxy = KernelProxy(kernel, lease_client)
            await on_proxy_thread(proxy.open())
            self._proxy, self._proxy_connection = proxy, dict(self.connection_info)  # type: ignore[assignment]
        await on_proxy_thread(self._proxy.start(lease, launch))

    async def _leave_proxy(self) -> None:
        """Close the proxy's ports, and ask for nothing more. May be repeated."""
        proxy, self._proxy = self._proxy, None
        if proxy is not None:
            await on_proxy_thread(proxy.close())
        if self._lease_client is not None:
            await on_proxy_thread(self._lease_client.stop())

    def _hear_resize_requests(self, connection_file: str, grant: Grant) -> Mapping[str, str]:
        """Let the kernel that is about to be launched ask for another size; return the variables it needs."""
        if self._resize_requests is None or self._resize_requests.connection_file != connection_file:
            self._close_resize_requests()
            self._resize_requests = accept_resize_requests(connection_file, proxy_loop())
        if self._resize_requests is None:
            return {}
        self._resize_requests.grant = grant
        return self._resize_requests.variables

    def _close_resize_requests(self) -> None:
        """Hear no more. May be repeated."""
        if self._resize_requests is not None:
            self._resize_requests.close()
            self._resize_requests = None

    @property
    def has_process(self) -> bool:
        """Whether there is something to signal and to wait for. Called before either."""
        return self._stands_in or bool(super().has_process)

    @property
    def _stands_in(self) -> bool:
        return self._proxy is not None and self._proxy.standing_in

    async def poll(self) -> int | None:
        """Return None while the kernel lives. Called by ``is_alive``, often."""
        return None if self._stands_in else await super().poll()

    async def wait(self) -> int | None:
        """Return once the kernel has ended. Called at every shutdown and restart."""
        while self._stands_in:  # noqa: ASYNC110 - as the stock provisioner does
            await asyncio.sleep(0.1)
        return await super().wait()

    async def send_signal(self, signum: int) -> None:
        """Pass a signal on; an interrupt gives up a wait. Also called by kill and terminate."""
        proxy = self._proxy
        if proxy is not None and signum == signal.SIGINT and proxy.takes_interrupts:
            await on_proxy_thread(proxy.interrupt())
        elif proxy is not None and proxy.standing_in:
            # What is not here takes no other signals.
            if signum in (signal.SIGTERM, signal.SIGKILL, signal.SIGHUP):
                await on_proxy_thread(proxy.stop())
        else:
            await super().send_signal(signum)

    async def kill(self, restart: bool = False) -> None:
        """End the kernel at once."""
        if self._proxy is not None and self._proxy.standing_in:
            await on_proxy_thread(self._proxy.stop())
        else:
            await super().kill(restart=restart)

    async def terminate(self, restart: bool = False) -> None:
        """Ask the kernel to end."""
        if self._proxy is not None and self._proxy.standing_in:
            await on_proxy_thread(self._proxy.stop())
        else:
            await super().terminate(restart=restart)

    async def _launch_process(self, cmd: list[str], **kwargs: Any) -> int:
        """Launch the real kernel, on the proxy's thread. Raises ``OSError``."""
        if self.process is not None:
            self.process.poll()  # one that the proxy has ended is still to be reaped
        await LocalProvisioner.launch_kernel(self, cmd, **kwargs)
        assert self.process is not None
        return int(self.process.pid)
