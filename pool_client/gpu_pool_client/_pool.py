"""The contract of a pool, and ``connect``, which finds the pool behind a URL.

Every implementation passes the same suite, ``tests/contract``.
"""

from __future__ import annotations

import abc
import os
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import entry_points
from types import TracebackType
from typing import Final
from urllib.parse import SplitResult, urlsplit

from gpu_pool_client._background import give_back
from gpu_pool_client._errors import BadRequest, NotAllowed, PoolUnreachable
from gpu_pool_client._processes import Process, account_of
from gpu_pool_client._requests import SliceRequest, parse_request
from gpu_pool_client._values import (
    Activity,
    DeviceStatus,
    EndedLease,
    EndReason,
    Holder,
    KernelCommand,
    KernelPod,
    Lease,
    LeaseState,
    Outlook,
    PoolStatus,
)

#: The entry-point group in which a distribution offers a pool for a URL scheme.
BACKENDS: Final = "gpu_pool.backends"
#: The variable that names the pool to use when none is given.
URL_VARIABLE: Final = "GPU_POOL_URL"
#: The variable that names the course in whose name slices are asked for.
COURSE_VARIABLE: Final = "GPU_POOL_COURSE"
#: The variable that says whether what asks for slices is batch work.
BATCH_VARIABLE: Final = "GPU_POOL_BATCH"
DEFAULT_URL: Final = "embedded:"
#: What frontends put a connection file's path in the place of, in a kernel's command.
CONNECTION_FILE: Final = "{connection_file}"
#: What stands for it in the command of a wrapped kernel: there the placeholder itself stands in one word
#: alone, the wrapper's own, since some frontends put the path in the place of the first one only.
WRAPPED_CONNECTION_FILE: Final = "@connection_file@"


