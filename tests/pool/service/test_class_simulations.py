"""Classes are simulated one at a time, for a while, and only while somebody waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from gpu_pool.courses.arithmetic import Rush, RushGivenUp
from gpu_pool.service.class_simulations import ClassSimulations, SimulationLimits
from gpu_pool.simulation.report import WaitFigures

FOUND = Rush(1, 60.0, 1, 0, WaitFigures(1, 0.0, 0.0, 0.0, 0.0))
ENDLESS = SimulationLimits(seconds=3600.0, waiting=3600.0)


class Endless:
    """A simulation that ends when it is told to."""

    def __init__(self) -> None:
        self.began, self.ended = threading.Event(), threading.Event()

    def __call__(self, goes_on: Callable[[], bool]) -> Rush:
        self.began.set()
        while goes_on():
            pass
        self.ended.set()
        raise RushGivenUp


def short(goes_on: Callable[[], bool]) -> Rush:
    assert goes_on()
    return FOUND


async def begun(simulations: ClassSimulations, user: str) -> tuple[Endless, asyncio.Task[Rush]]:
    endless = Endless()
    task = asyncio.create_task(simulations.rush(user, endless))
    await asyncio.to_thread(endless.began.wait)
    return endless, task


async def test_a_newer_one_of_the_same_user_takes_the_place_of_the_one_before() -> None:
    simulations = ClassSimulations(ENDLESS)
    _, first = await begun(simulations, "turing")
    assert await simulations.rush("turing", short) == FOUND
    with pytest.raises(RushGivenUp, match="a newer check of yours has taken its place"):
        await first


async def test_a_newer_one_takes_the_place_of_one_that_waits() -> None:
    simulations = ClassSimulations(ENDLESS)
    _, running = await begun(simulations, "hopper")
    waits = asyncio.create_task(simulations.rush("turing", short))
    newer = asyncio.create_task(simulations.rush("turing", short))
    with pytest.raises(RushGivenUp, match="a newer check of yours"):
        await waits
    running.cancel()
    assert await newer == FOUND


async def test_whoever_waits_and_leaves_keeps_nobody() -> None:
    simulations = ClassSimulations(ENDLESS)
    endless, running = await begun(simulations, "hopper")
    left = asyncio.create_task(simulations.rush("ada", short))
    stays = asyncio.create_task(simulations.rush("turing", short))
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    running.cancel()
    assert await stays == FOUND
    assert endless.ended.is_set()


async def test_the_next_begins_only_when_the_thread_before_it_has_ended() -> None:
    simulations = ClassSimulations(ENDLESS)
    endless, running = await begun(simulations, "hopper")
    running.cancel()

    def after(goes_on: Callable[[], bool]) -> Rush:
        assert endless.ended.is_set()
        return short(goes_on)

    assert await simulations.rush("turing", after) == FOUND


async def test_what_fails_is_told_and_keeps_nobody() -> None:
    simulations = ClassSimulations(ENDLESS)

    def fails(_: Callable[[], bool]) -> Rush:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await simulations.rush("turing", fails)
    assert await simulations.rush("turing", short) == FOUND


async def test_it_is_given_up_after_its_time_and_after_the_time_of_waiting() -> None:
    simulations = ClassSimulations(SimulationLimits(seconds=0.0, waiting=0.0))
    with pytest.raises(RushGivenUp, match=r"^that takes more than 0s\.$"):
        await simulations.rush("hopper", Endless())
    simulations = ClassSimulations(SimulationLimits(seconds=3600.0, waiting=0.0))
    _, running = await begun(simulations, "hopper")
    with pytest.raises(RushGivenUp, match="others are checking their courses, too, and were not done within"):
        await simulations.rush("turing", short)
    running.cancel()
