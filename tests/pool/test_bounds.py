"""Every number that an administrator sets has bounds, and is refused beyond them in words."""

from __future__ import annotations

import math
from typing import Any

import pytest
from traitlets import Float, Integer, TraitError
from traitlets.config import Configurable

from gpu_pool.cluster.dialects import DialectOptions
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.policy.sharing import Course, read_course, read_group, read_quota
from gpu_pool.service.settings import ServeSettings
from gpu_pool.settings import PoolSettings
from gpu_pool_client import BadRequest
from gpu_pool_provisioner.provisioner import GPUPoolProvisioner
from gpu_pool_provisioner.server.settings import GPUPoolServer
from gpu_pool_spawner.kube_profiles import KubeSettings

#: What Python, JSON and YAML can all write as a number, and nobody means.
WILD = [10**400, 10**5000, -(10**400), 1e308, -1e308, math.inf, -math.inf, math.nan, True, 2**63, -1]
NUMBERS = [
    (kind, name)
    for kind in (
        *(PoolSettings, ServeSettings, KubernetesSettings),
        *(GPUPoolProvisioner, GPUPoolServer, KubeSettings),
    )
    for name, trait in kind.class_traits(config=True).items()
    if isinstance(trait, Integer | Float) and trait.this_class.__module__.startswith("gpu_pool")
]


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=[f"{kind.__name__}.{name}" for kind, name in NUMBERS])
def test_every_number_has_bounds_and_what_lies_beyond_is_refused(kind: type[Configurable], name: str) -> None:
    trait: Any = kind.class_traits()[name]
    assert -(2**31) <= trait.min <= trait.max < 2**40
    wild = [each for each in WILD if not (trait.min <= each <= trait.max) or isinstance(each, bool)]
    for each in wild:
        with pytest.raises(TraitError, match=rf"{name} is (?s:.*); it must be a (whole )?number .*from"):
            trait.validate(None, each)


def test_there_are_such_numbers() -> None:
    assert len(NUMBERS) > 40


@pytest.mark.parametrize("name", ["volcano_memory_factor", "aliyun_memory_unit", "context_mib", "most_milli"])
@pytest.mark.parametrize(
    "number", [10**400, -1, math.inf, True, 2**63], ids=["large", "-1", "inf", "yes", "64 bits"]
)
def test_a_number_of_a_dialect_has_bounds(name: str, number: Any) -> None:
    with pytest.raises(BadRequest):
        DialectOptions(**{name: number})


@pytest.mark.parametrize(
    "number",
    [10**400, 10**5000, math.inf, math.nan, 1e308, True, 2**63, "9" * 5000],
    ids=["large", "huge", "inf", "nan", "float", "yes", "64 bits", "text"],
)
def test_a_number_of_a_course_or_group_has_bounds(number: Any) -> None:
    durations = ("longest_lease", "idle_limit", "yield_after", "warn_before", "keep_at_most")
    for name in ("weight", "priority", *durations):
        with pytest.raises(BadRequest, match=rf"(?s){name} of course 'ml101': .*Accepted"):
            read_course("ml101", {name: number})
    for name in ("slices", "share", "memory", "gpu_hours_per_week", "gpu_hours_per_term"):
        with pytest.raises(BadRequest, match=rf"(?s){name} of per_user: .*Accepted"):
            read_quota({name: number}, "per_user")
    with pytest.raises(BadRequest, match="priority"):
        read_group("phd", {"priority": number})


def test_the_largest_numbers_are_accepted() -> None:
    course = read_course("ml101", {"weight": 10**9, "priority": 10**6, "longest_lease": "3650d"})
    assert course == Course("ml101", 1e9, 10**6, longest_lease=3650 * 86_400.0)
