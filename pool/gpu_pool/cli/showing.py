"""``list``, ``status`` and ``smi``: what there is, who holds it, and my own slice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import click

from gpu_pool.cli import formatting, screen
from gpu_pool.cli.formatting import Plain, plain_devices, plain_lease, plain_status
from gpu_pool.cli.session import (
    TAKE_ONE,
    CommandSession,
    Interrupted,
    ancestors,
    complete,
    held_by,
    json_option,
    verb,
)
from gpu_pool_client import Lease, LeaseGone, LeaseState, PoolStatus, format_memory
from gpu_pool_client._processes import family

if TYPE_CHECKING:
    from gpu_pool.cli.screen import Shown

#: Seconds between two looks of ``status --watch``.
_EVERY = 1.0
#: Said to a user of a service, who is shown nobody else's leases.
_ONLY_OTHERS = "You hold nothing; what others hold is shown to them and to administrators."
_NO_DEVICES = "This pool has no GPU. To find out why, run: gpu-pool doctor"
_NOT_ASKED = (
    "The nodes of {} are asked for their GPUs once a kernel is started. To ask them now, run: gpu-pool doctor"
)


@verb(
    "list",
    "gpu-pool list",
    "gpu-pool list -d",
    "gpu-pool list --json | jq '.devices[].free_milli'",
    "gpu-pool list --nodes -d",
)
@click.option("-d", "--details", is_flag=True, help="Also show who holds what.")
@click.option(
    "--nodes", is_flag=True, help="List the nodes of a Kubernetes cluster, with what is held of each."
)
@json_option
def list_(session: CommandSession, details: bool, nodes: bool) -> int:
    """List the GPUs: how much of each is free.

    With --nodes, list the nodes of the cluster in KUBECONFIG, and how much of
    them is held by anybody; -d adds each GPU, and each pod that holds some.
    """
    if nodes:
        return _list_nodes(session, details)
    status = _status(session)
    if session.as_json:
        screen.show_json(plain_devices(status))
        return 0
    if status.devices:
        screen.show(screen.table(formatting.DEVICE_COLUMNS, formatting.device_rows(status)))
    else:
        screen.show(_no_devices())
    if details:
        rows = formatting.holding_rows(status, time.time())
        nothing = _ONLY_OTHERS if _others_hold(status) else "Nothing is held."
        screen.show("", screen.table(formatting.HOLDING_COLUMNS, rows) if rows else nothing)
    return 0


def _no_devices() -> str:
    """Say that there is no GPU; in a shell of ``salloc``, that nobody may have asked its nodes yet."""
    from gpu_pool.embedded.allocation import Allocation

    job = Allocation.of(os.environ)
    return _NO_DEVICES if job is None or job.node else _NOT_ASKED.format(job)


@verb("status", "gpu-pool status", "gpu-pool status --watch", "gpu-pool status --json | jq '.queue | length'")
@click.option("-w", "--watch", is_flag=True, help="Keep showing it until Ctrl-C.")
@json_option
def status(session: CommandSession, watch: bool) -> int:
    """Show the leases, and who waits in the queue for one."""
    if not watch:
        found = _status(session)
        if session.as_json:
            screen.show_json(_plain(found))
        else:
            screen.show(_status_table(found))
        return 0
    try:
        complete(_watch(session))
    except Interrupted as interrupted:
        # Ctrl-C is how one leaves.
        return 0 if interrupted.exit_code == 128 + signal.SIGINT else interrupted.exit_code
    return 0


@verb("smi", "gpu-pool smi", "gpu-pool smi --json | jq '.leases[0].slices[0].memory_used_mib'")
@json_option
def smi(session: CommandSession) -> int:
    """Show my slice, and the memory used of it.

    Also what is enforced, and how long it has been held. "My" slices are
    those of this shell, or of the kernel or command that this runs in.
    """
    status = _status(session)
    held = [lease for lease in status.leases if lease.state is LeaseState.HELD]
    mine = held_by(held, ancestors(), os.environ)
    if not mine:
        raise LeaseGone("This shell or kernel holds no GPU slice.", TAKE_ONE)
    used = [memory_used(lease) for lease in mine]
    if session.as_json:
        leases = [_plain_with_use(*each) for each in zip(mine, used, strict=True)]
        screen.show_json({"url": status.url, "leases": leases})
        return 0
    for number, (lease, memory) in enumerate(zip(mine, used, strict=True)):
        lines = formatting.slice_lines(lease, memory, time.time())
        screen.show(*([""] if number else []), *(f"{label + ':':<15}{text}" for label, text in lines))
    return 0


def _list_nodes(session: CommandSession, details: bool) -> int:
    from gpu_pool.cli import cluster

    found = cluster.nodes_in_use(cluster.read_snapshot())
    if session.as_json:
        screen.show_json({"nodes": cluster.plain_nodes(found)})
        return 0
    screen.show(screen.table(cluster.NODE_COLUMNS, cluster.node_rows(found)))
    if details:
        screen.show("", screen.table(cluster.GPU_COLUMNS, cluster.gpu_rows(found)))
        rows = cluster.pod_rows(found)
        screen.show("", screen.table(cluster.POD_COLUMNS, rows) if rows else "Nothing is held.")
    return 0


def _plain_with_use(lease: Lease, used: dict[str, int]) -> dict[str, object]:
    plain = plain_lease(lease)
    for part in plain["slices"]:
        part["memory_used_mib"] = used.get(part["device"])
    return plain


def _status(session: CommandSession) -> PoolStatus:
    found = session.ask(lambda pool: pool.status())
    if found.note:
        screen.note(found.note)
    return found


def _others_hold(status: PoolStatus) -> bool:
    """Whether something is held of which this user is shown the totals alone."""
    return not status.leases and any(device.leases for device in status.devices)


def _asleep(status: PoolStatus) -> dict[str, int]:
    """Return the MiB on disk of each lease whose kernel sleeps there, by its id, as servers say."""
    said = {each.id: each.hibernation for each in status.leases if each.state is LeaseState.PARKED}
    return {id_: each.image_mib for id_, each in said.items() if each and each.image_mib is not None}


def _plain(status: PoolStatus) -> Plain:
    asleep = [{"lease": lease, "image_mib": mib} for lease, mib in _asleep(status).items()]
    return {**plain_status(status), "asleep": asleep}


def _status_table(status: PoolStatus) -> Shown:
    rows, asleep = formatting.lease_rows(status, time.time()), _asleep(status)
    for row in rows:
        if (mib := asleep.get(row[-1])) is not None:
            row[0] = f"asleep, {format_memory(mib)}"
    if not rows:
        return _ONLY_OTHERS if _others_hold(status) else "Nothing is held, and nobody waits."
    left_out = {formatting.LIMITS} if screen.is_narrow() else set()
    if not any(lease.terms.job for lease in status.leases):
        left_out.add(formatting.JOB)
    shown = [column for column in formatting.LEASE_COLUMNS if column not in left_out]
    places = [formatting.LEASE_COLUMNS.index(column) for column in shown]
    return screen.table(shown, ([row[place] for place in places] for row in rows))


async def _watch(session: CommandSession) -> None:
    if session.as_json:
        async for status in _changes(session):
            screen.show_json(_plain(status), indent=None)
        return
    out = screen.console()
    if not out.is_terminal:
        async for status in _changes(session):
            out.print(_status_table(status), "")
        return
    from rich.live import Live

    async with session.connect() as pool:
        with Live(console=out, auto_refresh=False, transient=False) as live:
            while True:
                live.update(_status_table(await pool.status()), refresh=True)
                await asyncio.sleep(_EVERY)


async def _changes(session: CommandSession) -> AsyncIterator[PoolStatus]:
    """Yield the status now and whenever it has changed."""
    last: PoolStatus | None = None
    async with session.connect() as pool:
        while True:
            status = await pool.status()
            if status != last:
                yield status
            last = status
            await asyncio.sleep(_EVERY)


def memory_used(lease: Lease) -> dict[str, int]:
    """Return MiB in use by the lease's process and its descendants, by device uuid.

    A device is left out where this is not known: a simulated one, one whose
    driver does not say, or processes that cannot be seen from here.
    """
    real = [part.device for part in lease.slices if not part.device.simulated]
    if not real or lease.process is None or not lease.process.is_alive():
        return {}
    # Imported here because it costs some 40 ms, which simulated devices need not pay.
    from gpu_pool.devices.sampling import memory_by_device

    return memory_by_device(family(lease.process.pid), real)
