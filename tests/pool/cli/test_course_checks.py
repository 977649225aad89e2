"""``health`` and ``doctor`` about course files: which line, what is wrong, and what holds meanwhile."""

from __future__ import annotations

import json
import shutil

import pytest

GOOD = "title: A\nslices: [{name: S, request: 2%}]\n"


@pytest.fixture
def courses(terminal):
    folder = terminal.folder / "courses"
    folder.mkdir()
    config = terminal.folder / "config/gpu_pool_config.py"
    config.parent.mkdir(exist_ok=True)
    config.write_text(f"c.PoolSettings.courses_dir = {str(folder)!r}\n")
    (folder / "good.yaml").write_text(GOOD)
    return folder


def told(terminal, verb):
    done = terminal.run(verb, "--json")
    found = [each for each in json.loads(done.stdout)["checks"] if each["name"] == "courses"]
    return done.returncode, [(each["state"], each["text"], each["remedy"]) for each in found]


@pytest.mark.parametrize("verb", ["health", "doctor"])
def test_a_broken_file_is_told_with_its_line_and_that_the_course_is_not_offered(terminal, courses, verb):
    (courses / "bad.yaml").write_text(GOOD + "weight: lots\n")
    (courses / "CS 2.yml").write_text(GOOD)
    status, found = told(terminal, verb)
    assert status == 1
    (_, names, _), (other, text, _), (state, words, remedy) = found
    assert (names, other, state) == ("good", "broken", "broken")
    assert text.startswith("CS 2.yml: 'CS 2.yml' is not the name of a course file")
    assert words == "bad.yaml, line 3: weight: 'lots' is not a valid number; the course is not offered"
    assert remedy.startswith("Accepted: a number from 0")
    assert f"gpu-pool courses check {courses}/bad.yaml" in remedy
    (courses / "bad.yaml").write_text(GOOD)
    (courses / "CS 2.yml").unlink()
    assert told(terminal, verb) == (0, [("ok", "bad, good", "")])


def test_a_time_without_a_unit_is_noted(terminal, courses):
    (courses / "old.yaml").write_text(GOOD + "longest_lease: 90\n")
    status, found = told(terminal, "health")
    assert status == 0
    text = "old.yaml, line 3: longest_lease: '90' has no unit, and is read as 1 minute 30 seconds."
    assert found[1] == ("note", text, "Write 90s, 90min or 90h.")


def test_a_folder_that_is_gone_is_told(terminal, courses):
    shutil.rmtree(courses)
    status, [(state, text, _)] = told(terminal, "health")
    assert (status, state) == (1, "broken")
    assert text == f"'{courses}' cannot be read: No such file or directory."


def test_a_course_in_the_settings_and_in_a_file_is_told(terminal, courses):
    config = terminal.folder / "config/gpu_pool_config.py"
    config.write_text(config.read_text() + "c.PoolSettings.courses = {'good': {}}\n")
    status, [(state, text, _)] = told(terminal, "health")
    assert (status, state) == (1, "broken")
    assert "the course 'good' is also in c.PoolSettings.courses" in text
