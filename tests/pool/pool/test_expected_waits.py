"""The expected waits of a line: worked out for all at once, told for a while."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from gpu_pool.policy import forecast
from gpu_pool.policy.queue import Policy, Situation, Usage
from gpu_pool.policy.queue_state import HoldingTime
from gpu_pool.pool import expected_waits
from gpu_pool.pool.expected_waits import ExpectedWaits
from support.pools import V100, embedded, eventually, take
from support.queues import RULES, holding, statuses, waiter

STAYS = [HoldingTime("", 1000, 60.0 * minutes) for minutes in (10, 20, 30, 40, 50)]


#: Seconds to wait for what is worked out, however busy the machine is.
PATIENT = 30.0


def prospects(*numbers: int) -> Situation:
    """Return what a line for four GPUs that are all held is told."""
    held = [holding(index, 1000) for index in range(4)]
    line = [waiter(number, "1") for number in numbers]
    return Situation(line, held, statuses(held), RULES, Policy(), Usage(), 100.0, history=STAYS)


async def test_waits_are_those_of_the_whole_line_less_what_has_passed() -> None:
    now = 1_000.0
    waits = ExpectedWaits(patience=PATIENT, clock=lambda: now)
    await waits.learn(prospects(1, 2))
    expected = forecast.expected_waits(prospects(1, 2))
    now += 60.0
    for number in (1, 2):
        assert waits.of(number) == pytest.approx([each - 60.0 for each in expected[number]])
    assert waits.of(3) is None
    waits.close()


async def test_what_took_long_is_not_worked_out_again_soon() -> None:
    waits = ExpectedWaits(patience=PATIENT, times=1e9)
    assert waits.are_due
    await waits.learn(prospects(1))
    assert not waits.are_due
    await waits.learn(prospects(2))
    assert waits.of(2) is None
    assert waits.of(1) is not None
    waits.longest = 0.0
    assert waits.of(1) is None
    waits.close()


async def test_nobody_waits_long_for_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, may_end = ExpectedWaits(patience=0.05), threading.Event()
    with monkeypatch.context() as slow:
        slow.setattr(expected_waits, "expected_wait", lambda *_: may_end.wait(120))
        assert await waits.foresee(1, prospects(1)) is None
    may_end.set()
    waits.patience = PATIENT
    assert await waits.foresee(1, prospects(1)) is not None
    waits.close()


async def test_few_at_once_keep_it_busy_and_the_line_is_worked_out_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most, may_end, begun = 4, threading.Event(), []
    waits = ExpectedWaits(patience=0.05, most_asking=most)

    def slowly(number: int, *_: object) -> None:
        begun.append(number)
        may_end.wait(120)

    with monkeypatch.context() as slow:
        slow.setattr(expected_waits, "expected_wait", slowly)
        many = range(3 * most)
        await asyncio.gather(
            *(waits.foresee(each, prospects(each)) for each in many), waits.learn(prospects(1))
        )
        assert not waits.are_due
        may_end.set()
        await eventually(lambda: waits.of(1) is not None)
    assert begun == list(many[:most])
    # Their places are free again.
    waits.patience = PATIENT
    assert await waits.foresee(1, prospects(1)) is not None
    waits.close()


async def test_whoever_waits_is_told_for_how_long_once_enough_is_known(tmp_path: Path) -> None:
    """But not of a lease that has lasted longer than all others did, and has no end."""
    for longest, is_told in (("4h", True), ("none", False)):
        course = {"longest_lease": longest} if is_told else {}
        async with embedded(tmp_path / f"{longest}.db", V100, default_course=course) as pool:
            for number in range(5):
                await pool.release(await take(pool, "1", f"past-{number}"))
            await take(pool, "1", "held")
            waiting = await take(pool, "1", "waiting")
            held = (await pool.status()).leases[0].held_at
            assert held is not None
            longest_past = max(each.held_seconds for each in await pool.history())
            await eventually(lambda held=held, past=longest_past: time.time() - held > past)  # type: ignore[misc]
            assert ((await pool.explain(waiting)).wait is not None) is is_told
