"""``simulate``: how long people would wait, under our order and under others."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpu_pool.cli import completing, recorded, screen
from gpu_pool.cli.formatting import safe
from gpu_pool.cli.recorded import RecordedOptions, recorded_options, recorded_rows
from gpu_pool.cli.screen import Progress
from gpu_pool.cli.session import CommandSession, Duration, complete, json_option, verb
from gpu_pool_client import BadRequest, GpuPoolError, format_duration

if TYPE_CHECKING:
    from gpu_pool.cli.screen import Shown
    from gpu_pool.policy.queue import Policy
    from gpu_pool.simulation import Arrival, RunFigures
    from gpu_pool.simulation.engine import Lengths
    from gpu_pool.simulation.recorded import RecordedDays
    from gpu_pool.simulation.replay import Way
    from gpu_pool.simulation.report import WaitFigures
    from gpu_pool_client import Device

#: Files of history longer than this are refused, in bytes.
_MAX_FILE = 200_000_000
_DEVICES = "--devices"


@verb(
    "simulate",
    "gpu-pool simulate mixed",
    "gpu-pool simulate research --weight research=1 --drain-after 1h",
    "gpu-pool simulate history.jsonl --devices V100-SXM2-32GB:4 --plot waits.svg",
    "gpu-pool simulate mixed --json | jq '.orders.fair.utilisation'",
    "gpu-pool simulate trace.csv --format openb --window 125d+3d --devices V100-SXM2-32GB:8",
    "gpu-pool simulate trace.csv --format sensei --window 561.5h+17.5h --devices V100-SXM2-32GB:400",
    "gpu-pool simulate --from-history 30d --devices +V100:4 --yield-after 60s",
)
@click.argument("workload", default="mixed", shell_complete=completing.workloads)
@click.option(
    _DEVICES,
    metavar="DEVICES",
    help="The GPUs, as in GPU_POOL_DEVICES: V100-SXM2-32GB:4. By default the pool's own for a file, "
    "and for a made-up workload those that it is made for. +V100:4 for four more than the pool has.",
)
@click.option("--weight", metavar="COURSE=N", multiple=True, help="The weight of a course; 1 by default.")
@click.option(
    "--drain-after",
    type=Duration(unit=60),
    metavar="TIME",
    help="How long a large request waits before a GPU is reserved for it: 2h, or minutes; 30 by default.",
)
@click.option(
    "--lengths",
    type=click.Choice(["none", "learned", "known"]),
    default="learned",
    help="What the queue is told of how long leases last: nothing, what ended ones show (the default), or "
    "all, as if everybody had said so.",
)
@click.option("--seed", type=int, help="The random seed of a made-up workload.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a plot to this SVG file."
)
@recorded_options
@json_option
def simulate(
    session: CommandSession,
    workload: str,
    devices: str | None,
    weight: tuple[str, ...],
    drain_after: float | None,
    lengths: Lengths,
    seed: int | None,
    plot: Path | None,
    **about_days: Any,
) -> int:
    """Simulate the queue, and show how long people wait.

    WORKLOAD is one-size, mixed or research, or a file of recorded leases: one
    JSON object per line with requested_at, held_seconds, request, user, course,
    or with --format a public trace. The rules that grant real slices are run
    beside strict order, smallest first and plain backfill, on the same
    arrivals. Where it is known when cells ran, they are replayed, with slices
    reserved, given back after an idle limit, yielded when somebody waits, and
    given to each cell. Nothing is granted.
    """
    options = RecordedOptions(**about_days)
    given = dict(map(_weight, weight))
    if options.form is not None or options.from_history is not None:
        _simulate_days(session, workload, devices, options, _policy(given, drain_after), plot, lengths)
        return 0
    title, found, gpus, weights = _arrivals(session, workload, devices, seed)
    _compare(session, title, found, gpus, _policy({**weights, **given}, drain_after), plot, lengths)
    return 0


def _simulate_days(
    session: CommandSession,
    workload: str,
    devices: str | None,
    options: RecordedOptions,
    policy: Policy,
    plot: Path | None,
    lengths: Lengths,
) -> None:
    """Replay what was recorded: cell by cell where it is known when these ran, else as leases."""
    from gpu_pool.pool.own_days import own_days

    if options.from_history is not None:
        title = f"the last {format_duration(options.from_history)}"
        since = time.time() - options.from_history
        rows = session.ask(lambda pool: recorded_rows(pool, since))
        days = recorded.in_window(own_days(rows), options.window)
    else:
        title, days = Path(workload).name, recorded.read_days(_file(workload), options)
    gpus = recorded.nodes(_gpus(session, devices, days, options), options.per_node)
    if days.has_cells and lengths != "learned":
        raise BadRequest("Cells are replayed without lengths.", "Leave --lengths out.")
    if days.has_cells:
        now = _as_now(session, options)
        recorded.replay_days(title, days, gpus, options, policy, plot, now, as_json=session.as_json)
    elif options.idle_limit or options.yield_after:
        raise BadRequest(
            "It was not recorded when cells ran, so it cannot be told when kernels were idle.",
            "Leave --idle-limit and --yield-after out.",
        )
    else:
        _compare(session, title, days.arrivals(), gpus, policy, plot, lengths, recorded.left_out(days))


def _as_now(session: CommandSession, options: RecordedOptions) -> Way | None:
    """Return what the pool's courses say; None where ways are named, or of a pool that is elsewhere."""
    from gpu_pool.courses.folder import SHARED_FOLDERS
    from gpu_pool.pool.own_days import as_now
    from gpu_pool.settings import load_settings

    is_here = not session.address.startswith(("http:", "https:"))
    if options.from_history is None or options.idle_limit or options.yield_after or not is_here:
        return None
    settings = load_settings()
    sharing = settings.sharing
    if settings.courses_dir:
        folder = SHARED_FOLDERS.folder(Path(settings.courses_dir), settings.courses)
        sharing = folder.current().sharing(sharing)
    return as_now(sharing)


