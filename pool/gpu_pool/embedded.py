"""The embedded pool: the ledger opened in the caller's own process, no daemon.

For one Unix user on one machine. Several processes may open the same ledger;
every decision is one transaction, so none of them needs to be in charge.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote, unquote

from gpu_pool.audit import acting, audit_log, refusals, this_process
from gpu_pool.courses import CourseVersion
from gpu_pool.enforcing import Enforcer
from gpu_pool.gate import CourseGate
from gpu_pool.inventory import Inventory, discover
from gpu_pool.inventory.activity import activity_of
from gpu_pool.isolation import Isolation
from gpu_pool.isolation.choosing import owned, unowned
from gpu_pool.ledger import files
from gpu_pool.ledger.book import Book
from gpu_pool.ledger.database import Database
from gpu_pool.ledger.leases import gone
from gpu_pool.ledger.ownership import Ownership
from gpu_pool.ledger.thread import LedgerThread
from gpu_pool.looking import Looker
from gpu_pool.readings import Reading
from gpu_pool.settings import PoolSettings, load_settings
from gpu_pool_client import (
    Activity,
    BadRequest,
    Device,
    DeviceStatus,
    EndReason,
    Holder,
    KernelCommand,
    KernelPod,
    Lease,
    LeaseState,
    NotAllowed,
    Outlook,
    Pool,
    PoolStatus,
    PoolUnreachable,
    Process,
    SliceRequest,
)
from gpu_pool_client.pool import split_url

T = TypeVar("T")

#: How often a waiter reads its place: a few microseconds of work each time.
_POLL: Final = 0.1
#: How often, at most, all waiters together look for processes that are gone.
_LOOK: Final = 1.0


def open_embedded(url: str) -> EmbeddedPool:
    """Return the pool at ``embedded:[path]``; see :func:`gpu_pool_client.connect`."""
    return EmbeddedPool(ledger_path(url), load_settings())


def ledger_path(url: str) -> Path:
    """Return the ledger's file that an ``embedded:`` URL names."""
    parts = split_url(url)
    text = "" if parts is None else unquote(parts.netloc + parts.path)
    if parts is None or parts.query or parts.fragment or (text and not text.isprintable()):
        raise BadRequest(f"{url[:200]!a} is not the URL of an embedded pool.", "Accepted: embedded:[path].")
    path = Path(text).expanduser() if text else files.default_path()
    return path.absolute()


