"""``serve``, ``why``, ``history``, ``report``: running and looking after a pool."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click

from gpu_pool.cli import completing, formatting, screen
from gpu_pool.cli.formatting import plain_failure
from gpu_pool.cli.recorded import hashed, nameless, recorded_rows
from gpu_pool.cli.session import (
    CommandSession,
    Duration,
    Interrupted,
    complete,
    json_option,
    naming_leases,
    verb,
)
from gpu_pool.policy import usage_report
from gpu_pool.policy.usage_report import PeriodParts, UsageRow, UseOverTime, until_now, use_over_time
from gpu_pool_client import (
    BadRequest,
    EndedLease,
    Failure,
    LeaseGone,
    LeaseState,
    NotAllowed,
    Outlook,
    Pool,
    format_duration,
    parse_duration,
)
from gpu_pool_client._requests import MAX_MIB, format_memory


@verb("why", "gpu-pool why 12-0123abcd", "gpu-pool why")
@click.argument("lease_id", metavar="[LEASE]", required=False, shell_complete=completing.waiting_leases)
@json_option
def why(session: CommandSession, lease_id: str | None) -> int:
    """Say why a lease waits, and for about how long: one lease, or all that wait.

    For a lease that does not wait and whose kernel failed in its pod, say how it failed.
    """
    found, failure = session.ask(lambda pool: _why(pool, lease_id))
    if session.as_json:
        screen.show_json(
            {
                "queue": [
                    {"lease": name, "position": each.position, "why": each.why, "wait_seconds": each.wait}
                    for name, each in found.items()
                ],
                "failure": plain_failure(failure),
            }
        )
    elif failure is not None:
        click.echo(_failed(str(lease_id), failure))
    elif found:
        for name, outlook in found.items():
            click.echo(f"{name}: {formatting.safe(str(outlook), 1_000)}")
    else:
        click.echo("The queue is empty.")
    return 0


@verb(
    "history",
    "gpu-pool history --since 7d",
    "gpu-pool history --json | tail -n 1",
    "gpu-pool history --cells --since 30d | tail -n 1",
)
@click.option(
    "--since", default="1d", metavar="DURATION", help="How far back: 90min, 12h, 7d. By default 1d."
)
@click.option(
    "--cells",
    is_flag=True,
    help="Print who had a slice when, and when it was busy, as JSON; users by a name of this export alone.",
)
@click.option("--without-names", is_flag=True, help="With --cells: leave users out.")
@json_option
def history(session: CommandSession, since: str, cells: bool, without_names: bool) -> int:
    """List the leases that have ended, and why.

    With --json one object per line, which "gpu-pool simulate" reads; with --cells
    as well, for its --format history.
    """
    first = time.time() - parse_duration(since)
    if cells:
        rows = session.ask(lambda pool: recorded_rows(pool, first))
        for plain in nameless(rows) if without_names else hashed(rows):
            screen.show_json(plain, indent=None)
        return 0
    ended, living = session.ask(lambda pool: _history(pool, first))
    if session.as_json:
        for row in ended:
            screen.show_json(dataclasses.asdict(row), indent=None)
    elif ended:
        # The job, where some lease was in one, stands before the lease.
        has_job = any(row.job for row in ended)
        columns = [*_HISTORY_COLUMNS[:-1], *([formatting.JOB] if has_job else []), _HISTORY_COLUMNS[-1]]
        screen.show(screen.table(columns, [_history_row(row, has_job=has_job) for row in ended]))
        for row in ended:
            if row.failure is not None:
                click.echo(_failed(row.id, row.failure))
    else:
        click.echo("No lease has ended in this time.")
    if living and not session.as_json:
        click.echo(_living(living))
    return 0


_HISTORY_COLUMNS = ("Ended", "Slice", "User", "Course", "For", "Waited", "Held for", "Reason", "Lease")


def _history_row(row: EndedLease, *, has_job: bool) -> list[str]:
    job = [formatting.safe(row.job or "-")] if has_job else []
    who = formatting.safe(row.user), formatting.safe(row.course or "-")
    if not row.id:
        day = time.strftime("%m-%d", time.localtime(row.ended_at))
        count = "1 lease" if row.leases == 1 else f"{row.leases} leases"
        return [day, "-", *who, count, "-", format_duration(row.held_seconds), row.reason, *job, "-"]
    return [
        time.strftime("%m-%d %H:%M:%S", time.localtime(row.ended_at)),
        formatting.safe(row.request),
        *who,
        formatting.safe(row.kernel or "-"),
        format_duration((row.held_at or row.ended_at) - row.requested_at),
        format_duration(row.held_seconds),
        row.reason,
        *job,
        row.id,
    ]


def _failed(lease_id: str, failure: Failure) -> str:
    """Say how a lease's kernel failed, and where."""
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(failure.at))
    where = f"pod {failure.pod} on {failure.node or 'no machine'}, image {failure.image or 'unknown'}"
    said = formatting.safe(failure.message, 500)
    return f"{lease_id}: its kernel failed at {when}. {said} ({formatting.safe(where, 1_000)})"