def _gpus(
    session: CommandSession, devices: str | None, days: RecordedDays, options: RecordedOptions
) -> tuple[Device, ...]:
    """Return the devices to simulate: those that are named, with those of the pool or in their place."""
    from gpu_pool.devices.inventory import parse_devices

    if devices and devices.startswith("+"):
        return recorded.more_devices(devices[1:], complete(_of_pool(session)))
    if devices:
        return parse_devices(devices, _DEVICES)
    if days.has_cells and options.form not in (None, "history"):
        return ()  # it is still told what would be held if there were enough
    return complete(_of_pool(session))


def _compare(
    session: CommandSession,
    title: str,
    found: list[Arrival],
    gpus: tuple[Device, ...],
    policy: Policy,
    plot: Path | None,
    lengths: Lengths,
    beside: Mapping[str, Any] | None = None,
) -> None:
    """Serve the same arrivals in every order, and show how long people wait in each.

    ``beside`` is what else is told in JSON.
    """
    by_order = _run(found, gpus, policy, lengths)
    if plot is not None:
        from gpu_pool.simulation.plot import waits_plot

        heading = f"{title.partition(':')[0]}: 95th percentile of waits (simulated)"
        recorded.write_plot(plot, waits_plot(heading, by_order))
    if session.as_json:
        orders = {name: dataclasses.asdict(each) for name, each in by_order.items()}
        about = {"workload": title, "simulated": True, "requests": len(found), **(beside or {})}
        screen.show_json({**about, "orders": orders})
        return
    screen.show(f"{title} (simulated, {len(found)} requests)", "", _table(by_order))
    screen.show("", "Waits by size: median / 95th percentile / worst", _size_table(by_order))
    screen.show("", "Mean waits of the users: least / median / most", _user_table(by_order))


def _file(workload: str) -> Path:
    """Return the file of that name. Raises ``BadRequest`` where there is none, or one that is too large."""
    path = Path(workload)
    if not path.is_file() or path.stat().st_size > _MAX_FILE:
        from gpu_pool.simulation import WORKLOADS

        raise BadRequest(
            f"{safe(workload)!r} is neither a workload nor a file of at most {_MAX_FILE // 1_000_000} MB.",
            f"Workloads: {', '.join(WORKLOADS)}.",
        )
    return path


