"""Course files that are wrong, in the log of a service that no Hub is before, and in ``health`` beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_pool.courses import Courses, FileProblem, parse_course
from gpu_pool.service.course_log import changes
from support.pools import eventually
from support.service import ForkServer, Service, serving
from support.terminal import Terminal

GOOD = "title: A\nslices: [{name: S, request: 2%}]\n"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "courses"
    folder.mkdir()
    (folder / "good.yaml").write_text(GOOD)
    (folder / "bad.yaml").write_text(GOOD + "weight: lots\n")
    (folder / "old.yaml").write_text(GOOD + "longest_lease: 90\n")
    return folder


#: A service that fails when it is to log what has become of a file of this text.
_FAILS = """
import gpu_pool.service.course_log as course_log
changes = course_log.changes
def failing(before, now):
    if any("Unlucky" in str(course.title) for course in now.usable.values()):
        raise ZeroDivisionError("unlucky")
    return changes(before, now)
course_log.changes = failing
"""


async def test_the_log_goes_on_where_it_has_failed(tmp_path: Path, folder: Path) -> None:
    children = ForkServer(_FAILS)
    try:
        async with serving(children, tmp_path, f"c.PoolSettings.courses_dir = {str(folder)!r}\n") as service:
            (folder / "good.yaml").write_text(GOOD.replace("title: A", "title: Unlucky"))
            await eventually(lambda: "Following the course files for the log has failed" in service.log)
            assert "ZeroDivisionError: unlucky" in service.log
            (folder / "good.yaml").write_text(GOOD)
            (folder / "bad.yaml").write_text(GOOD)
            await eventually(lambda: "Courses: corrected, and in force: bad.yaml" in service.log)
    finally:
        children.close()


def health(service: Service) -> list[tuple[str, str]]:
    environment = {"JUPYTER_CONFIG_DIR": str(service.folder), "GPU_POOL_URL": service.url}
    done = Terminal(service.children, service.folder, environment).run("health", "--json")
    return [
        (each["state"], each["text"])
        for each in json.loads(done.stdout)["checks"]
        if each["name"] == "courses"
    ]


@pytest.mark.long
async def test_what_is_wrong_is_logged_at_the_start_as_it_comes_and_as_it_is_mended(
    children: ForkServer, tmp_path: Path, folder: Path
) -> None:
    async with serving(children, tmp_path, f"c.PoolSettings.courses_dir = {str(folder)!r}\n") as service:
        start = service.log
        wrong = "bad.yaml, line 3: weight: 'lots' is not a valid number."
        assert f"ERROR: Courses: {wrong}" in start
        assert "The course is not offered until this is corrected." in start
        assert "WARNING: Courses: old.yaml, line 3: longest_lease: '90' has no unit" in start
        assert "Courses: offered from now on: good, old" in start
        (folder / "good.yaml").write_text(GOOD + "wieght: 2\n")
        await eventually(lambda: "good.yaml, line 3: there is no field 'wieght'" in service.log)
        assert "Its last good version stays in force, until this service ends." in service.log
        found = health(service)
        assert ("broken", f"{wrong[:-1]}; the course is not offered") in found
        text = "there is no field 'wieght'; its last good version is in force until the service ends"
        assert ("note", f"good.yaml, line 3: {text}") in found
        (folder / "bad.yaml").write_text(GOOD)
        await eventually(lambda: "Courses: corrected, and in force: bad.yaml" in service.log)
        (folder / "old.yaml").unlink()
        await eventually(lambda: "no longer offered, since its file is gone: old" in service.log)
        folder.rename(tmp_path / "away")  # noqa: ASYNC240 - the service is another process
        await eventually(lambda: "Courses: courses: the folder cannot be read" in service.log)
        assert service.log.count(wrong) == 1
        assert "Traceback" not in service.log


def test_a_name_of_a_file_breaks_no_line_of_the_log() -> None:
    problem = FileProblem("a\nERROR: all is lost\u2028.yaml", 1, "", "is bad.")
    course = parse_course("good.yaml", GOOD.encode())
    lines = [line for _, line in changes(Courses(), Courses({"good": course}, {}, (problem,), (problem,)))]
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
