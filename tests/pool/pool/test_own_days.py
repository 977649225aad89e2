"""What is compared of a pool's own days: what its courses say is one way among others."""

from __future__ import annotations

import pytest

from gpu_pool.policy.sharing import Course, Sharing
from gpu_pool.pool.own_days import AS_NOW, WAYS, as_now
from gpu_pool_client import WhenIdle

NEVER = Course("never", yield_after=None)


@pytest.mark.parametrize(
    "sharing",
    [
        Sharing(),
        Sharing({"ml": Course("ml")}),
        Sharing({"never": NEVER}, NEVER),
        Sharing({"ml": Course("ml")}, in_pods=True),
        Sharing({"ml": Course("ml", idle_limit=600.0)}, in_pods=True),
    ],
    ids=["no courses", "as without a word", "reserved", "pods", "kept in pods"],
)
def test_courses_that_say_what_is_compared_anyhow_are_no_way_of_their_own(sharing: Sharing) -> None:
    assert as_now(sharing) is None


def test_each_course_counts_and_who_names_none() -> None:
    now = as_now(Sharing({"ml": Course("ml", idle_limit=600.0), "never": NEVER}))
    assert now is not None
    assert now.name == AS_NOW
    assert now.name not in {way.name for way in WAYS}
    assert (now.idle_limit, now.yield_after) == (None, 60.0)
    said = {name: (way.idle_limit, way.yield_after) for name, way in now.of_course.items()}
    assert said == {"ml": (600.0, 60.0), "never": (None, None)}


def test_an_idle_kernel_in_a_pod_only_ends() -> None:
    ends = Course("ml", idle_limit=600.0, when_idle=WhenIdle.END)
    now = as_now(Sharing({"ml": ends}, in_pods=True))
    assert now is not None
    assert [(way.idle_limit, way.yield_after) for way in now.of_course.values()] == [(600.0, None)]
