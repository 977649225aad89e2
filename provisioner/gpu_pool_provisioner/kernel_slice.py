"""One kernel's slice, taken at its first start, kept over restarts, given back once; and its environment."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Final

from gpu_pool_client import (
    Activity,
    EndReason,
    Enforcement,
    GpuPoolError,
    Holder,
    Lease,
    LeaseGone,
    LeaseState,
    NotAllowed,
    OverQuota,
    Pool,
    PoolStatus,
    PoolUnreachable,
    Process,
    SliceRequest,
    TimedOut,
    connect,
)
from gpu_pool_client._framework_caps import slice_environment
from gpu_pool_client._free import cut
from gpu_pool_client._log import get_logger

#: What a kernel is to show its user below the first cell; see gpu_pool_kernels.inkernel.extension.
NOTICE_VARIABLE: Final = "GPU_POOL_NOTICE"
#: What a pool raises about a lease that there is where it cannot answer now: it is away, or its user
#: has asked it too much within a minute. (Of a request for a lease, ``OverQuota`` is the answer.)
NOT_NOW: Final = (PoolUnreachable, OverQuota)
#: Seconds in which a pool hears of a restart. One that is slower may still keep the slice.
_ATTACHED_WITHIN: Final = 15.0
#: Seconds in which it changes a size: the process that used the slice has ended, which is forgiven that long.
_RESIZED_WITHIN: Final = 5.0
#: Seconds for which what a restart is to have is kept for it.
_KEPT_FOR: Final = 60.0
#: Seconds between two attempts where the process that has ended is still seen.
_RESIZE_AGAIN: Final = 0.2
#: Characters of a user's or kernel's name that are kept, as a pool does.
_LONGEST_NAME: Final = 200
_OTHER_SIZE: Final = (
    "You asked for {}. This cluster has no slice of exactly that size: you have {}, and that counts."
)

#: The open pools, by URL and process: a forked child must not use its parent's.
_pools: dict[tuple[str, int], Pool] = {}


def shared_pool(url: str) -> Pool:
    """Return this process's pool for ``url``, opened at the first call and open until the process ends.

    Raises what :func:`gpu_pool_client.connect` raises; a failure is not remembered.
    """
    key = url, os.getpid()
    if key not in _pools:
        _pools[key] = connect(url)
    return _pools[key]


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
        #: In whose name it was asked for last.
        self._holder = Holder("")
        #: The request that is under way, see :meth:`take_within`.
        self._asking: asyncio.Task[Lease] | None = None
        #: The size to change to once the kernel's process, which has used its devices, has ended.
        self.pending_size: SliceRequest | None = None
        #: Gives up what was kept for a restart that has not come.
        self._giving_up: asyncio.Task[None] | None = None
        #: Why the last change of size came to nothing, for whoever uses the kernel that is launched next.
        self.notice = ""
        #: The lease as it was last seen, by whomever, and when, by ``time.monotonic()``.
        self.lease: Lease | None = None
        self.seen_at = 0.0
        #: What the kernel's process was last seen to do with its devices.
        self.activity: Activity | None = None

    @property
    def pool(self) -> Pool:
        """The pool at ``url``, opened at the first use."""
        return shared_pool(self.url)

    def see(self, lease: Lease) -> Lease:
        """Remember the lease as it is now, for those who ask; return it."""
        self.lease, self.seen_at = lease, time.monotonic()
        return lease

    async def take(self, holder: Holder, timeout: float | None = None) -> Lease:
        """Return the lease from before a restart, or a new one, which may still be in the queue.

        With a ``timeout``, one that is held within so many seconds. Raises
        ``LeaseGone`` when the earlier lease has ended, and what
        ``Pool.request`` or ``Pool.acquire`` raises. May be called again where
        the pool did not answer.
        """
        self._holder = holder
        if self.lease_id is not None:
            return self.see(await self._earlier_lease(self.lease_id))
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
        return self.see(lease)

    async def take_within(self, holder: Holder, seconds: float) -> Lease | None:
        """Do what :meth:`take` does; return None where the pool has not answered within so many seconds.

        The request then goes on, and the next call waits for its answer. Call this,
        like :meth:`stop_asking`, on the proxies' event loop.
        """
        if self._asking is None:
            self._asking = asyncio.create_task(self.take(holder))
        asking = self._asking
        await asyncio.wait({asking}, timeout=seconds)
        if not asking.done():
            return None
        if self._asking is asking:
            self._asking = None
        return None if asking.cancelled() else asking.result()

    async def stop_asking(self) -> None:
        """Withdraw the request that is under way, if any, and ask anew the next time."""
        asking, self._asking = self._asking, None
        if asking is not None:
            asking.add_done_callback(note_error)
            if asking.cancel():
                self.renew_key()

    async def _earlier_lease(self, lease_id: str) -> Lease:
        try:
            lease = await self.pool.get_lease(lease_id)
        except LeaseGone as error:
            raise slice_lost(self.request.size, None) from error
        if lease.state is LeaseState.PARKED:
            return await self.pool.resume(lease_id)
        if lease.state is LeaseState.ENDED:
            raise slice_lost(self.request.size, lease.end_reason)
        return lease

    async def resize_next(self, request: SliceRequest) -> None:
        """Let a kernel that has no slice ask for another size. Raises what ``Pool.forecast`` does."""
        await self.pool.forecast(request, self._holder)
        self.request = request

    async def check_size(self, request: SliceRequest) -> None:
        """Raise why a kernel that has a slice could never have another size; nothing is changed.

        What it has now counts towards its quotas; so nothing is said of them.
        """
        with contextlib.suppress(OverQuota):
            await self.pool.forecast(request, self._holder)

    async def resize(self, request: SliceRequest) -> Lease:
        """Change the slice's size at once. Raises what ``Pool.resize`` raises."""
        if self.lease_id is None:
            raise slice_lost(self.request.size, None)
        lease = await self.pool.resize(self.lease_id, request)
        self.request, self.pending_size = request, None
        return self.see(lease)

    async def resize_as_requested(self) -> None:
        """Change to the size that was asked for, if any; where it is refused, the next kernel says so."""
        size, self.pending_size, self.notice = self.pending_size, None, ""
        if size is None:
            return
        try:
            await asyncio.wait_for(self._resize_once_ended(size), _RESIZED_WITHIN)
        except asyncio.TimeoutError:
            self.notice = f"You asked for {size.named}, and the GPU pool did not answer in time: see %gpu."
        except GpuPoolError as error:
            self.notice = f"You asked for {size.named}. This kernel still has {self.request.of_gpus}. {error}"

    async def _resize_once_ended(self, size: SliceRequest) -> None:
        give_up_at = time.monotonic() + _RESIZED_WITHIN - 2 * _RESIZE_AGAIN
        while True:
            try:
                await self.resize(size)
            except NotAllowed:  # noqa: PERF203 - the process has ended, and may be seen for a moment more
                if time.monotonic() > give_up_at:
                    raise
                await asyncio.sleep(_RESIZE_AGAIN)
            else:
                return

    async def reserve(self, size: SliceRequest, kept_for: float = _KEPT_FOR) -> None:
        """Take what another size needs, so that a restart within so many seconds has it for certain.

        Raises what ``Pool.resize`` raises.
        """
        if self.lease_id is None:
            raise slice_lost(self.request.size, None)
        self.see(await self.pool.resize(self.lease_id, size, ahead=True))
        self.pending_size = size
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._giving_up = asyncio.create_task(self._give_up_reserved(size, self.lease_id, kept_for))

    async def _give_up_reserved(self, size: SliceRequest, lease_id: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.pending_size is size and self.lease_id == lease_id:
            self.pending_size = None
            try:
                self.see(await self.pool.resize(lease_id, self.request, ahead=True))
            except GpuPoolError as error:
                get_logger().warning("What was kept for a kernel's restart is still kept: %s", error)

    async def resize_later(self, size: SliceRequest) -> None:
        """Ask for another size at the next restart, whenever that is, if it is free then.

        Raises what ``Pool.resize`` raises of what can never be.
        """
        if self.lease_id is None:
            raise slice_lost(self.request.size, None)
        with contextlib.suppress(TimedOut):
            await self.pool.resize(self.lease_id, size, ahead=True)
            # It can be had. Nobody knows when the restart comes, so others may have it meanwhile.
            await self.pool.resize(self.lease_id, self.request, ahead=True)
        self.pending_size = size

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
            await self.give_back(lease_id=lease_id)

    async def give_back(self, reason: EndReason = EndReason.RELEASED, *, lease_id: str | None = None) -> None:
        """Release the slice; where its pool cannot hear of it now, as soon as it can. May be repeated.

        A lease that is attached to the process of a server, as one in the queue is, would
        otherwise stay there for as long as the server runs. Whoever shuts a kernel
        down waits for the pool for a moment only. ``lease_id`` names a lease that this was before.
        """
        lease_id = lease_id or self.lease_id
        if lease_id is not None:
            await self.pool.give_back(lease_id, reason)

    def forget(self) -> None:
        """Let the next :meth:`take` acquire a new slice."""
        self.lease_id = self.pending_size = self.lease = self.activity = None
        self._key = uuid.uuid4().hex

    def renew_key(self) -> None:
        """Let the next request be another one than the last."""
        self._key = uuid.uuid4().hex


def note_error(task: asyncio.Task[Lease]) -> None:
    """Take note of a task's error, also where nobody waits for it any more."""
    if not task.cancelled():
        task.exception()


def slice_lost(size: str, reason: EndReason | None) -> LeaseGone:
    """Say why a kernel that had a slice cannot be restarted."""
    why = f" ({reason.value})" if reason else ""
    return LeaseGone(
        f"This kernel no longer has its GPU slice of {size}: it went back to the pool{why}.",
        "Shut the kernel down and start it again to ask for a new slice.",
        reason=reason.value if reason else None,
    )


def kernel_name(display_name: object, most: int = _LONGEST_NAME) -> str:
    """Return a kernel's name as a sentence has it: printable, and ``Python 3 (GPU  2%)`` with one space.

    Kernelspecs of old have a second one, for the order in Jupyter's lists.
    """
    return printable(str(display_name).replace("  ", " "), most)


#: By which a Jupyter server tells a kernel of the notebook, or console, that it was started for.
_SESSION_VARIABLE: Final = "JPY_SESSION_NAME"
_LONGEST_NOTEBOOK: Final = 80


def purpose(notebook: str, name: object, kernel_id: str) -> str:
    """Return what a slice is for, as others see it: ``week1.ipynb: Python 3 (GPU 2%) [5f0a1b2c]``.

    ``notebook`` is empty where it is not known.
    """
    kernel = f"{kernel_name(name, 180 - len(notebook))} [{kernel_id[:8]}]"
    return f"{notebook}: {kernel}" if notebook else kernel


def notebook_of(environment: Mapping[str, str], own: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the name of the notebook that a kernel with this environment is for, without its folder.

    Empty where it is not known: what ``own`` has, the environment of whoever starts it, is another kernel's.
    """
    path = environment.get(_SESSION_VARIABLE, "")
    return "" if path == own.get(_SESSION_VARIABLE) else printable(Path(path).name, _LONGEST_NOTEBOOK)


def name_on_size(name: str, started: SliceRequest, now: SliceRequest) -> str:
    """Return what a kernel is called that was ``started`` on one size and is on another ``now``.

    ``Python 3 (GPU 2%)`` becomes ``Python 3 (GPU 10%)``; a name that does not tell the size stays as it is.
    """
    return name.replace(started.title, now.title)


def printable(text: object, most: int = _LONGEST_NAME) -> str:
    """Return ``text`` cut to ``most`` characters, with a space for what cannot be shown.

    That is a line's end, a control character, or half a surrogate pair (as JSON can hold).
    """
    return "".join(sign if sign.isprintable() else " " for sign in str(text)[:most])


#: The entry-point group of callables that add to a kernel's command what it loads for its user,
#: and what sets the limits of frameworks that read none from the environment.
LAUNCHERS: Final = "gpu_pool.kernel_launchers"


class SliceEnvironment:
    """The command of a kernel on its slice, and the variables of the slice while it runs."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], lease: Lease) -> None:
        """Take the kernel's command, and what its environment is without a slice.

        The frameworks beside the first word of its command decide which memory
        caps are set. Kernels of other languages get none.
        """
        #: The command, with what an IPython kernel loads for its user.
        self.command = kernel_command(list(command))
        self._python = command[0]
        self._environment = dict(environment)
        self._hook = self.command != list(command)
        self.variables: Mapping[str, str] = slice_environment(
            lease, self._python, self._environment, hook=self._hook
        )

    @property
    def takes_changes(self) -> bool:
        """Whether the running kernel can be told of other variables."""
        return self._hook

    def change(self, lease: Lease) -> dict[str, tuple[str | None, str | None]]:
        """Return the variables that change, each with its value before and now; None where it is unset."""
        before = self.variables
        now = slice_environment(lease, self._python, self._environment, hook=self._hook)
        self.variables = now
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return {name: (before.get(name), now.get(name)) for name in names}


def expected_lease(request: SliceRequest, holder: Holder, status: PoolStatus) -> Lease:
    """Return what a request would probably be granted: of each device the same, and enforced as others are.

    It serves to foresee a slice's environment, and nothing else. Nothing is asked of the pool.
    """
    devices = [each.device for each in status.devices][: request.count]
    slices = tuple(cut(request, device) for device in devices)
    enforcement = next((each.enforcement for each in status.leases if each.slices), Enforcement())
    return Lease("", "", request, holder, LeaseState.HELD, 0.0, slices=slices, enforcement=enforcement)


def kernel_command(command: list[str], *, installed: bool = False) -> list[str]:
    """Return the command with what an IPython kernel loads for its user, if that is installed.

    With ``installed`` the kernel is to find it where it runs, in an image.
    """
    prepare = _ipykernel_launcher()
    return prepare(command, installed=installed) if prepare else command


def is_ipython(command: Sequence[str]) -> bool:
    """Whether a command starts an IPython kernel, as far as that can be seen."""
    return kernel_command(list(command), installed=True) != list(command)


@functools.cache
def _ipykernel_launcher() -> Callable[..., list[str]] | None:
    for point in entry_points(group=LAUNCHERS, name="ipykernel"):
        launcher: Callable[..., list[str]] = point.load()
        return launcher
    return None
