"""The queue and the placement in simulated time, against what one would write first.

Everything is simulated, from seeds: the same figures on every machine.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.report import Line
from benchmarks.sizes import sized
from gpu_pool.devices import discover
from gpu_pool.policy import placement
from gpu_pool.policy.queue import Decision, Policy, Situation, Waiter, decide
from gpu_pool.simulation import ORDERS, WORKLOADS, Arrival, RunFigures, Workload, arrivals, figures, simulate
from gpu_pool.simulation.engine import Order
from gpu_pool_client import WHOLE, DeviceStatus

HOUR = 3600.0
LASTS = sized(4 * 24 * HOUR, 3 * HOUR)
SEEDS = sized((1, 2, 3), (1,))
#: The baselines of the queue that the simulator has.
LINES = ("strict order", "smallest first", "backfill")
Sort = Callable[[Sequence[DeviceStatus]], Sequence[DeviceStatus]]


@dataclass(frozen=True, slots=True)
class Result:
    """Means over the seeds."""

    utilisation: float
    mean: float
    p95: float
    whole_p95: float
    jain: float
    #: Of what is free, the part on devices that are not free as a whole, as those see it who come.
    fragmented: float


def best_fit(statuses: Sequence[DeviceStatus]) -> Sequence[DeviceStatus]:
    """Put the fullest first."""
    return sorted(statuses, key=lambda status: status.free_milli)


def worst_fit(statuses: Sequence[DeviceStatus]) -> Sequence[DeviceStatus]:
    """Put the emptiest first: what spreads load."""
    return sorted(statuses, key=lambda status: -status.free_milli)


def at_random(stream: random.Random, statuses: Sequence[DeviceStatus]) -> Sequence[DeviceStatus]:
    """Put them in any order."""
    return stream.sample(statuses, len(statuses))


def backfill(now: Situation, *, queue: Iterable[Waiter] | None = None, sort: Sort = list) -> Decision:
    """Grant whoever can be placed, in the order of arrival or another, on the first device in that order."""
    free, grants, refused = list(now.statuses), [], set()
    for waiter in now.queue if queue is None else queue:
        parts = None if waiter.request in refused else placement.place(waiter.request, sort(free), now.rules)
        if parts is None:
            refused.add(waiter.request)
        else:
            free = placement.deduct(free, parts)
            grants.append((waiter, parts))
    return Decision(tuple(grants), {})


def shortest_first(coming: Sequence[Arrival]) -> Order:
    """Let those go first who will stay for the shortest: nobody can know, so this is told."""
    stays = [arrival.stay for arrival in coming]
    return lambda now: backfill(now, queue=sorted(now.queue, key=lambda waiter: stays[waiter.number]))


def observed(order: Order, seen: list[float]) -> Order:
    """Note at each decision how the free part of the pool is scattered."""

    def deciding(now: Situation) -> Decision:
        free = [status.free_milli for status in now.statuses]
        if any(free):
            seen.append(sum(each for each in free if each < WHOLE) / sum(free))
        return order(now)

    return deciding


def result(workload: Workload, order_for: Callable[[Sequence[Arrival]], Order]) -> Result:
    """Run a workload with each seed."""
    found: list[tuple[RunFigures, float]] = []
    devices = discover({"GPU_POOL_DEVICES": workload.devices}).devices
    for seed in SEEDS:
        coming = arrivals(replace(workload, lasts=LASTS), seed=seed)
        seen: list[float] = []
        order = observed(order_for(coming), seen)
        found.append((figures(simulate(coming, devices, order, Policy(workload.weights))), _mean(seen)))
    return Result(
        *(
            _mean(each)
            for each in zip(
                *(
                    (one.utilisation, one.waits.mean, one.waits.p95, one.whole.p95, one.jain, scattered)
                    for one, scattered in found
                ),
                strict=True,
            )
        )
    )


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean([*values] or [0.0])


def by_line(workload: Workload) -> dict[str, Result]:
    """Run the orders of the queue; placement is ours in all."""
    orders: dict[str, Callable[[Sequence[Arrival]], Order]] = {
        "ours": lambda _: decide,
        **{name: partial(_named, name) for name in LINES},
        "shortest first": shortest_first,
    }
    return {name: result(workload, order) for name, order in orders.items()}


def _named(name: str, _: Sequence[Arrival]) -> Order:
    return ORDERS[name]


def by_placement(workload: Workload) -> dict[str, Result]:
    """Run the placements; the queue is first come, first served, passing over whoever does not fit."""
    sorts: dict[str, Sort] = {
        "first fit (ours)": list,
        "best fit": best_fit,
        "worst fit": worst_fit,
        "random": partial(at_random, random.Random(0)),
    }
    return {
        name: result(workload, lambda _, sort=sort: partial(backfill, sort=sort))  # type: ignore[misc]
        for name, sort in sorts.items()
    }


def run() -> Iterator[Line]:
    """Simulate and yield the report's lines."""
    for name in ("mixed", "research"):
        found = by_line(WORKLOADS[name])
        ours = found.pop("ours")
        for other, theirs in found.items():
            yield from lines(f"{name}: fair line", ours, other, theirs)
    mixed = WORKLOADS["mixed"]
    twice = tuple(replace(group, load=2 * group.load) for group in mixed.groups)
    found = by_placement(replace(mixed, devices="V100-SXM2-32GB:8", groups=twice))
    ours = found.pop("first fit (ours)")
    for other, theirs in found.items():
        yield from lines("mixed, 8 GPUs: first fit", ours, other, theirs)


def lines(ours_is: str, ours: Result, other: str, theirs: Result) -> Iterator[Line]:
    """Set one run against another: their waits, and beside them everything else."""
    made_of = (
        f"simulated; in use {100 * ours.utilisation:.1f} to {100 * theirs.utilisation:.1f}%, "
        f"95th percentile of all waits {ours.p95 / 60:.0f} to {theirs.p95 / 60:.0f} min, "
        f"Jain {ours.jain:.3f} to {theirs.jain:.3f}, "
        f"free but on GPUs in use {100 * ours.fragmented:.0f} to {100 * theirs.fragmented:.0f}%"
    )
    for what, mine, its in (
        ("mean wait", ours.mean / 60, theirs.mean / 60),
        ("95th percentile for a whole GPU", ours.whole_p95 / 60, theirs.whole_p95 / 60),
    ):
        ratio = mine / its if its else 1.0 if mine == 0 else math.inf
        yield Line(f"{ours_is}, to {other}: {what}", ratio, made_of, ours=mine, yardstick=its, unit="min")
