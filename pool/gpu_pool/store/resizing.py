"""A lease that changes its size: what it may have now, without passing those in the queue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gpu_pool.clock import Clock
from gpu_pool.policy import admission, burst, placement, quotas
from gpu_pool.policy.placement import give_back
from gpu_pool.policy.queue_state import Rules
from gpu_pool.policy.sharing import Sharing
from gpu_pool.store.database import Database, Row
from gpu_pool.store.device_table import DeviceTable
from gpu_pool.store.lease_table import read_request
from gpu_pool.store.usage import UsageTotals
from gpu_pool_client import BadRequest, Device, DeviceStatus, LeaseState, Slice, SliceRequest, TimedOut


class Resizing:
    """Changes what leases ask for, inside the transactions of its caller, who then serves the queue."""

    def __init__(
        self,
        database: Database,
        devices: DeviceTable,
        use: UsageTotals,
        rules: Rules,
        sharing: Sharing,
        clock: Clock,
    ) -> None:
        self._db = database
        self._devices = devices
        self._use = use
        self._rules = rules
        self.sharing = sharing
        self._clock = clock

    def change(self, row: Row, request: SliceRequest, *, ahead: bool = False, stays: bool = False) -> None:
        """Change what the lease of this row asks for. Raises what ``Pool.resize`` does.

        One that ``stays`` has it on the devices of its process, or not at all.
        """
        before = read_request(row["request"])
        is_held, held = row["state"] == LeaseState.HELD, _guaranteed(self._devices.read(row["slices"]))
        only_limit = is_held and request.changes_only_limit_of(before)
        if request == before or (only_limit and ahead):  # a limit needs nothing that could be taken ahead
            own = self._of_process(before, held) if is_held and ahead else held
            if own != held:  # what was taken ahead has not come to be used
                self._write(row, before, held, own)
            return
        if only_limit:
            self._change_limit(row, request)
            return
        statuses = self._within(row)
        size, grows = self._checked(row, request, before, [status.device for status in statuses])
        if is_held:
            self._change_now(row, request, statuses, ahead=ahead, stays=stays)
        else:
            self._change_later(row, request, size, grows=grows)

    def _change_limit(self, row: Row, request: SliceRequest) -> None:
        """Let a lease use more, or less, on top of what it holds, which stays where it is."""
        held = self._devices.read(row["slices"])
        self._write(row, request, held, [self._up_to(request, part) for part in held])

    def _up_to(self, request: SliceRequest, part: Slice) -> Slice:
        limit = placement.cut(request, part.device, self._rules).limit_mib
        # What was taken ahead may be more than that.
        limit = limit if limit > part.memory_mib else 0
        on_top = min(part.burst_mib, max(0, limit - part.memory_mib))
        return replace(part, limit_mib=limit, burst_mib=on_top)

    def check(self, row: Row, request: SliceRequest) -> None:
        """Refuse a size that the lease of this row could never have, whatever is free and what it runs."""
        before = read_request(row["request"])
        if request != before:
            self._checked(row, request, before, [status.device for status in self._within(row)])

    def _within(self, row: Row) -> list[DeviceStatus]:
        """Return the devices that the lease may be on."""
        within = row["within"].split(",") if row["within"] else None
        return [s for s in self._devices.statuses() if within is None or s.device.uuid in within]

    def _checked(
        self, row: Row, request: SliceRequest, before: SliceRequest, devices: Sequence[Device]
    ) -> tuple[tuple[Slice, ...], bool]:
        """Return what a request takes, and whether that is more than before; refuse what can never be."""
        admission.check(request, devices, self._rules)
        size = _size(request, devices, self._rules)
        grows = not _is_within(size, _size(before, devices, self._rules))
        # Whoever is over a quota, since it was lowered, may still have less; and what was taken ahead.
        held = self._devices.read(row["slices"])
        largest_first = sorted(held, key=lambda part: (part.milli, part.memory_mib), reverse=True)
        if grows and not (row["state"] == LeaseState.HELD and _is_within(size, largest_first)):
            self._check_quotas(row, request, size)
        return size, grows

    def _check_quotas(self, row: Row, request: SliceRequest, size: Sequence[Slice]) -> None:
        user, course = row["user"], row["course"]
        limits = list(quotas.scopes(self.sharing, user, course))
        if not limits:
            return
        milli, memory_mib = _milli(size) - row["milli"], _memory_mib(size) - row["memory_mib"]
        more = quotas.Account(user, course, 0, max(0, milli), max(0, memory_mib))
        accounts = list(self._use.accounts())
        before = quotas.Account(user, course, 1, row["milli"], row["memory_mib"])
        allowed = quotas.Allowed(request, size[0].device, self._rules, limits, accounts, before)
        for limit in limits:
            quotas.check(limit, more, accounts, allowed)

    def _change_now(
        self,
        row: Row,
        request: SliceRequest,
        statuses: Sequence[DeviceStatus],
        *,
        ahead: bool,
        stays: bool,
    ) -> None:
        held = self._devices.read(row["slices"])
        rooms = list(self._rooms(give_back(statuses, held), held, batch=bool(row["batch"])))
        of_process = self._of_process(read_request(row["request"]), held) if stays else held
        own = {part.device.uuid for part in of_process}
        at_home = [status for status in rooms if status.device.uuid in own]
        parts = placement.place(request, at_home, self._rules)
        if stays:
            parts, rooms = parts if parts is not None and len(parts) == len(own) else None, at_home
        else:
            parts = parts or placement.place(request, rooms, self._rules)
        if parts is None:
            raise self._refusal(row, request, rooms)
        if ahead:  # what its process has stays until that has ended, and nobody else can have the rest
            before = read_request(row["request"])
            self._write(row, before, held, _both(self._of_process(before, held), parts))
        else:
            self._write(row, request, held, parts)

    def _of_process(self, request: SliceRequest, held: Sequence[Slice]) -> Sequence[Slice]:
        """Return what a lease holds without what was taken ahead, which comes after it or on top of it."""
        devices = [part.device for part in held[: request.count]]
        parts = tuple(placement.candidates(request, devices, self._rules))
        return parts if len(parts) == len(devices) else held

    def _write(
        self, row: Row, request: SliceRequest, before: Sequence[Slice], parts: Sequence[Slice]
    ) -> None:
        self._use.add(row)
        written = {
            "slices": self._devices.write(parts),
            "burst_mib": burst.total_mib(parts),
            "now": self._clock.wall(),
            "uptime": self._clock.uptime(),
        }
        values = {**_asked(row, request, parts), **written}
        self._db.run("resize_held", values)
        self._devices.count("give_back", before)
        self._devices.count("take", parts)

    def _rooms(
        self, statuses: Iterable[DeviceStatus], held: Sequence[Slice], *, batch: bool
    ) -> Iterator[DeviceStatus]:
        """Yield the devices with what is free there for a lease whose slices have been given back.

        Where nothing is granted, or others wait for what becomes free, that is what it held itself.
        """
        statuses = list(statuses)
        mine = {part.device.uuid: part for part in held}
        wanted = self._wanted([status.device for status in statuses], batch=batch)
        for status in statuses:
            uuid = status.device.uuid
            if not status.drained and uuid not in wanted:
                yield status
            elif uuid in mine:
                yield _nothing_but(mine[uuid], status)

    def _wanted(self, devices: Sequence[Device], *, batch: bool) -> set[str]:
        """Return the uuids of the devices on which somebody in the queue could be placed.

        Whoever comes after the lease, as batch work does after all other, does not count.
        """
        rows = self._db.run("waiting_before", {"batch": batch}).fetchall()
        shapes = {(row["request"], row["home"] or row["within"]) for row in rows}
        return {
            part.device.uuid
            for request, home in shapes
            for part in placement.candidates(read_request(request), devices, self._rules)
            if not home or part.device.uuid in home.split(",")
        }

    def _refusal(self, row: Row, request: SliceRequest, rooms: Sequence[DeviceStatus]) -> TimedOut:
        line = self._db.one("last_turn")[0]
        why = "others are waiting for it in the queue" if line else "not as much is free"
        milli = placement.largest(rooms, self._rules)
        largest = SliceRequest(milli=milli).size if milli else None
        now = read_request(row["request"]).named
        most = f"It stays as it is. At this moment it could have up to {admission.up_to(milli)}."
        return TimedOut(
            f"The slice of {now} cannot become {request.named} now: {why}.",
            most if largest else "",
            largest_now=largest,
        )

    def _change_later(self, row: Row, request: SliceRequest, size: Sequence[Slice], *, grows: bool) -> None:
        """Let a lease that is not held ask for something else from now on."""
        turn, since = row["turn"], row["waiting_since"]
        if grows and row["state"] == LeaseState.WAITING:
            turn, since = int(self._db.one("last_turn")[0]) + 1, self._clock.wall()
        # It has no state on the devices that it was parked on, and need not return to them.
        home = row["home"] if self._fits_home(row["home"], request) else ""
        values = {"home": home, "turn": turn, "waiting_since": since}
        self._db.run("resize_later", {**_asked(row, request, size), **values})

    def _fits_home(self, home: str, request: SliceRequest) -> bool:
        devices = [s.device for s in self._devices.statuses() if s.device.uuid in home.split(",")]
        return len(list(placement.candidates(request, devices, self._rules))) >= request.count


def with_length(row: Row, request: SliceRequest) -> SliceRequest:
    """Return what a lease is to ask for, with the length that it has where none is said.

    Others have been let in, or told when they are served, by the end of what has been held:
    that stays. Raises ``BadRequest``.
    """
    before = read_request(row["request"])
    if request.length is None:
        return replace(request, length=before.length)
    if request.length != before.length and row["first_held_at"] is not None:
        raise BadRequest(
            "For how long a slice is held is said when it is asked for, and stays once it has been granted.",
            f"Ask for {replace(request, length=None)} alone, or give it back and ask for another.",
        )
    return request


def _size(request: SliceRequest, devices: Sequence[Device], rules: Rules) -> tuple[Slice, ...]:
    """Return what a request takes on the first device that could hold it, as often as it asks."""
    part = next(placement.candidates(request, devices, rules), None)
    return (part,) * request.count if part else ()


def _is_within(size: Sequence[Slice], before: Sequence[Slice]) -> bool:
    """Whether this is no more than that, in number, share and memory."""
    return len(size) <= len(before) and all(
        new.milli <= old.milli and new.memory_mib <= old.memory_mib
        for new, old in zip(size, before, strict=False)
    )


def _both(held: Sequence[Slice], parts: Sequence[Slice]) -> tuple[Slice, ...]:
    """Return what covers two sets of slices, of each device once: those held now first."""
    found = {part.device.uuid: part for part in held}
    for part in parts:
        known = found.get(part.device.uuid, part)
        memory_mib = max(part.memory_mib, known.memory_mib)
        found[part.device.uuid] = replace(
            part,
            milli=max(part.milli, known.milli),
            memory_mib=memory_mib,
            contexts=max(part.contexts, known.contexts),
            limit_mib=known.limit_mib if known.limit_mib > memory_mib else 0,
        )
    return tuple(found.values())


def _guaranteed(parts: Iterable[Slice]) -> tuple[Slice, ...]:
    """Return slices without their bursts, which a resize leaves to the next decision."""
    return tuple(replace(part, burst_mib=0) for part in parts)


def _milli(parts: Iterable[Slice]) -> int:
    return sum(part.milli for part in parts)


def _memory_mib(parts: Iterable[Slice]) -> int:
    return sum(part.memory_mib for part in parts)


def _asked(row: Row, request: SliceRequest, parts: Sequence[Slice]) -> dict[str, object]:
    """Return what every change of a row's request writes."""
    size = {"milli": _milli(parts), "memory_mib": _memory_mib(parts)}
    return {"number": row["number"], "request": str(request), **size}


def _nothing_but(part: Slice, status: DeviceStatus) -> DeviceStatus:
    """Return the device as if all of it but this slice were held; of a drained one, too."""
    return replace(
        status,
        drained=False,
        held_milli=status.milli - part.milli,
        held_memory_mib=status.device.memory_mib - part.memory_mib,
        held_contexts=(status.device.contexts or 0) - part.contexts,
    )
