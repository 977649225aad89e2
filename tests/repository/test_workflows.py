"""``.github/workflows``: what they run of others is what was looked at, with no more rights than needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

WORKFLOWS = sorted((Path(__file__).parents[2] / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_commit(path: Path) -> None:
    """A tag or a branch can be moved; who moved the publishing action's could publish as this project."""
    used = re.findall(r"uses: (.*)", path.read_text())
    assert used
    for each in used:
        # Dependabot reads the version behind it.
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each), each


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_no_checkout_leaves_its_token_to_what_runs_after_it(path: Path) -> None:
    text = path.read_text()
    kept = re.findall(r"uses: actions/checkout@.*\n +with:\n +persist-credentials: false\n", text)
    assert len(kept) == text.count("actions/checkout@")
