"""Laws of a folder of course files, in any order of what can happen to it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from support.course_folders import CourseFiles, course, titles
from support.examples import examples


class ManyWriters(RuleBasedStateMachine):
    """Any order of changes, good and bad, of looks and of time that passes."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.files = CourseFiles(Path(self.place.name))
        self.good: dict[str, set[str]] = {}
        self.now: dict[str, str | None] = {}

    names = some.sampled_from(["a", "b"])

    @rule(name=names, title=some.sampled_from(["One", "Two", "Six"]), in_place=some.booleans())
    def write(self, name: str, title: str, in_place: bool) -> None:
        (self.files.write if in_place else self.files.replace)(name, course(title))
        self.good.setdefault(name, set()).add(title)
        self.now[name] = title

    @rule(name=names, text=some.sampled_from(["", "title: ", "title: Bad", "\0", "[" * 99]))
    def write_badly(self, name: str, text: str) -> None:
        self.files.replace(name, text)
        self.now[name] = None

    @rule(name=names)
    def remove(self, name: str) -> None:
        (self.files.path / f"{name}.yaml").unlink(missing_ok=True)
        self.now.pop(name, None)

    @rule(seconds=some.sampled_from([0.0, 0.3, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.files.wait(seconds)

    @rule()
    def leave_alone(self) -> None:
        """When all have been left alone, exactly what is written is in force."""
        self.files.look_later()
        courses = self.files.look_later()
        written = {name: title for name, title in self.now.items() if title}
        assert written.items() <= titles(courses).items()
        assert courses.usable.keys() | courses.refused.keys() == self.now.keys()
        bad = {f"{name}.yaml" for name, title in self.now.items() if title is None}
        assert {problem.file for problem in courses.problems} == bad

    @invariant()
    def only_what_was_written_is_in_force(self) -> None:
        for name, title in titles(self.files.folder.current()).items():
            assert title in self.good[name]

    def teardown(self) -> None:
        self.place.cleanup()


TestManyWriters = ManyWriters.TestCase
TestManyWriters.settings = settings(max_examples=examples(30), stateful_step_count=25)
