"""Recorded days: read from a pool, with users named by nothing known elsewhere; and ``simulate`` on them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from gpu_pool.cli import screen
from gpu_pool.cli.screen import Progress
from gpu_pool.cli.session import Duration
from gpu_pool_client import BadRequest, format_duration, parse_duration, parse_request

if TYPE_CHECKING:
    from gpu_pool.cli.screen import Shown
    from gpu_pool.policy.queue import Policy
    from gpu_pool.simulation.recorded import RecordedDays, UnlimitedSums
    from gpu_pool.simulation.replay import Costs, ReplayResult, Way
    from gpu_pool.simulation.report import ReplayFigures
    from gpu_pool_client import Device, Pool

F = TypeVar("F", bound=Callable[..., Any])

FORMATS: Final = ("history", "openb", "sensei", "helios", "pai")
#: Compared where none is named, in seconds.
_IDLE_LIMITS: Final = (900.0, 300.0)
_YIELD_AFTER: Final = (60.0,)
#: Bad rows that are told one by one.
_TOLD_ROWS: Final = 5


@dataclass(frozen=True, slots=True)
class RecordedOptions:
    """The options that are about recorded days, as they were given."""

    form: str | None
    window: str | None
    idle_limit: tuple[float, ...]
    yield_after: tuple[float, ...]
    resume_cost: float
    state: str | None
    same_device: bool
    per_node: int | None
    from_history: float | None


_OPTIONS: Final = (
    click.option(
        "--format",
        "form",
        type=click.Choice(FORMATS),
        help="What the file is: a history that gpu-pool wrote, or a public trace.",
    ),
    click.option(
        "--window", metavar="START+LENGTH", help="Only this part of the file: 125d+3d, 561.5h+17.5h."
    ),
    click.option(
        "--idle-limit",
        type=Duration(unit=60),
        metavar="TIME",
        multiple=True,
        help="Replay cells with slices given back after so much idle time: 15min, or minutes. Repeatable.",
    ),
    click.option(
        "--yield-after",
        type=Duration(),
        metavar="TIME",
        multiple=True,
        help="Replay cells with kernels that give way after so much idle time when somebody waits: 60s. "
        "Repeatable.",
    ),
    click.option(
        "--resume-cost",
        type=Duration(),
        metavar="TIME",
        default=5.0,
        help="How long a kernel takes to run on a slice that it takes again; 5s by default.",
    ),
    click.option(
        "--state",
        metavar="SIZE",
        help="Memory on each GPU that an idle kernel moves away and back, at 5 GB/s: 8GiB. None by default.",
    ),
    click.option(
        "--same-device",
        is_flag=True,
        help="Kernels return to the GPUs that they had, as after CUDA without a checkpoint.",
    ),
    click.option(
        "--per-node",
        type=click.IntRange(min=1),
        metavar="N",
        help="How many of the GPUs are in one machine; all by default. A slice's GPUs are in one.",
    ),
    click.option(
        "--from-history",
        type=Duration(unit=86_400),
        metavar="TIME",
        help="Replay what the pool itself has recorded, so far back: 30d, or days. No WORKLOAD is read.",
    ),
)


def recorded_options(function: F) -> F:
    """Add the options that are about recorded days."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def read_days(path: Path, options: RecordedOptions) -> RecordedDays:
    """Read a file of recorded days. Raises ``BadRequest`` where it cannot be read or is of another form."""
    from gpu_pool.simulation.formats import FORMATS as READERS

    try:
        with path.open(encoding="utf-8", newline="") as file:
            days = READERS[options.form or "history"](file)
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{str(path)!a} cannot be read: {error}.") from error
    for line, why in days.bad[:_TOLD_ROWS]:
        screen.note(f"line {line} is left out: {why}")
    if len(days.bad) > _TOLD_ROWS:
        screen.note(f"{len(days.bad)} lines are left out in all")
    return in_window(days, options.window)


def left_out(days: RecordedDays) -> Mapping[str, Any]:
    """Return which of a file's rows were left out, as JSON."""
    return {
        "left_out": days.left_out,
        "bad": [{"line": line, "why": why} for line, why in days.bad],
    }


