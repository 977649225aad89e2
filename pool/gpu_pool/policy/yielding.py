"""Which kernels give way to those who wait, what that does to them, and where they stand on return. Pure.

An idle kernel costs others nothing while nobody waits, so its slice is asked back only for somebody
who could then start, see :func:`ask_back`, and sooner for those who have waited for long, see
:func:`yields_at`. It takes a slice again at its next cell, and overtakes each newcomer at most once: see
:func:`place_of_return`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpu_pool.policy import placement
from gpu_pool.policy.queue import in_order_of_turn
from gpu_pool.policy.queue_state import Rules, Situation, Waiter
from gpu_pool_client import Activity, DeviceStatus, Lease, LeaseState, Slice, SliceRequest, TakingEffect
from gpu_pool_client._free import fits
from gpu_pool_client._leases import gives_way_after

#: Seconds that a kernel is idle before it may be asked back, unless its course says otherwise.
YIELD_AFTER: Final = 60.0
#: Slices are also asked back for leases that end within so many seconds, though these never yield.
SOON: Final = 600.0
#: How often one kernel is parked in an hour at most, because somebody waits.
MOST_PARKINGS: Final = 20
_HOUR: Final = 3_600.0


@dataclass(frozen=True, slots=True)
class HeldKernel:
    """One held lease of a kernel, as far as giving way is concerned. Times are those of the situation."""

    #: The store's number of the lease.
    number: int
    parts: tuple[Slice, ...]
    #: Since when no cell has run in it; None while one runs, and where that is not known.
    idle_since: float | None
    #: Whether its devices work for it; None where that is not known.
    working: bool | None
    #: How long it is idle before it may be asked back, or whoever needs it has waited, in seconds; None for
    #: never.
    yield_after: float | None = YIELD_AFTER
    #: Whether it has taken its slice again and run no cell since.
    returned: bool = False
    #: When it was parked because somebody waited, in order of time; an hour's are enough.
    parkings: tuple[float, ...] = ()
    #: Whether it has been asked back already: what it has will be free.
    asked: bool = False


def yields_at(kernel: HeldKernel, waiting_since: float = -math.inf) -> float | None:
    """Return from when on it may be asked back if nothing changes; None for never.

    That is once it has been idle for as long as its course says, or whoever needs what it has has waited
    for as long: so that nobody waits for longer beside slices that idle.

    Parameters
    ----------
    kernel
        What is known of it.
    waiting_since
        Since when the one who needs it waits; by default, for long enough.
    """
    idle_since, after = kernel.idle_since, kernel.yield_after
    if idle_since is None or after is None or kernel.working is not False or kernel.returned or kernel.asked:
        return None
    at = max(idle_since + gives_way_after(after), min(idle_since, waiting_since) + after)
    if len(kernel.parkings) >= MOST_PARKINGS:
        at = max(at, kernel.parkings[-MOST_PARKINGS] + _HOUR)
    return at


def may_yield(kernel: HeldKernel, now: float, waiting_since: float = -math.inf) -> bool:
    """Whether it may be asked back now for somebody who waits since then; see :func:`yields_at`."""
    at = yields_at(kernel, waiting_since)
    return at is not None and at <= now


def is_yielded_to(yield_after: float | None, ends_within: float | None) -> bool:
    """Whether others give way to a lease: to one that gives way itself, or that ends soon.

    Parameters
    ----------
    yield_after
        After how many idle seconds it gives way; None for never.
    ends_within
        For how many seconds it is held at most; None where nothing limits it.
    """
    return yield_after is not None or (ends_within is not None and ends_within <= SOON)


def ask_back(
    now: Situation,
    reservations: Mapping[int, Sequence[str]],
    kernels: Iterable[HeldKernel],
    yielded_to: Mapping[int, float],
) -> dict[int, tuple[int, ...]]:
    """Say which kernels to ask back, and for whom.

    Parameters
    ----------
    now
        The pool once everything has been granted that can be.
    reservations
        What is kept free for whom, as the queue decided it: uuids by the waiter's number.
    kernels
        All held leases of kernels, those that have been asked before as well.
    yielded_to
        By number, when each of the waiters asked whom others give way to; see :func:`is_yielded_to`.

    Returns
    -------
    By waiter's number: the numbers of the kernels that it needs, each asked for one waiter alone. For
    each the fewest that free enough; among equals those that have been idle for longest.
    """
    held = list(kernels)
    idle = [kernel for kernel in held if may_yield(kernel, now.now)]
    if not idle or not now.queue:
        return {}
    coming = _Coming(now, reservations, [kernel for kernel in held if kernel.asked], idle)
    found: dict[int, tuple[int, ...]] = {}
    for waiter in in_order_of_turn(now):
        since = yielded_to.get(waiter.number)
        asked = None if since is None else coming.serve(waiter, since)
        if asked:
            found[waiter.number] = tuple(kernel.number for kernel in asked)
    return found


class _Coming:
    """The devices as they will be once those who have been asked back are gone, and whom that serves."""

    def __init__(
        self,
        now: Situation,
        reservations: Mapping[int, Sequence[str]],
        asked: Sequence[HeldKernel],
        idle: Iterable[HeldKernel],
    ) -> None:
        self._rules, self._reservations = now.rules, reservations
        self._statuses = list(now.statuses)
        for kernel in asked:
            self._statuses = placement.give_back(self._statuses, kernel.parts)
        self._idle, self._now = sorted(idle, key=_idle_since), now.now
        #: When the waiters began to wait at the latest for whom these give way, in order.
        self._latest = sorted(_latest(kernel, now.now) for kernel in self._idle)
        #: What cannot be had, though so many give way: by request, devices and what is reserved for others.
        #: Whoever has waited for longer has the same ones give way, and maybe more.
        self._vain: set[tuple[SliceRequest, frozenset[str], frozenset[str], int]] = set()

    def serve(self, waiter: Waiter, since: float) -> tuple[HeldKernel, ...] | None:
        """Take what the waiter needs, and return who gives way for it; None if that does not help."""
        taken = frozenset(
            uuid for number, kept in self._reservations.items() if number != waiter.number for uuid in kept
        )
        give_way = len(self._latest) - bisect_left(self._latest, since)
        kind = waiter.request, waiter.devices, taken, give_way
        if kind in self._vain:
            return None
        usable = _usable(self._statuses, waiter.devices, taken)
        idle = [kernel for kernel in self._idle if may_yield(kernel, self._now, since)]
        giving = () if self._place(waiter, usable) else _fewest(waiter.request, usable, idle, self._rules)
        if giving is None:
            self._vain.add(kind)
            return None
        for kernel in giving:
            self._statuses = placement.give_back(self._statuses, kernel.parts)
            self._idle.remove(kernel)
            self._latest.remove(_latest(kernel, self._now))
            self._vain.clear()
        parts = self._place(waiter, _usable(self._statuses, waiter.devices, taken)) or ()
        self._statuses = placement.deduct(self._statuses, parts)
        return giving

    def _place(self, waiter: Waiter, usable: Sequence[DeviceStatus]) -> tuple[Slice, ...] | None:
        return placement.place(waiter.request, usable, self._rules)


def _usable(
    statuses: Iterable[DeviceStatus], home: Collection[str], taken: Collection[str]
) -> list[DeviceStatus]:
    return [
        status
        for status in statuses
        if status.device.uuid not in taken and (not home or status.device.uuid in home)
    ]


def _latest(kernel: HeldKernel, now: float) -> float:
    """Return when somebody must have begun to wait at the latest, so that a kernel that is idle gives way."""
    after = kernel.yield_after or 0.0
    return math.inf if _idle_since(kernel) + after <= now else now - after


def _idle_since(kernel: HeldKernel) -> float:
    return kernel.idle_since or 0.0


def _cost(kernels: Sequence[HeldKernel]) -> tuple[int, float]:
    """Return what is compared of sets of kernels: their number, and who of them was used last."""
    return len(kernels), max(map(_idle_since, kernels), default=-math.inf)


def _fewest(
    request: SliceRequest, usable: Sequence[DeviceStatus], idle: Sequence[HeldKernel], rules: Rules
) -> tuple[HeldKernel, ...] | None:
    """Return the fewest kernels without which the request fits, given in order of idleness."""
    by_uuid = {status.device.uuid: status for status in usable}
    on: dict[str, list[HeldKernel]] = {uuid: [] for uuid in by_uuid}
    for kernel in idle:
        for part in kernel.parts:
            if part.device.uuid in on:
                on[part.device.uuid].append(kernel)
    wanted = placement.candidates(request, (status.device for status in usable), rules)
    sets = (
        _together(request.count, {part.device.uuid: part for part in parts}, by_uuid, on)
        for parts in placement.by_node(wanted)
        if len(parts) >= request.count
    )
    return min((found for found in sets if found is not None), key=_cost, default=None)


def _together(
    count: int,
    wanted: Mapping[str, Slice],
    statuses: Mapping[str, DeviceStatus],
    on: Mapping[str, Sequence[HeldKernel]],
) -> tuple[HeldKernel, ...] | None:
    """Return the fewest kernels without which so many of the wanted slices of one machine fit.

    Device after device: the one that costs the fewest kernels for each device that is won with it.
    That is the fewest in all unless slices of several devices are parts of devices.
    """
    state = {uuid: statuses[uuid] for uuid in wanted}
    given: list[HeldKernel] = []
    while True:
        missing = count - sum(fits(part, state[uuid]) for uuid, part in wanted.items())
        if missing <= 0:
            return tuple(_needed(count, given, wanted, statuses))
        choices = (
            (_price(kernels, wanted, state, missing), place, kernels)
            for place, (uuid, part) in enumerate(wanted.items())
            if not fits(part, state[uuid])
            and (kernels := _on_device(part, state[uuid], [k for k in on[uuid] if k not in given]))
        )
        best = min(choices, key=lambda choice: choice[:2], default=None)
        if best is None:
            return None
        given += best[2]
        state = _without(state, best[2])


def _price(
    kernels: Sequence[HeldKernel],
    wanted: Mapping[str, Slice],
    state: Mapping[str, DeviceStatus],
    missing: int,
) -> tuple[float, float]:
    """Return kernels for each device that is won without them, and who of them was used last."""
    after = _without(state, kernels)
    touched = {part.device.uuid for kernel in kernels for part in kernel.parts} & after.keys()
    won = sum(not fits(wanted[uuid], state[uuid]) and fits(wanted[uuid], after[uuid]) for uuid in touched)
    number, last = _cost(kernels)
    return number / max(1, min(won, missing)), last


def _without(state: Mapping[str, DeviceStatus], kernels: Iterable[HeldKernel]) -> dict[str, DeviceStatus]:
    after = dict(state)
    for kernel in kernels:
        for part in kernel.parts:
            uuid = part.device.uuid
            if uuid in after:
                after[uuid] = placement.more(after[uuid], part)
    return after


def _needed(
    count: int,
    given: Sequence[HeldKernel],
    wanted: Mapping[str, Slice],
    statuses: Mapping[str, DeviceStatus],
) -> list[HeldKernel]:
    """Leave out whom later choices made needless, the last used first."""
    needed = sorted(given, key=_idle_since)
    for kernel in reversed(list(needed)):
        rest = [each for each in needed if each is not kernel]
        after = _without({uuid: statuses[uuid] for uuid in wanted}, rest)
        if sum(fits(part, after[uuid]) for uuid, part in wanted.items()) >= count:
            needed = rest
    return needed


def _on_device(
    part: Slice, status: DeviceStatus, kernels: Sequence[HeldKernel]
) -> tuple[HeldKernel, ...] | None:
    """Return the fewest of one device's kernels, given in order of idleness, without which the slice fits.

    The largest are the fewest. Of as many, those are taken whose last used has been idle for longest.
    """
    sizes = {kernel.number: _size_on(kernel, part.device.uuid) for kernel in kernels}
    fewest = _largest(part, status, kernels, sizes, len(kernels))
    if fewest is None:
        return None
    for number in range(len(fewest), len(kernels)):
        found = _largest(part, status, kernels[:number], sizes, len(fewest))
        if found is not None:
            return found
    return fewest


def _largest(
    part: Slice,
    status: DeviceStatus,
    kernels: Sequence[HeldKernel],
    sizes: Mapping[int, tuple[int, int]],
    most: int,
) -> tuple[HeldKernel, ...] | None:
    """Return the largest kernels, at most so many, without which the slice fits."""
    # Sorting keeps the order of idleness among equals.
    by_size = sorted(kernels, key=lambda kernel: sizes[kernel.number], reverse=True)
    state = {part.device.uuid: status}
    for number, kernel in enumerate(by_size[:most], 1):
        state = _without(state, [kernel])
        if fits(part, state[part.device.uuid]):
            return tuple(by_size[:number])
    return None


def _size_on(kernel: HeldKernel, uuid: str) -> tuple[int, int]:
    return next((p.milli, p.memory_mib) for p in kernel.parts if p.device.uuid == uuid)


def place_of_return(
    now: float, newcomers: Iterable[tuple[int, float]], overtaken: Collection[int]
) -> tuple[float, frozenset[int]]:
    """Say since when a kernel that wants its slice again counts as waiting, and whom it has overtaken.

    It stands before the first newcomer that it has not overtaken yet, and behind every one that it has:
    so that whoever waits is overtaken by each kernel at most once.

    Parameters
    ----------
    now
        When it asks.
    newcomers
        Those who wait and have not held their slice yet: (number, since when they wait).
    overtaken
        The numbers of those that it has overtaken before.

    Returns
    -------
    The time for :attr:`~gpu_pool.policy.queue_state.Waiter.since`, and the numbers of those who still
    wait and have been overtaken by then.
    """
    waiting = list(newcomers)
    behind = max((since for number, since in waiting if number in overtaken), default=-math.inf)
    free = [since for _, since in waiting if math.nextafter(since, -math.inf) > behind]
    place = math.nextafter(min(free), -math.inf) if free else now
    return place, frozenset(number for number, since in waiting if since > place or number in overtaken)


def effect_of(lease: Lease, activity: Activity, *, is_kernel: bool) -> TakingEffect:
    """Say what taking a living lease's slices back would do now.

    ``is_kernel`` is whether a kernel manager looks after its process, which can hold back cells.
    """
    if not (is_kernel or lease.terms.in_pod):
        return TakingEffect.LEAVES_QUEUE if lease.state is LeaseState.WAITING else TakingEffect.FREES_SLICE
    if lease.state is LeaseState.WAITING and lease.process is None:
        return TakingEffect.LEAVES_QUEUE
    # What is parked, or waits to come back, has no slice that could go without its kernel.
    is_free_to_go = lease.state is LeaseState.HELD and activity.initialised is False
    is_kept = is_free_to_go and lease.terms.can_be_parked
    return TakingEffect.KEEPS_KERNEL if is_kept else TakingEffect.ENDS_KERNEL
