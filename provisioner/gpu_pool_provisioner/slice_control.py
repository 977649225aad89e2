"""What may be done from outside about one kernel's slice: what ``%gpu`` does within it, by the same code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_pool_client import LeaseState, NotAllowed, Outlook, SliceRequest, TimedOut, parse_request
from gpu_pool_client._background import background_loop, in_background
from gpu_pool_provisioner.driver import SessionDriver
from gpu_pool_provisioner.kernel_slice import KernelSlice, SliceEnvironment
from gpu_pool_provisioner.resizing import grant
from gpu_pool_provisioner.slice_state import KernelSliceState, SlicePhase

_THEN = "Restart the kernel: it then changes to {}"


@dataclass(frozen=True, slots=True)
class SizeChange:
    """What came of asking for another size."""

    granted: bool
    #: Whether it changes when the kernel is restarted.
    at_restart: bool
    #: What its user reads.
    message: str


class SliceControl:
    """One kernel's slice, as it is now. Its methods may be called on any event loop."""

    def __init__(
        self,
        kernel_slice: KernelSlice,
        proxy: SessionDriver,
        on_slice: SliceEnvironment | None,
    ) -> None:
        """Take what the running kernel was told of its slice, too."""
        self._slice = kernel_slice
        self._proxy = proxy
        self._on_slice = on_slice

    @property
    def state(self) -> KernelSliceState:
        """How things stand, by what was last seen. Costs next to nothing."""
        kernel_slice, proxy = self._slice, self._proxy
        state = proxy.state
        return KernelSliceState(
            kernel_slice.url,
            kernel_slice.request,
            kernel_slice.pending_size,
            kernel_slice.lease,
            kernel_slice.seen_at,
            kernel_slice.activity,
            state,
            resizes_live=self._resizes_live(state.phase),
        )

    def _resizes_live(self, phase: SlicePhase) -> bool:
        told = self._on_slice is not None and self._on_slice.takes_changes
        return phase is SlicePhase.WAITING or (phase is SlicePhase.HELD and told and not self._proxy.in_pod)

    def somebody_looks(self) -> None:
        """Find out why the kernel waits, and for how long, also before a cell does. Called by the server."""
        proxy = self._proxy
        if not proxy.is_looked_at:
            background_loop().call_soon_threadsafe(proxy.somebody_looks)

    async def keep(self, seconds: int) -> str:
        """Count the kernel as in use for so many seconds; return what its user reads. As ``%gpu keep``.

        Raises ``NotAllowed`` where it has no slice now.
        """
        return await in_background(self._proxy.keep(seconds))

    async def give_back(self) -> str:
        """Let the slice go as soon as the kernel is idle; return what its user reads.

        Raises ``NotAllowed`` where there is nothing to give back.
        """
        return await in_background(self._proxy.give_back())

    async def resume(self) -> str:
        """Ask for a parked kernel's slice again; return what its user reads.

        Raises ``NotAllowed`` where it is not lent.
        """
        return await in_background(self._proxy.resume())

    async def leave_queue(self) -> str:
        """Give up the wait; return what its user reads. Raises ``NotAllowed`` where there is none."""
        return await in_background(self._proxy.leave_queue())

    async def resize(self, size: str) -> SizeChange:
        """Change the size, at once or at the next restart, as ``%gpu use`` does.

        Raises ``BadRequest`` where ``size`` is none, ``NotAllowed`` while the kernel works or its slice is
        lent, and the pool's other refusals, unless a running kernel reads them.
        """
        wanted, state = parse_request(size), self.state
        phase = state.proxy.phase
        if phase is SlicePhase.WAITING:
            lease = await in_background(self._proxy.resize_waiting(lambda: self._slice.resize(wanted)))
            does = "waits for" if lease.state is LeaseState.WAITING else "has"
            return SizeChange(True, False, f"This kernel now {does} {lease.request.of_gpus}.")
        if phase is SlicePhase.ASKING:
            raise NotAllowed("The GPU pool has not answered this kernel yet.", "Try again once it has.")
        if self._slice.lease_id is None:
            await in_background(self._slice.resize_next(wanted))
            return SizeChange(True, False, f"The next cell asks for {wanted.of_gpus}.")
        if state.resizes_live:
            return await in_background(self._resize_live(size))
        if phase is SlicePhase.NONE:  # its lease has ended, or goes on without a kernel
            lease = await in_background(self._slice.resize(wanted))
            return SizeChange(True, False, f"This kernel now has {lease.request.of_gpus}.")
        return await self.resize_at_restart(wanted, None)

    async def _resize_live(self, size: str) -> SizeChange:
        try:
            answer = await self._proxy.resize(lambda: self._grant(size))
        except NotAllowed:
            await self._slice.check_size(parse_request(size))  # nobody waits for a cell's end for that
            raise
        return SizeChange(bool(answer["granted"]), self._slice.pending_size is not None, answer["message"])

    async def _grant(self, size: str) -> Mapping[str, Any]:
        assert self._on_slice is not None
        return await grant(self._slice, self._on_slice, size)

    async def resize_at_restart(self, size: SliceRequest, outlook: Outlook | None) -> SizeChange:
        """Take another size for a restart, whether or not it could be had at once; only then is it granted.

        What is taken is kept for a minute. ``outlook`` is what a request for that size would meet, for
        whoever cannot have it. Raises ``NotAllowed`` where the kernel has no slice now, and the pool's
        other refusals.
        """
        phase = self.state.proxy.phase
        if phase in (SlicePhase.PARKED, SlicePhase.RESUMING):
            await in_background(self._slice.check_size(size))
            raise NotAllowed(
                "This kernel's GPU slice is lent to others, and its variables are kept.",
                "Take the slice again first, or run a cell; then change the size.",
            )
        if phase not in (SlicePhase.HELD, SlicePhase.STARTING):
            return await self.resize(str(size))  # there are no variables to lose, nor a slice to keep
        try:
            await in_background(self._slice.reserve(size))
        except TimedOut as error:
            return SizeChange(False, True, self._not_now(size, error, outlook))
        return SizeChange(True, True, f"{size.named} is kept for this kernel for a minute. {_then(size)}")

    def _not_now(self, size: SliceRequest, error: TimedOut, outlook: Outlook | None) -> str:
        wait = outlook.expected if outlook is not None else ""
        after = f"A wait for {size.named} would take {wait}." if wait else ""
        largest = parse_request(error.largest_now).of_gpus if error.largest_now else ""
        fits = f"At this moment it could have up to {largest}." if largest else ""
        kept = f"The kernel was not restarted: it keeps {self._slice.request.of_gpus} and all its variables."
        return " ".join(filter(None, (error.message, kept, fits, after)))


def _then(size: SliceRequest) -> str:
    return f"{_THEN.format(size.named)}."
