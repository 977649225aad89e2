"""From a workload to its arrivals, at random from its seed."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import NormalDist
from typing import Final

from gpu_pool.simulation.engine import Arrival
from gpu_pool_client import WHOLE, Device, parse_request

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


def _of_group(group: ArrivalGroup, lasts: float, stream: random.Random) -> Iterator[Arrival]:
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


def _stay(group: ArrivalGroup, stream: random.Random) -> float:
    """Draw a lognormal stay, cut off at the longest lease."""
    quantile = _NORMAL.inv_cdf(min(max(stream.random(), 1e-12), 1 - 1e-12))
    return min(group.median_stay * math.exp(group.spread * quantile), group.longest)


_MINUTE: Final = 60.0
_HOUR: Final = 3600.0


@dataclass(frozen=True, slots=True)
class ArrivalGroup:
    """People of one course who come at random, at the same mean rate at all times."""

    course: str
    users: int
    #: What they ask for: parts of 1, by size.
    sizes: Mapping[str, float]
    #: How many whole devices they would keep busy on average, if nobody had to wait.
    load: float
    #: The lognormal distribution of their stays: its median in seconds, and its sigma.
    median_stay: float
    spread: float
    #: The longest lease of the course, in seconds: stays are cut off there.
    longest: float
    #: How often the second, third, … user comes in relation to the one before; 1 for equally often.
    eagerness: float = 1.0

    @property
    def mean_stay(self) -> float:
        """Seconds that a stay lasts on average, those cut off included."""
        normal, mu, sigma = NormalDist(), math.log(self.median_stay), self.spread
        cut = (math.log(self.longest) - mu) / sigma
        shorter = math.exp(mu + sigma * sigma / 2) * normal.cdf(cut - sigma)
        return shorter + self.longest * (1 - normal.cdf(cut))

    @property
    def rate(self) -> float:
        """Arrivals per second."""
        requests = {parse_request(size): part for size, part in self.sizes.items()}
        devices = sum(
            part * request.count * (request.milli or 0) / WHOLE for request, part in requests.items()
        )
        return self.load / (devices * self.mean_stay)


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that decides who arrives when."""

    name: str
    #: Who comes, and what they ask for.
    about: str
    #: As in ``GPU_POOL_DEVICES``.
    devices: str
    groups: tuple[ArrivalGroup, ...]
    #: How long people keep arriving, in seconds.
    lasts: float
    seed: int
    #: The weights of the courses; 1 for those not named.
    weights: Mapping[str, float] = field(default_factory=dict)

    def title(self, devices: Sequence[Device]) -> str:
        """Return what its figures on these devices are headed with: who comes, and to how much."""
        gpus = sum(device.milli for device in devices) / WHOLE
        load = sum(group.load for group in self.groups) / gpus
        return f"{self.name}: {self.about}; {gpus:g} GPU{'s' * (gpus != 1)}, load {load:.2g}"


ONE_SIZE: Final = Workload(
    name="one-size",
    about="60 students, some much more eager than others, who all ask for 2% of a GPU",
    devices="V100-SXM2-32GB:1",
    groups=(
        ArrivalGroup("class", 60, {"2%": 1.0}, 0.95, 40 * _MINUTE, 1.0, longest=4 * _HOUR, eagerness=0.95),
    ),
    lasts=10 * 24 * _HOUR,
    seed=1,
)

MIXED: Final = Workload(
    name="mixed",
    about="60% ask for 2%, 25% for 10%, 10% for 25 to 50%, 5% for a whole GPU",
    devices="V100-SXM2-32GB:4",
    groups=(
        ArrivalGroup(
            "class",
            60,
            {"2%": 0.6, "10%": 0.25, "25%": 0.04, "30%": 0.02, "40%": 0.02, "50%": 0.02, "1": 0.05},
            2.8,
            40 * _MINUTE,
            1.0,
            longest=4 * _HOUR,
        ),
    ),
    lasts=10 * 24 * _HOUR,
    seed=1,
)

RESEARCH: Final = Workload(
    name="research",
    about="100 students who ask for 2%, and 8 researchers of three times the weight for whole GPUs",
    devices="V100-SXM2-32GB:4",
    groups=(
        ArrivalGroup("class", 100, {"2%": 1.0}, 1.0, 40 * _MINUTE, 1.0, longest=4 * _HOUR),
        ArrivalGroup("research", 8, {"1": 1.0}, 1.8, 2 * _HOUR, 1.0, longest=8 * _HOUR),
    ),
    lasts=10 * 24 * _HOUR,
    seed=1,
    weights={"research": 3.0},
)

#: The committed workloads by name.
WORKLOADS: Final[Mapping[str, Workload]] = {w.name: w for w in (ONE_SIZE, MIXED, RESEARCH)}
