"""Three made-up terms: who comes, how often, for what and for how long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Final

from gpu_pool_client import WHOLE, parse_request

_MINUTE: Final = 60.0
_HOUR: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Group:
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
    about: str
    #: As in ``GPU_POOL_DEVICES``.
    devices: str
    groups: tuple[Group, ...]
    #: How long people keep arriving, in seconds.
    lasts: float
    seed: int
    #: The weights of the courses; 1 for those not named.
    weights: Mapping[str, float] = field(default_factory=dict)


ONE_SIZE: Final = Workload(
    name="one-size",
    about="60 students, some much more eager than others, who all ask for 2% of one GPU; load 0.95",
    devices="V100-SXM2-32GB:1",
    groups=(Group("class", 60, {"2%": 1.0}, 0.95, 40 * _MINUTE, 1.0, longest=4 * _HOUR, eagerness=0.95),),
    lasts=10 * 24 * _HOUR,
    seed=1,
)

MIXED: Final = Workload(
    name="mixed",
    about="60% ask for 2%, 25% for 10%, 10% for 25 to 50%, 5% for a whole GPU; 4 GPUs, load 0.7",
    devices="V100-SXM2-32GB:4",
    groups=(
        Group(
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
    about="100 students who ask for 2%, and 8 researchers of three times the weight"
    " for whole GPUs; 4 GPUs, load 0.7",
    devices="V100-SXM2-32GB:4",
    groups=(
        Group("class", 100, {"2%": 1.0}, 1.0, 40 * _MINUTE, 1.0, longest=4 * _HOUR),
        Group("research", 8, {"1": 1.0}, 1.8, 2 * _HOUR, 1.0, longest=8 * _HOUR),
    ),
    lasts=10 * 24 * _HOUR,
    seed=1,
    weights={"research": 3.0},
)

#: The committed workloads by name.
WORKLOADS: Final[Mapping[str, Workload]] = {w.name: w for w in (ONE_SIZE, MIXED, RESEARCH)}
