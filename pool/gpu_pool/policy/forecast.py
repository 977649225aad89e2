"""What somebody who waits can be told: why, and for about how long. Pure functions.

No other user's name is told, nor what they do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Final

from gpu_pool.policy import placement
from gpu_pool.policy.holding_times import FEWEST, HoldingTimes
from gpu_pool.policy.placement import give_back
from gpu_pool.policy.queue import Holding, Situation, Waiter, decide
from gpu_pool.policy.queue_state import Rules
from gpu_pool.policy.reservations import Plans
from gpu_pool_client import DeviceStatus, format_share
from gpu_pool_client._free import accepts, ask_about, say_drained
from gpu_pool_client._requests import memory_in_words

#: The futures that are played through, each with other holding times; evenly spread, not at random.
_FUTURES: Final = 8
# Who comes meanwhile is not foreseen, so the range of these futures is widened: so, it held four of five
# waits in the workloads.
#: The shortest wait is multiplied by this.
_SOONER: Final = 0.5
#: The longest is multiplied by this,
_LATER: Final = 3.0
#: and so many seconds are added.
_LATER_STILL: Final = 120.0
#: Ends of leases that one future is followed for.
_MOST_EVENTS: Final = 400
#: The fractional parts of its multiples are spread evenly, and differ from neighbour to neighbour.
_SPREAD: Final = 0.6180339887498949
_BATCH: Final = "This request is batch work: it comes after everybody who sits at a notebook."


def explain(number: int, now: Situation, drained: Sequence[DeviceStatus] = ()) -> str:
    """Say in a few sentences why this waiter waits: what it needs, what is free, what is kept for whom.

    ``drained`` are the devices on which nothing new is granted, which the situation leaves out.
    """
    waiter = now.waiter(number)
    kept = {uuid for other in now.queue if other is not waiter for uuid in other.reserved}
    sentences = [_needed(waiter, [*now.statuses, *drained]), _free(waiter, now.statuses, kept)]
    closed = [status for status in drained if _could_be_on(waiter, status)]
    if closed:
        sentences.append(say_drained(closed))
        if not any(_could_be_on(waiter, status) for status in now.statuses):
            sentences.append(ask_about(closed))
    if waiter.reserved:
        sentences.append(_emptied(waiter, now))
    elif kept:
        sentences.append(_kept(waiter, [s for s in now.statuses if s.device.uuid in kept], now.rules))
    if waiter.batch:
        sentences.append(_BATCH)
    return " ".join(filter(None, sentences))


def expected_wait(number: int, now: Situation) -> tuple[float, float] | None:
    """Return (likely soonest, likely latest) in seconds from now for one waiter, None if nothing is known."""
    return _expected(now, [number]).get(number)


def expected_waits(now: Situation) -> dict[int, tuple[float, float]]:
    """Return (likely soonest, likely latest) in seconds from now, by waiter's number, where known.

    What is held is supposed to last as long as those of these that lasted as long as it
    has by now (``now.history``), of the same course and size where there are enough; then the queue is
    run forward with ``decide``. Nobody new is supposed to come. Whoever would have to
    wait for a lease that has outlasted all that are known is told nothing.
    """
    return _expected(now, [waiter.number for waiter in now.queue])


def _expected(now: Situation, numbers: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Return the waits of these, following each future until all of them have been granted something."""
    if len(now.history) < FEWEST:
        return {}
    known = HoldingTimes(now.history, now.holdings, now.now)
    waits: dict[int, list[float]] = {number: [] for number in numbers}
    for future in range(_FUTURES):
        left = set(numbers)
        for granted, at in _Future(future, now, known).grants():
            if granted in left:
                left.remove(granted)
                waits[granted].append(at - now.now)
            if not left:
                break
    return {
        granted: (min(found) * _SOONER, max(found) * _LATER + _LATER_STILL)
        for granted, found in waits.items()
        if len(found) == _FUTURES
    }


class _Future:
    """The pool as it may go on: who holds now leaves one after the other, and the queue moves up."""

    def __init__(self, future: int, situation: Situation, holding_times: HoldingTimes) -> None:
        self._future, self._holding_times, self._begun, self._now = (
            future,
            holding_times,
            situation,
            situation.now,
        )
        self._queue = {waiter.number: waiter for waiter in situation.queue}
        self._held = dict(enumerate(situation.holdings))
        self._next_key = len(self._held)
        self._statuses = list(situation.statuses)
        self._ends = [(self._end(key, holding), key) for key, holding in self._held.items()]
        heapify(self._ends)

    def grants(self) -> Iterable[tuple[int, float]]:
        """Yield waiters' numbers with the times of their grants."""
        for _ in range(_MOST_EVENTS):
            if not self._queue or not self._ends:
                return
            at, key = heappop(self._ends)
            if not math.isfinite(at):  # all who are left have outlasted whatever is known
                return
            self._now = at
            self._statuses = give_back(self._statuses, self._held.pop(key).parts)
            decision = decide(
                replace(
                    self._begun,
                    queue=list(self._queue.values()),
                    holdings=list(self._held.values()),
                    statuses=self._statuses,
                    now=self._now,
                )
            )
            for waiter, parts in decision.grants:
                del self._queue[waiter.number]
                self._statuses = placement.deduct(self._statuses, parts)
                self._hold(Holding(waiter.user, waiter.course, parts, None, self._now))
                yield waiter.number, self._now
            for number, waiter in self._queue.items():
                reserved = decision.reservations.get(number, ())
                if reserved != waiter.reserved:
                    self._queue[number] = replace(waiter, reserved=reserved)

    def _hold(self, holding: Holding) -> None:
        key = self._next_key
        self._next_key += 1
        self._held[key] = holding
        heappush(self._ends, (self._end(key, holding), key))

    def _end(self, key: int, holding: Holding) -> float:
        """Return when the lease ends in this future: times differ evenly from lease to lease and future."""
        part = (key * _SPREAD + (self._future + 0.5) / _FUTURES) % 1.0
        rest = self._holding_times.rest(holding.course, holding.milli, self._now - holding.since, part)
        if holding.ends_by is None:
            return self._now + rest
        left = max(0.0, holding.ends_by - self._now)
        # Where nothing else is known, at any time until it has to.
        return self._now + (min(rest, left) if math.isfinite(rest) else part * left)


