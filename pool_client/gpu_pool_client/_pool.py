"""The contract of a pool, and ``connect``, which finds the pool behind a URL.

Each verb of the contract is a row of one table, :data:`OPERATIONS`, see ``_operations``. Every implementation
passes the same suite, ``tests/contract``, which goes through the whole table.
"""

from __future__ import annotations

import abc
import os
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from types import TracebackType
from typing import Final
from urllib.parse import SplitResult, urlsplit

from gpu_pool_client._devices import DeviceStatus
from gpu_pool_client._errors import BadRequest, PoolUnreachable
from gpu_pool_client._lease_operations import LeaseOperations
from gpu_pool_client._leases import EndedLease, EndReason, Holder, Lease, LeaseState, Outlook, PoolStatus
from gpu_pool_client._operations import (
    ADMINISTRATORS,
    NODE_AGENTS,
    OWNERS,
    USERS,
    Cost,
    Http,
    Principal,
    Sight,
    operation,
    operations_of,
)
from gpu_pool_client._pods import MemoryMove, MoveResult, PodDeviceUse
from gpu_pool_client._processes import Process, account_of
from gpu_pool_client._requests import SliceRequest, parse_request

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


class Pool(LeaseOperations):
    """A pool of devices. All methods may raise ``PoolUnreachable``.

    Methods that take a ``lease_id`` raise ``LeaseGone`` when that lease has
    ended or never existed, except :meth:`release`, which may be repeated.
    A pool is an asynchronous context manager; leaving it closes it and ends
    no lease.
    """

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

    @operation(
        Http("POST", "/leases", holder=("course", "kernel", "batch", "yields")),
        may=USERS,
        cost=Cost.REQUEST,
        decision="request {request}",
    )
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
        return await self._perform(Pool.request, request, holder, key)

    @operation(
        None,
        may=OWNERS,
        missing=("A pool's service finds leases by their ids alone.", "Repeat the request to learn its id."),
    )
    async def find(self, key: str) -> Lease | None:
        """Return the lease of a request's key, ended ones included.

        Parameters
        ----------
        key
            See :meth:`request`.

        Returns
        -------
        Lease or None
            The lease as it was last written down; None if there was no such request.
        """
        return await self._perform(Pool.find, key)

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

    @operation(
        Http("GET", "/forecast", holder=("course", "anybody", "batch")),
        may=(*USERS, Principal.SERVICE),
        cost=Cost.QUESTION,
    )
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
        return await self._perform(Pool.forecast, request, holder)

    @operation(
        Http("POST", "/devices/{device}/drain", required=("drained",)),
        may=ADMINISTRATORS,
        cost=Cost.DECISION,
        decision="{drained}drain {device}",
        refusal=("Only an administrator can drain a GPU.", "Ask the administrator."),
    )
    async def drain(self, device: str, *, drained: bool = True, hibernate: bool = False) -> DeviceStatus:
        """Grant nothing more on a device, so that it is free once its leases have ended; or grant again.

        Parameters
        ----------
        device
            Its uuid or its index.
        drained
            False to grant on it again.
        hibernate
            Whether the kernels of its leases go to disk as soon as they are idle, as far as their servers can
            do that, and stay there for as long as it is drained: :attr:`Lease.hibernates`. So do kernels that
            are parked and may come back to any device. Draining again without it changes nothing of that; one
            with parts of several devices stays until none of them is drained so. A service of a release that
            cannot do this drains all the same: :attr:`DeviceStatus.hibernates` is None there.

        Returns
        -------
        DeviceStatus
            The device, and what is still held of it.

        Raises
        ------
        BadRequest
            There is no such device.
        """
        return await self._perform(Pool.drain, device, drained=drained, hibernate=hibernate)

    @operation(
        Http("GET", "/history"),
        may=USERS,
        cost=Cost.ONE_AT_A_TIME,
        sees={Principal.USER: Sight.OWN},
    )
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
        return await self._perform(Pool.history, since)

    @operation(Http("GET", "/busy"), may=ADMINISTRATORS, cost=Cost.ONE_AT_A_TIME)
    async def busy_times(self, since: float = 0.0) -> Mapping[str, tuple[tuple[float, float], ...]]:
        """Return when kernels worked whose leases have ended, as far as their servers have said so.

        Parameters
        ----------
        since
            The time from which on they have ended, in Unix seconds.

        Returns
        -------
        Mapping[str, tuple[tuple[float, float], ...]]
            By lease id: when each piece of work began, in Unix seconds, and for how many seconds it lasted.
            A lease of which nobody has said anything is missing.
        """
        return await self._perform(Pool.busy_times, since)

    @operation(
        Http("GET", "/status"),
        may=(*USERS, Principal.INSTRUCTOR, Principal.SERVICE),
        cost=Cost.QUESTION,
        sees={
            Principal.USER: Sight.OWN,
            Principal.INSTRUCTOR: Sight.COURSES,
            Principal.SERVICE: Sight.NO_LEASES,
        },
    )
    async def status(self) -> PoolStatus:
        """Return devices, leases and queue as one consistent snapshot.

        Returns
        -------
        PoolStatus
            The snapshot.
        """
        return await self._perform(Pool.status)

    @operation(Http("GET", "/positions"), may=USERS, sees=dict.fromkeys(USERS, Sight.OWN))
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

    @operation(Http("GET", "/offers", holder=("course",)), may=USERS, cost=Cost.QUESTION)
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
        return await self._perform(Pool.offers, holder)

    def without_retries(self) -> Pool:
        """Return this pool for a caller who tries again: ``PoolUnreachable`` comes at the first failure.

        A pool of another process may be asked for some seconds until it answers, as it may just be
        restarted. It is not to be closed.

        Returns
        -------
        Pool
            The pool; itself where there is nobody to be asked again.
        """
        return self

    @operation(
        Http("POST", "/node/use"),
        may=NODE_AGENTS,
        cost=Cost.REPORT,
        refusal=("Only a node agent can say what is used on its node.", "Ask the administrator."),
    )
    async def report_use(
        self, devices: Sequence[str], uses: Sequence[PodDeviceUse], *, complete: bool = True
    ) -> None:
        """Say what the pods of the caller's node use of its devices now, in place of what was said before.

        What is said holds for some seconds. After that, what these pods use is not known.

        Parameters
        ----------
        devices
            The uuids of the devices that were looked at.
        uses
            What each pod uses of each of them. One that is not here uses nothing there.
        complete
            Whether these are all devices of the node. Of pods without a use that is told here, nothing is
            known otherwise.

        Raises
        ------
        BadRequest
            That cannot be so, such as more memory than any device has.
        NotAllowed
            Somebody else than a node agent calls this, or a pod is of another node. What was said of
            this node before does not count any more then.
        """
        await self._perform(Pool.report_use, devices, uses, complete=complete)

    @operation(
        Http("POST", "/node/moves"),
        may=NODE_AGENTS,
        cost=Cost.REPORT,
        refusal=(
            "Only a node agent can move what kernels keep on its node's devices.",
            "Ask the administrator.",
        ),
    )
    async def move_memory(
        self,
        unmovable: Mapping[str, str],
        results: Sequence[MoveResult] = (),
        *,
        known: Sequence[str] = (),
        seconds: float = 0.0,
    ) -> tuple[MemoryMove, ...]:
        """Say what came of moves, and return those that are wanted on the caller's node now.

        Whoever calls this again and again can suspend and restore what pods keep on these devices.

        Parameters
        ----------
        unmovable
            By the uuid of each device of the node: why what processes keep there cannot be moved away, as a
            clause that can follow "since"; empty where it can.
        results
            What came of moves since the last call. One that is not wanted any more is passed over.
        known
            The ids of moves that the caller is at.
        seconds
            For how long to wait for one that it is not at.

        Returns
        -------
        tuple[MemoryMove, ...]
            All that are wanted, also those that are known.

        Raises
        ------
        BadRequest
            That cannot be so.
        NotAllowed
            Somebody else than a node agent calls this, or this pool suspends nothing.
        """
        return await self._perform(Pool.move_memory, unmovable, results, known=known, seconds=seconds)

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


#: The table: every operation of the contract.
OPERATIONS: Final = operations_of(Pool)


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
