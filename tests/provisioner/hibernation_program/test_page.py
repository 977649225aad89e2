"""The administrator's page: what it says that an attacker may try is tried by the tests that it names."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
_ELSEWHERE = ("test_hibernation_killed.py", "test_prepared_kernels.py")
PAGE = Path(__file__).parents[3] / "docs/administrator/hibernation.md"


def test_each_row_names_the_tests_that_try_it() -> None:
    text = PAGE.read_text().partition("| who tries what |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
    assert len(rows) > 20
    there = {
        name
        for path in (*HERE.glob("test_*.py"), *map(HERE.parent.joinpath, _ELSEWHERE))
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.M)
    }
    for who, _, tests in rows:
        named = re.findall(r"`(\w+)`", tests)
        assert named, who
        assert set(named) <= there, who
