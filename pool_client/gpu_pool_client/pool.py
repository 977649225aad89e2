"""The contract of a pool, and ``connect``, which finds the pool behind a URL.

Every implementation passes the same suite, ``tests/contract``.
"""

from __future__ import annotations

import abc
import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from types import TracebackType
from typing import Final
from urllib.parse import SplitResult, urlsplit

from gpu_pool_client.errors import BadRequest, NotAllowed, PoolUnreachable
from gpu_pool_client.outlook import Outlook
from gpu_pool_client.pods import KernelCommand, KernelPod
from gpu_pool_client.processes import Process, account_of
from gpu_pool_client.requests import SliceRequest, parse_request
from gpu_pool_client.terms import Activity
from gpu_pool_client.values import DeviceStatus, EndedLease, EndReason, Holder, Lease, LeaseState, PoolStatus

#: The entry-point group in which a distribution offers a pool for a URL scheme.
BACKENDS: Final = "gpu_pool.backends"
#: The variable that names the pool to use when none is given.
URL_VARIABLE: Final = "GPU_POOL_URL"
#: The variable that names the course in whose name slices are asked for.
COURSE_VARIABLE: Final = "GPU_POOL_COURSE"
DEFAULT_URL: Final = "embedded:"


class Pool(abc.ABC):
    """A pool of devices. All methods may raise ``PoolUnreachable``.

    Methods that take a ``lease_id`` raise ``LeaseGone`` when that lease has
    ended or never existed, except :meth:`release`, which may be repeated.
    A pool is an asynchronous context manager; leaving it closes it and ends
    no lease.
    """

    #: Where it is, in full: other processes reach the same pool by it.
    url: str

    @asynccontextmanager
    async def lease(
        self,
        request: SliceRequest | str,
        holder: Holder | None = None,
        key: str | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Lease]:
        """Hold a slice within an ``async with`` block: ask, wait, attach this process, release.

        ::

            async with connect() as pool, pool.lease("2%") as lease:
                subprocess.run(["python", "train.py"], env={**os.environ, **lease.environment})

        The slice goes back to the pool when the block is left, however that happens, and when this
        process ends. Whatever goes wrong before the block begins, the request is withdrawn.

        Parameters
        ----------
        request
            What to ask for, as a value or as text that :func:`parse_request` reads.
        holder
            Who asks; by default the user of this process.
        key
            See :meth:`request`; by default a new one, so that every block has a lease of its own.
        timeout
            Seconds to wait at most; by default for as long as it takes.

        Yields
        ------
        Lease
            The lease, held and attached to this process.

        Raises
        ------
        BadRequest, NeverFits, NotAllowed, OverQuota
            As :meth:`request`.
        TimedOut
            Nothing became free within ``timeout``.
        """
        wanted = parse_request(request) if isinstance(request, str) else request
        acquired = await self.acquire(
            wanted, holder or Holder(account_of(os.getuid())), key or f"lease-{uuid.uuid4().hex}", timeout
        )
        try:
            yield await self.attach(acquired.id, Process.current())
        finally:
            await asyncio.shield(self.release(acquired.id))

    @abc.abstractmethod
    async def request(self, request: SliceRequest, holder: Holder, key: str) -> Lease:
        """Ask for a slice; return at once with a lease that is HELD or WAITING.

        The same ``key`` (1 to 128 printable ASCII characters, chosen by the
        caller) is the same request: repeating it returns the same lease,
        whatever became of it. A held lease to which nothing is attached ends
        after a while; see :meth:`attach`.

        Raises ``BadRequest``, ``NeverFits``, ``NotAllowed`` or ``OverQuota``.
        """

    @abc.abstractmethod
    async def get_lease(self, lease_id: str) -> Lease:
        """Return the lease as it is now, ended ones included."""

    @abc.abstractmethod
    async def wait(self, lease_id: str, timeout: float | None = None) -> Lease:
        """Return the lease once it is HELD.

        Raises ``TimedOut`` after ``timeout`` seconds; the lease then keeps its
        position in the queue. Cancelling this call changes nothing either: whoever
        waited may come back and wait again.
        """

    async def acquire(
        self, request: SliceRequest, holder: Holder, key: str, timeout: float | None = None
    ) -> Lease:
        """Ask and wait. After ``timeout`` seconds the request is withdrawn and ``TimedOut`` raised.

        Cancelling this call withdraws the request, too.
        Nobody tells the caller when the lease ends before it is released: at its
        ``terms.ends_at``, or because it was taken back. :meth:`watch` it, and end what runs
        on it.
        """
        lease = await self.request(request, holder, key)
        if lease.state is LeaseState.HELD:
            return lease
        try:
            return await self.wait(lease.id, timeout)
        except BaseException:
            await self._abandon(lease.id)
            raise

    async def _abandon(self, lease_id: str) -> None:
        """Withdraw a request, as :meth:`acquire` does. A pool that may be busy makes sure that it happens."""
        await asyncio.shield(self.release(lease_id, EndReason.WITHDRAWN))

    @abc.abstractmethod
    def watch(self, lease_id: str) -> AsyncIterator[Lease]:
        """Yield the lease now and after every change of its state or place, until it has ended."""

    @abc.abstractmethod
    async def explain(self, lease_id: str) -> Outlook:
        """Say why a lease waits, and how long that may take. Raises ``BadRequest`` if it does not wait."""

    @abc.abstractmethod
    async def forecast(self, request: SliceRequest, holder: Holder) -> Outlook | None:
        """Say what this request would meet if it were made now; None if it would be HELD at once.

        Nothing is asked for. A holder without a name is somebody new to the pool,
        who has used nothing and is in every course. Raises what :meth:`request` raises.
        """

    @abc.abstractmethod
    async def attach(
        self,
        lease_id: str,
        process: Process,
        *,
        ready_within: float | None = None,
        grace: float = 0.0,
    ) -> Lease:
        """Tie the lease to a process: its death ends the lease. Legal while waiting, too.

        A later call replaces the process. With ``ready_within`` (seconds) the
        lease ends unless :meth:`renew` is called by then. With ``grace`` the
        death of ``process`` is forgiven for that many seconds while the
        holder's own process lives: room to restart.
        """

    @abc.abstractmethod
    async def renew(self, lease_id: str, ttl: float | None = None) -> Lease:
        """Say that all is well: lift the lease's deadline, or set it ``ttl`` seconds from now.

        While nothing is attached to a held lease, its deadline can only come sooner.
        """

    @abc.abstractmethod
    async def activity(self, lease_id: str) -> Activity:
        """Return what the lease's process does with its devices, as the driver sees it."""

    @abc.abstractmethod
    async def resize(self, lease_id: str, request: SliceRequest) -> Lease:
        """Change what a lease asks for; it keeps its id, its key and its holder.

        A held lease has other slices at once, on its own devices if it can;
        its holder is to give its process the new :attr:`Lease.environment`. One
        that waits keeps its position only if it asks for no more than before; a
        parked one asks for the new size when it resumes.

        Raises what :meth:`request` raises; ``TimedOut`` where a held lease
        cannot have the size now, since it is not free or since others wait in
        line for it: then nothing has changed. Raises ``NotAllowed`` where its
        process has initialised CUDA, or may have, and to anybody but the
        process that asked for the lease.
        """

    @abc.abstractmethod
    async def park(self, lease_id: str) -> Lease:
        """Give the slices of a held lease to others, and keep the lease.

        One that waits in the queue to resume leaves the queue and is parked again.
        Raises ``NotAllowed`` where its process has initialised CUDA: what it
        keeps on the device would be in the next holder's way. It is also raised
        to anybody but the process that asked for the lease, since nobody else
        can keep its process from working meanwhile.
        """

    @abc.abstractmethod
    async def resume(self, lease_id: str) -> Lease:
        """Ask again for the slices of a parked lease; it may have to wait in the queue.

        It gets the same devices as before.
        """

    @abc.abstractmethod
    async def release(self, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
        """End the lease. Repeating it, or naming a lease that is gone, does nothing."""

    async def launch(self, lease_id: str, kernel: KernelCommand) -> KernelPod:
        """Start the kernel of a held lease in a pod, in place of one that was started before.

        For leases whose ``terms.in_pod`` says so. Returns at once; see :meth:`pod`. The pod ends with its
        lease. Its own end leaves the lease as it is, so that the kernel can be launched again, unless the
        cluster took it away.

        Raises ``BadRequest`` for a lease that is not held and for what no pod can be made of, and
        ``NotAllowed`` for what course or cluster forbid, and where kernels are their holders' affair.
        """
        raise _no_pods(lease_id, kernel.argv)

    async def pod(self, lease_id: str, seen: str = "") -> KernelPod:
        """Return how the lease's pod is, once its version is not ``seen``, or after some seconds.

        Raises ``BadRequest`` where none was launched.
        """
        raise _no_pods(lease_id, seen)

    async def end_pod(self, lease_id: str) -> None:
        """End the lease's pod, and keep the lease. Repeating it does nothing."""
        raise _no_pods(lease_id)

    @abc.abstractmethod
    async def drain(self, device: str, *, drained: bool = True) -> DeviceStatus:
        """Grant nothing more on a device, so that it is free once its leases have ended; or grant again.

        ``device`` is its uuid or its index. Raises ``BadRequest`` for one that is not there.
        """

    @abc.abstractmethod
    async def history(self, since: float = 0.0) -> list[EndedLease]:
        """Return the leases that have ended, the first to end first.

        No more than the last 100,000 of them, and of a user who asks a service the last 10,000.

        Parameters
        ----------
        since
            The time from which on they have ended, in Unix seconds.

        Returns
        -------
        list[EndedLease]
            What became of each.
        """

    @abc.abstractmethod
    async def status(self) -> PoolStatus:
        """Return devices, leases and line as one consistent snapshot."""

    async def positions(self) -> Mapping[str, int]:
        """Return the positions in the queue of one's own leases, 1 for the next, by lease id.

        All that one has asked for oneself counts; what others did lately may not yet. This is for
        those who ask again and again: where many do, it costs a small part of :meth:`status`.
        """
        return {lease.id: lease.position for lease in (await self.status()).queue if lease.position}

    async def offers(self, holder: Holder) -> tuple[SliceRequest, ...] | None:
        """Return the slices that the holder's course offers now; None where no course file says.

        Raises ``NotAllowed`` for who is not in the course.
        """
        del holder
        return None

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of the pool. Leases live on."""

    async def __aenter__(self) -> Pool:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _no_pods(*_: object) -> NotAllowed:
    return NotAllowed("This pool starts no kernels.", "Start the kernel where its slice is.")


def connect(url: str | None = None) -> Pool:
    """Return the pool at ``url``, by default the one in ``$GPU_POOL_URL`` or ``embedded:``.

    ``embedded:[path]`` is a pool within the calling process, its store at
    ``path``. Other schemes are found through the entry points of the group
    ``gpu_pool.backends``: a callable that takes the URL and returns a pool.

    Raises ``BadRequest`` for a URL that nothing serves and ``PoolUnreachable``
    when the pool cannot be opened.
    """
    url = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    parts = split_url(url)
    scheme = parts.scheme if parts else ""
    offers = {point.name: point for point in entry_points(group=BACKENDS)}
    if scheme not in offers:
        known = ", ".join(f"{name}:" for name in sorted(offers)) or "none installed"
        raise BadRequest(f"{url[:200]!a} is not the URL of a pool.", f"Accepted here: {known}.")
    try:
        open_pool: Callable[[str], Pool] = offers[scheme].load()
    except ImportError as error:
        raise PoolUnreachable(
            f"The part of jupyter-gpu-pool that serves {scheme}: is not installed.",
            "Install jupyter-gpu-pool again.",
        ) from error
    return open_pool(url)


def split_url(url: str) -> SplitResult | None:
    """Return the parts of a pool's URL, or None if it is not a URL at all."""
    try:
        return urlsplit(url)
    except ValueError:  # such as "[" without "]" where a host would stand
        return None
