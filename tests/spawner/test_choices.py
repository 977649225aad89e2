"""What is chosen, by whom, and whether that may be. No Hub is needed."""

from __future__ import annotations

import json
from datetime import datetime, timezone

import pytest

from gpu_pool.courses import Courses, parse_course
from gpu_pool_client import BadRequest, GpuPoolError, NotAllowed
from gpu_pool_kernels import offered
from gpu_pool_spawner import mixin
from gpu_pool_spawner.choices import check, courses_of, options_of_form, options_of_link

NOW = datetime(2026, 10, 12, 10, tzinfo=timezone.utc)
FILES = {
    "ml": "title: ML\nwho: {groups: [ml]}\nslices: [{name: Small, request: 2%}, {name: Large, request: 10%}]",
    "all": "title: All\nslices: [{name: Small, request: 2%}]",
    "shut": "title: Shut\nwho: {users: [ada]}\ninstructors: [grace]\nslices: [{name: S, request: 2%}]\n"
    "hours: Sun 10:00-12:00\ntime_zone: UTC",
}
COURSES = Courses({name: parse_course(f"{name}.yaml", text.encode()) for name, text in FILES.items()})


@pytest.mark.parametrize(
    ("user", "groups", "may", "later"),
    [
        ("ada", {"ml"}, {"ml", "all"}, {"shut"}),
        ("grace", set(), {"all", "shut"}, set()),
        ("alan", {"other"}, {"all"}, set()),
    ],
)
def test_a_course_is_found_by_name_by_group_and_by_the_hour(
    user: str, groups: set[str], may: set[str], later: set[str]
) -> None:
    mine = courses_of(user, groups, COURSES, NOW)
    assert (set(mine.open), set(mine.closed)) == (may, later)


def test_a_form_means_a_course_or_none() -> None:
    assert options_of_form({"course": ["ml"]}) == {"course": "ml"}
    assert options_of_form({"course": [""]}) == options_of_form({}) == {}


@pytest.mark.parametrize(
    "form",
    [{"course": ["ml", "all"]}, {"course": [b"ml"]}, {"course": ["ml"], "image": ["x"]}, {"a_file": [1]}],
)
def test_a_form_with_anything_else_is_refused(form: dict[str, list[object]]) -> None:
    with pytest.raises(BadRequest):
        options_of_form(form)


def test_a_link_without_a_course_starts_nothing() -> None:
    assert options_of_link({"course": ["ml"], "_xsrf": ["x"]}) == {"course": "ml"}
    with pytest.raises(BadRequest):
        options_of_link({"_xsrf": ["x"]})


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("ml", NotAllowed, "not in this course"),
        ("shut", NotAllowed, "It opens on Sun 2026-10-18 at 10:00 (UTC)."),
        ("none", NotAllowed, "No course file describes the course 'none'"),
        (None, BadRequest, "Choose one of yours: all."),
    ],
)
def test_a_refusal_says_why(name: str | None, error: type[GpuPoolError], words: str) -> None:
    with pytest.raises(error) as refused:
        check(name, "ada", (), COURSES, NOW, required=True)
    assert words in str(refused.value)


def test_a_server_without_a_course_where_none_is_required() -> None:
    assert check(None, "ada", (), COURSES, NOW, required=False) is None
    told = mixin.with_course({"GPU_POOL_COURSE": "left", "GPU_POOL_KERNELS": "left"}, None, None, "unix:")
    assert told == {"GPU_POOL_URL": "unix:", "GPU_POOL_KERNELS": "[]"}


def test_a_server_is_told_its_course_whatever_was_set_before() -> None:
    before = {
        "GPU_POOL_COURSE": "mine",
        "GPU_POOL_URL": "embedded:",
        "GPU_POOL_KERNELS": '["1"]',
        "HOME": "/h",
    }
    told = mixin.with_course(before, "ml", COURSES.usable["ml"], "unix:/p")
    assert told.pop("HOME") == "/h"
    assert json.loads(told.pop("GPU_POOL_KERNELS")) == ["2%", "10%"]
    assert told == {"GPU_POOL_COURSE": "ml", "GPU_POOL_URL": "unix:/p"}


PRELOADING = "title: A\nslices: [{name: S, request: 2%}, {name: L, request: 10%, default: true}]\n"


@pytest.mark.parametrize(
    ("line", "in_pods", "told"),
    [
        ("", False, None),
        ("preload: [numpy, torch]", False, {"modules": ["numpy", "torch"]}),
        ("preload: []", False, {"modules": []}),
        ("preload: numpy\npreload_with_server: true", False, {"modules": ["numpy"], "with_server": "10%"}),
        ("preload: numpy\npreload_with_server: true", True, {"modules": ["numpy"]}),
    ],
)
def test_a_server_is_told_what_its_kernels_preload(
    line: str, in_pods: bool, told: dict[str, object] | None
) -> None:
    course = parse_course("a.yaml", f"{PRELOADING}{line}\n".encode())
    found = mixin.with_course({"GPU_POOL_PRELOAD": "left"}, "a", course, "unix:", in_pods=in_pods)
    assert json.loads(found.get("GPU_POOL_PRELOAD", "null")) == told


def test_the_server_knows_what_the_spawner_says() -> None:
    assert mixin.KERNELS_VARIABLE == offered.KERNELS_VARIABLE
    assert mixin.PRELOAD_VARIABLE == offered.PRELOAD_VARIABLE
    assert mixin.arguments(cpu_kernels=False) == [
        f"--ServerApp.kernel_spec_manager_class={offered.__name__}.{offered.OfferedKernels.__name__}",
        f"--{offered.OfferedKernels.__name__}.{offered.OfferedKernels.other_kernels.name}=False",
    ]