async def _history(pool: Pool, since: float) -> tuple[list[EndedLease], Counter[LeaseState]]:
    """Return what has ended since then, and how many leases have not, by their state."""
    ended, status = await pool.history(since), await pool.status()
    return ended, Counter(lease.state for lease in (*status.leases, *status.queue))


def _living(living: Counter[LeaseState]) -> str:
    """Say how many leases have not ended, and so are not in the history."""
    states = (LeaseState.HELD, LeaseState.PARKED, LeaseState.WAITING)
    counts = ", ".join(f"{living[state]} {state.value}" for state in states if living[state])
    return f"Not ended yet: {counts}. See: gpu-pool status"


async def _why(pool: Pool, lease_id: str | None) -> tuple[dict[str, Outlook], Failure | None]:
    if lease_id is not None:
        with naming_leases():
            return await _why_one(pool, lease_id)
    found: dict[str, Outlook] = {}
    status = await pool.status()
    for lease in (*status.queue, *(each for each in status.leases if each.is_queued)):
        with contextlib.suppress(BadRequest, LeaseGone):  # it may not wait any more
            found[lease.id] = await pool.explain(lease.id)
    return found, None


async def _why_one(pool: Pool, lease_id: str) -> tuple[dict[str, Outlook], Failure | None]:
    try:
        return {lease_id: await pool.explain(lease_id)}, None
    except (BadRequest, LeaseGone):
        failure = (await pool.get_lease(lease_id)).failure
        if failure is None:
            raise
        return {}, failure


@verb(
    "serve",
    "gpu-pool serve",
    "gpu-pool serve --socket /run/gpu-pool/gpu-pool.sock --mode 0666",
    "gpu-pool serve --kubernetes",
)
@click.option(
    "--socket",
    metavar="PATH",
    help="Where to listen. By default /run/gpu-pool/gpu-pool.sock for root, "
    "$XDG_RUNTIME_DIR/gpu-pool/gpu-pool.sock for others.",
)
@click.option(
    "--mode", metavar="MODE", help="The socket's mode, 0600 by default; 0666 lets every user connect."
)
@click.option("--store", metavar="PATH", help="The store, by default that of an embedded pool.")
@click.option(
    "--kubernetes", is_flag=True, default=None, help="Serve a cluster's GPUs: kernels run there, in pods."
)
def serve(
    _session: CommandSession, socket: str | None, mode: str | None, store: str | None, kubernetes: bool | None
) -> int:
    """Serve this machine's pool on a Unix socket, to its users and to containers.

    Clients use it with GPU_POOL_URL=unix:PATH. SIGTERM or Ctrl-C ends it;
    kernels and commands on slices go on, and waiting requests continue once it
    is started again.
    """
    # Imported here because no other verb needs what it costs.
    from traitlets.config import Config

    from gpu_pool.service.app import ServeApp
    from gpu_pool_kernels.launching import supervisor_files

    given = {"socket": socket, "mode": mode, "store": store, "kubernetes": kubernetes}
    app = ServeApp()
    app.supervisor_files = supervisor_files
    app.configure(Config({"ServeApp": {name: value for name, value in given.items() if value is not None}}))
    app.start()
    return 0