def _needed(waiter: Waiter, statuses: Sequence[DeviceStatus]) -> str:
    if waiter.is_parked:
        size = waiter.request.guarantee.size
        places = sorted(s.device.index for s in statuses if s.device.uuid in waiter.devices)
        if not places:
            return f"{size} is needed on the GPU where the kernel was, which grants nothing now."
        part = "" if waiter.request.whole_devices else f"{size} of "
        names = " and ".join(f"GPU {place}" for place in places)
        return f"{part}{names}, where the kernel was, {'is' if len(places) == 1 else 'are'} needed."
    return f"{_amount(waiter)} needed."


def _amount(waiter: Waiter) -> str:
    request = waiter.request
    if request.whole_devices:
        return "A whole GPU is" if request.count == 1 else f"{request.count} whole GPUs are"
    size = (
        memory_in_words(request.memory_mib, exact=True)
        if request.memory_mib
        else format_share(request.milli or 0)
    )
    each = "one GPU" if request.count == 1 else f"each of {request.count} GPUs"
    return f"{size} of {each} is"


def _free(waiter: Waiter, statuses: Sequence[DeviceStatus], kept: set[str]) -> str:
    """Say what is free of the devices that the request accepts and that are kept for nobody else."""
    usable = [
        status for status in statuses if status.device.uuid not in kept and _could_be_on(waiter, status)
    ]
    if not usable:
        return ""
    if all(status.device.exclusive and status.leases for status in usable):
        return _exclusive(usable)
    if waiter.request.count > 1:
        return _free_of_several(usable)
    best = _most_room(usable)
    if not best.free_milli:
        return "Nothing is free."
    if len(usable) == 1:
        return f"{_room(best)} of it are free."
    return f"Of {len(usable)} that would do, the one with most room has {_room(best)} free."


def _free_of_several(usable: Sequence[DeviceStatus]) -> str:
    """Say how many of these devices are free as a whole, and how much of the best of the others."""
    held = [status for status in usable if status.leases]
    empty = len(usable) - len(held)
    free = "none is" if not empty else "1 is" if empty == 1 else f"{empty} are"
    best = _most_room(held) if held else None
    if best is None or not best.free_milli:
        return f"Of {len(usable)} that would do, {free} free."
    which = "one with most room" if not empty else "next"
    return f"Of {len(usable)} that would do, {free} free; the {which} has {_room(best)}."


def _most_room(statuses: Sequence[DeviceStatus]) -> DeviceStatus:
    return max(statuses, key=lambda status: (status.free_milli, status.free_memory_mib))


def _room(status: DeviceStatus) -> str:
    return f"{format_share(status.free_milli)} and {memory_in_words(status.free_memory_mib)}"


def _exclusive(statuses: Sequence[DeviceStatus]) -> str:
    """Say that devices admit one process at a time, each of which is there."""
    first = statuses[0].device
    which = f"GPU {first.index} is" if len(statuses) == 1 else f"{len(statuses)} GPUs are"
    return (
        f"{which} in compute mode Exclusive_Process, which admits one process at a time, and another has it. "
        f"The administrator can let kernels share it: sudo nvidia-smi -i {first.uuid} -c DEFAULT"
    )


def _could_be_on(waiter: Waiter, status: DeviceStatus) -> bool:
    """Whether the waiter accepts a device, whatever is free of it."""
    wished = not waiter.devices or status.device.uuid in waiter.devices
    return wished and accepts(waiter.request.filters, status.device)


def _kept(waiter: Waiter, kept: Sequence[DeviceStatus], rules: Rules) -> str:
    gpus = "1 GPU is" if len(kept) == 1 else f"{len(kept)} GPUs are"
    own = [status for status in kept if not waiter.devices or status.device.uuid in waiter.devices]
    could = placement.place(waiter.request, own, rules) is not None
    why = ", though you would fit there now" if could and not waiter.is_parked else ""
    return f"{gpus} kept free for a large request that has waited longer{why}."


def _emptied(waiter: Waiter, now: Situation) -> str:
    """Say which devices are kept free for the waiter, from when on likely, and by when at the latest."""
    gpus = "A GPU is" if len(waiter.reserved) == 1 else f"{len(waiter.reserved)} GPUs are"
    ends = [h.ends_by for h in now.holdings if any(p.device.uuid in waiter.reserved for p in h.parts)]
    if not ends:
        return f"{gpus} kept free for you."
    known = [end for end in ends if end is not None]
    latest = _minutes(max(known) - now.now) if len(known) == len(ends) else None
    plan = Plans(now, now.statuses, now.holdings).plan(waiter, waiter.reserved)
    likely = _minutes(plan.start - now.now) if plan is not None and math.isfinite(plan.start) else None
    if likely is None or len(now.history) < FEWEST or (latest is not None and latest <= likely):
        told = "" if latest is None else f"; the leases that are still there end within {latest} min"
    else:
        told = f"; the leases that are still there likely end in about {likely} min"
        told += "" if latest is None else f", and within {latest} min at the latest"
    return f"{gpus} kept free for you{told}."


def _minutes(seconds: float) -> int:
    return max(0, math.ceil(seconds / 60))