def more_devices(text: str, own: Sequence[Device]) -> tuple[Device, ...]:
    """Return the pool's devices, and what is added to them: ``V100:4`` for four more of those that it has.

    A model that the pool has not is named with its memory, as in ``GPU_POOL_DEVICES``. Raises ``BadRequest``.
    """
    from gpu_pool.devices.inventory import parse_devices
    from gpu_pool.pool.own_days import with_more

    added: list[Device] = []
    for entry in text.split(","):
        name, _, number = entry.strip().rpartition(":")
        like = next((each for each in own if name and name.lower() in each.model.lower()), None)
        if like is None or not number.isascii() or not number.isdigit():
            added += parse_devices(entry, "--devices")
        else:
            added += [like] * int(number)
    return with_more(own, added)


def in_window(days: RecordedDays, window: str | None) -> RecordedDays:
    """Return the part of the days that is asked for. Raises ``BadRequest`` where there is nothing in it."""
    found = days
    if window is not None:
        start, sign, length = window.partition("+")
        if not sign:
            raise BadRequest(f"{window[:40]!a} is not START+LENGTH.", "Write, for example, --window 125d+3d.")
        found = days.window(parse_duration(start), parse_duration(length))
    if not found.sessions:
        raise BadRequest(
            "Nothing that was recorded is in this window." if window else "Nothing was recorded."
        )
    return found


def nodes(devices: Sequence[Device], per_node: int | None) -> tuple[Device, ...]:
    """Return the devices, so many of them in each machine."""
    if per_node is None:
        return tuple(devices)
    return tuple(
        dataclasses.replace(each, node=f"node-{place // per_node}") for place, each in enumerate(devices)
    )


def replay_days(
    title: str,
    days: RecordedDays,
    devices: Sequence[Device],
    options: RecordedOptions,
    policy: Policy,
    plot: Path | None,
    now: Way | None = None,
    *,
    as_json: bool,
) -> None:
    """Play the days' cells in each way, and show what each holds and whom it makes wait.

    ``now`` is what the pool's courses say. Without devices only what would be held without a queue is shown.
    """
    from gpu_pool.simulation.plot import replay_plot

    limits = options.idle_limit or (() if options.yield_after else _IDLE_LIMITS)
    sums = days.sums(sorted({*limits, *_IDLE_LIMITS}))
    by_way = _replay(days, devices, _ways(options, now), _costs(options), policy) if devices else {}
    if plot is not None and by_way:
        write_plot(plot, replay_plot(f"{title}: {len(devices)} GPUs (simulated)", by_way))
    if as_json:
        ways = {name: dataclasses.asdict(figures) for name, (_, figures) in by_way.items()}
        screen.show_json(
            {
                "workload": title,
                "simulated": True,
                "sessions": len(days.sessions),
                "devices": len(devices),
                **left_out(days),
                "without_queue": _plain_sums(sums),
                "ways": ways,
            }
        )
        return
    cells = sum(len(session.cells) for session in days.sessions)
    screen.show(f"{title} (simulated, {len(days.sessions)} sessions, {cells} cells, {len(devices)} GPUs)")
    screen.show("", _sums_table(sums))
    if by_way:
        figures = {name: each for name, (_, each) in by_way.items()}
        screen.show("", _ways_table(figures))
        screen.show("", "Waits for a slice by size: mean / 95th percentile / worst", _size_table(figures))
        screen.show("", "Waits for a slice by course: mean / 95th percentile / worst", _course_table(figures))


def _replay(
    days: RecordedDays, devices: Sequence[Device], ways: Sequence[Way], costs: Costs, policy: Policy
) -> dict[str, tuple[ReplayResult, ReplayFigures]]:
    from gpu_pool.policy import admission
    from gpu_pool.policy.queue_state import Rules
    from gpu_pool.simulation.replay import replay
    from gpu_pool.simulation.report import replay_figures

    for request in {session.request for session in days.sessions}:
        admission.check(request, devices, Rules())
    found = {}
    with Progress() as progress:
        for number, way in enumerate(ways, 1):
            tell = functools.partial(progress.tell, f"simulating {way.name}, {number} of {len(ways)}")
            result = replay(days.sessions, devices, way, costs, policy=policy, tell=tell)
            found[way.name] = result, replay_figures(days.sessions, result)
    return found


