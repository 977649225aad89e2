"""``request`` and ``release``: a slice for the shell one works in."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import click

from gpu_pool.cli import completing
from gpu_pool.cli.acquiring import acquire, new_key
from gpu_pool.cli.formatting import at_most, granted, safe
from gpu_pool.cli.json_output import plain_lease
from gpu_pool.cli.own_leases import TAKE_ONE, ancestors, held_by, naming_leases, shows_all
from gpu_pool.cli.running import waiting_options
from gpu_pool.cli.screen import show_json
from gpu_pool.cli.session import CommandSession, complete, json_option, verb
from gpu_pool_client import (
    BadRequest,
    EndReason,
    Lease,
    LeaseGone,
    LeaseState,
    Pool,
    Process,
    SliceRequest,
    parse_request,
)
from gpu_pool_client.processes import account_of

_VERB = "request"


@verb(
    _VERB,
    "gpu-pool request 2%",
    "gpu-pool request 2x50% --timeout 10min",
    "gpu-pool request 10% --keeper $$ --json | jq -r .id",
)
@click.argument("size")
@waiting_options
@click.option(
    "--keeper",
    "pid",
    type=click.IntRange(min=1),
    metavar="PID",
    help="The process whose end gives the slice back, by default the one that calls this command.",
)
@json_option
def request(session: CommandSession, size: str, wait: bool, timeout: float | None, pid: int | None) -> int:
    """Take a slice for this shell, for "exec" and "shell" to use.

    It is back when this shell ends, or with "gpu-pool release". In a pipe or
    a $(...), name your shell with --keeper $$.
    """
    lease = complete(_request(session, parse_request(size), _keeper(pid), timeout if wait else 0))
    if session.as_json:
        show_json(plain_lease(lease))
    else:
        click.echo(f"You hold {granted(lease)}{at_most(lease, time.time())} (lease {lease.id}).")
        click.echo("Use it:       gpu-pool exec -- COMMAND   or   gpu-pool shell")
        click.echo("Give it back: gpu-pool release   (or end this shell)")
    return 0


@verb("release", "gpu-pool release", "gpu-pool release 12-0123abcd", "gpu-pool release --all-mine")
@click.argument("lease_ids", metavar="[LEASE]...", nargs=-1, shell_complete=completing.leases)
@click.option("--all-mine", is_flag=True, help="All your leases: those of kernels, and waiting ones, too.")
@json_option
def release(session: CommandSession, lease_ids: tuple[str, ...], all_mine: bool) -> int:
    """Give slices back: this shell's, or those that are named.

    A command under "gpu-pool run", or a kernel behind "gpu-pool serve", is
    ended with its slice, and told. Any other process that still runs on it
    goes on without being counted: end it first. What an administrator ends
    of somebody else's is recorded as revoked.
    """
    if all_mine and lease_ids:
        raise BadRequest("Leases are named, and --all-mine is given.", "Give one or the other.")
    released = complete(_release(session, lease_ids, all_mine))
    if session.as_json:
        show_json({"released": [lease.id for lease in released]})
    else:
        for lease in released:
            click.echo(_what_became(lease))
        if not released:
            click.echo("You hold no slice.")
    return 0


def _keeper(pid: int | None) -> Process:
    chosen = os.getppid() if pid is None else pid
    # The first process never ends: what it keeps is never given back.
    keeper = Process.of(chosen) if chosen > 1 or pid is not None else None
    if keeper is None:
        who = "The process that called this command" if pid is None else f"Process {pid}"
        raise BadRequest(f"{who} cannot keep a slice: it has ended.", "Name one that can with --keeper PID.")
    return keeper


async def _request(
    session: CommandSession, wanted: SliceRequest, keeper: Process, timeout: float | None
) -> Lease:
    async with session.connect() as pool:
        return await acquire(pool, wanted, new_key(_VERB), "interactive work", keeper, timeout)


async def _release(session: CommandSession, lease_ids: tuple[str, ...], all_mine: bool) -> list[Lease]:
    async with session.connect() as pool:
        if lease_ids:
            with naming_leases():
                chosen = [await pool.get_lease(lease_id) for lease_id in lease_ids]
        else:
            chosen = await (_all_of_mine(pool) if all_mine else _of_this_shell(pool))
        running = [lease for lease in chosen if lease.state is not LeaseState.ENDED]
        for lease in running:
            await pool.release(lease.id)
        return [await pool.get_lease(lease.id) for lease in running]


def _what_became(lease: Lease) -> str:
    """Say how a lease ended that was to be given back: an administrator's end of another's is revoked."""
    what = f"{safe(str(lease.request))} (lease {lease.id})"
    if lease.end_reason is EndReason.REVOKED:
        return f"Revoked {what} of {safe(lease.holder.user)}, who is told."
    return f"Gave back {what}."


async def _all_of_mine(pool: Pool) -> list[Lease]:
    """Return all that is ours, or refuse where the pool shows leases and does not tell whose we are.

    A service knows us by a name of its own: the Hub's, or that of a container's uid.
    """
    status = await pool.status()
    shown = [*status.leases, *status.queue]
    mine = [lease for lease in shown if lease.holder.user == account_of(os.getuid())]
    if not shown or urlsplit(status.url).scheme == "embedded":
        return mine
    if await shows_all(pool) is False:
        return shown
    if not mine:
        raise _nameless(shown)
    return mine


def _nameless(shown: Sequence[Lease]) -> BadRequest:
    """Say whose leases there are to somebody to whom all are shown."""
    by_user: dict[str, list[str]] = {}
    for lease in shown:
        by_user.setdefault(safe(lease.holder.user), []).append(lease.id)
    me = safe(account_of(os.getuid()))
    held = "; ".join(f"{user}: {', '.join(ids)}" for user, ids in by_user.items())
    return BadRequest(
        f"None of the leases that you are shown is of {me}, by which name the pool need not "
        f"know you. Nothing was given back. There are those of {held}.",
        "Name those that are yours: gpu-pool release ID",
    )


async def _of_this_shell(pool: Pool) -> list[Lease]:
    """Return what was taken with ``request``: a kernel's or a command's slice is not meant."""
    status = await pool.status()
    found = held_by(status.leases, ancestors(), os.environ)
    mine = [lease for lease in found if lease.key.startswith(f"{_VERB}-")]
    if not mine:
        what = "is in use by what runs here" if found else "is held by this shell"
        raise LeaseGone(
            f"No slice that was taken with gpu-pool request {what}.",
            "End the kernel or command to give its slice back, or name the lease." if found else TAKE_ONE,
        )
    return mine
