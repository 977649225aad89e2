"""The arithmetic of a course, against numbers worked out by hand and the code that places real slices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from gpu_pool.courses import CourseFile, parse_course
from gpu_pool.courses.arithmetic import (
    Fit,
    limit_notes,
    memory_text,
    prepared_note,
    rush,
    slice_figures,
)
from gpu_pool.devices.inventory import parse_devices
from gpu_pool.policy import placement
from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import Device, DeviceStatus, SliceRequest, format_memory

V100 = parse_devices("V100-SXM2-32GB:1")
MIXED = parse_devices("V100-SXM2-32GB:1,T4@16GiB:2")


def course(request: str = "2%", more: str = "") -> CourseFile:
    return parse_course("a.yaml", f"title: A\nslices: [{{name: S, request: {request}}}]\n{more}".encode())


@pytest.mark.parametrize(
    ("request_", "each", "memory", "left"),
    [("2%", 50, 655, 305), ("1.5GiB", 21, 1536, 1186), ("1", 1, 32768, 32418), ("1%", 0, 327, -23)],
)
def test_how_many_fit_and_what_is_left(request_: str, each: int, memory: int, left: int) -> None:
    [found] = slice_figures(course(request_), V100, Rules())
    assert found.fits == (Fit("V100-SXM2-32GB (simulated)", 1, each, memory, left),)
    assert found.at_once == each


def test_of_a_slice_with_a_limit_the_guarantee_is_counted() -> None:
    quota = "quota: {share: 20%}"
    [plain], [limited] = (slice_figures(course(text, quota), V100, Rules()) for text in ("2%", "2%..10%"))
    [fit] = limited.fits
    assert (fit.memory_mib, fit.limit_mib, fit.no_limit) == (655, 3276, "")
    assert memory_text(fit, format_memory) == "655MiB, up to 3276MiB"
    assert replace(limited, request="2%", fits=plain.fits) == plain
    assert (limited.quota, replace(fit, limit_mib=0)) == (10, plain.fits[0])
    [note] = limit_notes(limited)
    assert note.startswith("S: 2% is certain: that is what is counted, here and by quotas. Up to 10%")
    assert "NvFractions" in note
    assert not list(limit_notes(plain))


@pytest.mark.parametrize(
    ("device", "rules", "why"),
    [
        (Device("MIG-1", 0, "A100", 4864, mig_profile="1g.5gb", milli=142), Rules(), "a MIG instance has"),
        (replace(V100[0], one_size=True), Rules(), "MPS gives all slices of the GPU one size"),
        (V100[0], Rules(max_milli=20), "nobody may have more of it"),
    ],
)
def test_where_a_limit_changes_nothing_that_is_said(device: Device, rules: Rules, why: str) -> None:
    [found] = slice_figures(course("2%..10%"), [device], rules)
    assert found.fits[0].limit_mib == 0
    _, note = limit_notes(found)
    assert note.startswith(f"S: on 1 x {device.label} the limit changes nothing: {why}")


def test_a_class_of_slices_with_limits_waits_like_one_without() -> None:
    limited, plain = (rush("a", course(text), 60, 3600, V100, Rules()) for text in ("2%..10%", "2%"))
    assert limited == plain


def test_each_model_has_a_line_of_its_own() -> None:
    [found] = slice_figures(course("2%"), MIXED, Rules())
    assert [(fit.gpus, fit.each) for fit in found.fits] == [(1, 50), (2, 0)]
    assert found.at_once == 50


def test_a_mig_instance_holds_one() -> None:
    part = Device("MIG-1", 0, "A100", 4864, mig_profile="1g.5gb", milli=142)
    [found] = slice_figures(course("2%"), [part], Rules())
    assert found.fits[0].each == 1


def test_contexts_are_counted_where_they_are_limited() -> None:
    limited = Device("GPU-1", 0, "V100", 32768, contexts=20)
    [found] = slice_figures(course("2%"), [limited], Rules())
    assert found.fits[0].each == 10


@given(
    some.integers(1, 4),
    some.integers(12, 1000).map(lambda milli: {"milli": milli})
    | some.integers(350, 40_000).map(lambda mib: {"memory_mib": mib}),
    some.integers(1000, 3000),
)
def test_it_is_as_many_as_can_be_placed(count: int, size: dict[str, int], device_milli: int) -> None:
    rules = Rules(device_milli=device_milli)
    request = SliceRequest(count, **size)
    [found] = slice_figures(course(str(request)), MIXED, rules)
    statuses = [DeviceStatus(device, 0, 0, 0, 0, rules.device_milli) for device in MIXED]
    placed = 0
    while parts := placement.place(request, statuses, rules):
        statuses, placed = placement.deduct(statuses, parts), placed + 1
    # Lowest index first is not always the most that several devices at once can hold.
    assert placed == found.at_once if count == 1 else placed <= found.at_once


def test_a_request_for_two_gpus_is_never_placed_on_one() -> None:
    devices = parse_devices("V100-SXM2-32GB:1,T4@16GiB:1")
    [found] = slice_figures(course("2x4GiB"), devices, Rules())
    assert ([fit.each for fit in found.fits], found.at_once) == ([8, 4], 4)


def test_a_class_that_fits_waits_for_nobody() -> None:
    found = rush("a", course(), 50, 3600, V100, Rules())
    assert (found.at_once, found.refused, found.waits.worst) == (50, 0, 0)


def test_a_class_that_does_not_fit_waits_for_the_first_to_leave() -> None:
    found = rush("a", course(), 120, 3600, V100, Rules())
    assert (found.at_once, found.refused) == (50, 0)
    assert (found.waits.median, found.waits.p95, found.waits.worst) == (3600, 7200, 7200)


def test_nobody_stays_longer_than_the_longest_lease() -> None:
    found = rush("a", course(more="longest_lease: 10min"), 60, 3600, V100, Rules())
    assert (found.stay, found.waits.worst) == (600, 600)


@pytest.mark.parametrize(
    ("more", "at_once", "refused"),
    [
        ("quota: {slices: 30}", 30, 30),
        ("quota: {share: 50%}", 25, 35),
        ("quota: {memory: 6550MiB}", 10, 50),
        ("per_user: {slices: 1}", 50, 0),
        ("per_user: {share: 1%}", 0, 60),
    ],
)
def test_whom_a_quota_turns_away_does_not_wait(more: str, at_once: int, refused: int) -> None:
    found = rush("a", course(more=more), 60, 3600, V100, Rules())
    assert (found.at_once, found.refused) == (at_once, refused)


@pytest.mark.parametrize(
    ("kubernetes", "said"),
    [
        ("{prepared_pods: 20, cpu: 1, kernel_cpu: 0.5, memory: 2GiB}", "request 10 CPU cores and 40960 MiB"),
        ("{prepared_pods: 2}", "request as many times the CPU of c.KubernetesSettings and as many times its"),
    ],
)
def test_what_prepared_pods_may_request_is_said(kubernetes: str, said: str) -> None:
    assert said in prepared_note(course(more=f"kubernetes: {kubernetes}\n"))


@pytest.mark.parametrize("more", ["", "kubernetes: {prepared_pods: 0}\n", "kubernetes: {cpu: 1}\n"])
def test_a_course_without_prepared_pods_says_nothing_of_them(more: str) -> None:
    assert prepared_note(course(more=more)) == ""
