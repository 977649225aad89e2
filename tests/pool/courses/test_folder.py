"""A folder of course files in use: changes, mistakes, and writers who are not done."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path

import pytest

from gpu_pool.courses import CourseFolder, folder, read_bytes
from gpu_pool.policy.sharing import Sharing, read_course
from gpu_pool.settings import PoolSettings
from gpu_pool_client import NotAllowed, parse_request
from support.course_folders import Desk, course, titles


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_the_files_of_a_folder_are_its_courses(desk: Desk) -> None:
    desk.write("cs101", course("One"))
    desk.write("cs102", course("Two"))
    for other in (
        "README.md",
        ".cs103.yaml.swp",
        ".cs103.yaml",
        "cs103.yaml~",
        "#cs103.yaml#",
        "#cs103.yaml",
    ):
        (desk.path / other).write_text("not a course: at all")
    assert titles(desk.folder.look()) == {"cs101": "One", "cs102": "Two"}
    assert desk.folder.look().problems == ()


def test_what_is_new_changed_or_gone_is_noticed(desk: Desk) -> None:
    desk.write("cs101", course("One"))
    assert desk.titles() == {"cs101": "One"}
    desk.write("cs102", course("Two"))
    desk.replace("cs101", course("First"))
    assert desk.titles() == {"cs101": "First", "cs102": "Two"}
    (desk.path / "cs102.yaml").unlink()
    desk.look_later()
    assert desk.titles() == {"cs101": "First"}


def test_while_nothing_changes_the_value_is_the_very_same(desk: Desk) -> None:
    desk.write("cs101", course("One"))
    seen = desk.look_later()
    assert desk.look_later() is seen
    (desk.path / "cs101.yaml").touch()
    assert desk.look_later() is seen


def test_it_looks_at_most_once_a_second(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []
    monkeypatch.setattr(CourseFolder, "_look", lambda _, is_first: looks.append(is_first) or True)
    for _ in range(100):
        desk.folder.look()
    assert looks == [True]
    desk.wait(1)
    desk.folder.look()
    assert looks == [True, False]


def test_a_file_that_becomes_bad_leaves_its_course_and_all_others_as_they_were(desk: Desk) -> None:
    desk.write("cs101", course("One"))
    desk.write("cs102", course("Two"))
    desk.look_later()
    desk.replace("cs101", "title: One\nslices: none\n")
    courses = desk.look_later()
    assert titles(courses) == {"cs101": "One", "cs102": "Two"}
    assert [str(each)[:38] for each in courses.problems] == ["cs101.yaml, line 2: slices: is 'none'."]
    desk.replace("cs101", course("One"))
    assert desk.look_later().problems == ()


@pytest.mark.parametrize("way", ["link", "pipe", "huge", "folder"])
def test_whatever_takes_the_place_of_a_good_file_and_back(desk: Desk, way: str) -> None:
    desk.write("cs101", course("One"))
    desk.look_later()
    path = desk.path / "cs101.yaml"
    path.unlink()
    ways = {
        "link": lambda: path.symlink_to("/etc/passwd"),
        "pipe": lambda: os.mkfifo(path),
        "huge": lambda: path.write_bytes(b"#" * 10**6),
        "folder": path.mkdir,
    }
    ways[way]()
    courses = desk.look_later()
    assert titles(courses) == {"cs101": "One"}
    assert len(courses.problems) == 1
    shutil.rmtree(path) if way == "folder" else path.unlink()
    desk.write("cs101", course("One"))
    assert desk.look_later().problems == ()


def test_after_a_fresh_start_a_bad_file_is_refused_in_words(desk: Desk) -> None:
    desk.write("cs102", course("Two"))
    desk.replace("cs101", "title: One\n\nslices: none\n")
    courses = desk.opened().look()
    assert titles(courses) == {"cs102": "Two"}
    words = "Course cs101 cannot be used: its file has an error on line 3; ask its instructor."
    with pytest.raises(NotAllowed, match=words):
        courses.course("cs101")
    with pytest.raises(NotAllowed, match=words):
        courses.sharing(Sharing()).course("cs101")


def test_a_file_with_another_ending_is_a_problem_and_no_course(desk: Desk) -> None:
    (desk.path / "cs101.yml").write_text(course("One"))
    courses = desk.folder.look()
    assert titles(courses) == {}
    assert "Name it, say, cs101.yaml" in str(courses.problems[0])


def test_a_course_that_nobody_described_is_no_other_course(desk: Desk) -> None:
    courses = desk.folder.look()
    with pytest.raises(NotAllowed, match="no course file of a course 'cs101'"):
        courses.course("cs101")
    with pytest.raises(NotAllowed, match="This pool has no course 'cs101'"):
        courses.sharing(Sharing()).course("cs101")


@pytest.mark.parametrize(
    ("name", "size", "user", "words"),
    [
        ("cs101", "2%", "ada", ""),
        ("cs101", "2%", "bob", "not in this course"),
        ("cs101", "3%", "ada", "You asked for 3%"),
        ("of-the-settings", "3%", "bob", ""),
        (None, "3%", "bob", ""),
    ],
)
def test_a_request_is_held_to_the_file_of_its_course(
    desk: Desk, name: str | None, size: str, user: str, words: str
) -> None:
    desk.write("cs101", course("One") + "who: {users: [ada]}\n")
    courses, now = desk.folder.look(), datetime.now(timezone.utc)
    with pytest.raises(NotAllowed, match=words) if words else nullcontext():
        courses.check(name, parse_request(size), user, (), now)


def test_files_and_settings_together(desk: Desk) -> None:
    desk.write("cs101", course("One"))
    settings = PoolSettings(courses={"ml101": {"weight": 3}}, courses_dir=str(desk.path)).sharing
    sharing = desk.opened("ml101").look().sharing(settings)
    assert sharing.course("ml101") == read_course("ml101", {"weight": 3})
    assert sharing.course("cs101") == read_course("cs101", {})
    assert dict(sharing.policy.weights) == {"": 1.0, "ml101": 3, "cs101": 1.0}


def test_a_course_in_both_is_refused_in_words_and_takes_nothing_else_down(desk: Desk) -> None:
    desk.write("ml101", course("One"))
    desk.write("cs101", course("Two"))
    courses = desk.opened("ml101").look()
    sharing = courses.sharing(PoolSettings(courses={"ml101": {}}).sharing)
    assert sharing.course("cs101").name == "cs101"
    with pytest.raises(NotAllowed, match="ml101 cannot be used: it is described twice"):
        sharing.course("ml101")
    assert "also in c.PoolSettings.courses" in str(courses.problems[0])


def test_a_folder_that_cannot_be_read_is_a_problem_and_changes_nothing(desk: Desk) -> None:
    desk.write("cs101", course("One"))
    desk.look_later()
    away = desk.path.with_name("away")
    desk.path.rename(away)
    courses = desk.look_later()
    assert titles(courses) == {"cs101": "One"}
    assert "the folder cannot be read: No such file" in str(courses.problems[0])
    away.rename(desk.path)
    assert desk.look_later().problems == ()


def test_a_file_that_is_away_for_a_moment_keeps_its_course(desk: Desk) -> None:
    desk.write("cs101", course("One"))
    desk.look_later()
    (desk.path / "cs101.yaml").rename(desk.path / "cs101.yaml~")
    assert desk.titles() == {"cs101": "One"}
    desk.write("cs101", course("New"))
    assert desk.titles() == {"cs101": "New"}


def test_half_a_file_is_never_in_force(desk: Desk) -> None:
    # Everything before "who" is a course by itself, for everybody.
    half = course("One")
    desk.write("cs101", half + "who: {users: [ada]}\n")
    desk.look_later()
    desk.write("cs101", half)
    desk.waited += 60
    desk.left_alone += 0.9
    assert desk.folder.look().usable["cs101"].who.users == ("ada",)
    desk.write("cs101", half + "who: {users: [ada, grace]}\n")
    assert desk.look_later().usable["cs101"].who.users == ("ada", "grace")


def test_a_new_file_counts_once_it_is_written(desk: Desk) -> None:
    desk.folder.look()
    desk.write("cs101", course("One"))
    desk.waited += 60
    assert titles(desk.folder.look()) == {}
    assert desk.titles() == {"cs101": "One"}


def test_a_copy_with_the_times_of_its_original_is_not_taken_for_finished(desk: Desk) -> None:
    desk.write("cs101", course("One"))
    desk.look_later()
    desk.write("cs101", course("Two"))
    os.utime(desk.path / "cs101.yaml", (0, 0))
    desk.waited += 60
    assert titles(desk.folder.look()) == {"cs101": "One"}
    assert desk.titles() == {"cs101": "Two"}


def test_a_change_while_the_file_is_read_is_waited_for(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.write("cs101", course("One"))
    desk.look_later()
    desk.write("cs101", course("Two"))
    desk.wait(2)

    def interrupted(path: Path, file: str) -> bytes:
        (path / file).write_text(course("Half"))
        return read_bytes(path, file)

    with monkeypatch.context() as patched:
        patched.setattr(folder, "read_bytes", interrupted)
        assert titles(desk.folder.look()) == {"cs101": "One"}
    desk.write("cs101", course("Three"))
    assert desk.titles() == {"cs101": "Three"}


def test_a_change_that_the_clock_of_the_files_is_too_coarse_for_is_not_missed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.write("cs101", course("One"))
    mark = folder._mark(desk.path / "cs101.yaml")
    monkeypatch.setattr(folder, "_mark", lambda path: mark)
    assert titles(desk.folder.look()) == {"cs101": "One"}
    desk.write("cs101", course("Two"))
    assert desk.titles() == {"cs101": "Two"}
