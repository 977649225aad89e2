"""The version stands in ``pyproject.toml``, and wherever else it stands ``make version`` changes it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from support.images import script

ROOT = Path(__file__).parents[2]
#: What tells of other versions, too; the recipe's is the last one that was published.
OF_ITS_OWN = {"CHANGELOG.md", "RELEASE.md", "recipe/recipe.yaml", "tests/support/old_versions.py"}


def test_make_version_changes_every_file_that_has_the_version() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout")
    settings = (ROOT / "pyproject.toml").read_text()
    version = script("build").project_version()
    changed = set(re.findall(r'^    \{ filename = "(.*?)"', settings, re.MULTILINE))
    assert changed
    pattern = re.compile(rf"(?<![\d.^~]){re.escape(version)}(?![\d.])".encode())
    paths = [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]
    have = {path for path in paths if pattern.search((ROOT / path).read_bytes())}
    assert have - OF_ITS_OWN == {*changed, "pyproject.toml"}
