"""A school's cluster: 200 nodes with 8 GPUs each, and 500, 2,000 and 5,000 kernels of 2%, asked for at once.

API server, etcd, scheduler and controllers are Kubernetes' own; the nodes are hollow, so
pods run nothing. All of it shares this machine's cores with the pool, and takes most of
them: so the time between two kernels is told beside the processor time that the pool
itself takes for one. What it asks of the API server is counted in the latter's audit log.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from benchmarks.report import Line, Skipped, percentile
from benchmarks.sizes import sized
from gpu_pool.pool.pool import GpuPool
from support import api_server, control_plane
from support.school import School, burst, end_all, kernel, pool_of, school

NODES, USERS = sized((200, 50), (20, 20))
SIZES = sized((500, 2_000, 5_000), (100, 150, 200))
#: Kernels between two looks at the clock: what few of them take is chance.
WINDOW = 25
#: Kernels that are asked for one after the other beside those that run.
BESIDE = sized(40, 5)
#: Points of a curve in the plot.
POINTS = 200
STEADY_SECONDS = sized(30.0, 5.0)
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
#: The programs of a control plane, as the system calls them.
PROGRAMS = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager")


@dataclass
class Burst:
    """What was measured of so many kernels, asked for at once. Times in seconds, memory in MiB."""

    count: int
    #: When each ran, in order, from the moment when all were asked for.
    ran: list[float]
    #: Processor time of the pool, and of each program of the cluster, until all ran.
    processor: dict[str, float]
    #: By seconds from that moment: the pool's memory, and its processor time.
    samples: list[tuple[float, float, float]]
    #: Requests to the API server until all ran; later also while nothing happened, and to end them.
    asked: dict[str, Counter[str]]
    #: From asked to running, of kernels that were asked for one by one beside them.
    beside: list[float] = field(default_factory=list)
    #: Processor time of the pool in each second in which nothing happened, and its memory then.
    resting: float = 0.0
    memory: float = 0.0

    @property
    def per_grant(self) -> list[float]:
        """Seconds between two kernels that come to run, for each window of kernels."""
        return [(later - sooner) / WINDOW for sooner, later in pairwise(self.ran[::WINDOW])]


async def all_at_once(pool: GpuPool, known: School, count: int) -> tuple[Burst, list[str]]:
    """Ask for so many kernels at once; return what was measured until all ran, and their leases."""
    requests, work, began = _requests(known), _processor(), time.monotonic()
    samples: list[tuple[float, float, float]] = []
    looking = asyncio.create_task(_sample(samples, began))
    kernels = await burst(pool, known, count, f"burst-{count}")
    looking.cancel()
    used = {name: after - work.get(name, 0.0) for name, after in _processor().items()}
    ran = sorted(each.ran - began for each in kernels.values())
    return Burst(count, ran, used, samples, {"to run": _requests(known) - requests}), list(kernels)


async def one_by_one(pool: GpuPool, found: Burst) -> list[str]:
    """Ask for some more kernels beside those that run, one after the other; return their leases."""
    leases = []
    for number in range(BESIDE):
        lease, times = await kernel(pool, f"user-{number % USERS}", f"beside-{found.count}-{number}")
        found.beside.append(times.ran - times.asked)
        leases.append(lease)
    return leases


async def measure_burst(pool: GpuPool, known: School, count: int) -> Burst:
    """Ask for so many kernels at once, for some more one by one, let nothing happen, and end them all."""
    found, leases = await all_at_once(pool, known, count)
    leases += await one_by_one(pool, found)
    before, used, began = _requests(known), time.process_time(), time.monotonic()
    await asyncio.sleep(STEADY_SECONDS)
    found.asked["while nothing happened"] = _requests(known) - before
    found.resting = (time.process_time() - used) / (time.monotonic() - began)
    found.memory = _memory()
    before = _requests(known)
    await end_all(pool, leases)
    found.asked["to end"] = _requests(known) - before
    return found


async def measure() -> list[Burst]:
    """Measure few kernels, then more and more, in one cluster and one pool."""
    if missing := [*api_server.missing_programs(), *control_plane.missing_programs()]:
        raise Skipped(f"no {' and no '.join(missing)} in {control_plane.ASSETS}")
    with tempfile.TemporaryDirectory() as name, school(Path(name), NODES, USERS) as known:
        async with pool_of(known, Path(name) / "store.db") as pool:
            # Whether a home can be used everywhere is asked once for each, and known from then on.
            await end_all(pool, await burst(pool, known, USERS, "warm"))
            return [await measure_burst(pool, known, count) for count in SIZES]


async def _sample(samples: list[tuple[float, float, float]], began: float) -> None:
    while True:
        samples.append((time.monotonic() - began, _memory(), time.process_time()))
        await asyncio.sleep(1)


def _requests(known: School) -> Counter[str]:
    return Counter({" ".join(what): count for what, count in known.account.asked().items()})


def _processor() -> dict[str, float]:
    """Return the processor time of this process, and of each program of the cluster, in seconds."""
    used = {"pool": time.process_time()}
    for each in psutil.Process().children(recursive=True):
        name = each.name()
        used[name if name in PROGRAMS else "nodes"] = sum(each.cpu_times()[:2])
    return used


def _memory() -> float:
    return float(psutil.Process().memory_info().rss) / 2**20


def writes(asked: Counter[str]) -> int:
    """Return how many of these requests changed something."""
    return sum(count for what, count in asked.items() if what.split()[0] in WRITES)


def lists(asked: Counter[str]) -> int:
    """Return how many of these requests were for all objects of a kind."""
    return sum(count for what, count in asked.items() if what.startswith("list "))


def lines(bursts: Sequence[Burst]) -> Iterator[Line]:
    """Put the figures into the report's lines."""
    few, *more, many = bursts
    sizes = f"{many.count:,} at once to {few.count}"
    steps = _points((WINDOW * number, 1e3 * each) for number, each in enumerate(many.per_grant))
    yield _slower(f"time per grant (95%), {sizes}", few.per_grant, many.per_grant, steps)
    one = f"one more kernel (95%) beside {many.count:,}, to beside {few.count}"
    yield _slower(one, few.beside, many.beside)
    for each in (*more, many):
        yield _processors(few, each)
    yield _resting(bursts)
    yield _waits(few, many)
    yield _memories(many, bursts)
    yield from _counts(bursts)


