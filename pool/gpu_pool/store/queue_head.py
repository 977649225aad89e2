"""The part of a long queue whose turn may have come, read from the store without reading the rest."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from gpu_pool.policy import placement, queue
from gpu_pool.policy.queue import Shape, Situation, Waiter
from gpu_pool.policy.queue_state import Rules
from gpu_pool.store.database import Database, Row
from gpu_pool.store.lease_table import read_request
from gpu_pool_client import DeviceStatus

#: Fewer than this are read without looking who of them comes first.
_FEW = 16


def allowed_devices(row: Row) -> frozenset[str]:
    """Return the uuids of the devices that a waiting lease may have; empty for any."""
    return _devices(row["home"] or row["within"])


@functools.lru_cache(maxsize=1024)
def _devices(uuids: str) -> frozenset[str]:
    return frozenset(filter(None, uuids.split(",")))


def _shape(row: Row) -> Shape:
    return read_request(row["request"]), allowed_devices(row)


class QueueHead:
    """The waiters that something fits for, as far as they come before all others.

    A few kinds of lease make up a long queue: those of one course who ask for the
    same. What does not fit one of a kind fits none. Nothing is remembered from
    one decision to the next.
    """

    def __init__(
        self,
        database: Database,
        read: Callable[[Row], Waiter],
        reserved: Iterable[Waiter],
        statuses: Iterable[DeviceStatus],
        rules: Rules,
    ) -> None:
        self._db, self._read, self._rules = database, read, rules
        taken = {uuid for waiter in reserved for uuid in waiter.reserved}
        self._free = [status for status in statuses if status.device.uuid not in taken]
        kinds = self._db.run("kinds").fetchall()
        #: The courses of all who wait.
        self.courses = frozenset(row["course"] for row in kinds)
        #: What fits beside what is reserved.
        self._shapes = {shape for shape in map(_shape, kinds) if self._fits(shape)}
        self.kinds = [row for row in kinds if _shape(row) in self._shapes]
        self._courses: dict[str, list[Row]] = {}
        for row in self.kinds:
            self._courses.setdefault(row["course"], []).append(row)
        self._first = list(islice(chain(*map(self._arrivals, self._courses.values())), _FEW))

    @property
    def is_one(self) -> bool:
        """Whether something fits for one alone."""
        return len(self._first) == 1

    def waiters(self, now: Situation, prior: Iterable[str]) -> list[Waiter]:
        """Return those without reservation who come first; ``now`` needs only the courses.

        ``prior`` are the users who may have a higher priority than others of their course.
        """
        if len(self._first) < _FEW:
            return self._first
        arrivals = [(self._arrivals(kinds), _last_arrivals(kinds)) for kinds in self._courses.values()]
        room = sum(queue.room(shape[0], self._usable(shape), self._rules) for shape in self._shapes)
        found = queue.queue_head(now, arrivals, room)
        rows = chain(*(self._db.run("waiters_of_user", {"user": user}) for user in prior))
        found += [self._read(row) for row in rows if _shape(row) in self._shapes and not row["reserved"]]
        return list({waiter.number: waiter for waiter in found}.values())

    def _fits(self, shape: Shape) -> bool:
        return placement.place(shape[0], self._usable(shape), self._rules) is not None

    def _usable(self, shape: Shape) -> list[DeviceStatus]:
        devices = shape[1]
        return [status for status in self._free if not devices or status.device.uuid in devices]

    def _arrivals(self, kinds: Sequence[Row]) -> Iterator[Waiter]:
        """Yield those of one course who have nothing reserved, in order of arrival."""
        lines = [self._db.run("waiters_of_kind", {"kind": kind["kind"]}) for kind in kinds]
        for row in heapq.merge(*lines, key=lambda row: (row["waiting_since"], row["number"])):
            if not row["reserved"]:
                yield self._read(row)


def _last_arrivals(kinds: Iterable[Row]) -> Mapping[Shape, float]:
    last: dict[Shape, float] = {}
    for kind in kinds:
        shape = _shape(kind)
        last[shape] = max(kind["last_arrival"], last.get(shape, kind["last_arrival"]))
    return last
