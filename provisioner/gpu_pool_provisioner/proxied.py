"""A local provisioner whose kernel may be a waiting room: it lives, and has no process yet.

What the kernel manager asks about the process, and does to it, concerns the
room for as long as that is all there is.
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
from gpu_pool_provisioner.proxy.runs import Launch, ProxiedKernel
from gpu_pool_provisioner.proxy.thread import on_proxy_thread, proxy_loop
from gpu_pool_provisioner.resize_requests import Grant, ResizeRequests, accept_resize_requests


class ProxiedProvisioner(LocalProvisioner):
    """The stock provisioner, with a room before the process and in front of it."""

    _room: KernelProxy | None = None
    #: Asks for the slice, from the first start on.
    _turn: LeaseClient | None = None
    #: The ports and keys on which the room listens.
    _room_connection: KernelConnectionInfo | None = None
    #: Where the running kernel asks for another size of its slice.
    _wishes: ResizeRequests | None = None

    async def _enter_room(
        self, kernel: ProxiedKernel, turn: LeaseClient, lease: Lease | None, launch: Launch
    ) -> None:
        """Let a room speak for the kernel: a new one, or after a restart the same one.

        Without a lease the turn still asks for it.
        """
        if self._room is not None and (self._room.closed or self._room_connection != self.connection_info):
            await self._leave_room()
        if self._room is None:
            room = KernelProxy(kernel, turn)
            await on_proxy_thread(room.open())
            self._room, self._room_connection = room, dict(self.connection_info)  # type: ignore[assignment]
        await on_proxy_thread(self._room.start(lease, launch))

    async def _leave_room(self) -> None:
        """Close the room's ports, and ask for nothing more. May be repeated."""
        room, self._room = self._room, None
        if room is not None:
            await on_proxy_thread(room.close())
        if self._turn is not None:
            await on_proxy_thread(self._stop_asking(self._turn))

    @staticmethod
    async def _stop_asking(turn: LeaseClient) -> None:
        turn.stop()

    def _hear_wishes(self, connection_file: str, grant: Grant) -> Mapping[str, str]:
        """Let the kernel that is about to be launched wish for things; return the variables it needs."""
        if self._wishes is None or self._wishes.connection_file != connection_file:
            self._close_wishes()
            self._wishes = accept_resize_requests(connection_file, proxy_loop())
        if self._wishes is None:
            return {}
        self._wishes.grant = grant
        return self._wishes.variables

    def _close_wishes(self) -> None:
        """Hear no more. May be repeated."""
        if self._wishes is not None:
            self._wishes.close()
            self._wishes = None

    @property
    def has_process(self) -> bool:
        """Whether there is something to signal and to wait for. Called before either."""
        return self._stands_in or bool(super().has_process)

    @property
    def _stands_in(self) -> bool:
        return self._room is not None and self._room.standing_in

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
        room = self._room
        if room is not None and signum == signal.SIGINT and room.takes_interrupts:
            await on_proxy_thread(room.interrupt())
        elif room is not None and room.standing_in:
            # What is not here takes no other signals.
            if signum in (signal.SIGTERM, signal.SIGKILL, signal.SIGHUP):
                await on_proxy_thread(room.stop())
        else:
            await super().send_signal(signum)

    async def kill(self, restart: bool = False) -> None:
        """End the kernel at once."""
        if self._room is not None and self._room.standing_in:
            await on_proxy_thread(self._room.stop())
        else:
            await super().kill(restart=restart)

    async def terminate(self, restart: bool = False) -> None:
        """Ask the kernel to end."""
        if self._room is not None and self._room.standing_in:
            await on_proxy_thread(self._room.stop())
        else:
            await super().terminate(restart=restart)

    async def _launch_process(self, cmd: list[str], **kwargs: Any) -> int:
        """Launch the real kernel, on the room's thread. Raises ``OSError``."""
        if self.process is not None:
            self.process.poll()  # one that the room has ended is still to be reaped
        await LocalProvisioner.launch_kernel(self, cmd, **kwargs)
        assert self.process is not None
        return int(self.process.pid)
