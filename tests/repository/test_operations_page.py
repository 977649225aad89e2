"""The page of operations has the table of operations as it is."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_as_the_table_is_now() -> None:
    written = runpy.run_path(str(DOCS / "operations.py"))
    text = written["PAGE"].read_text()
    assert written["page"](text) == text, "run docs/operations.py"
