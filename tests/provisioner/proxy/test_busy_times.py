"""When a kernel worked, as it is told to its pool."""

from __future__ import annotations

from gpu_pool_provisioner.proxy.busy_times import EVERY, BusyTimes


def test_pieces_of_work_are_told_once_and_not_too_often() -> None:
    now = 1_000.0
    times = BusyTimes(wall=lambda: now + 5_000, clock=lambda: now)
    times.see(busy=True)
    times.see(busy=True)  # a second subshell
    now += 2.5
    times.see(busy=False)
    times.see(busy=False)
    assert times.due() == ()
    now += EVERY
    times.see(busy=True)
    assert times.due() == ((6_000.0, 2.5),)
    assert times.due() == ()
    now += EVERY
    assert times.due() == ()  # what is under way has no length yet
    times.see(busy=False)
    assert times.due() == ((6_062.5, EVERY),)


def test_a_clock_that_is_set_makes_no_work_longer() -> None:
    wall = 5_000.0
    now = 0.0
    times = BusyTimes(wall=lambda: wall, clock=lambda: now)
    times.see(busy=True)
    wall, now = 90.0, 3.0
    times.see(busy=False)
    now += EVERY
    assert times.due() == ((5_000.0, 3.0),)


def test_the_last_thousand_are_kept() -> None:
    now = 0.0
    times = BusyTimes(wall=lambda: now, clock=lambda: now)
    for _ in range(1_500):
        times.see(busy=True)
        now += 1
        times.see(busy=False)
    assert [at for at, _ in times.due()] == [float(number) for number in range(500, 1_500)]
