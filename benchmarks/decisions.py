"""What one decision of the queue costs with those who wait, and a simulated lease, on 640 devices."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from benchmarks.report import Line
from benchmarks.sizes import sized
from gpu_pool.devices import discover
from gpu_pool.policy import placement
from gpu_pool.policy.queue import Decision, Holding, Policy, Situation, Usage, Waiter, decide
from gpu_pool.policy.queue_state import Rules
from gpu_pool.simulation import ORDERS, Arrival, simulate
from gpu_pool_client import DeviceStatus, parse_request

DEVICES = discover({"GPU_POOL_DEVICES": "V100-SXM2-32GB:640"}).devices
WAITERS, LEASES, ROUNDS = sized((100, 1_000, 10_000), (10, 100)), sized(3_000, 200), sized(9, 2)
#: What is asked for, and how often.
SIZES = {"1": 50.0, "81%": 15.0, "47%": 9.0, "32%": 6.0, "23%": 4.0, "5%": 12.0, "2": 0.7, "4": 0.7, "8": 0.7}
REQUESTS = [parse_request(size) for size in SIZES]
COURSES, USERS, MEAN_STAY = ("a", "b", "c"), 200, 2_400.0


def arrivals(count: int, load: float, seed: int) -> list[Arrival]:
    """Draw who comes: stays are lognormal, of about 40 minutes."""
    stream, at, found = random.Random(seed), 0.0, []
    milli = sum(w * (r.milli or 0) * r.count for r, w in zip(REQUESTS, SIZES.values(), strict=True))
    rate = load * len(DEVICES) * 1000 / (milli / sum(SIZES.values()) * MEAN_STAY)
    for _ in range(count):
        at += stream.expovariate(rate)
        request = stream.choices(REQUESTS, list(SIZES.values()))[0]
        stay = min(43_200.0, stream.lognormvariate(7.28, 1.0))
        found.append(Arrival(at, f"user-{stream.randrange(USERS)}", stream.choice(COURSES), request, stay))
    return found


def full(waiters: int) -> Situation:
    """Return a pool in which nothing is free, and so many wait, the first of whom has something reserved."""
    come = arrivals(waiters, 1.0, 1)
    line = [
        Waiter(number, each.request, user=each.user, course=each.course, since=3_990.0 * number / waiters)
        for number, each in enumerate(come)
    ]
    empty = [DeviceStatus(each, 0, 0, 0, 0) for each in DEVICES]
    now = Situation(arrived(2_000), (), empty, Rules(), Policy(), Usage(), 4_000.0)
    now = settled(now, decide(now))
    return settled(replace(now, queue=line), decide(replace(now, queue=line)))


def arrived(count: int) -> list[Waiter]:
    """Return those who fill the pool."""
    come = arrivals(count, 1.0, 2)
    return [
        Waiter(-1 - n, each.request, user=each.user, course=each.course, since=-1.0 * n)
        for n, each in enumerate(come)
    ]


def settled(now: Situation, decision: Decision) -> Situation:
    """Return the situation once the decision has taken effect."""
    granted, kept, statuses = (
        {waiter.number for waiter, _ in decision.grants},
        decision.reservations,
        now.statuses,
    )
    for _, parts in decision.grants:
        statuses = placement.deduct(statuses, parts)
    held = [Holding(w.user, w.course, parts, None, w.since) for w, parts in decision.grants]
    line = [replace(w, reserved=kept.get(w.number, ())) for w in now.queue if w.number not in granted]
    return replace(now, queue=line, holdings=[*now.holdings, *held], statuses=statuses)


def one_ended(now: Situation) -> Situation:
    """Return the situation once the lease of a whole device has ended."""
    ended = next(each for each in now.holdings if each.milli == 1000)
    holdings = [each for each in now.holdings if each is not ended]
    return replace(now, holdings=holdings, statuses=placement.give_back(now.statuses, ended.parts))


def cost(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the least milliseconds of processor time that it takes: others use the machine."""
    found = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        found.append(1e3 * (time.process_time() - began))
    return min(found)


def run() -> Iterator[Line]:
    """Measure decisions with few and many in the queue, and a simulated lease."""
    now = {waiters: full(waiters) for waiters in WAITERS}
    for what, change in (("nothing is free", lambda each: each), ("one lease has ended", one_ended)):
        found = [(float(n), cost(partial(decide, change(now[n])))) for n in WAITERS]
        less, more = found[0], found[-1]
        yield Line(
            f"a decision when {what}, {more[0]:,.0f} waiting, to {less[0]:,.0f}",
            more[1] / less[1],
            f"processor time, least of {ROUNDS}: "
            + ", ".join(f"{ms:.1f} ms with {n:,.0f}" for n, ms in found),
            ours=more[1],
            yardstick=less[1],
            unit="ms",
            points=tuple(found),
        )
    for load in (0.9, 1.2):
        come = arrivals(LEASES, load, 0)
        each = cost(partial(simulate, come, DEVICES, ORDERS["fair"]), 1) / LEASES
        yield Line(
            f"a lease in simulated time at load {load}", each, f"{LEASES:,} leases", ours=each, unit="ms"
        )
