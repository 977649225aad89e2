"""Every pool does what the model of a pool does, whatever happens to it.

A few hundred steps in ``make test``, most of them with the embedded pool, some thousand
in ``make test-all``; ``make soak`` does as many as one likes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from model.grounds import GROUNDS, Ground
from model.machine import PoolMachine
from support.hub import Hub
from support.service import ForkServer

#: Steps of one run from an empty pool, at most.
_LENGTH = 80
#: What part of them is done: Hypothesis ends some runs before.
_DONE = 0.7
#: What part of the steps is done with which pool: those in a process of their own start slowly.
_PARTS = {"embedded": 0.75, "unix": 0.1, "http": 0.07, "kubernetes": 0.08}
_ASKED = int(os.environ.get("GPU_POOL_MODEL_STEPS", "0"))
_AMOUNTS = [_ASKED] if _ASKED else [300, pytest.param(2_000, marks=pytest.mark.long)]

pytestmark = [
    pytest.mark.timeout(0 if _ASKED > 10_000 else 900),
    pytest.mark.parametrize("steps", _AMOUNTS),
]


@pytest.mark.parametrize("ground", GROUNDS)
def test_a_pool_does_what_its_model_does(
    steps: int,
    ground: str,
    children: ForkServer,
    request: pytest.FixtureRequest,
) -> None:
    def find_hub() -> Hub:
        found: Hub = request.getfixturevalue("hub")
        return found

    _hold(PoolMachine, ground, lambda: GROUNDS[ground](children, find_hub), steps)


def test_a_pool_over_a_cluster_does_what_its_model_does(steps: int, cluster_children: ForkServer) -> None:
    pytest.importorskip("kubernetes_asyncio", reason="the extra [kubernetes] is not installed")
    from model.cluster_steps import ClusterMachine
    from model.clusters import ClusterGround

    _hold(ClusterMachine, "kubernetes", lambda: ClusterGround(cluster_children), steps)


def _hold(machine: type[PoolMachine], name: str, make: Callable[[], Ground], every: int) -> None:
    """Do the part of all steps that is this pool's."""
    tried = type("Machine", (machine,), {"name": name, "make": staticmethod(make)})
    steps = every * _PARTS[name]
    run_state_machine_as_test(
        tried,
        settings=settings(
            max_examples=max(2, math.ceil(steps / (_DONE * _LENGTH))),
            stateful_step_count=min(_LENGTH, max(10, round(steps / 2))),
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
    print(f"{name}: {PoolMachine.steps[name]} steps")
