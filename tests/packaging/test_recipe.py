"""The recipe for conda-forge says what pyproject.toml says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
RECIPE: dict[str, Any] = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())
#: Those for people who use this project.
EXTRAS = ("lab", "hub", "metrics", "kubernetes", "checkpoint")


@pytest.fixture(scope="module")
def declared() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="this Python cannot read pyproject.toml")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())  # type: ignore[no-any-return]


def named(requirements: list[str]) -> dict[str, str]:
    """Return the versions that are required, by name."""
    parsed = [Requirement(text) for text in requirements]
    return {canonicalize_name(each.name): str(each.specifier) for each in parsed}


def of_recipe(part: str) -> dict[str, str]:
    """Return a part of the recipe's requirements, but for Python and pip."""
    given = [text for text in RECIPE["requirements"][part] if text.partition(" ")[0] not in ("python", "pip")]
    return named(given)


def test_it_requires_what_is_declared(declared: dict[str, Any]) -> None:
    project, extras = declared["project"], declared["project"]["optional-dependencies"]
    assert of_recipe("run") == named(project["dependencies"])
    assert of_recipe("run_constraints") == named([text for extra in EXTRAS for text in extras[extra]])
    hook = declared["tool"]["hatch"]["build"]["hooks"]["custom"]
    assert of_recipe("host") == named([*declared["build-system"]["requires"], *hook["dependencies"]])
    assert f">={RECIPE['context']['python_min']}" == project["requires-python"]


def test_it_describes_the_same_package(declared: dict[str, Any]) -> None:
    project, about = declared["project"], RECIPE["about"]
    assert (RECIPE["package"]["name"], about["summary"]) == (project["name"], project["description"])
    assert ([about["license_file"]], about["license"]) == (project["license-files"], project["license"])
    scripts = [f"{name} = {target}" for name, target in project["scripts"].items()]
    assert RECIPE["build"]["python"]["entry_points"] == scripts
    packages = [
        Path(path).name for path in declared["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    ]
    assert sorted(RECIPE["tests"][0]["python"]["imports"]) == sorted(packages)
