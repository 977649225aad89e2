"""How memory that is granted to nobody is divided on top of guarantees, and taken back. Pure.

A lease with a limit may use more of its device than it was granted while nobody else is granted that memory:
its burst. Only what the guarantees leave is divided, so that nobody's guarantee is ever touched, and what one
more lease is granted is free of bursts from the next decision on.

What is in use stays before what is not; kernels that work have it before those that idle; among these the
shares are even, up to each limit. Caps of running programs follow, so small changes move nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpu_pool_client import Slice

#: A cap moves by no less than this, in MiB, unless it must, or comes to its limit.
LEAST_CHANGE_MIB: Final = 64


@dataclass(frozen=True, slots=True)
class BurstSlice:
    """A held lease on one device that may use more of it than it was granted. Memory is in MiB."""

    #: Names it; the older lease has the lower one.
    number: int
    guarantee_mib: int
    #: The most that it may ever use: more than the guarantee.
    limit_mib: int
    #: What it had on top last.
    burst_mib: int = 0
    #: What it uses now; None where nobody knows.
    used_mib: int | None = None
    #: Whether its kernel runs something, or nobody knows that it does not.
    works: bool = True

    @property
    def most_mib(self) -> int:
        """The most that it may have on top."""
        return self.limit_mib - self.guarantee_mib

    @property
    def burst_in_use_mib(self) -> int:
        """What it uses of its burst; what it uses beyond that gives it no claim."""
        used = (self.used_mib or 0) - self.guarantee_mib
        return max(0, min(used, self.burst_mib, self.most_mib))


def total_mib(parts: Iterable[Slice]) -> int:
    """Return what slices may use on top of what was granted, all together, in MiB."""
    return sum(part.burst_mib for part in parts)


def divide(free_mib: int, slices: Sequence[BurstSlice]) -> Mapping[int, int]:
    """Return what each may use from now on on top of its guarantee, in MiB, by its number.

    Parameters
    ----------
    free_mib
        What of the device's memory is granted to nobody, and not counted for others either.
    slices
        All leases there that have a limit.
    """
    ordered = sorted(slices, key=lambda each: each.number)
    return _without_small_changes(max(0, free_mib), ordered, shares(free_mib, ordered))


def shares(free_mib: int, slices: Sequence[BurstSlice]) -> Mapping[int, int]:
    """Return what each is to have on top, whatever it had last but for what it uses of that.

    More that is free lowers nobody's share.
    """
    ordered = sorted(slices, key=lambda each: each.number)
    working = [each for each in ordered if each.works]
    idle = [each for each in ordered if not each.works]
    most = {each.number: each.most_mib for each in ordered}
    in_use = {each.number: each.burst_in_use_mib for each in ordered}
    left, given = max(0, free_mib), dict.fromkeys(most, 0)
    # First for what is in use, then for the rest; each time those that work come first.
    for ceilings in (in_use, most):
        for group in (working, idle):
            numbers = [each.number for each in group]
            more = _fill(left, {n: given[n] for n in numbers}, {n: ceilings[n] for n in numbers})
            left -= sum(more[n] - given[n] for n in numbers)
            given |= more
    # So little is not worth a change, unless it is all, or in use.
    little = [n for n, mib in given.items() if mib < LEAST_CHANGE_MIB and mib < most[n]]
    return {**given, **{n: min(given[n], in_use[n]) for n in little}}


def _fill(left: int, floors: Mapping[int, int], ceilings: Mapping[int, int]) -> dict[int, int]:
    """Return floors raised as evenly as so much more allows, the lowest first, none above its ceiling.

    All of it is given as far as the ceilings allow: what does not divide goes to the first.
    """
    budget = sum(floors.values()) + left
    low, high = 0, max(ceilings.values(), default=0)
    while low < high:  # the highest level that can be paid for
        level = (low + high + 1) // 2
        if sum(_at(level, floors, ceilings).values()) <= budget:
            low = level
        else:
            high = level - 1
    filled = _at(low, floors, ceilings)
    rest = budget - sum(filled.values())
    for number in filled:
        if rest > 0 and floors[number] <= low < ceilings[number]:
            filled[number] += 1
            rest -= 1
    return filled


def _at(level: int, floors: Mapping[int, int], ceilings: Mapping[int, int]) -> dict[int, int]:
    return {number: max(floor, min(level, ceilings[number])) for number, floor in floors.items()}


def _without_small_changes(
    free_mib: int, slices: Sequence[BurstSlice], wanted: Mapping[int, int]
) -> Mapping[int, int]:
    """Return the shares that are wanted, or what each had last where that is nearly the same and fits."""
    most = {each.number: each.most_mib for each in slices}
    last = {each.number: min(each.burst_mib, each.most_mib) for each in slices}
    kept = {n: wanted[n] if last[n] - wanted[n] >= LEAST_CHANGE_MIB else last[n] for n in wanted}
    if sum(kept.values()) > free_mib:
        kept = {n: min(last[n], wanted[n]) for n in wanted}
    ceilings = {n: wanted[n] if _is_raised(last[n], wanted[n], most[n]) else kept[n] for n in wanted}
    raised = _fill(free_mib - sum(kept.values()), kept, ceilings)
    return {n: raised[n] if _is_raised(last[n], raised[n], most[n]) else kept[n] for n in wanted}


def _is_raised(last: int, wanted: int, most: int) -> bool:
    """Whether a share is so much more than the last that the cap is raised."""
    return wanted - last >= LEAST_CHANGE_MIB or (wanted == most and wanted > last)
