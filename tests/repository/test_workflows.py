"""``.github/workflows``: what they run of others is what was looked at, with no more rights than needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_commit(path: Path) -> None:
    """A tag or a branch can be moved; who moved the publishing action's could publish as this project."""
    used = re.findall(r"uses: (?!\./)(.*)", path.read_text())
    assert used
    for each in used:
        # Dependabot reads the version behind it.
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each), each


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_no_checkout_leaves_its_token_to_what_runs_after_it(path: Path) -> None:
    text = path.read_text()
    kept = re.findall(r"uses: actions/checkout@.*\n +with:\n +persist-credentials: false\n", text)
    assert len(kept) == text.count("actions/checkout@")


def parsed(workflow: str) -> Any:
    return yaml.safe_load((FOLDER / f"{workflow}.yml").read_text())


def jobs(workflow: str) -> Any:
    """Return the jobs of a workflow, by name."""
    return parsed(workflow)["jobs"]


def test_a_tag_publishes_nothing_before_all_tests_have_passed() -> None:
    # `on` is true in YAML 1.1.
    triggers = {path.stem: parsed(path.stem)[True] for path in WORKFLOWS}
    assert [name for name, each in triggers.items() if "tags" in (each.get("push") or {})] == ["release"]
    release = jobs("release")
    assert release["tests"]["uses"] == "./.github/workflows/tests.yml"
    publishing = {name for name, job in release.items() if "write" in job.get("permissions", {}).values()}
    assert publishing == {"publish", "images", "chart"}
    assert all({"build", "tests"} <= set(release[name]["needs"]) for name in publishing)
