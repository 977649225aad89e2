"""From a workload to its arrivals, at random from its seed."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate
from statistics import NormalDist

from gpu_pool.simulation.engine import Arrival
from gpu_pool.simulation.workloads import Group, Workload
from gpu_pool_client import parse_request

_NORMAL = NormalDist()


def arrivals(workload: Workload, seed: int | None = None) -> list[Arrival]:
    """Return everybody who comes, in order of time.

    Each group draws from a stream of its own, and from ``random()`` alone,
    whose numbers are the same in every version of Python.
    """
    found: list[Arrival] = []
    for place, group in enumerate(workload.groups):
        # Not for secrets: the same numbers are wanted every time.
        stream = random.Random(f"{workload.seed if seed is None else seed}/{place}")  # noqa: S311
        found += _of_group(group, workload.lasts, stream)
    return sorted(found, key=lambda arrival: arrival.at)


def _of_group(group: Group, lasts: float, stream: random.Random) -> Iterator[Arrival]:
    requests = [parse_request(size) for size in group.sizes]
    by_size = list(accumulate(group.sizes.values()))
    by_user = list(accumulate(group.eagerness**place for place in range(group.users)))
    now = 0.0
    while True:
        now += -math.log(1 - stream.random()) / group.rate
        if now >= lasts:
            return
        user = f"{group.course}-{_draw(by_user, stream) + 1}"
        request = requests[_draw(by_size, stream)]
        yield Arrival(now, user, group.course, request, _stay(group, stream), group.longest)


def _draw(cumulative: list[float], stream: random.Random) -> int:
    return min(bisect(cumulative, stream.random() * cumulative[-1]), len(cumulative) - 1)


def _stay(group: Group, stream: random.Random) -> float:
    """Draw a lognormal stay, cut off at the longest lease."""
    quantile = _NORMAL.inv_cdf(min(max(stream.random(), 1e-12), 1 - 1e-12))
    return min(group.median_stay * math.exp(group.spread * quantile), group.longest)
