"""Whatever is killed at whatever step to disk or back: one kernel runs, or one whole image is there."""

from __future__ import annotations

import os
import random
from typing import Final

import pytest

from support.jupyter_env import JupyterEnv
from support.kernels_on_disk import NEEDS_CRIU
from support.killed_hibernation import Machine

pytestmark = [
    *NEEDS_CRIU,
    pytest.mark.long,
    pytest.mark.timeout(900),
]
#: Who takes part in a dump: the server, and calls of the program, of which one stays with the kernel.
_ALL: Final = ("server", "criu", "launch", "dump")
#: Where something is killed on its way, and what.
STEPS: Final = [
    *[("dump", moment, who) for moment in ("before", "writing", "after") for who in _ALL],
    *[("dump", "named", who) for who in ("server", "launch", "dump")],
    *[("restore", moment, who) for moment in ("before", "after") for who in ("server", "criu", "restore")],
]


@pytest.fixture
def machine(jupyter_env: JupyterEnv) -> Machine:
    return Machine(jupyter_env)


@pytest.mark.parametrize(("step", "moment", "who"), STEPS)
async def test_what_is_killed_at_a_step_leaves_one_of_it(
    machine: Machine, step: str, moment: str, who: str
) -> None:
    await machine.killed(step, moment, who)


#: How often something is killed at a random moment, and where the random numbers begin.
ROUNDS: Final = int(os.environ.get("HIBERNATION_ROUNDS", "20"))
SEED: Final = os.environ.get("CHAOS_SEED") or str(random.randrange(10**6))


@pytest.mark.timeout(120 * ROUNDS)
async def test_what_is_killed_at_a_random_moment_leaves_one_of_it(machine: Machine) -> None:
    """To have the same again do: ``CHAOS_SEED=…``. What runs meanwhile besides decides, too."""
    for number in range(ROUNDS):
        await machine.struck(f"CHAOS_SEED={SEED}, round {number}", random.Random(f"{SEED} {number}"))
