"""``report``: who used how much, as a table, for a spreadsheet or for a program."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

import click

from gpu_pool.cli import formatting, screen
from gpu_pool.cli.session import CommandSession, complete, json_option, verb
from gpu_pool.policy import usage_report
from gpu_pool.policy.usage_report import UsageRow
from gpu_pool_client import BadRequest, EndedLease, format_duration, parse_duration
from gpu_pool_client._requests import format_memory

_KEYS: Final[Mapping[str, Callable[[EndedLease], str]]] = {
    "user": lambda row: str(row.user),
    "course": lambda row: str(row.course or ""),
    "day": lambda row: time.strftime("%Y-%m-%d", time.localtime(row.ended_at)),
    "kernel": lambda row: str(row.kernel or ""),
}
_COLUMNS: Final = ("GPU-hours", "Leases", "People", "Peak", "Mean", "GPU unused", "Median wait", "Ends")
_ACCEPTED: Final = "Accepted: a time ago (12h, 7d), a day (2026-09-01) or a moment (2026-09-01T14:30)."


@verb(
    "report",
    "gpu-pool report --by course --since 30d",
    "gpu-pool report --by user --since 2026-09-01 --until 2026-10-01 --format csv",
    "gpu-pool report --json | jq '.total.gpu_hours'",
)
@click.option(
    "--by", type=click.Choice(list(_KEYS)), default="user", help="What to group by; user by default."
)
@click.option(
    "--since", default="7d", metavar="WHEN", help="A time ago or a day: 12h, 2026-09-01; 7d by default."
)
@click.option(
    "--until", metavar="WHEN", help="The end of the period; by default now, with leases that have not ended."
)
@click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table")
@json_option
def report(session: CommandSession, by: str, since: str, until: str | None, form: str) -> int:
    """Add up what was used: GPU-hours (share times time), memory, waits.

    A lease counts when it ended, and one that is held or parked up to now. Memory is
    what was measured, on one GPU; "GPU unused" counts leases without any process on a GPU.
    """
    now = time.time()
    first, last = _moment(since, now), now if until is None else _moment(until, now)
    if last < first:
        raise BadRequest(
            f"--until {formatting.safe(str(until))} is before --since {formatting.safe(since)}.", _ACCEPTED
        )
    rows, held = complete(_rows(session, first, last, now if until is None else None))
    lines, total = usage_report.report(rows, _KEYS[by]), usage_report.line("total", rows)
    if session.as_json or form == "json":
        plain = [{by: each.key, **_figures(each)} for each in lines]
        period = {"by": by, "since": first, "until": last, "living": held}
        screen.show_json({**period, "rows": plain, "total": _figures(total)})
    elif form == "csv":
        click.echo(_csv(by, [*lines, total]), nl=False)
    elif lines:
        _show(by, lines, total, held)
    else:
        click.echo("No lease has ended in this time, and none is held or parked.")
    return 0


async def _rows(
    session: CommandSession, since: float, until: float, now: float | None
) -> tuple[list[EndedLease], int]:
    """Return the leases that ended then, with those that have not by ``now`` if it is given, and how many."""
    async with session.connect() as pool:
        rows = [row for row in await pool.history(since) if row.ended_at <= until]
        if now is None:
            return rows, 0
        status = await pool.status()
        living = [each for each in (*status.leases, *status.queue) if usage_report.has_used(each)]
        return [*rows, *(usage_report.living(lease, now) for lease in living)], len(living)


def _moment(text: str, now: float) -> float:
    """Return the Unix time that was written as a time ago, a day or a moment."""
    try:
        return now - parse_duration(text)
    except BadRequest:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise BadRequest(f"{text[:40]!a} is not a valid time.", _ACCEPTED) from None


def _figures(line: UsageRow) -> dict[str, Any]:
    figures = asdict(line)
    del figures["key"]
    return figures


def _csv(by: str, lines: list[UsageRow]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([by, *_figures(lines[-1])])
    for each in lines:
        figures = _figures(each)
        figures["reasons"] = " ".join(f"{reason}:{count}" for reason, count in each.reasons.items())
        writer.writerow(_harmless(cell) for cell in (each.key, *figures.values()))
    return text.getvalue()


def _harmless(cell: object) -> object:
    """Keep a spreadsheet from taking a name for a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def _show(by: str, lines: list[UsageRow], total: UsageRow, held: int) -> None:
    rows = [[formatting.safe(each.key) or "-", *_cells(each)] for each in lines]
    screen.show(screen.table((by.capitalize(), *_COLUMNS), [*rows, ["total", *_cells(total)]]))
    if held:
        are = (
            "1 lease that has not ended is counted"
            if held == 1
            else f"{held} leases that have not ended, held or parked, are counted"
        )
        screen.show("", f"{are} up to now, without memory and wait.")


def _cells(line: UsageRow) -> list[str]:
    return [
        f"{line.gpu_hours:.2f}",
        str(line.leases),
        str(line.people),
        "-" if line.peak_mib is None else format_memory(line.peak_mib),
        "-" if line.mean_mib is None else format_memory(round(line.mean_mib)),
        f"{line.untouched / line.measured:.0%} of {line.measured}" if line.measured else "-",
        "-" if line.median_wait is None else format_duration(line.median_wait),
        ", ".join(f"{reason} {count}" for reason, count in line.reasons.items()),
    ]