class EmbeddedPool(Pool):
    """A pool whose decisions this process makes itself, in the ledger that all share.

    The ledger is opened, and the machine's devices are registered, by the
    first call. It may be used from several event loops.
    """

    def __init__(
        self,
        path: Path,
        settings: PoolSettings | None = None,
        find_devices: Callable[[], Inventory] = discover,
        isolation: Isolation | None = None,
        *,
        owner: bool = False,
    ) -> None:
        self.url = f"embedded:{quote(str(path))}"
        self._path = path
        self._settings = settings or PoolSettings()
        self._find_devices = find_devices
        self._gate = CourseGate(self._settings)
        self._owner = owner
        self._ownership: Ownership | None = None
        self._ledger = LedgerThread(path, self._open)
        self._looker = Looker()
        #: None where decisions are not written down.
        self.audit = audit_log(self._settings.audit_log)
        tiers = isolation or (owned if owner else unowned)(self._settings)
        self._enforcer = Enforcer(path, self._settings, tiers, self._ledger, owner=owner)

    async def request(
        self,
        request: SliceRequest,
        holder: Holder,
        key: str,
        *,
        groups: Collection[str] | None = None,
        server: str | None = None,
    ) -> Lease:
        """See ``Pool.request``. Processes that are gone are looked for when nothing is free.

        ``groups`` are the holder's; None for those that the system knows. ``server`` is the
        holder's server at a JupyterHub that asks, if one does.
        """
        what = {"user": holder.user, "course": holder.course, "request": str(request)}
        with self._asked(what):
            try:
                known = await self._gate.groups(holder, groups)
                check = partial(self._gate.check, request, holder, known)
                within = await self._devices_for(request, holder, server)
                lease = await self._do(lambda book: book.request(request, holder, key, check, within))
                if lease.state is LeaseState.WAITING:
                    lease = await self._do(lambda book: _after_a_look(book, lease.id))
            except (asyncio.CancelledError, PoolUnreachable):
                # The decision may still be made, or has been, and nobody would know of it.
                self._ledger.later(lambda book: book.release_key(key, EndReason.WITHDRAWN))
                raise
        return await self._enforcer.hand_out(lease)

    async def _devices_for(
        self,
        request: SliceRequest,  # noqa: ARG002 - for pools that look
        holder: Holder,  # noqa: ARG002
        server: str | None,  # noqa: ARG002
    ) -> Collection[str]:
        """Return the uuids of the devices that a request may have; none mean all. May refuse it."""
        return ()

    async def lease(self, lease_id: str) -> Lease:
        """See ``Pool.lease``."""
        return await self._enforcer.hand_out(await self._do(lambda book: book.lease(lease_id)))

    async def wait(self, lease_id: str, timeout: float | None = None) -> Lease:
        """See ``Pool.wait``."""
        give_up_at = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                lease = await self._do(lambda book: _after_a_look(book, lease_id, _LOOK))
                if lease.state is LeaseState.HELD:
                    return await self._enforcer.hand_back(lease)
                _refuse_unless_waiting(lease)
                if give_up_at is not None and time.monotonic() >= give_up_at:
                    raise await self._do(lambda book: book.shortage(lease_id))
                await asyncio.sleep(_POLL)
        except asyncio.CancelledError:
            with self._asked({}):
                self._ledger.later(lambda book: book.release(lease_id, EndReason.WITHDRAWN))
            raise

    async def watch(self, lease_id: str) -> AsyncIterator[Lease]:
        """See ``Pool.watch``."""
        last: Lease | None = None
        while last is None or last.state is not LeaseState.ENDED:
            lease = await self._enforcer.hand_out(
                await self._do(lambda book: _after_a_look(book, lease_id, _LOOK))
            )
            if lease != last:
                yield lease
            last = lease
            await asyncio.sleep(_POLL)

    async def explain(self, lease_id: str) -> Outlook:
        """See ``Pool.explain``."""
        return await self._do(lambda book: book.explain(lease_id))

    async def forecast(
        self,
        request: SliceRequest,
        holder: Holder,
        *,
        groups: Collection[str] | None = None,
        server: str | None = None,
    ) -> Outlook | None:
        """See ``Pool.forecast``, and :meth:`request`. Nobody knows in which courses somebody new is."""
        check = None
        if holder.user:
            check = partial(self._gate.check, request, holder, await self._gate.groups(holder, groups))
        within = await self._devices_for(request, holder, server)
        return await self._do(lambda book: book.forecast(request, holder, check, within))

    async def attach(
        self,
        lease_id: str,
        process: Process,
        *,
        ready_within: float | None = None,
        grace: float = 0.0,
    ) -> Lease:
        """See ``Pool.attach``."""
        lease = await self._do(lambda book: book.attach(lease_id, process, ready_within, grace))
        await self._enforcer.attach(lease, process)
        return await self._enforcer.hand_out(lease)

    async def renew(self, lease_id: str, ttl: float | None = None) -> Lease:
        """See ``Pool.renew``."""
        return await self._enforcer.hand_out(await self._do(lambda book: book.renew(lease_id, ttl)))

    async def activity(self, lease_id: str) -> Activity:
        """See ``Pool.activity``."""
        lease = await self.lease(lease_id)
        if lease.state is LeaseState.ENDED:
            raise gone(lease)
        found = await self._activity(lease)
        if self._settings.checkpoint and found.initialised:
            return replace(found, movable=await self._enforcer.is_movable(lease))
        return found

    async def resize(
        self,
        lease_id: str,
        request: SliceRequest,
        *,
        caller: Process | None = None,
        groups: Collection[str] | None = None,
    ) -> Lease:
        """See ``Pool.resize``. Asked in the name of ``caller``, by default this process."""
        with self._asked({"lease": lease_id, "request": str(request)}):
            return await self._resize(lease_id, request, caller, groups)

    async def _resize(
        self,
        lease_id: str,
        request: SliceRequest,
        caller: Process | None,
        groups: Collection[str] | None,
    ) -> Lease:
        lease = await self._own(lease_id, caller, "change its size")
        if (await self._activity(lease)).initialised is not False or self._enforcer.keeps_state(lease):
            raise NotAllowed(
                "The slice cannot change its size: its process has initialised CUDA, or may have, "
                "and what it keeps on the GPU would be in the way.",
                "End the process to give the slice back.",
            )
        known = await self._gate.groups(lease.holder, groups)

        def resize(book: Book) -> Lease:
            self._gate.check(request, lease.holder, known)
            return book.resize(lease_id, request)

        return await self._enforcer.hand_out(await self._do(resize))

    async def park(self, lease_id: str, *, caller: Process | None = None) -> Lease:
        """See ``Pool.park``. Asked in the name of ``caller``, by default this process."""

        async def park() -> Lease:
            return await self._do(lambda book: book.park(lease_id))

        with self._asked({"lease": lease_id}):
            lease = await self._own(lease_id, caller, "be lent to others")
            if (await self._activity(lease)).initialised is False:
                return await park()
            return await self._enforcer.park(lease, park)

    async def _activity(self, lease: Lease) -> Activity:
        """Look at what a lease's processes do, which takes some time on a machine with many."""
        return await asyncio.to_thread(
            activity_of, lease.process, lease.slices, lease.id, lease.holder.process
        )

    async def _own(self, lease_id: str, caller: Process | None, what: str) -> Lease:
        """Return a lease; refuse, with ``NotAllowed``, to take its slices away in another's name."""
        lease = await self.lease(lease_id)
        if lease.state is LeaseState.ENDED:
            raise gone(lease)
        if lease.holder.process != (caller or Process.current()):
            raise NotAllowed(
                f"The slice cannot {what}: only the process that asked for it knows whether it is in use.",
                "Release it to take it back.",
            )
        return lease

    async def resume(self, lease_id: str) -> Lease:
        """See ``Pool.resume``."""
        with self._asked({"lease": lease_id}):
            return await self._enforcer.hand_back(await self._do(lambda book: book.resume(lease_id)))

    async def release(self, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
        """See ``Pool.release``."""
        with self._asked({"lease": lease_id}):
            await self._do(lambda book: book.release(lease_id, reason))

    async def revoke(self, lease_id: str, words: str, reason: EndReason = EndReason.REVOKED) -> None:
        """End a lease, by default in an administrator's name; its holder reads ``words``.

        Raises ``LeaseGone``.
        """
        with self._asked({"lease": lease_id}):
            await self._do(lambda book: book.revoke(lease_id, words, reason))

    async def launch(self, lease_id: str, kernel: KernelCommand, *, server: str | None = None) -> KernelPod:  # noqa: ARG002 - for pools that start kernels
        """See ``Pool.launch``. Asked by the holder's ``server`` at a JupyterHub, if by one."""
        return await super().launch(lease_id, kernel)

    async def pod(self, lease_id: str, seen: str = "", seconds: float = 0.0) -> KernelPod:  # noqa: ARG002
        """See ``Pool.pod``; ``seconds`` is for how long to wait for news."""
        return await super().pod(lease_id, seen)

    def stop_waiting(self) -> None:
        """Let nobody wait any more for news of a pod."""

    async def drain(self, device: str, *, drained: bool = True) -> DeviceStatus:
        """See ``Pool.drain``."""
        with self._asked({"device": device}):
            return await self._do(lambda book: book.drain(device, drained))

    async def history(self, since: float = 0.0, *, user: str | None = None) -> list[Mapping[str, Any]]:
        """See ``Pool.history``. With ``user``, of that user alone."""
        return await self._do(lambda book: book.history(since, user))

    async def course_versions(
        self, course: str, most: int, before: int | None = None
    ) -> tuple[CourseVersion, ...]:
        """Return the latest versions of a course file that were kept, see ``VersionTable.latest``."""
        return await self._do(lambda book: book.versions.latest(course, most, before))

    async def keep_versions(self, course: str, versions: Sequence[CourseVersion]) -> int:
        """Keep versions of a course file; return the number of the last."""
        return await self._do(lambda book: book.versions.add(course, versions))

    async def remove_version(self, number: int) -> None:
        """Keep a version of a course file no longer."""
        await self._do(lambda book: book.versions.remove(number))

    async def reread_course(self, file: str) -> None:
        """Follow a course file that has been replaced, at once."""
        await self._ledger.do(lambda book: self._gate.reread(file, book))

    async def status(self) -> PoolStatus:
        """See ``Pool.status``.

        Looks first for processes that are gone, and enforces no more what is not held.
        """

        def look_and_read(book: Book) -> PoolStatus:
            book.look()
            return book.status(self.url)

        status = await self._do(look_and_read)
        await self._enforcer.settle([each for each in status.leases if each.state is LeaseState.HELD])
        return replace(status, leases=tuple(map(self._enforcer.state, status.leases)))

    @contextlib.contextmanager
    def _asked(self, what: Mapping[str, object]) -> Iterator[None]:
        """Do what somebody asks for: if nobody else is known to, this process. Refusals are written down."""
        by_itself = self._owner or self.audit is None
        with acting(None if by_itself else this_process()), refusals(self.audit, what):
            yield

    async def look_at_devices(self, devices: Collection[Device]) -> Mapping[str, Reading | None]:
        """Return what each of these does, real ones alone, by uuid; None for one that does not answer."""
        return await self._looker.look(devices)

    async def try_writing(self, within: float) -> None:
        """Try whether decisions can be kept. Raises ``PoolUnreachable`` where not, within so many seconds."""
        await self._ledger.do(lambda book: book.try_writing(), within)

    async def close(self) -> None:
        """Close the ledger once what was begun is done. Leases live on."""
        await self._looker.close()
        await self._enforcer.close()
        await self._ledger.close()
        if self._ownership is not None:
            self._ownership.close()

    def _open(self, give_up_at: float | None) -> tuple[Database, Book]:
        """Open the ledger, and register this machine's devices in it."""
        devices = self._enforcer.adapt(self._find_devices().devices)
        with contextlib.ExitStack() as opened:
            database = opened.enter_context(contextlib.closing(Database(self._path)))
            ownership = opened.enter_context(contextlib.closing(Ownership(self._path, owner=self._owner)))
            # What is registered may serve the line, whose order the course files know.
            book = self._gate.keep_up(Book(database, self._settings))
            book.give_up_at = give_up_at
            # A process that sees no devices (no driver in its container, no variable
            # in its terminal) must not take away those that another one registered.
            if devices:
                book.register(devices)
            self._enforcer.recover(book)
            opened.pop_all()
        self._ownership = ownership
        return database, book

    async def _do(self, job: Callable[[Book], T]) -> T:
        """Run a job on the ledger."""
        return await self._ledger.do(lambda book: job(self._gate.keep_up(book)))


def _after_a_look(book: Book, lease_id: str, at_most_every: float = 0.0) -> Lease:
    book.look(at_most_every)
    return book.lease(lease_id)


def _refuse_unless_waiting(lease: Lease) -> None:
    if lease.state is LeaseState.ENDED:
        raise gone(lease)
    if lease.state is LeaseState.PARKED:
        raise BadRequest("A parked lease is not in line.", "Resume it first.")
