"""One kernel's slice, taken at its first start, kept over restarts, given back once; and its environment."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Final

from traitlets.log import get_logger

from gpu_pool_client import (
    GpuPoolError,
    Holder,
    Lease,
    LeaseGone,
    LeaseState,
    Pool,
    Process,
    SliceRequest,
)
from gpu_pool_client._framework_caps import installed_frameworks, lease_caps, with_caps
from gpu_pool_provisioner.advice import slice_lost
from gpu_pool_provisioner.pools import NOT_NOW, give_back, shared_pool

#: What a kernel is to show its user below the first cell; see gpu_pool_kernels.inkernel.extension.
NOTICE_VARIABLE: Final = "GPU_POOL_NOTICE"
#: Seconds in which a pool hears of a restart. One that is slower may still keep the slice.
_ATTACHED_WITHIN: Final = 15.0
_OTHER_SIZE: Final = (
    "You asked for {}. This cluster has no slice of exactly that size: you have {}, and that counts."
)


class KernelSlice:
    """The slice of one kernel, over all its launches.

    ``lease_id`` is set from :meth:`take` to :meth:`forget`, even if the lease
    has ended in between: a kernel that lost its slice must not be given another
    by a restart that nobody asked for.
    """

    def __init__(self, url: str, request: SliceRequest) -> None:
        self.url = url
        self.request = request
        self.lease_id: str | None = None
        #: Names the request to the pool, so that one whose answer was lost is not made twice.
        self._key = uuid.uuid4().hex
        #: The size to change to once the kernel's process, which has used its devices, has ended.
        self.pending_size: SliceRequest | None = None
        #: Why the last change of size came to nothing, for whoever uses the kernel that is launched next.
        self.notice = ""

    @property
    def pool(self) -> Pool:
        """The pool at ``url``, opened at the first use."""
        return shared_pool(self.url)

    async def take(self, holder: Holder, timeout: float | None = None) -> Lease:
        """Return the lease of before a restart, or a new one, which may still be in the queue.

        With a ``timeout``, one that is held within so many seconds. Raises
        ``LeaseGone`` when the lease of before has ended, and what
        ``Pool.request`` or ``Pool.acquire`` raises. To be called again where
        the pool did not answer.
        """
        if self.lease_id is not None:
            return await self._lease_of_before(self.lease_id)
        if timeout is None:
            lease = await self.pool.request(self.request, holder, self._key)
        else:
            lease = await self.pool.acquire(self.request, holder, self._key, timeout)
        if lease.state is LeaseState.ENDED:  # an earlier call was heard, and nobody came for what it got
            self.renew_key()
            return await self.take(holder, timeout)
        self.lease_id = lease.id
        if lease.request.size != self.request.size:
            self.notice = _OTHER_SIZE.format(self.request.of_gpus, lease.request.size)
        return lease

    async def _lease_of_before(self, lease_id: str) -> Lease:
        try:
            lease = await self.pool.get_lease(lease_id)
        except LeaseGone as error:
            raise slice_lost(self.request.size, None) from error
        if lease.state is LeaseState.PARKED:
            return await self.pool.resume(lease_id)
        if lease.state is LeaseState.ENDED:
            raise slice_lost(self.request.size, lease.end_reason)
        return lease

    async def resize(self, request: SliceRequest) -> Lease:
        """Change the slice's size at once. Raises what ``Pool.resize`` raises."""
        if self.lease_id is None:
            raise slice_lost(self.request.size, None)
        lease = await self.pool.resize(self.lease_id, request)
        self.request, self.pending_size = request, None
        return lease

    async def resize_as_requested(self) -> None:
        """Change to the size that was asked for, if any; where it is refused, the next kernel says so."""
        size, self.pending_size, self.notice = self.pending_size, None, ""
        if size is None:
            return
        try:
            await self.resize(size)
        except GpuPoolError as error:
            self.notice = f"You asked for {size.named}. This kernel still has {self.request.of_gpus}. {error}"

    async def attach_here(self, seconds: float) -> None:
        """Attach the slice to this process until the kernel is launched again, for ``seconds`` at most."""
        lease_id = self.lease_id
        if lease_id is None:
            return
        try:
            attach = self.pool.attach(lease_id, Process.current(), ready_within=seconds)
            await asyncio.wait_for(attach, _ATTACHED_WITHIN)
        except (LeaseGone, *NOT_NOW, asyncio.TimeoutError) as error:
            # The relaunch that follows looks at the lease, and says what is wrong.
            get_logger().warning("Keeping the kernel's GPU slice over its restart failed: %r", error)
        if self.lease_id != lease_id:
            # The kernel was shut down during its restart; this process must not keep its slice alive.
            await give_back(self.pool, lease_id)

    async def give_back(self) -> None:
        """Release the slice, see :func:`gpu_pool_provisioner.returning.give_back`."""
        if self.lease_id is not None:
            await give_back(self.pool, self.lease_id)

    def forget(self) -> None:
        """Let the next :meth:`take` acquire a new slice."""
        self.lease_id = self.pending_size = None
        self._key = uuid.uuid4().hex

    def renew_key(self) -> None:
        """Let the next request be another one than the last."""
        self._key = uuid.uuid4().hex


#: The entry-point group of callables that add to a kernel's command what it loads for its user,
#: and what sets the limits of frameworks that read none from the environment.
LAUNCHERS: Final = "gpu_pool.kernel_launchers"


def slice_environment(lease: Lease, command: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a kernel on ``lease`` needs in addition to its ``environment``.

    The frameworks beside the first word of its command decide which memory caps
    are set. Kernels of other languages get none.
    """
    command = list(command)
    found = installed_frameworks(command[0], environment)
    limits = lease_caps(found, lease, environment, hook=kernel_command(command) != command)
    return {**with_caps(lease, limits).environment, **limits}


def kernel_command(command: list[str], *, installed: bool = False) -> list[str]:
    """Return the command with what an IPython kernel loads for its user, if that is installed.

    With ``installed`` the kernel is to find it where it runs, in an image.
    """
    prepare = _ipykernel_launcher()
    return prepare(command, installed=installed) if prepare else command


@functools.cache
def _ipykernel_launcher() -> Callable[..., list[str]] | None:
    for point in entry_points(group=LAUNCHERS, name="ipykernel"):
        launcher: Callable[..., list[str]] = point.load()
        return launcher
    return None
