"""What was measured as one table, and as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.report import Line

#: Columns of a table that is written to a file or a pipe.
WIDTH = 150
_STYLES: Final = {"not kept": "bold red", "undecided": "yellow"}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report, and the benchmark that made it."""

    name: str
    line: Line

    def plain(self) -> dict[str, object]:
        """Return it as JSON has it."""
        command = f"python -m benchmarks {self.name}"
        return {"name": self.name, "command": command, **asdict(self.line), "verdict": self.line.verdict}


def facts(quick: bool) -> dict[str, object]:
    """Return on what is measured, and how much else went on as it began."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processes that wanted a core as it began": f"{os.getloadavg()[0]:.1f}",
        "quick": quick,
    }


def printed(rows: Sequence[Row], words: Sequence[str], about: Mapping[str, object]) -> None:
    """Print the table."""
    table = Table("what", box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for heading in ("ours", "yardstick", "ratio"):
        table.add_column(heading, justify="right")
    for heading in ("unit", "promise", "python -m benchmarks"):
        table.add_column(heading)
    for row in rows:
        table.add_row(*_cells(row))
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(table)
    for word in words:
        console.print(Text(word))
    console.print(Text("; ".join(f"{name}: {fact}" for name, fact in about.items())))


def _cells(row: Row) -> list[Text]:
    line = row.line
    alone = line.ours is not None and line.yardstick is None
    promise = "" if line.promise is None else f"{line.kind} {line.promise:g}: "
    return [
        Text.assemble(line.what, "\n", (line.made_of, "dim")),
        Text(_figure(line.ours)),
        Text(_figure(line.yardstick)),
        Text("" if alone else _figure(line.ratio)),
        Text(line.unit),
        Text.assemble(promise, (line.verdict or "", _STYLES.get(line.verdict or "", ""))),
        Text(row.name),
    ]


def _figure(value: float | None) -> str:
    """Write three digits that count, or all of a larger number."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def written(rows: Sequence[Row], words: Sequence[str], about: Mapping[str, object]) -> str:
    """Return everything as JSON."""
    found = {"about": dict(about), "rows": [row.plain() for row in rows], "notes": list(words)}
    return json.dumps(found, indent=1) + "\n"
