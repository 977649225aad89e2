"""A folder of course files in use: changes, mistakes, and writers who are not done."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path

import pytest

from gpu_pool.courses import folder, read_bytes
from gpu_pool.courses.folder import SharedFolders
from gpu_pool.policy.sharing import Sharing, read_course
from gpu_pool.settings import PoolSettings
from gpu_pool_client import NotAllowed, parse_request
from support.course_folders import CourseFiles, course, titles


@pytest.fixture
def files(tmp_path: Path) -> CourseFiles:
    return CourseFiles(tmp_path)


def test_the_files_of_a_folder_are_its_courses(files: CourseFiles) -> None:
    files.write("cs101", course("One"))
    files.write("cs102", course("Two"))
    for other in (
        "README.md",
        ".cs103.yaml.swp",
        ".cs103.yaml",
        "cs103.yaml~",
        "#cs103.yaml#",
        "#cs103.yaml",
    ):
        (files.path / other).write_text("not a course: at all")
    assert titles(files.folder.current()) == {"cs101": "One", "cs102": "Two"}
    assert files.folder.current().problems == ()


def test_what_is_new_changed_or_gone_is_noticed(files: CourseFiles) -> None:
    files.write("cs101", course("One"))
    assert files.titles() == {"cs101": "One"}
    files.write("cs102", course("Two"))
    files.replace("cs101", course("First"))
    assert files.titles() == {"cs101": "First", "cs102": "Two"}
    (files.path / "cs102.yaml").unlink()
    files.look_later()
    assert files.titles() == {"cs101": "First"}


def test_while_nothing_changes_the_value_is_the_very_same(files: CourseFiles) -> None:
    files.write("cs101", course("One"))
    seen = files.look_later()
    assert files.look_later() is seen
    (files.path / "cs101.yaml").touch()
    assert files.look_later() is seen


def test_it_looks_at_most_once_a_second(files: CourseFiles) -> None:
    files.write("cs101", course("One"))
    assert files.titles() == {"cs101": "One"}
    files.write("cs101", course("Two"))
    files.left_alone += 2
    assert titles(files.folder.current()) == {"cs101": "One"}, "it was looked just now"
    files.waited += 0.9
    assert titles(files.folder.current()) == {"cs101": "One"}
    files.waited += 0.1
    assert titles(files.folder.current()) == {"cs101": "Two"}


def test_a_file_that_becomes_bad_leaves_its_course_and_all_others_as_they_were(files: CourseFiles) -> None:
    files.write("cs101", course("One"))
    files.write("cs102", course("Two"))
    files.look_later()
    files.replace("cs101", "title: One\nslices: none\n")
    courses = files.look_later()
    assert titles(courses) == {"cs101": "One", "cs102": "Two"}
    assert [str(each)[:38] for each in courses.problems] == ["cs101.yaml, line 2: slices: is 'none'."]
    files.replace("cs101", course("One"))
    assert files.look_later().problems == ()


@pytest.mark.parametrize("way", ["link", "pipe", "huge", "folder"])
def test_whatever_takes_the_place_of_a_good_file_and_back(files: CourseFiles, way: str) -> None:
    files.write("cs101", course("One"))
    files.look_later()
    path = files.path / "cs101.yaml"
    path.unlink()
    ways = {
        "link": lambda: path.symlink_to("/etc/passwd"),
        "pipe": lambda: os.mkfifo(path),
        "huge": lambda: path.write_bytes(b"#" * 10**6),
        "folder": path.mkdir,
    }
    ways[way]()
    courses = files.look_later()
    assert titles(courses) == {"cs101": "One"}
    assert len(courses.problems) == 1
    shutil.rmtree(path) if way == "folder" else path.unlink()
    files.write("cs101", course("One"))
    assert files.look_later().problems == ()


def test_after_a_fresh_start_a_bad_file_is_refused_in_words(files: CourseFiles) -> None:
    files.write("cs102", course("Two"))
    files.replace("cs101", "title: One\n\nslices: none\n")
    courses = files.opened().current()
    assert titles(courses) == {"cs102": "Two"}
    words = "Course cs101 cannot be used: its file has an error on line 3; ask its instructor."
    with pytest.raises(NotAllowed, match=words):
        courses.course("cs101")
    with pytest.raises(NotAllowed, match=words):
        courses.sharing(Sharing()).course("cs101")


def test_a_file_with_another_ending_is_a_problem_and_no_course(files: CourseFiles) -> None:
    (files.path / "cs101.yml").write_text(course("One"))
    courses = files.folder.current()
    assert titles(courses) == {}
    assert "For example, name it cs101.yaml" in str(courses.problems[0])


def test_a_course_that_nobody_described_is_no_other_course(files: CourseFiles) -> None:
    courses = files.folder.current()
    with pytest.raises(NotAllowed, match="No course file describes the course 'cs101'"):
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
    files: CourseFiles, name: str | None, size: str, user: str, words: str
) -> None:
    files.write("cs101", course("One") + "who: {users: [ada]}\n")
    courses, now = files.folder.current(), datetime.now(timezone.utc)
    with pytest.raises(NotAllowed, match=words) if words else nullcontext():
        courses.check(name, parse_request(size), user, (), now)


def test_files_and_settings_together(files: CourseFiles) -> None:
    files.write("cs101", course("One"))
    settings = PoolSettings(courses={"ml101": {"weight": 3}}, courses_dir=str(files.path)).sharing
    sharing = files.opened("ml101").current().sharing(settings)
    assert sharing.course("ml101") == read_course("ml101", {"weight": 3})
    assert sharing.course("cs101") == read_course("cs101", {})
    assert dict(sharing.policy.weights) == {"": 1.0, "ml101": 3, "cs101": 1.0}


def test_a_course_in_both_is_refused_in_words_and_takes_nothing_else_down(files: CourseFiles) -> None:
    files.write("ml101", course("One"))
    files.write("cs101", course("Two"))
    courses = files.opened("ml101").current()
    sharing = courses.sharing(PoolSettings(courses={"ml101": {}}).sharing)
    assert sharing.course("cs101").name == "cs101"
    with pytest.raises(NotAllowed, match="ml101 cannot be used: it is described twice"):
        sharing.course("ml101")
    assert "also in c.PoolSettings.courses" in str(courses.problems[0])


def test_a_folder_that_cannot_be_read_is_a_problem_and_changes_nothing(files: CourseFiles) -> None:
    files.write("cs101", course("One"))
    files.look_later()
    away = files.path.with_name("away")
    files.path.rename(away)
    courses = files.look_later()
    assert titles(courses) == {"cs101": "One"}
    assert "the folder cannot be read: No such file" in str(courses.problems[0])
    away.rename(files.path)
    assert files.look_later().problems == ()


def test_a_file_that_is_away_for_a_moment_keeps_its_course(files: CourseFiles) -> None:
    files.write("cs101", course("One"))
    files.look_later()
    (files.path / "cs101.yaml").rename(files.path / "cs101.yaml~")
    assert files.titles() == {"cs101": "One"}
    files.write("cs101", course("New"))
    assert files.titles() == {"cs101": "New"}


def test_half_a_file_is_never_in_force(files: CourseFiles) -> None:
    # Everything before "who" is a course by itself, for everybody.
    half = course("One")
    files.write("cs101", half + "who: {users: [ada]}\n")
    files.look_later()
    files.write("cs101", half)
    files.waited += 60
    files.left_alone += 0.9
    assert files.folder.current().usable["cs101"].who.users == ("ada",)
    files.write("cs101", half + "who: {users: [ada, grace]}\n")
    assert files.look_later().usable["cs101"].who.users == ("ada", "grace")


def test_a_new_file_counts_once_it_is_written(files: CourseFiles) -> None:
    files.folder.current()
    files.write("cs101", course("One"))
    files.waited += 60
    assert titles(files.folder.current()) == {}
    assert files.titles() == {"cs101": "One"}


def test_a_copy_with_the_times_of_its_original_is_not_taken_for_finished(files: CourseFiles) -> None:
    files.write("cs101", course("One"))
    files.look_later()
    files.write("cs101", course("Two"))
    os.utime(files.path / "cs101.yaml", (0, 0))
    files.waited += 60
    assert titles(files.folder.current()) == {"cs101": "One"}
    assert files.titles() == {"cs101": "Two"}


def test_a_change_while_the_file_is_read_is_waited_for(
    files: CourseFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write("cs101", course("One"))
    files.look_later()
    files.write("cs101", course("Two"))
    files.wait(2)

    def interrupted(path: Path, file: str) -> bytes:
        (path / file).write_text(course("Half"))
        return read_bytes(path, file)

    with monkeypatch.context() as patched:
        patched.setattr(folder, "read_bytes", interrupted)
        assert titles(files.folder.current()) == {"cs101": "One"}
    files.write("cs101", course("Three"))
    assert files.titles() == {"cs101": "Three"}


def test_a_change_that_the_clock_of_the_files_is_too_coarse_for_is_not_missed(
    files: CourseFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write("cs101", course("One"))
    file, stat = files.path / "cs101.yaml", Path.stat
    first = file.stat()
    monkeypatch.setattr(Path, "stat", lambda path, **how: first if path == file else stat(path, **how))
    assert titles(files.folder.current()) == {"cs101": "One"}
    files.write("cs101", course("Two"))
    assert files.titles() == {"cs101": "Two"}


def test_one_object_reads_a_folder_for_all_of_a_process(tmp_path: Path) -> None:
    folders = SharedFolders()
    one = folders.folder(tmp_path, ["ml101"])
    assert folders.folder(tmp_path, ("ml101",)) is one
    assert folders.folder(tmp_path) is not one
    assert SharedFolders().folder(tmp_path, ["ml101"]) is not one
