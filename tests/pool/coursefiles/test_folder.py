"""A folder of course files in use: changes, mistakes, and writers who are not done."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gpu_pool.clock import Clock
from gpu_pool.coursefiles import CourseFolder, Courses, folder, read_bytes
from gpu_pool.courses import Sharing, read_course
from gpu_pool.settings import PoolSettings
from gpu_pool_client import NotAllowed, parse_request


class Desk:
    """A folder with somebody who writes in it, and clocks that run ahead when they are told to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waited = 0.0
        #: Since the last change, whose time is the system's.
        self.left_alone = 0.0
        self.folder = self.opened()

    def opened(self, *taken: str) -> CourseFolder:
        """Return the folder as a process that begins now opens it."""
        clock = Clock(lambda: time.time() + self.left_alone, lambda: time.monotonic() + self.waited)
        return CourseFolder(self.path, taken, clock)

    def write(self, name: str, text: str) -> None:
        """Write a file as editors do that write into the file."""
        self.left_alone = 0.0
        (self.path / f"{name}.yaml").write_text(text)

    def replace(self, name: str, text: str) -> None:
        """Write a file as editors do that put another in its place."""
        self.write(f".{name}", text)
        (self.path / f".{name}.yaml").replace(self.path / f"{name}.yaml")

    def wait(self, seconds: float) -> None:
        self.waited += seconds
        self.left_alone += seconds

    def look_later(self) -> Courses:
        """Look when everything written until now has been left alone."""
        self.wait(2)
        return self.folder.look()

    def titles(self) -> dict[str, str]:
        return titles(self.look_later())


def course(title: str) -> str:
    return f"title: {title}\nslices: [{{name: Small, request: 2%}}]\n"


def titles(courses: Courses) -> dict[str, str]:
    return {name: file.title for name, file in courses.usable.items()}


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


class ManyWriters(RuleBasedStateMachine):
    """Any order of changes, good and bad, of looks and of time that passes."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.desk = Desk(Path(self.place.name))
        self.good: dict[str, set[str]] = {}
        self.now: dict[str, str | None] = {}

    names = some.sampled_from(["a", "b"])

    @rule(name=names, title=some.sampled_from(["One", "Two", "Six"]), in_place=some.booleans())
    def write(self, name: str, title: str, in_place: bool) -> None:
        (self.desk.write if in_place else self.desk.replace)(name, course(title))
        self.good.setdefault(name, set()).add(title)
        self.now[name] = title

    @rule(name=names, text=some.sampled_from(["", "title: ", "title: Bad", "\0", "[" * 99]))
    def write_badly(self, name: str, text: str) -> None:
        self.desk.replace(name, text)
        self.now[name] = None

    @rule(name=names)
    def remove(self, name: str) -> None:
        (self.desk.path / f"{name}.yaml").unlink(missing_ok=True)
        self.now.pop(name, None)

    @rule(seconds=some.sampled_from([0.0, 0.3, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.desk.wait(seconds)

    @rule()
    def leave_alone(self) -> None:
        """When all have been left alone, exactly what is written is in force."""
        self.desk.look_later()
        courses = self.desk.look_later()
        written = {name: title for name, title in self.now.items() if title}
        assert written.items() <= titles(courses).items()
        assert courses.usable.keys() | courses.refused.keys() == self.now.keys()
        bad = {f"{name}.yaml" for name, title in self.now.items() if title is None}
        assert {problem.file for problem in courses.problems} == bad

    @invariant()
    def only_what_was_written_is_in_force(self) -> None:
        for name, title in titles(self.desk.folder.look()).items():
            assert title in self.good[name]

    def teardown(self) -> None:
        self.place.cleanup()


TestManyWriters = ManyWriters.TestCase
TestManyWriters.settings = settings(max_examples=30, stateful_step_count=25)
