"""A kernel whose slice is lent to others while it idles, and taken again at the next cell.

Its process lives on, with all its variables. What is submitted meanwhile is
held: no cell runs without the slice.
"""

from __future__ import annotations

import asyncio
from typing import Final

import zmq
from traitlets.log import get_logger

from gpu_pool_client import Lease, LeaseState, NotAllowed, PoolUnreachable
from gpu_pool_provisioner.room import notice
from gpu_pool_provisioner.room.reception import Reception
from gpu_pool_provisioner.room.running import Run
from gpu_pool_provisioner.room.turn import Turn
from gpu_pool_provisioner.room.wires import Wires

#: Seconds in which an idle kernel answers; one that does not is left alone.
_ANSWERS_WITHIN: Final = 5.0
#: Seconds to leave a kernel alone that could not be parked.
_TRY_AGAIN: Final = 30.0
#: What a Python kernel that has not initialised CUDA sees of its devices.
_VISIBLE: Final = "__import__('os').environ.update(CUDA_VISIBLE_DEVICES={!r})"
_NONE: Final = "-1"
#: Where a message's header is, from its end.
_HEADER: Final = 4
_POISONED: Final = (
    "While this kernel's GPU slice was lent to others, something in it looked for a GPU and found none. "
    "If CUDA now says that there is no device, restart the kernel."
)


class Parking:
    """One time that a kernel is parked."""

    def __init__(self, turn: Turn, run: Run, front: Wires, reception: Reception) -> None:
        self._turn = turn
        self._run = run
        self._front = front
        self._reception = reception
        self._wanted = asyncio.Event()
        self._resuming: asyncio.Task[Lease] | None = None

    @property
    def resuming(self) -> bool:
        """Whether something was submitted, and the slice is asked for again."""
        return self._resuming is not None

    def give_up(self) -> None:
        """Let what was submitted fail, and leave the slice to others. The kernel stays as it is."""
        if self._resuming is not None:
            self._resuming.cancel()

    async def until_resumed(self, lease: Lease) -> Lease:
        """Park the slice; return its lease when it is held again and everything is relayed again.

        Where it cannot be parked, the lease as it was, after a while. Raises
        what the pool raises when the lease is lost.
        """
        if not await self._park():
            self._relay_again()
            await asyncio.sleep(_TRY_AGAIN)
            return lease
        visible = lease.environment["CUDA_VISIBLE_DEVICES"]
        self._show_devices(_NONE)
        resumed: Lease | None = None
        while resumed is None:
            await self._wanted.wait()
            self._wanted.clear()
            resumed = await self._resumed()
        self._show_devices(visible)
        if (await self._turn.activity()).initialised:
            self._run.relay.tell(_POISONED)
        self._relay_again()
        return resumed

    async def _park(self) -> bool:
        """Hold what is submitted from now on; lend the slice unless the kernel turns out to be at work."""
        self._front["shell"].on_message = self._hold
        if not await self._run.relay.is_idle(_ANSWERS_WITHIN) or self._wanted.is_set():
            return False
        try:
            await self._turn.park()
        except (NotAllowed, PoolUnreachable) as error:
            get_logger().info("The slice of an idle kernel is kept: %s", error)
            return False
        return True

    async def _resumed(self) -> Lease | None:
        """Return the lease once it is held again, None if that was given up."""
        self._resuming = asyncio.create_task(self._wait_for_slice())
        self._front["control"].on_message = self._control
        try:
            return await self._resuming
        except asyncio.CancelledError:
            if not self._resuming.cancelled():
                raise  # it is not the wait that was cancelled
            self._reception.refuse(notice.gave_up(self._turn.size))
            self._reception.show("")
            await self._turn.park()
            return None
        finally:
            self._resuming.cancel()
            self._resuming = None
            self._front["control"].on_message = self._run.relay.back["control"].send

    async def _wait_for_slice(self) -> Lease:
        lease = await self._turn.resume()
        if lease.state is LeaseState.WAITING:
            looked_at = asyncio.Event()
            looked_at.set()
            lease = await self._turn.granted(lease.id, self._show, looked_at)
        return lease

    def _show(self, text: str) -> None:
        self._reception.show(notice.resuming(text))

    def _hold(self, frames: list[zmq.Frame]) -> None:
        self._reception.receive("shell", frames)
        if self._reception.holds_work:
            self._wanted.set()

    def _control(self, frames: list[zmq.Frame]) -> None:
        """Take an interrupt, which in the kernel would not reach the cell that waits here."""
        if len(frames) > _HEADER and b'"interrupt_request"' in frames[-_HEADER].bytes:
            self._reception.receive("control", frames)
        else:
            self._run.relay.back["control"].send(frames)

    def _relay_again(self) -> None:
        self._run.relay.begin()
        self._reception.hand_over(self._run.relay.back)

    def _show_devices(self, visible: str) -> None:
        language = self._reception.introduction.get("language_info", {}).get("name")
        if language == "python":
            self._run.relay.run_silently(_VISIBLE.format(visible))