def is_yes(value: str) -> bool:
    """Whether a variable says yes: ``1``, ``true``, ``yes`` or ``on``."""
    return value.strip().lower() in ("1", "true", "yes", "on")


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
            await self.give_back(acquired.id)

    @abc.abstractmethod
    async def request(self, request: SliceRequest, holder: Holder, key: str) -> Lease:
        """Ask for a slice; return at once with a lease that is HELD or WAITING.

        A held lease to which nothing is attached ends after a while; see :meth:`attach`.

        Parameters
        ----------
        request
            What is asked for; :func:`parse_request` reads it from text.
        holder
            Who asks, and what for.
        key
            1 to 128 printable ASCII characters, chosen by the caller. The same key is the same request:
            repeating it returns the same lease, whatever became of it.

        Returns
        -------
        Lease
            The lease, held or in the queue.

        Raises
        ------
        BadRequest
            The key is malformed.
        NeverFits
            No device of this pool could ever hold it.
        NotAllowed
            The rules of the pool or of the course forbid it.
        OverQuota
            The holder already has as much as the rules allow.
        """

    @abc.abstractmethod
    async def get_lease(self, lease_id: str) -> Lease:
        """Return a lease as it is now, even one that has ended.

        Parameters
        ----------
        lease_id
            The lease's id.

        Returns
        -------
        Lease
            Its state, its slices and its terms.
        """

    @abc.abstractmethod
    async def wait(self, lease_id: str, timeout: float | None = None) -> Lease:
        """Wait until a lease is HELD, and return it.

        Waiting changes nothing: whoever cancels this call keeps the position in the queue.

        Parameters
        ----------
        lease_id
            The lease's id.
        timeout
            Seconds to wait at most; by default for as long as it takes.

        Returns
        -------
        Lease
            The lease, held.

        Raises
        ------
        TimedOut
            It was not granted within ``timeout``. It keeps its position in the queue.
        """

    async def acquire(
        self, request: SliceRequest, holder: Holder, key: str, timeout: float | None = None
    ) -> Lease:
        """Ask for a slice and wait for it: :meth:`request` and :meth:`wait` in one.

        Cancelling this call withdraws the request. Nobody tells the caller when the lease ends before it
        is released: at its ``terms.ends_at``, or because it was taken back. :meth:`watch` it, and end
        what runs on it.

        Parameters
        ----------
        request, holder, key
            As for :meth:`request`.
        timeout
            Seconds to wait at most; by default for as long as it takes.

        Returns
        -------
        Lease
            The lease, held.

        Raises
        ------
        BadRequest, NeverFits, NotAllowed, OverQuota
            As :meth:`request`.
        TimedOut
            It was not granted within ``timeout``. The request is withdrawn.
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
        await self.give_back(lease_id, EndReason.WITHDRAWN)

    @abc.abstractmethod
    def watch(self, lease_id: str) -> AsyncIterator[Lease]:
        """Follow a lease: yield it now, and after every change of its state or position, until it has ended.

        Parameters
        ----------
        lease_id
            The lease's id.

        Yields
        ------
        Lease
            The lease after each change; the last one is ENDED, and its ``end_reason`` says why.
        """

    @abc.abstractmethod
    async def explain(self, lease_id: str) -> Outlook:
        """Say why a lease waits, and how long that may take.

        Parameters
        ----------
        lease_id
            The lease's id.

        Returns
        -------
        Outlook
            Its position, the reason, and the expected wait in seconds where one can be guessed.

        Raises
        ------
        BadRequest
            The lease does not wait.
        """

    @abc.abstractmethod
    async def forecast(self, request: SliceRequest, holder: Holder) -> Outlook | None:
        """Say what a request would meet if it were made now. Nothing is asked for.

        Parameters
        ----------
        request
            The slice in question.
        holder
            Who would ask. A holder without a name is somebody new to the pool, who has used nothing and
            is in every course.

        Returns
        -------
        Outlook or None
            The wait that is expected; None if the request would be HELD at once.

        Raises
        ------
        BadRequest, NeverFits, NotAllowed, OverQuota
            As :meth:`request`.
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
        """Tie a lease to a process, whose death then ends the lease. Also allowed while the lease waits.

        A later call replaces the process.

        Parameters
        ----------
        lease_id
            The lease's id.
        process
            The process that the lease lives and dies with.
        ready_within
            Seconds within which :meth:`renew` must be called, or the lease ends; by default no such limit.
        grace
            Seconds for which the death of ``process`` is forgiven while the holder's own process lives,
            so that it can be restarted.

        Returns
        -------
        Lease
            The lease with its process.
        """

    @abc.abstractmethod
    async def renew(self, lease_id: str, ttl: float | None = None) -> Lease:
        """Say that all is well: lift a lease's deadline, or set it anew.

        While nothing is attached to a held lease, its deadline can only come sooner.

        Parameters
        ----------
        lease_id
            The lease's id.
        ttl
            Seconds from now until the next deadline; by default there is none.

        Returns
        -------
        Lease
            The lease as it is now.
        """

    @abc.abstractmethod
    async def activity(self, lease_id: str) -> Activity:
        """Say what a lease's process does with its devices, as the driver sees it.

        Parameters
        ----------
        lease_id
            The lease's id.

        Returns
        -------
        Activity
            Memory in MiB, whether CUDA was initialised and whether the device works; None for what is
            not known.
        """

    @abc.abstractmethod
    async def resize(self, lease_id: str, request: SliceRequest, *, ahead: bool = False) -> Lease:
        """Change the size of a lease, which keeps its id, its key and its holder.

        A held lease gets other slices at once, on its own devices if possible; its holder must give
        its process the new :attr:`Lease.environment`. A waiting one keeps its position only if it asks
        for no more than before. A parked one asks for the new size when it resumes.

        Whoever is about to end the process for another size asks for it ``ahead``, so that nobody else
        can have it meanwhile: see there.

        Parameters
        ----------
        lease_id
            The lease's id.
        request
            The size it has from now on.
        ahead
            Only take what a held lease needs for the size on top of what it has. Its request and its
            process's part stay as they are, also where the process has initialised CUDA. Once that has
            ended, the same size can be had for certain, without ``ahead``. To ask ahead for the
            size that it has gives back what was taken.

        Returns
        -------
        Lease
            The lease with its new size.

        Raises
        ------
        BadRequest, NeverFits, OverQuota
            As :meth:`request`, also where the lease's process is in the way as well.
        TimedOut
            A held lease cannot have the size now, because it is not free or because others wait for it.
            Nothing has changed.
        NotAllowed
            As :meth:`request`; or the lease's process has initialised CUDA, or may have; or somebody else
            than the process that asked for the lease calls this.
        """

    @abc.abstractmethod
    async def park(self, lease_id: str) -> Lease:
        """Lend the slices of a held lease to others, and keep the lease.

        One that waits in the queue to resume leaves the queue and is parked again.

        Parameters
        ----------
        lease_id
            The lease's id.

        Returns
        -------
        Lease
            The lease, parked.

        Raises
        ------
        NotAllowed
            Its process has initialised CUDA, and what it keeps on the device would be in the next
            holder's way; or its process has ended, or is not ready yet; or somebody else than the process
            that asked for the lease calls this, which cannot keep its process from working meanwhile.
        """

    @abc.abstractmethod
    async def resume(self, lease_id: str) -> Lease:
        """Ask again for the slices of a parked lease, on the same devices as before. It may have to wait.

        Parameters
        ----------
        lease_id
            The lease's id.

        Returns
        -------
        Lease
            The lease, held or in the queue.
        """

    @abc.abstractmethod
    async def release(self, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
        """End a lease. Repeating it, or naming a lease that is gone, does nothing.

        Parameters
        ----------
        lease_id
            The lease's id.
        reason
            Why it ends; the history keeps it.
        """

    async def give_back(self, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
        """Release a lease; where the pool cannot hear of it now, as soon as it can.

        Returns after a few seconds at most, and goes on for as long as this process lives, also where this
        call is cancelled. What fails is logged.

        Parameters
        ----------
        lease_id
            The lease's id.
        reason
            As for :meth:`release`.
        """
        release = partial(self.release, lease_id, reason)
        await give_back((self.url, lease_id), f"GPU lease {lease_id}", release)

    async def launch(self, lease_id: str, kernel: KernelCommand) -> KernelPod:
        """Start the kernel of a held lease in a pod, in place of one that was started before.

        For leases whose ``terms.in_pod`` says so. Returns at once; see :meth:`pod`. The pod ends with its
        lease. Its own end leaves the lease as it is, so that the kernel can be launched again, unless the
        cluster took it away.

        Parameters
        ----------
        lease_id
            The lease's id.
        kernel
            What to run in the pod.

        Returns
        -------
        KernelPod
            The pod, which is about to start.

        Raises
        ------
        BadRequest
            The lease is not held, or no pod can be made of ``kernel``.
        NotAllowed
            The course or the cluster forbids it, or this pool starts no kernels.
        """
        raise _no_pods(lease_id, kernel.argv)

    async def pod(self, lease_id: str, seen: str = "") -> KernelPod:
        """Return the state of a lease's pod once it differs from the one seen, or after some seconds.

        Parameters
        ----------
        lease_id
            The lease's id.
        seen
            The ``version`` that the caller has seen; empty for none.

        Returns
        -------
        KernelPod
            The pod as it is now.

        Raises
        ------
        BadRequest
            No pod was launched for this lease.
        """
        raise _no_pods(lease_id, seen)

    async def end_pod(self, lease_id: str) -> None:
        """End a lease's pod, and keep the lease. Repeating it does nothing.

        Parameters
        ----------
        lease_id
            The lease's id.
        """
        raise _no_pods(lease_id)

    @abc.abstractmethod
    async def drain(self, device: str, *, drained: bool = True) -> DeviceStatus:
        """Grant nothing more on a device, so that it is free once its leases have ended; or grant again.

        Parameters
        ----------
        device
            Its uuid or its index.
        drained
            False to grant on it again.

        Returns
        -------
        DeviceStatus
            The device, and what is still held of it.

        Raises
        ------
        BadRequest
            There is no such device.
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
        """Return devices, leases and queue as one consistent snapshot.

        Returns
        -------
        PoolStatus
            The snapshot.
        """

    async def positions(self) -> Mapping[str, int]:
        """Return the positions in the queue of one's own leases.

        All that one has asked for oneself counts; what others did lately may not yet. This is for those
        who ask again and again: where many do, it costs a small part of :meth:`status`.

        Returns
        -------
        Mapping[str, int]
            The position of each waiting lease, 1 for the next, by lease id.
        """
        return {lease.id: lease.position for lease in (await self.status()).queue if lease.position}

    async def offers(self, holder: Holder) -> tuple[SliceRequest, ...] | None:
        """Return the slices that the holder's course offers now.

        Parameters
        ----------
        holder
            Who asks, and in which course.

        Returns
        -------
        tuple[SliceRequest, ...] or None
            The slices; None where no course file lists any.

        Raises
        ------
        NotAllowed
            The holder is not in the course.
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
    """Open a pool.

    ``embedded:[path]`` is a pool within the calling process, its store at ``path``;
    ``unix:[path]`` and ``http(s)://host/services/gpu-pool`` are a service's. Schemes are found
    through the entry points of the group ``gpu_pool.backends``: a callable that takes the URL
    and returns a pool.

    Parameters
    ----------
    url
        The pool's URL; by default ``$GPU_POOL_URL``, or else ``embedded:``.

    Returns
    -------
    Pool
        The pool, to be closed when it is no longer needed, as ``async with`` does.

    Raises
    ------
    BadRequest
        Nothing here serves such a URL.
    PoolUnreachable
        The pool cannot be opened.
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