@verb(
    "node-agent",
    "gpu-pool node-agent --pool http://gpu-pool.jupyterhub:8888/services/gpu-pool",
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    default="/var/run/secrets/gpu-pool/token",
    metavar="PATH",
    help="Where the cluster puts the agent's token. By default /var/run/secrets/gpu-pool/token.",
)
@click.option(
    "--every",
    type=Duration(),
    default=5.0,
    metavar="TIME",
    help="How long to rest between two reports, from 1s to 20s. By default 5s.",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="A file that is written anew by each report that the pool takes, and removed when one is refused.",
)
@click.option(
    "--suspend-in",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Suspend kernels, too, when the pool asks for it, and record it in this folder of the node's.",
)
@click.option(
    "--suspend-untested", is_flag=True, help="Also with drivers with which that is not known to work."
)
@click.option(
    "--suspend-memory",
    type=click.IntRange(0, MAX_MIB),
    default=0,
    metavar="MIB",
    help="The node's memory for all suspended kernels. By default a quarter of it.",
)
def node_agent(
    session: CommandSession,
    token_file: Path,
    every: float,
    ready_file: Path | None,
    suspend_in: Path | None,
    suspend_untested: bool,
    suspend_memory: int,
) -> int:
    """Tell a cluster's pool what the pods of this node use of its GPUs.

    This runs in a pod on each node with GPUs, see "The node agent" in the
    administrator's guide. It asks the pool's service, and nobody connects to it.
    SIGTERM or Ctrl-C ends it.
    """
    if not _REPORTS_EVERY[0] <= every <= _REPORTS_EVERY[1]:
        raise BadRequest(f"--every is {format_duration(every)}.", "Accepted: from 1s to 20s.")
    # Imported here because no other verb needs what it costs.
    from gpu_pool.cluster.node_agent.program import NodeAgentProgram, log_to_stderr
    from gpu_pool.cluster.node_agent.suspending import PodSuspender
    from gpu_pool.settings import PoolSettings

    suspender = None
    if suspend_in is not None:
        how = "on" if suspend_untested else "auto"
        settings = PoolSettings(checkpoint=how, checkpoint_host_mib=suspend_memory)
        suspender = PodSuspender(suspend_in, settings)
    program = NodeAgentProgram(session.address, token_file, every, ready_file=ready_file, suspender=suspender)
    log_to_stderr()
    try:
        complete(program.run())
    except Interrupted:
        # That is how it ends.
        return 0


#: Seconds between two reports of a node's agent, the least and the most: what it says holds for 30.
_REPORTS_EVERY: Final = (1.0, 20.0)

_KEYS: Final[Mapping[str, Callable[[EndedLease], str]]] = {
    "user": lambda row: str(row.user),
    "course": lambda row: str(row.course or ""),
    "day": lambda row: time.strftime("%Y-%m-%d", time.localtime(row.ended_at)),
    "kernel": lambda row: str(row.kernel or ""),
}
_COLUMNS: Final = (
    "GPU-hours",
    "Lent",
    "On top",
    "Leases",
    "People",
    "Peak",
    "Mean",
    "GPU unused",
    "Median wait",
    "Ends",
)
_ACCEPTED: Final = "Accepted: a time ago (12h, 7d), a day (2026-09-01) or a moment (2026-09-01T14:30)."


