"""How long a kernel keeps its slice: the decisions, without a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_pool_client import Activity, EndReason, Terms, WhenIdle
from gpu_pool_provisioner.session.expiry_policy import (
    ExpiryAction,
    KernelObservation,
    given_back_at,
    keep,
    keeps_variables,
    step,
    warned_of_now,
    yields_at,
)

NOW = 1_000_000.0
IDLE = KernelObservation(busy=False, idle_since=NOW, activity=Activity(initialised=False, working=False))
ON_THE_DEVICE = replace(IDLE, activity=Activity(initialised=True, working=False))
PARKS = Terms(idle_limit=600)
ENDS = Terms(idle_limit=600, when_idle=WhenIdle.END, warn_before=60)


def test_a_kernel_that_never_used_the_device_is_parked_when_it_has_been_idle_for_long() -> None:
    assert step(PARKS, IDLE, NOW + 599).act is ExpiryAction.NOTHING
    assert step(PARKS, IDLE, NOW + 600).act is ExpiryAction.PARK


def test_it_is_looked_at_again_when_that_may_be_due() -> None:
    assert step(PARKS, IDLE, NOW + 599).again_in == pytest.approx(1)
    assert step(PARKS, IDLE, NOW).again_in == 30
    assert step(Terms(idle_limit=5), replace(IDLE, busy=True), NOW).again_in == 5


@pytest.mark.parametrize(
    "seen",
    [
        replace(IDLE, busy=True),
        replace(IDLE, kept_until=NOW + 10_001),
        ON_THE_DEVICE,
        replace(IDLE, activity=Activity()),
    ],
)
def test_what_is_in_use_or_may_be_is_not_parked(seen: KernelObservation) -> None:
    assert step(PARKS, seen, NOW + 10_000).act is ExpiryAction.NOTHING


@pytest.mark.parametrize("working", [True, None])
def test_busy_training_is_never_called_idle(working: bool | None) -> None:
    training = replace(IDLE, activity=Activity(initialised=True, working=working))
    assert step(ENDS, training, NOW + 10_000).act is ExpiryAction.NOTHING


def test_what_is_asked_back_goes_as_soon_as_nothing_runs_whatever_its_course_says() -> None:
    terms = Terms()
    wanted = [replace(each, asked_back=True, kept_until=NOW + 3_600) for each in (IDLE, ON_THE_DEVICE)]
    assert [step(terms, seen, NOW + 2.9).act for seen in wanted] == [ExpiryAction.NOTHING] * 2, (
        "another cell may come"
    )
    parks, ends = [step(terms, seen, NOW + 3) for seen in wanted]
    assert parks.act is ExpiryAction.PARK
    assert (ends.act, ends.reason) == (ExpiryAction.END, EndReason.IDLE)
    movable = replace(wanted[1], activity=Activity(initialised=True, working=False, movable=True))
    assert step(terms, movable, NOW + 3).act is ExpiryAction.PARK
    unknown = replace(IDLE, asked_back=True, activity=Activity())
    assert step(terms, unknown, NOW + 59).act is ExpiryAction.NOTHING, "its GPU may work for it"
    assert step(terms, unknown, NOW + 60).act is ExpiryAction.END
    working = replace(IDLE, asked_back=True, activity=Activity(initialised=True, working=True))
    for at_work in (working, replace(unknown, busy=True)):
        assert step(terms, at_work, NOW + 10_000).act is ExpiryAction.NOTHING


def test_what_could_not_be_parked_is_left_alone_for_a_while() -> None:
    movable = replace(IDLE, activity=Activity(initialised=True, working=False, movable=True))
    for seen in (IDLE, movable, ON_THE_DEVICE):
        postponed = replace(seen, asked_back=True, postponed_until=NOW + 30)
        left_alone = step(Terms(), postponed, NOW + 10)
        assert (left_alone.act, left_alone.again_in) == (ExpiryAction.NOTHING, 20)
        assert step(Terms(), postponed, NOW + 30).act is not ExpiryAction.NOTHING
    assert step(PARKS, replace(IDLE, postponed_until=NOW + 700), NOW + 650).act is ExpiryAction.NOTHING


def test_a_kernel_that_cannot_be_parked_is_ended_after_a_warning_where_its_course_says_so() -> None:
    assert step(ENDS, ON_THE_DEVICE, NOW + 539).act is ExpiryAction.NOTHING
    warning = step(ENDS, ON_THE_DEVICE, NOW + 541)
    assert warning.act is ExpiryAction.WARN
    assert "ends in 59s" in warning.message
    warned = replace(ON_THE_DEVICE, warned=frozenset({warning.warns_of}))
    assert step(ENDS, warned, NOW + 550).act is ExpiryAction.NOTHING
    ending = step(ENDS, warned, NOW + 600)
    assert ending.act is ExpiryAction.END
    assert "idle for longer" in ending.message


def test_in_a_pod_what_is_submitted_decides_alone() -> None:
    unseen = replace(IDLE, activity=Activity())
    assert step(ENDS, unseen, NOW + 10_000).act is ExpiryAction.NOTHING
    in_pod = replace(ENDS, in_pod=True)
    assert step(in_pod, unseen, NOW + 541).act is ExpiryAction.WARN
    assert step(in_pod, unseen, NOW + 600).act is ExpiryAction.END
    for used in (replace(unseen, busy=True), replace(unseen, kept_until=NOW + 10_000)):
        assert step(in_pod, used, NOW + 600).act is ExpiryAction.NOTHING
    assert step(replace(in_pod, when_idle=WhenIdle.KEEP), unseen, NOW + 10_000).act is ExpiryAction.NOTHING


def test_in_a_pod_a_gpu_that_is_seen_to_work_keeps_its_kernel() -> None:
    """As the agent of its node sees it. That it does not work is what is assumed anyway, whoever says it."""
    in_pod = replace(ENDS, in_pod=True)
    works = replace(IDLE, activity=Activity(initialised=True, working=True, memory_mib=412))
    assert step(in_pod, works, NOW + 10_000).act is ExpiryAction.NOTHING
    rests = replace(works, activity=replace(works.activity, working=False))
    assert step(in_pod, rests, NOW + 600).act is ExpiryAction.END


def test_where_nobody_can_see_whether_the_gpu_works_what_is_submitted_decides_and_it_is_said() -> None:
    on_mig = replace(IDLE, activity=Activity(initialised=True, unmeasured=True))
    warning = step(ENDS, on_mig, NOW + 541)
    assert warning.act is ExpiryAction.WARN
    assert "Nothing has been run in this kernel for a long time, and it ends in 59s." in warning.message
    assert "cannot be seen on this GPU" in warning.message
    assert step(ENDS, on_mig, NOW + 600).act is ExpiryAction.END
    for used in (replace(on_mig, busy=True), replace(on_mig, kept_until=NOW + 10_000)):
        assert step(ENDS, used, NOW + 600).act is ExpiryAction.NOTHING
    assert step(PARKS, on_mig, NOW + 10_000).act is ExpiryAction.NOTHING


def test_the_longest_lease_ends_even_a_busy_kernel_after_a_warning() -> None:
    terms = Terms(ends_at=NOW + 7200, warn_before=300)
    busy = replace(IDLE, busy=True)
    assert step(terms, busy, NOW + 6000).act is ExpiryAction.NOTHING
    warning = step(terms, busy, NOW + 6900)
    assert (warning.act, "ends in 5min" in warning.message) == (ExpiryAction.WARN, True)
    assert (
        step(terms, replace(busy, warned=frozenset({warning.warns_of})), NOW + 7199).act
        is ExpiryAction.NOTHING
    )
    assert step(terms, busy, NOW + 7200).act is ExpiryAction.END


def test_a_length_that_was_said_is_warned_of_and_kept_as_such() -> None:
    terms = Terms(ends_at=NOW + 1200, warn_before=300, ends_as_asked=True)
    busy = replace(IDLE, busy=True)
    warning, end = step(terms, busy, NOW + 900), step(terms, busy, NOW + 1200)
    assert "ends in 5min, and the kernel with it, because nothing longer was asked for." in warning.message
    assert (end.act, end.reason) == (ExpiryAction.END, EndReason.TOO_LONG)
    assert end.message.endswith("had been held for as long as was asked for.")


def test_the_end_of_a_job_is_warned_of_twice_and_left_to_who_runs_it() -> None:
    terms = Terms(job="Slurm job 7", job_ends_at=NOW + 3600)
    busy = replace(IDLE, busy=True)
    assert terms.has_limits
    assert step(terms, busy, NOW + 2999).act is ExpiryAction.NOTHING
    assert step(terms, busy, NOW + 2990).again_in == pytest.approx(10)
    first = step(terms, busy, NOW + 3001)
    assert (first.act, first.again_in) == (ExpiryAction.WARN, 30)
    assert first.message == (
        "Slurm job 7 ends in 10min, and this kernel with it: the time limit of the job is reached then. "
        "Save what you need."
    )
    told = replace(busy, warned=frozenset({first.warns_of}))
    assert step(terms, told, NOW + 3479).act is ExpiryAction.NOTHING
    second = step(terms, told, NOW + 3481)
    assert "Slurm job 7 ends in 2min, and" in second.message
    told = replace(told, warned=told.warned | {second.warns_of})
    assert [step(terms, told, NOW + at).act for at in (3599, 3600, 9000)] == [ExpiryAction.NOTHING] * 3


def test_of_a_jobs_end_that_was_moved_is_warned_again() -> None:
    before = Terms(job="Slurm job 7", job_ends_at=NOW + 600)
    warning = step(before, IDLE, NOW)
    warned = frozenset({warning.warns_of, "of something else"})
    same = replace(before, job_ends_at=NOW + 601)
    assert warned_of_now(warned, before, same) == warned
    for moved in (NOW + 4200, None):
        after = replace(before, job_ends_at=moved)
        assert warned_of_now(warned, before, after) == {"of something else"}


def test_a_lease_that_ends_before_its_job_ends_as_its_course_says() -> None:
    terms = Terms(ends_at=NOW + 60, warn_before=300, job="Slurm job 7", job_ends_at=NOW + 90)
    assert step(terms, IDLE, NOW + 60).act is ExpiryAction.END
    assert terms.over_at == NOW + 60


def test_the_end_of_the_lease_comes_before_parking() -> None:
    assert step(Terms(ends_at=NOW + 600, idle_limit=600), IDLE, NOW + 600).act is ExpiryAction.END


def test_without_limits_nothing_is_done() -> None:
    assert step(Terms(), IDLE, NOW + 10**9).act is ExpiryAction.NOTHING


@pytest.mark.parametrize(
    ("terms", "seconds", "answer"),
    [
        (PARKS, 7_200, "for 2h, the most that its course allows at once."),
        (replace(PARKS, keep_at_most=36_000), 10_800, "for 3h."),
        (replace(PARKS, ends_at=NOW + 7_200), 7_200, "for 2h, the most that its course allows at once."),
        (
            replace(PARKS, ends_at=NOW + 51),
            51,
            "for 51s only, however long it is in use: its lease",
        ),
        (replace(PARKS, ends_at=NOW - 1), 0, "for 0s only"),
    ],
)
def test_who_keeps_a_kernel_is_told_the_earliest_end(terms: Terms, seconds: float, answer: str) -> None:
    kept, told = keep(terms, 10_800, NOW)
    assert kept == seconds
    assert told.startswith(f"This kernel keeps its GPU slice {answer}")


@pytest.mark.parametrize(
    ("terms", "seen", "expected"),
    [
        (PARKS, IDLE, (NOW + 600, False)),
        (PARKS, replace(IDLE, kept_until=NOW + 900), (NOW + 900, False)),
        (PARKS, replace(IDLE, busy=True), (None, False)),
        (PARKS, ON_THE_DEVICE, (None, False)),
        (PARKS, replace(IDLE, activity=Activity()), (None, False)),
        (ENDS, ON_THE_DEVICE, (NOW + 600, True)),
        (ENDS, replace(IDLE, activity=Activity(True, working=False, movable=True)), (NOW + 600, False)),
        (ENDS, replace(IDLE, activity=Activity(True, working=True)), (None, False)),
        (Terms(), IDLE, (None, False)),
    ],
)
def test_what_is_announced_is_what_is_done(
    terms: Terms, seen: KernelObservation, expected: tuple[float | None, bool]
) -> None:
    at, ends = given_back_at(terms, seen)
    assert (at, ends) == expected
    if at is not None:
        warned = replace(seen, warned=frozenset({step(terms, seen, at - 1).warns_of}))
        assert step(terms, warned, at - 0.1).act in (ExpiryAction.NOTHING, ExpiryAction.WARN)
        assert step(terms, warned, at).act is (ExpiryAction.END if ends else ExpiryAction.PARK)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (IDLE, NOW + 60),
        (replace(IDLE, kept_until=NOW + 900), NOW + 900),
        (replace(IDLE, busy=True), None),
        (ON_THE_DEVICE, None),
        (replace(IDLE, activity=Activity()), None),
        (replace(IDLE, activity=Activity(True, working=False, movable=True)), NOW + 60),
        (replace(IDLE, activity=Activity(True, working=False, movable=True), kept=True), None),
    ],
)
def test_it_is_announced_when_it_gives_way(seen: KernelObservation, expected: float | None) -> None:
    terms, asked = Terms(yield_after=60), replace(seen, yields=True)
    assert yields_at(terms, seen) == expected
    assert yields_at(Terms(), seen) is None
    # Where the pool asks, it goes after a pause: somebody has waited for as long.
    at = NOW + 900 if expected is None else expected - 55 if expected == NOW + 60 else expected
    assert step(terms, asked, at - 0.1).act is ExpiryAction.NOTHING
    assert step(terms, asked, at).act is (ExpiryAction.NOTHING if expected is None else ExpiryAction.PARK)
    assert step(terms, seen, NOW + 800).act is ExpiryAction.NOTHING


@pytest.mark.parametrize(
    ("activity", "kept"),
    [
        (Activity(initialised=False), True),
        (Activity(), False),
        (Activity(initialised=True, working=False), False),
        (Activity(initialised=True, working=False, movable=True), True),
        (Activity(initialised=True, working=True, movable=True), False),
    ],
)
def test_variables_are_kept_where_the_kernel_can_be_parked(activity: Activity, kept: bool) -> None:
    assert keeps_variables(activity) is kept
