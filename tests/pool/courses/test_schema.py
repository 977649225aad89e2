"""What an editor is told agrees with what is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gpu_pool.courses import CourseFile, json_schema, parse_course
from gpu_pool.courses.editing import template
from gpu_pool.courses.model import CourseLimits, CourseServer, Period, SliceOffer, Who

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples/courses").iterdir())
PAGE = (ROOT / "docs/reference/course-files.md").read_text()


def as_editors_see_it(text: str) -> Any:
    """Read YAML 1.2, as editors do: numbers and truth values in few forms, no dates."""

    def read(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: read(each) for key, each in value.items()}
        if isinstance(value, list):
            return [read(each) for each in value]
        if value in ("true", "false"):
            return value == "true"
        return float(value) if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", value) else value

    return read(yaml.load(text, yaml.BaseLoader))


@pytest.mark.parametrize("text", [template("cs101"), *(each.read_text() for each in EXAMPLES)])
def test_the_examples_and_the_template_are_good_to_both(text: str) -> None:
    parse_course("cs101.yaml", text.encode())
    jsonschema.validate(as_editors_see_it(text), json_schema())


def test_every_commented_line_of_the_template_is_good_too() -> None:
    everything = re.sub(r"(?m)^( *)# ([a-z_]+:|  (?:[a-z_]+:|- ))", r"\1\2", template("cs101"))
    course = parse_course("cs101.yaml", everything.encode())
    assert course.weeks
    assert course.hours
    assert course.instructors
    assert course.who.users
    assert course.quota.share


@pytest.mark.parametrize(
    "text",
    [
        "title: A",
        "title: A\nslices: []\nwieght: 2",
        "title: A\nslices: [{name: S}]",
        "title: A\nslices: [{name: S, request: [2%]}]",
        "title: A\nslices: [{name: S, request: 2%}]\nwhen_idle: stop",
        "title: A\nslices: [{name: S, request: 2%}]\nweeks: {from: 2026-10-12}",
        "title: A\nslices: [{name: S, request: 2%}]\nper_user: {slices: some}",
        "title: A\nslices: [{name: S, request: 2%}]\nquota:",
    ],
)
def test_what_is_wrong_is_wrong_in_the_editor(text: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(as_editors_see_it(text), json_schema())


def test_the_schema_is_one_and_describes_every_field() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    parts = [schema, *schema["$defs"].values()]
    fields = [field for part in parts for field in part["properties"].values()]
    assert len(parts) == 7
    assert all(field.get("description") for field in fields)


@pytest.mark.parametrize("part", [CourseFile, Who, SliceOffer, CourseLimits, Period, CourseServer])
def test_every_field_is_in_the_reference(part: type[CourseFile]) -> None:
    for name, field in part.model_fields.items():
        assert f"| `{field.alias or name}` |" in PAGE