@verb(
    "report",
    "gpu-pool report --by course --since 30d",
    "gpu-pool report --by user --since 2026-09-01 --until 2026-10-01 --format csv",
    "gpu-pool report --json | jq '.total.gpu_hours'",
    "gpu-pool report --by course --since 1d --plot yesterday.svg",
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
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also draw the GPUs in use over this time, in this SVG file.",
)
@json_option
def report(
    session: CommandSession, by: str, since: str, until: str | None, form: str, plot: Path | None
) -> int:
    """Add up what was used: GPU-hours (share times time), memory, waits.

    A lease counts when it ended, and one that is held or parked up to now. "Lent" are
    GPU-hours that others could have while its kernel was idle, "on top" GiB-hours of memory
    that it could use beyond what it was granted. Memory is what was measured, on one GPU;
    "GPU unused" counts leases without any process on a GPU.
    """
    now = time.time()
    first, last = _moment(since, now), now if until is None else _moment(until, now)
    if last < first:
        raise BadRequest(
            f"{'Now' if until is None else f'--until {formatting.safe(until)}'} is before "
            f"--since {formatting.safe(since)}.",
            _ACCEPTED,
        )
    rows, held = session.ask(lambda pool: _rows(pool, first, last, now if until is None else None))
    if plot is not None:
        _draw(session, plot, by, first, last)
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


async def _rows(pool: Pool, since: float, until: float, now: float | None) -> tuple[list[EndedLease], int]:
    """Return the leases that ended then, with those that have not by ``now`` if it is given, and how many."""
    rows = [row for row in await pool.history(since) if row.ended_at <= until]
    if now is None:
        return rows, 0
    status = await pool.status()
    living = [each for each in (*status.leases, *status.queue) if usage_report.has_used(each)]
    return [*rows, *(usage_report.living(lease, now) for lease in living)], len(living)


def _draw(session: CommandSession, path: Path, by: str, first: float, last: float) -> None:
    """Draw what was held, lent and used by cells in a time, of everything that was held then."""
    from gpu_pool.cli import use_plot
    from gpu_pool.cli.recorded import write_plot

    period = PeriodParts(first, max(last - first, 1.0) / use_plot.BARS, use_plot.BARS)
    # What is drawn lies in its days already.
    kind = "course" if by == "day" else by
    use = session.ask(lambda pool: _use(pool, _KEYS[kind], period))
    began, ended = (time.strftime("%d %b %Y", time.localtime(each)) for each in (first, last))
    title = f"GPUs in use by {kind}, {began} to {ended}"
    write_plot(path, use_plot.use_plot(title, use, period))


async def _use(pool: Pool, key_of: Callable[[EndedLease], str], period: PeriodParts) -> UseOverTime:
    rows, status = await pool.history(period.began), await pool.status()
    living = until_now((*status.leases, *status.queue), time.time())
    try:
        busy = await pool.busy_times(period.began)
    except NotAllowed:  # administrators alone are told when others' kernels worked
        busy = None
    return use_over_time([*rows, *living], key_of, period, busy)


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
    return {name: value for name, value in dataclasses.asdict(line).items() if name != "key"}


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
        are = f"{held} leases that have not ended, held or parked, are counted"
        if held == 1:
            are = "1 lease that has not ended is counted"
        screen.show("", f"{are} up to now, without memory and wait.")


def _cells(line: UsageRow) -> list[str]:
    return [
        f"{line.gpu_hours:.2f}",
        f"{line.lent_gpu_hours:.2f}",
        f"{line.burst_gib_hours:.2f}" if line.burst_peak_mib else "-",
        str(line.leases),
        str(line.people),
        "-" if line.peak_mib is None else format_memory(line.peak_mib),
        "-" if line.mean_mib is None else format_memory(round(line.mean_mib)),
        f"{line.untouched / line.measured:.0%} of {line.measured}" if line.measured else "-",
        "-" if line.median_wait is None else format_duration(line.median_wait),
        ", ".join(f"{reason} {count}" for reason, count in line.reasons.items()),
    ]