def _arrivals(
    session: CommandSession, workload: str, devices: str | None, seed: int | None
) -> tuple[str, list[Arrival], tuple[Device, ...], dict[str, float]]:
    """Return (title, arrivals, devices, weights) of a made-up workload or of a file."""
    from gpu_pool.devices.inventory import parse_devices
    from gpu_pool.simulation import WORKLOADS, arrivals, read_history

    known = WORKLOADS.get(workload)
    if known is not None:
        gpus = parse_devices(devices or known.devices, _DEVICES)
        return known.title(gpus), arrivals(known, seed), gpus, dict(known.weights)
    path = _file(workload)
    try:
        with path.open(encoding="utf-8") as file:
            found = read_history(file)
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{safe(workload)!r} cannot be read: {error}.") from error
    return path.name, found, parse_devices(devices, _DEVICES) if devices else complete(_of_pool(session)), {}


async def _of_pool(session: CommandSession) -> tuple[Device, ...]:
    """Return the pool's own devices. Raises ``BadRequest`` where there are none to simulate with."""
    try:
        async with session.connect() as pool:
            found = tuple(status.device for status in (await pool.status()).devices)
    except GpuPoolError as error:
        why = f"the pool's own GPUs cannot be read: {error.message}"
    else:
        if found and not any(device.unbounded for device in found):
            return found
        why = "the pool does not know its GPUs one by one" if found else "the pool has no GPU"
    raise BadRequest(
        f"A recorded history does not name its GPUs, and {why.rstrip('.')}.",
        "Name them, for example --devices V100-SXM2-32GB:4.",
    )


def _run(
    found: list[Arrival], devices: tuple[Device, ...], policy: Policy, lengths: Lengths
) -> dict[str, RunFigures]:
    from gpu_pool.policy import admission
    from gpu_pool.policy.queue_state import Rules
    from gpu_pool.simulation import ORDERS, figures
    from gpu_pool.simulation import simulate as run

    for request in {arrival.request for arrival in found}:
        admission.check(request, devices, Rules())
    results = {}
    with Progress() as progress:
        for number, (name, order) in enumerate(ORDERS.items(), 1):
            what = f"simulating {name}, {number} of {len(ORDERS)}"
            tell = functools.partial(progress.tell, what)
            results[name] = figures(run(found, devices, order, policy, tell=tell, lengths=lengths))
    return results


def _policy(weights: Mapping[str, float], drain_after: float | None) -> Policy:
    from gpu_pool.policy.queue import Policy

    policy = Policy(weights=weights)
    return policy if drain_after is None else dataclasses.replace(policy, drain_after=drain_after)


def _weight(text: str) -> tuple[str, float]:
    course, sign, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = -1.0
    if not sign or not 0 <= weight <= 1e6:
        raise BadRequest(f"{safe(text)!r} is not COURSE=N.", "Write, for example, --weight research=3.")
    return course, weight


def _table(by_order: Mapping[str, RunFigures]) -> Shown:
    columns = ("Order", "In use", "Mean wait", "Median", "95th perc.", "Worst", "Whole GPU 95th", "Jain")
    rows = [
        [
            name,
            f"{each.utilisation:.0%}",
            format_duration(each.waits.mean),
            *_three(each.waits),
            format_duration(each.whole.p95) if each.whole.count else "-",
            f"{each.jain:.3f}",
        ]
        for name, each in by_order.items()
    ]
    return screen.table(columns, rows)


def _size_table(by_order: Mapping[str, RunFigures]) -> Shown:
    sizes = list(next(iter(by_order.values())).by_size)
    shown = sizes if len(sizes) <= 12 else [*sizes[:6], *sizes[-6:]]
    rows = [[size, *(" / ".join(_three(each.by_size[size])) for each in by_order.values())] for size in shown]
    return screen.table(("Size", *by_order), rows)


def _user_table(by_order: Mapping[str, RunFigures]) -> Shown:
    def spread(each: RunFigures) -> str:
        means = sorted(waits.mean for waits in each.by_user.values())
        return " / ".join(format_duration(mean) for mean in (means[0], means[len(means) // 2], means[-1]))

    return screen.table(tuple(by_order), [[spread(each) for each in by_order.values()]])


def _three(waits: WaitFigures) -> list[str]:
    return [format_duration(waits.median), format_duration(waits.p95), format_duration(waits.worst)]