def _ways(options: RecordedOptions, now: Way | None) -> list[Way]:
    from gpu_pool.simulation.replay import PER_CELL, RESERVATION, Way

    limits, after = options.idle_limit, options.yield_after
    if not limits and not after:
        limits, after = _IDLE_LIMITS, _YIELD_AFTER
    idle = [Way(f"idle limit {format_duration(each)}", idle_limit=each) for each in limits]
    yielding = [Way(f"yield after {format_duration(each)}", yield_after=each) for each in after]
    return [RESERVATION, *idle, *yielding, *filter(None, [now]), PER_CELL]


def _costs(options: RecordedOptions) -> Costs:
    from gpu_pool.simulation.replay import Costs

    state = 0
    if options.state is not None:
        memory = parse_request(options.state).memory_mib
        if memory is None:
            raise BadRequest(f"{options.state[:40]!a} is not an amount of memory.", "Accepted: 8GiB, 500MiB.")
        state = memory
    return Costs(options.resume_cost, state_mib=state, same_devices=options.same_device)


def write_plot(path: Path, drawn: str) -> None:
    """Write a picture. Raises ``BadRequest`` where that cannot be done."""
    try:
        path.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"{path} cannot be written: {error.strerror}.") from error


def _plain_sums(sums: UnlimitedSums) -> dict[str, Any]:
    after = [
        {"idle_seconds": limit, "held": held, "again": sums.again[limit]} for limit, held in sums.held.items()
    ]
    return {"gpu_hours": {"reserved": sums.reserved, "used": sums.used}, "given_back_after": after}


def _sums_table(sums: UnlimitedSums) -> Shown:
    def row(name: str, hours: float, again: str) -> list[str]:
        return [name, f"{hours:,.0f}", f"{hours / sums.reserved:.1%}" if sums.reserved else "-", again]

    rows = [
        row("reserved from first to last cell", sums.reserved, "-"),
        *(
            row(f"given back after {format_duration(limit)} idle", held, f"{sums.again[limit]:.1%}")
            for limit, held in sorted(sums.held.items(), reverse=True)
        ),
        row("by cells alone", sums.used, "-"),
    ]
    return screen.table(
        ("If there were GPUs for all", "GPU-hours", "Of reserved", "Cells that take again"), rows
    )


def _ways_table(by_way: Mapping[str, ReplayFigures]) -> Shown:
    columns = (
        "Way",
        "GPU-hours held",
        "In use",
        "At once",
        "Median",
        "95th perc.",
        "99th",
        "Asked back",
        "Parked",
    )
    rows = [
        [
            name,
            f"{each.gpu_hours.held:,.0f}",
            f"{each.utilisation.used:.0%} of {each.utilisation.held:.0%}",
            f"{each.cells.at_once:.1%}",
            format_duration(each.cells.delay.p50),
            format_duration(each.cells.delay.p95),
            format_duration(each.cells.delay.p99),
            str(each.asked_back),
            str(each.parked),
        ]
        for name, each in by_way.items()
    ]
    return screen.table(columns, rows)


def _size_table(by_way: Mapping[str, ReplayFigures]) -> Shown:
    return _waits_table("Size", {name: each.by_size for name, each in by_way.items()})


def _course_table(by_way: Mapping[str, ReplayFigures]) -> Shown:
    return _waits_table("Course", {name: each.by_course for name, each in by_way.items()})


def _waits_table(what: str, by_way: Mapping[str, Mapping[str, Any]]) -> Shown:
    groups = dict.fromkeys(group for each in by_way.values() for group in each)
    rows = [[group or "-", *(_waits(each.get(group)) for each in by_way.values())] for group in groups]
    return screen.table((what, *by_way), rows)


def _waits(waits: Any) -> str:
    if waits is None:
        return "-"
    return " / ".join(format_duration(each) for each in (waits.mean, waits.p95, waits.worst))


async def recorded_rows(pool: Pool, since: float) -> list[dict[str, Any]]:
    """Return the leases that were held and have ended since then, with when they were busy."""
    from gpu_pool.pool.own_days import recorded_leases

    return recorded_leases(await pool.history(since), await pool.busy_times(since))


def hashed(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Name users by what tells them apart in this export, and in no other."""
    salt = secrets.token_bytes(16)
    for row in rows:
        digest = hashlib.blake2b(row["user"].encode(errors="replace"), key=salt, digest_size=6)
        yield {**row, "user": f"user-{digest.hexdigest()}"}


def nameless(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Leave users out."""
    for row in rows:
        yield {**row, "user": ""}