def _slower(
    what: str, few: Sequence[float], many: Sequence[float], points: tuple[tuple[float, float], ...] = ()
) -> Line:
    slow, fast = (1e3 * percentile(each, 0.95) for each in (many, few))
    middle = [1e3 * percentile(each, 0.5) for each in (many, few)]
    made_of = f"medians {middle[0]:.0f} to {middle[1]:.0f} ms"
    return Line(what, slow / fast, made_of, 1.5, ours=slow, yardstick=fast, unit="ms", points=points)


def _processors(few: Burst, many: Burst) -> Line:
    """Return what the pool itself does for a grant, however many others share its cores."""
    ours, before = (1e3 * each.processor["pool"] / each.count for each in (many, few))
    others = ", ".join(
        f"{name} {1e3 * used / many.count:.1f}" for name, used in many.processor.items() if name != "pool"
    )
    what = f"the pool's processor time per grant, {many.count:,} to {few.count}"
    made_of = f"others beside {many.count:,}, in ms: {others}"
    return Line(what, ours / before, made_of, 1.5, ours=ours, yardstick=before, unit="ms")


def _resting(bursts: Sequence[Burst]) -> Line:
    """Return what the pool does while nothing happens, with few kernels and with many."""
    many = bursts[-1]
    made_of = ", ".join(f"{1e3 * each.resting:.1f} with {each.count:,}" for each in bursts)
    what = f"the pool's processor time in a second in which nothing happens, with {many.count:,} kernels"
    ours, before = (1e3 * each.resting for each in (many, bursts[0]))
    return Line(what, ours / before, made_of, ours=ours, yardstick=before, unit="ms")


def _waits(few: Burst, many: Burst) -> Line:
    slow, fast = (percentile(each.ran, 0.95) for each in (many, few))
    what = f"from asked to running (95%), {many.count:,} at once to {few.count}"
    made_of = f"all wait for the same cores; the first runs after {many.ran[0]:.1f} and {few.ran[0]:.1f} s"
    points = _points(enumerate(many.ran))
    return Line(what, slow / fast, made_of, ours=slow, yardstick=fast, unit="s", points=points)


def _memories(many: Burst, bursts: Sequence[Burst]) -> Line:
    """Return how the pool's memory grows with the kernels that run."""
    curve = [(bisect(many.ran, seconds), mib) for seconds, mib, _ in many.samples]
    before, after = curve[0][1], curve[-1][1]
    each = 1024 * (after - before) / many.count
    settled = ", ".join(f"{burst.memory:.0f} MiB with {burst.count:,}" for burst in bursts)
    made_of = f"{each:.0f} KiB for each; those who ask are in the same process; once all run: {settled}"
    what = f"memory with {many.count:,} kernels, to none"
    points = _points(curve)
    return Line(what, after / before, made_of, ours=after, yardstick=before, unit="MiB", points=points)


def _counts(bursts: Sequence[Burst]) -> Iterator[Line]:
    many = bursts[-1]
    begun, ended = many.asked["to run"], many.asked["to end"]
    each = writes(begun) / many.count + writes(ended) / (many.count + BESIDE)
    made_of = f"to run: {_told(begun)}; to end, with {BESIDE} more: {_told(ended)}"
    yield Line("writes per grant, its end included", each, made_of, 4.0, ours=each)
    idle = _told(many.asked["while nothing happened"]) or "none"
    again = float(sum(lists(asked) for burst in bursts for asked in burst.asked.values()))
    made_of = f"all requests in {STEADY_SECONDS:.0f} s in which nothing happened: {idle}"
    yield Line("lists once the pool has started", again, made_of, 0.0, ours=again)


def _points(curve: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return of a curve as many points as a plot shows."""
    every = tuple(curve)
    return every[:: max(1, len(every) // POINTS)]


def _told(asked: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(asked.items()))


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    yield from lines(asyncio.run(measure()))
