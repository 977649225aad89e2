"""Every pool does what the model of a pool does, whatever happens to it.

By default some hundred steps for each; ``make soak`` does as many as one likes.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from model.grounds import GROUNDS, Ground
from model.machine import PoolMachine
from support.hub import Hub
from support.service import Nursery

#: Steps of one run from an empty pool.
_LENGTH = 80
#: What part of the steps is done with which pool: those in a process of their own start slowly.
_PARTS = {"embedded": 0.8, "unix": 0.12, "http": 0.08}
_STEPS = int(os.environ.get("GPU_POOL_MODEL_STEPS", "1000"))


@pytest.mark.timeout(0 if _STEPS > 10_000 else 900)
@pytest.mark.parametrize("ground", GROUNDS)
def test_a_pool_does_what_its_model_does(
    ground: str,
    nursery: Nursery,
    request: pytest.FixtureRequest,
) -> None:
    def find_hub() -> Hub:
        found: Hub = request.getfixturevalue("hub")
        return found

    class Machine(PoolMachine):
        name = ground

        @staticmethod
        def make() -> Ground:
            return GROUNDS[ground](nursery, find_hub)

    examples = max(2, round(_STEPS * _PARTS.get(ground, 0.1) / _LENGTH))
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=_LENGTH,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
    print(f"{ground}: {Machine.steps[ground]} steps")
