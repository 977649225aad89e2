"""The Pythons that are said to work are those that are tested, wherever they are listed.

A cell of the matrix whose Python is missing is skipped, and the workflow would be green without it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def declared() -> list[str]:
    classifier = r'"Programming Language :: Python :: (3\.\d+)"'
    return re.findall(classifier, (ROOT / "pyproject.toml").read_text())


def test_the_oldest_is_what_pip_is_told() -> None:
    assert f'requires-python = ">={declared()[0]}"' in (ROOT / "pyproject.toml").read_text()


def test_the_matrix_has_all_of_them() -> None:
    """The noxfile is read and not imported: nox is no part of the tests."""
    (listed,) = re.findall(r"^PYTHONS = (\[.*\])$", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    assert ast.literal_eval(listed) == declared()


def test_the_workflows_have_all_of_them() -> None:
    workflows = ROOT / ".github" / "workflows"
    (listed,) = re.findall(r"^ +python: (\[.*\])$", (workflows / "tests.yml").read_text(), re.MULTILINE)
    assert ast.literal_eval(listed) == declared()
    installed = (workflows / "matrix.yml").read_text().partition("python-version: |\n")[2]
    assert installed.partition("- uses")[0].split() == declared()


def test_the_page_of_what_was_run_has_all_of_them() -> None:
    page = (ROOT / "docs" / "developer" / "compatibility.md").read_text()
    first, last = declared()[0], declared()[-1]
    assert f"| `newest-{first}` … `newest-{last}` |" in page
    assert f"| `wheel` | {first} … {last} |" in page
