"""How many share GPUs: slices of 2% against a whole GPU for everybody, as it is without a pool."""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from benchmarks.report import Line
from benchmarks.sizes import sized
from gpu_pool.devices import discover
from gpu_pool.policy.queue import decide
from gpu_pool.simulation import WORKLOADS, Workload, arrivals, figures, simulate
from gpu_pool_client import WHOLE, Device, Holder, LeaseState, Process, connect, parse_request

DEVICES = "V100-SXM2-32GB:4"
LASTS = sized(24, 2) * 3600.0
#: Nobody calls that waiting: the 95th percentile, in seconds.
AT_MOST = 60.0
#: Loads that are tried, in hundredths of the pool.
STEP = 5


async def granted(size: str) -> int:
    """Ask for slices until one waits; return how many there were."""
    with tempfile.TemporaryDirectory() as folder:
        async with connect(f"embedded:{folder}/store.db") as pool:
            holder = Holder("bench", process=Process.current())
            for number in count():
                lease = await pool.request(parse_request(size), holder, f"key-{number}")
                if lease.state is LeaseState.WAITING:
                    return number
    raise AssertionError


def present(size: str) -> float:
    """Return how many students may be there at once, on average, before waiting is felt."""
    workload, loads = _of(size), range(STEP, 100, STEP)
    fine = bisect_right(loads, AT_MOST, key=lambda load: _p95(workload, load))
    each = parse_request(size).milli or WHOLE
    return STEP * fine / 100 * len(_devices()) * WHOLE / each


def _devices() -> tuple[Device, ...]:
    return discover({"GPU_POOL_DEVICES": DEVICES}).devices


def _of(size: str) -> Workload:
    class_ = WORKLOADS["one-size"]
    return replace(class_, lasts=LASTS, groups=(replace(class_.groups[0], sizes={size: 1.0}, eagerness=1.0),))


def _p95(workload: Workload, load: int) -> float:
    group = replace(workload.groups[0], load=load / 100 * len(_devices()))
    coming = arrivals(replace(workload, groups=(group,)))
    return figures(simulate(coming, _devices(), decide)).waits.p95


def run() -> Iterator[Line]:
    """Count and simulate, and yield the report's lines."""
    os.environ["GPU_POOL_DEVICES"] = DEVICES
    many, few = asyncio.run(granted("2%")), asyncio.run(granted("1"))
    yield Line(
        "slices of 2% that 4 GPUs grant, to whole GPUs",
        many / few,
        "of 32 GiB each, simulated: 655 MiB a slice, the CUDA context in it",
        ours=many,
        yardstick=few,
        unit="leases",
    )
    sliced, whole = present("2%"), present("1")
    yield Line(
        "students at once without a wait to speak of, slices of 2% to whole GPUs",
        sliced / whole if whole else math.inf,
        f"4 GPUs, simulated for {LASTS / 3600:g} h; 95 of 100 wait {AT_MOST:g} s at most; "
        f"stays of 40 min (median); loads tried in steps of {STEP}%",
        ours=sliced,
        yardstick=whole,
        unit="students",
    )
