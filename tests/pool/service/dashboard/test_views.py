"""What the dashboard makes of a pool: bars, line, own leases, history, courses, quotas."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from gpu_pool.courses import Courses, parse_course
from gpu_pool.policy.sharing import Group, Quota, Sharing
from gpu_pool.policy.usage_report import until_now
from gpu_pool.service.dashboard import course_view, history_view, pool_view
from gpu_pool.service.dashboard.pool_view import Mark, Viewer, as_seen_by, marks, without_names
from gpu_pool_client import (
    Device,
    DeviceStatus,
    EndedLease,
    Failure,
    Holder,
    Lease,
    LeaseState,
    Outlook,
    Place,
    PoolStatus,
    Process,
    Slice,
    parse_request,
)
from support.dashboard import courses_of
from support.pools import device

NOW = 1_790_000_000.0
HOUR = 3_600.0
ADA, ADMIN = Viewer("ada"), Viewer("root", is_admin=True)
GPU = device(0)
MARKS = marks(["ml", "nlp"], [None])


def lease(
    number: int,
    user: str = "ada",
    course: str | None = "ml",
    milli: int = 100,
    state: LeaseState = LeaseState.HELD,
    **facts: Any,
) -> Lease:
    parts = (Slice(GPU, milli, 32768 * milli // 1000),) if state is LeaseState.HELD else ()
    return Lease(
        id=f"{number}-abcdef",
        key=f"secret-key-{number}",
        request=parse_request(f"{milli / 10:g}%"),
        holder=Holder(user, course, f"kernel of {user}", Process.current()),
        state=state,
        requested_at=NOW - 60,
        held_at=NOW - 30 if state is LeaseState.HELD else None,
        slices=parts,
        **facts,
    )


def waiting(number: int, place: int, **facts: Any) -> Lease:
    return lease(number, state=LeaseState.WAITING, position=place, **facts)


def pool(*leases: Lease, queue: tuple[Lease, ...] = (), of: Device = GPU, **facts: Any) -> PoolStatus:
    parts = [part for each in leases for part in each.slices]
    held = sum(part.milli for part in parts), sum(part.memory_mib for part in parts)
    return PoolStatus("embedded:", (DeviceStatus(of, *held, 0, len(parts), **facts),), leases, queue)


class TestViewer:
    def test_of_others_only_course_size_and_place_are_left(self) -> None:
        everybody = without_names(pool(lease(1), queue=(waiting(2, 1, user="grace"),)))
        told = repr(everybody)
        assert not any(word in told for word in ("ada", "grace", "abcdef", "secret-key", "kernel of"))
        assert [each.holder.course for each in (*everybody.leases, *everybody.queue)] == ["ml", "ml"]
        assert everybody.leases[0].slices == lease(1).slices

    def test_one_sees_own_leases_and_those_of_courses_that_one_teaches(self) -> None:
        status = pool(lease(1), lease(2, "grace", "nlp"), lease(3, "grace", "ml"))

        def seen(viewer: Viewer, *teaches: str) -> list[str]:
            return [each.holder.user for each in as_seen_by(status, viewer, teaches).leases]

        assert seen(ADA) == ["ada", "", ""]
        assert seen(Viewer("turing"), "ml") == ["ada", "", "grace"]
        assert seen(ADMIN) == ["ada", "grace", "grace"]

    def test_how_a_kernel_failed_is_its_users_its_instructors_and_the_administrators_to_know(self) -> None:
        status = pool(lease(1, "grace", "ml", failure=Failure(1.0, "It ended.", "pod", "node", "image")))

        def told(viewer: Viewer, *teaches: str) -> bool:
            (row,) = pool_view.lease_rows(as_seen_by(status, viewer, teaches), MARKS, lambda _: True)
            return row.failure is not None

        assert [told(ADA), told(Viewer("grace")), told(Viewer("turing"), "ml"), told(ADMIN)] == [
            False,
            True,
            True,
            True,
        ]


class TestMarks:
    def test_neighbours_differ_in_colour_and_in_pattern(self) -> None:
        found = list(marks((f"course-{number:02}" for number in range(32)), []).values())
        assert len(set(found)) == 32
        for one, next_one in itertools.pairwise(found):
            assert one.hue != next_one.hue
            assert one.pattern != next_one.pattern

    def test_what_is_only_found_somewhere_changes_no_configured_course(self) -> None:
        more = marks(["ml", "nlp"], ["ancient", None])
        assert (more["ml"], more["nlp"]) == (Mark(0, 0), Mark(1, 1))
        assert set(more) == {"ml", "nlp", "ancient", "no course"}


class TestDevices:
    def test_a_bar_has_a_part_for_each_course(self) -> None:
        status = pool(lease(1, milli=200), lease(2, "grace", "nlp", 300), lease(3, "grace", milli=100))
        (bar,) = pool_view.device_bars(status, MARKS)
        assert [(part.course, part.x, part.width, part.slices) for part in bar.parts] == [
            ("ml", 0.0, 30.0, "2 slices"),
            ("nlp", 30.0, 30.0, "1 slice"),
        ]
        assert [part.mark for part in bar.parts] == [MARKS["ml"], MARKS["nlp"]]
        assert (bar.free_share, bar.free_memory, bar.memory) == ("40%", "12.8 GiB", "32 GiB")

    def test_memory_is_drawn_by_itself(self) -> None:
        unlike = lease(1, milli=100)
        big = Slice(GPU, 100, 16384)
        (bar,) = pool_view.device_bars(pool(Lease(**{**_fields(unlike), "slices": (big,)})), MARKS)
        assert (bar.parts[0].width, bar.parts[0].memory_width) == (10.0, 50.0)

    def test_more_than_is_there_stays_within_the_bar(self) -> None:
        status = pool(*(lease(number, milli=500) for number in range(3)), milli=2000)
        (bar,) = pool_view.device_bars(status, MARKS)
        assert sum(part.width for part in bar.parts) == 75.0

    def test_drained_and_simulated_devices_say_so(self) -> None:
        (bar,) = pool_view.device_bars(pool(drained=True), MARKS)
        assert bar.is_drained
        assert bar.is_simulated
        assert bar.parts == ()

    def test_a_small_part_has_no_room_for_its_name(self) -> None:
        (bar,) = pool_view.device_bars(pool(lease(1, milli=20), lease(2, course="nlp", milli=200)), MARKS)
        assert [part.has_room for part in bar.parts] == [False, True]


class TestLeases:
    def test_a_row_says_what_is_held(self) -> None:
        (row,) = pool_view.lease_rows(pool(lease(1, notice="Too much.")), MARKS, ADA.owns)
        assert (row.size, row.where, row.state) == ("10%, 3.2 GiB", "GPU 0 (simulated)", "held")
        assert (row.notice, row.purpose) == ("Too much.", "kernel of ada")
        assert row.since.iso == "2026-09-21T14:12:50Z"

    def test_what_is_enforced_has_the_units_of_all_else_on_the_page(self) -> None:
        (row,) = pool_view.lease_rows(pool(lease(1)), MARKS, ADA.owns)
        assert row.limits.startswith("memory: 3.2 GiB, none (accounting only); compute: 10%, ")

    def test_a_row_says_for_how_long_it_waits_and_why(self) -> None:
        outlook = Outlook(2, "All is held.", (120, 300))
        status = pool(queue=(waiting(7, 2),))
        (row,) = pool_view.lease_rows(status, MARKS, ADA.owns, {"7-abcdef": outlook})
        assert row.state == "position 2 in the queue"
        assert row.outlook == "perhaps about 2 to 5 min. All is held."

    def test_what_waits_in_the_queue_of_the_cluster_is_not_called_parked(self) -> None:
        queued = replace(lease(1), state=LeaseState.PARKED, slices=(), place=Place(3))
        (row,) = pool_view.lease_rows(pool(queued), MARKS, ADA.owns)
        assert row.state == "in the cluster's queue"

    def test_the_line_is_counted_by_course(self) -> None:
        line = (waiting(1, 1), waiting(2, 2, user="x"), waiting(3, 3, course=None))
        found = pool_view.queue_by_course(pool(queue=line), MARKS)
        assert [(each.course, each.number) for each in found] == [("ml", 2), ("no course", 1)]


class TestChanges:
    def test_what_becomes_of_own_leases_is_said(self) -> None:
        before = pool(queue=(waiting(1, 2),))
        assert (
            pool_view.describe_changes(before, pool(queue=(waiting(1, 1),)), ADA, {})
            == "Your slice of 10%: next in the queue."
        )
        held = pool(lease(1))
        assert (
            pool_view.describe_changes(before, held, ADA, {})
            == "Your slice of 10%: held on GPU 0 (simulated)."
        )
        assert pool_view.describe_changes(held, pool(), ADA, {}) == "Your slice of 10% has ended."
        ends = {"1-abcdef": "taken back: “Exam.”"}
        assert (
            pool_view.describe_changes(held, pool(), ADA, ends)
            == "Your slice of 10% has ended: taken back: “Exam.”."
        )
        assert pool_view.describe_changes(held, pool(lease(1, notice="Too much.")), ADA, {}) == "Too much."

    def test_of_others_nothing_is_said(self) -> None:
        assert pool_view.describe_changes(pool(lease(1, "grace")), pool(lease(2, "grace")), ADA, {}) == ""


def past(**facts: Any) -> EndedLease:
    row = {
        "milli": 500,
        "id": "1-a", "user": "ada", "course": "ml", "kernel": None, "request": "50%", "reason": "released",
        "requested_at": NOW - 3 * HOUR, "held_at": NOW - 2 * HOUR, "ended_at": NOW - HOUR,
        "held_seconds": HOUR, "gpu_seconds": HOUR / 2, "peak_mib": None,
    }  # fmt: skip
    return EndedLease(**{**row, **facts})


class TestHistory:
    def test_the_plot_holds_what_was_used(self) -> None:
        plot = history_view.plot([past()], MARKS, 1, NOW)
        assert plot.top == "50%"
        # An hour is two of the 48 bars of a day.
        assert [(block.x, block.height) for block in plot.blocks] == [
            (pytest.approx(100 * bar / 48, abs=0.001), 100.0) for bar in (44, 45)
        ]

    def test_courses_stand_on_each_other(self) -> None:
        plot = history_view.plot([past(), past(course="nlp", gpu_seconds=HOUR / 2)], MARKS, 1, NOW)
        assert plot.top == "1 GPU"
        ml, nlp = plot.blocks[:2]
        assert (ml.y, nlp.y, ml.mark, nlp.mark) == (50.0, 0.0, MARKS["ml"], MARKS["nlp"])

    def test_what_began_before_the_plot_is_cut(self) -> None:
        long = past(held_at=NOW - 48 * HOUR, ended_at=NOW, gpu_seconds=48 * HOUR)
        plot = history_view.plot([long, past(held_at=None)], MARKS, 1, NOW)
        assert len(plot.blocks) == history_view.BUCKETS
        assert {block.height for block in plot.blocks} == {100.0}

    def test_what_was_lent_stands_above_what_was_used(self) -> None:
        rows = [past(lent_gpu_seconds=HOUR / 4), past(course="nlp", gpu_seconds=HOUR / 4)]
        plot = history_view.plot(rows, MARKS, 1, NOW)
        assert plot.top == "1 GPU"
        assert [(block.x, block.y, block.height) for block in plot.lent] == [
            (pytest.approx(100 * bar / 48, abs=0.001), 0.0, 25.0) for bar in (44, 45)
        ]
        assert {block.mark for block in plot.lent} == {None}
        assert min(block.y for block in plot.blocks) == 25.0

    def test_what_was_only_lent_lies_on_the_ground(self) -> None:
        (block, _) = history_view.plot([past(gpu_seconds=0.0, lent_gpu_seconds=HOUR)], MARKS, 1, NOW).lent
        assert (block.y, block.height) == (0.0, 100.0)

    def test_where_nothing_was_lent_nothing_is_drawn_of_it(self) -> None:
        assert history_view.plot([past()], MARKS, 1, NOW).lent == ()

    def test_what_could_be_used_on_top_has_a_plot_of_its_own(self) -> None:
        rows = [past(burst_mib_seconds=3 * 1024 * HOUR, burst_peak_mib=6144), past(course="nlp")]
        plot = history_view.plot(rows, MARKS, 1, NOW)
        assert plot.burst_top == "5 GiB"
        assert [(block.x, block.y, block.height) for block in plot.burst] == [
            (pytest.approx(100 * bar / 48, abs=0.001), 40.0, 60.0) for bar in (44, 45)
        ]
        ml, nlp = history_view.sums(rows, MARKS)
        assert (ml.burst, ml.burst_peak, nlp.burst, nlp.burst_peak) == ("3.00", "6 GiB", "", "")
        assert history_view.plot([past()], MARKS, 1, NOW).burst == ()

    def test_cells_that_ran_are_a_line_within_what_was_held(self) -> None:
        busy = {"1-a": ((NOW - 2 * HOUR, HOUR / 2),)}
        plot = history_view.plot([past()], MARKS, 1, NOW, busy)
        assert len(plot.busy) == history_view.BUCKETS
        assert [level.x for level in plot.busy if level.y == 0.0] == [pytest.approx(100 * 44 / 48, abs=0.001)]
        assert {level.y for level in plot.busy} == {0.0, 100.0}

    def test_where_no_cell_is_known_to_have_run_there_is_no_line(self) -> None:
        assert history_view.plot([past()], MARKS, 1, NOW, {}).busy == ()

    def test_what_lives_is_in_the_plot(self) -> None:
        plot = history_view.plot(until_now([lease(1)], NOW), MARKS, 1, NOW)
        assert len(plot.blocks) == 1

    def test_everybody_sees_own_rows_and_administrators_all(self) -> None:
        rows = [past(), past(user="grace")]
        assert [row.user for row in history_view.visible(rows, ADA)] == ["ada"]
        assert len(history_view.visible(rows, ADMIN)) == 2

    def test_the_last_to_end_is_the_first_row(self) -> None:
        rows = [past(), past(id="2-b", reason="revoked", note="Exam at ten.", held_at=None)]
        last, first = history_view.past_rows(rows)
        assert (last.reason, last.note, last.waited) == (
            "an administrator took it back",
            "Exam at ten.",
            None,
        )
        assert (first.waited, first.held, first.gpu_hours) == ("1h", "1h", "0.50")

    def test_how_its_kernel_failed_is_a_part_of_why_it_ended(self) -> None:
        failure = Failure(at=1.0, message="It ended with status 1.", pod="p", node="n", image="i")
        (row,) = history_view.past_rows([past(reason="not-ready", failure=failure)])
        assert row.why.endswith(". Its kernel failed: It ended with status 1.")

    def test_what_was_taken_away_is_not_what_one_ended_oneself(self) -> None:
        rows = [past(), past(reason="idle", id="2-b"), past(reason="revoked", user="grace")]
        assert [row.id for row in history_view.taken_away(rows, ADA)] == ["2-b"]


class TestCourses:
    COURSES = courses_of({"ml": "Machine Learning"})
    AT = datetime.fromtimestamp(NOW, timezone.utc)

    def test_only_who_is_in_a_course_sees_it(self) -> None:
        def seen(viewer: Viewer) -> int:
            return len(course_view.course_links(self.COURSES, viewer, MARKS, self.AT))

        found = [seen(Viewer(name)) for name in ("ada", "turing", "mallory")]
        assert found == [1, 1, 0]
        assert seen(ADMIN) == 1

    def test_it_says_how_much_is_held_and_by_how_many(self) -> None:
        status = pool(lease(1), lease(2, "x"), lease(3, "x", "nlp"), queue=(waiting(4, 1),))
        view = course_view.course_view("ml", self.COURSES.usable["ml"], status, self.AT)
        assert (view.held, view.waiting) == ("2 slices, 20%", "1 request")
        assert [(offer.name, offer.is_default) for offer in view.offers] == [("Small", True), ("Half", False)]

    def test_a_slice_with_a_limit_is_offered_in_words(self) -> None:
        course = parse_course("ml.yaml", b"title: ML\nslices: [{name: Elastic, request: 2%..10%}]\n")
        (offer,) = course_view.course_view("ml", course, pool(), self.AT).offers
        assert offer.request == "2%, up to 10% while that is free"

    def test_the_settings_are_all_there(self) -> None:
        course = self.COURSES.usable["ml"]
        said = {each.name: each.value for each in course_view.settings(course)}
        assert {*type(course).model_fields} - {"kubernetes", "slurm"} == {*said}
        assert said["quota"] == "2 GPUs in all"

    def test_no_course_has_no_problems(self) -> None:
        assert course_view.problems_of("ml", Courses()) == ()


def test_quotas_stand_beside_what_is_held_of_them() -> None:
    lab = Group("lab", frozenset(("x", "y")), quota=Quota(slices=1))
    sharing = courses_of({"ml": "Machine Learning"}).sharing(Sharing(per_user=Quota(slices=5), groups=(lab,)))
    nothing = "0 slices, 0%, 0 MiB"

    def rows(*leases: Lease) -> list[tuple[str, str, str]]:
        found = pool_view.quota_rows(sharing, pool(*leases))
        return [(row.whose, row.allowed, row.now) for row in found]

    assert rows(lease(1), lease(2, "x"), lease(3, "x", "nlp")) == [
        ("each user, over all courses", "5 slices", "most: x, 2 slices, 20%, 6.4 GiB"),
        ("ml, together", "2 GPUs", "2 slices, 20%, 6.4 GiB"),
        ("ml, each user", "3 slices", "most: ada, 1 slice, 10%, 3.2 GiB"),
        ("group lab (2 users)", "1 slice", "2 slices, 20%, 6.4 GiB"),
    ]
    assert [now for _, _, now in rows()] == ["nobody has any", nothing, "nobody has any", nothing]


def _fields(value: Lease) -> dict[str, Any]:
    return {name: getattr(value, name) for name in Lease.__dataclass_fields__}
