"""Sessions played cell by cell: who holds what, who waits, and who gives way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_pool.simulation.recorded import RecordedCell, RecordedSession
from gpu_pool.simulation.replay import (
    MOVED_PER_SECOND,
    PER_CELL,
    RESERVATION,
    Costs,
    ReplayResult,
    Way,
    replay,
)
from gpu_pool_client import parse_request
from support.pools import device

YIELD = Way("yield after 1 min", yield_after=60.0)
IDLE_LIMIT = Way("idle limit 5 min", idle_limit=300.0)
WAYS = [RESERVATION, IDLE_LIMIT, YIELD, PER_CELL]


def session(
    at: float, *busy: tuple[float, float], ends_at: float | None = None, size: str = "1"
) -> RecordedSession:
    request = parse_request(size)
    cells = tuple(RecordedCell(*each) for each in busy)
    end = cells[-1].ended_at if ends_at is None else ends_at
    return RecordedSession(at, end, f"u{at:g}", "ml", request, request.count * (request.milli or 0), cells)


def play(*sessions: RecordedSession, way: Way, gpus: int = 1, costs: Costs | None = None) -> ReplayResult:
    return replay(sessions, [device(index) for index in range(gpus)], way, costs)


#: Works for ten seconds, thinks for an hour, and works again; meanwhile somebody comes.
THINKER = session(0, (0, 10), (3610, 10))
NEWCOMER = session(600, (600, 30))


def test_reservation_lets_others_wait_to_the_end() -> None:
    result = play(THINKER, NEWCOMER, way=RESERVATION)
    assert sorted(result.delays) == [0, 0, 3020]
    assert result.held == 1000 * (3620 + 30)
    assert (result.asked_back, result.parked) == (0, 0)


def test_an_idle_kernel_gives_way_at_once_when_somebody_waits_and_only_then() -> None:
    result = play(THINKER, NEWCOMER, way=YIELD)
    # Its second cell takes the slice again.
    assert sorted(result.delays) == [0, 0, 5]
    assert (result.asked_back, result.parked) == (1, 1)
    assert result.held == 1000 * (600 + 30 + 15)
    alone = play(THINKER, way=YIELD)
    assert (alone.asked_back, alone.delays, alone.held) == (0, [0, 0], 1000 * 3620)


def test_a_kernel_that_has_not_been_idle_for_long_gives_way_when_it_has() -> None:
    result = play(THINKER, session(30, (30, 30)), way=YIELD)
    # Idle from 10 on: asked back at 70.
    assert sorted(result.delays) == [0, 5, 40]


def test_an_idle_limit_gives_back_though_nobody_waits() -> None:
    result = play(THINKER, way=IDLE_LIMIT)
    assert (result.delays, result.asked_back, result.parked) == ([0, 5], 0, 1)
    assert result.held == 1000 * (310 + 15)


def test_each_course_may_say_something_else() -> None:
    of_course = replace(IDLE_LIMIT, name="as said", of_course={"ml": YIELD})
    assert of_course.asks_back
    assert not replace(of_course, of_course={"ml": RESERVATION}).asks_back
    assert play(THINKER, NEWCOMER, way=of_course).held == play(THINKER, NEWCOMER, way=YIELD).held
    others = [replace(each, course="nlp") for each in (THINKER, NEWCOMER)]
    assert play(*others, way=of_course).held == play(*others, way=IDLE_LIMIT).held
    # Whoever yields to nobody is not given way to, and does not give way.
    mixed = play(replace(THINKER, course="nlp"), NEWCOMER, way=of_course)
    assert (mixed.asked_back, mixed.parked) == (0, 1)


def test_slices_given_to_cells_are_held_for_cells_and_for_taking_them() -> None:
    result = play(THINKER, NEWCOMER, way=PER_CELL)
    assert sorted(result.delays) == [0, 0, 5]
    assert result.held == 1000 * (10 + 15 + 30)


def test_think_times_are_kept() -> None:
    """Who gets a result later submits the next cell later: the wait is told once."""
    result = play(session(0, (0, 1000)), session(10, (10, 10), (30, 10), (50, 10)), way=RESERVATION)
    assert result.delays == [0, 990, 0, 0]


def test_what_is_on_a_device_is_moved_before_others_use_it_and_before_it_is_used_again() -> None:
    costs = Costs(resume=0.0, state_mib=10 * MOVED_PER_SECOND)
    result = play(THINKER, NEWCOMER, way=YIELD, costs=costs)
    assert sorted(result.delays) == [0, 10, 10]


def test_who_has_used_cuda_returns_to_its_own_device() -> None:
    stays = session(605, (605, 9000))
    pinned = play(THINKER, stays, session(0, (0, 700)), way=YIELD, gpus=2, costs=Costs(same_devices=True))
    anywhere = play(THINKER, stays, session(0, (0, 700)), way=YIELD, gpus=2)
    assert max(anywhere.delays) == 5
    assert max(pinned.delays) > 5_000


def test_a_session_that_was_cut_while_idle_begins_without_a_slice() -> None:
    cut = replace(session(0, (100, 10)), idle_before=90.0)
    assert play(cut, session(0, (0, 50)), way=YIELD).delays == [0, 5]
    assert play(cut, way=RESERVATION).delays == [0]


def test_a_session_without_cells_holds_for_as_long_as_it_did() -> None:
    idle = session(0, ends_at=500.0)
    assert play(idle, way=RESERVATION).held == 500 * 1000
    assert play(idle, NEWCOMER, way=YIELD).held == (500 + 30) * 1000
    assert play(idle, session(100, (100, 10)), way=YIELD).held == (100 + 10) * 1000


def test_others_do_not_give_way_to_a_job() -> None:
    result = play(THINKER, replace(NEWCOMER, is_job=True), way=YIELD)
    assert (result.asked_back, max(result.delays)) == (0, 3020)


@st.composite
def days(draw: st.DrawFn) -> list[RecordedSession]:
    sessions = []
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, 600))
        now, busy = float(at), []
        for think, lasts in draw(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 300)), max_size=5)):
            busy.append((now + think, float(lasts)))
            now += think + lasts
        size = draw(st.sampled_from(["20%", "1", "2"]))
        sessions.append(session(at, *busy, ends_at=now + draw(st.integers(1, 300)), size=size))
    return sessions


@given(days(), st.sampled_from(WAYS), st.booleans(), st.sampled_from([0.0, 4.0]))
def test_every_cell_runs_once_and_every_slice_comes_back(
    sessions: list[RecordedSession], way: Way, same: bool, park: float
) -> None:
    result = play(*sessions, way=way, gpus=2, costs=Costs(same_devices=same, park=park))
    assert len(result.delays) == sum(len(each.cells) for each in sessions)
    assert min(result.delays, default=0.0) >= 0
    assert result.held >= sum(each.used_gpu_seconds * 1000 for each in sessions) - 1e-3
    assert result.asked_back <= result.parked
    assert sum(wait.is_first for wait in result.waits) == len(sessions)


def test_nobody_waits_longer_by_yielding_where_there_is_room_for_all() -> None:
    sessions = [session(n, (n, 10), (n + 1000, 10)) for n in range(4)]
    for way in (RESERVATION, YIELD):
        assert set(play(*sessions, way=way, gpus=4).delays) == {0}


@pytest.mark.parametrize("way", WAYS)
def test_how_far_it_has_come_is_told(way: Way) -> None:
    told: list[float] = []
    replay([THINKER, NEWCOMER], [device(0)], way, tell=told.append)
    assert told
    assert all(0 <= part <= 1 for part in told)
