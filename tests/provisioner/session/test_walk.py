"""Random walks of sessions through their table, against what they promise."""

from __future__ import annotations

import random

import pytest

from gpu_pool_provisioner.session import State
from support.session_world import LAUNCHED, Arrow, World, a_left_one, a_session, arrows, starting


def walk(seed: int, steps: int) -> World:
    """Walk so many steps; once a session has ended, a few more, and with the next one from the beginning.

    Every second one's kernel runs at once: few come that far by chance. Most may sleep on disk, and a quarter
    does from the beginning.
    """
    chance, seen = random.Random(seed), set[Arrow]()
    begin = (a_session(), a_session(), a_session(), a_left_one())
    world = World(chance, session=chance.choice(begin), seen=seen)
    worlds, after_its_end = 1, 0
    for _ in range(steps):
        world.walk()
        after_its_end += world.session.state is State.ENDED
        if after_its_end > 3:
            world, after_its_end = World(chance, session=chance.choice(begin), seen=seen), 0
            worlds += 1
            if worlds % 2 == 0 and not world.session.left:
                for event in starting(chance.choice(LAUNCHED)):
                    world.happen(event)
    return world


@pytest.mark.parametrize("seed", range(4))
def test_no_walk_breaks_a_promise(seed: int) -> None:
    walk(seed, 5_000)


@pytest.mark.long
def test_no_long_walk_breaks_a_promise_and_every_arrow_is_gone() -> None:
    world = walk(1, 3_000_000)
    assert world.seen == arrows()
