"""The pages of the dialects say what their tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_pool.cluster.dialects import NOT_SEEN, Dialect, installed_dialects

DIALECTS, _ = installed_dialects()
PAGES = Path(__file__).parents[3] / "docs" / "kubernetes"


def row(dialect: type[Dialect]) -> str:
    """Return a dialect's line in the table of promises."""
    table = dialect.table
    cells = (
        f"[`{table.name}`]({table.name}.md)",
        table.memory,
        table.compute,
        table.smallest,
        table.rounding,
        table.seen,
    )
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_has_its_line_in_the_table_of_promises(dialect: type[Dialect]) -> None:
    assert row(dialect) in (PAGES / "index.md").read_text().splitlines()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_has_a_guide_that_names_its_source_and_whether_it_was_seen(dialect: type[Dialect]) -> None:
    page = (PAGES / f"{dialect.table.name}.md").read_text()
    beginning = " ".join(page.partition("[")[0].split()).lower()
    seen = dialect.table.seen
    assert (seen if seen == NOT_SEEN else f"seen {seen}").lower() in beginning
    assert all(key.rpartition("/")[2] in page for key in dialect.table.quota)


def test_the_order_of_preference_is_written_down() -> None:
    page = (PAGES / "index.md").read_text()
    order = page[page.index("1. those that limit memory") : page.index("KAI uses")]
    places = [order.index(f"`{dialect.table.name}`") for dialect in DIALECTS]
    assert places == sorted(places)
