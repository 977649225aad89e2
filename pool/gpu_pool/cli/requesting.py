"""``request`` and ``release``: a slice for the shell one works in, and waiting in the queue for any slice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import Sequence
from urllib.parse import urlsplit

import click

from gpu_pool.cli import completing
from gpu_pool.cli.formatting import at_most, granted, plain_lease, safe, waiting
from gpu_pool.cli.screen import StatusLine, note, show_json
from gpu_pool.cli.session import (
    TAKE_ONE,
    CommandSession,
    ancestors,
    held_by,
    json_option,
    naming_leases,
    shows_all,
    verb,
    waiting_options,
)
from gpu_pool_client import (
    BadRequest,
    EndReason,
    GpuPoolError,
    Holder,
    Lease,
    LeaseGone,
    LeaseState,
    NotAllowed,
    Pool,
    Process,
    SliceRequest,
    format_duration,
    parse_request,
)
from gpu_pool_client._pool import COURSE_VARIABLE
from gpu_pool_client._processes import account_of

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
    help="The process whose end releases the slice; by default the one that calls this command.",
)
@json_option
def request(
    session: CommandSession, size: str, wait: bool, timeout: float | None, batch: bool, pid: int | None
) -> int:
    """Take a slice for this shell, to use with "exec" and "shell".

    It is released when this shell ends, or by "gpu-pool release". In a pipe or
    a $(...), name your shell with --keeper $$.
    """
    wanted, keeper = parse_request(size), _keeper(pid)
    within = timeout if wait else 0
    lease = session.ask(
        lambda pool: acquire(pool, wanted, new_key(_VERB), "interactive work", keeper, within, batch=batch)
    )
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
    """Release slices: this shell's, or the leases named.

    A command under "gpu-pool run", or a kernel behind "gpu-pool serve", is
    ended with its slice, and says so. Any other process that still runs on it
    goes on without being counted: end it first. Leases that an administrator
    ends for somebody else are recorded as revoked. Nobody else ends another's:
    that is said, and the exit status is 4.
    """
    if all_mine and lease_ids:
        raise BadRequest("Both leases and --all-mine were given.", "Give one or the other.")
    chosen = session.ask(lambda pool: _release(pool, lease_ids, all_mine))
    released = [lease for lease in chosen if lease.state is LeaseState.ENDED]
    if session.as_json:
        show_json({"released": [lease.id for lease in released]})
    else:
        for lease in released:
            click.echo(_what_became(lease))
        if not chosen:
            click.echo("You hold no slice.")
    kept = [_what_became(lease) for lease in chosen if lease.state is not LeaseState.ENDED]
    if kept:
        raise NotAllowed("\n".join(kept), "Only its user and administrators can end a lease.")
    return 0


def _keeper(pid: int | None) -> Process:
    chosen = os.getppid() if pid is None else pid
    # The first process never ends: what it keeps is never given back.
    keeper = Process.of(chosen) if chosen > 1 or pid is not None else None
    if keeper is None:
        who = "The process that called this command" if pid is None else f"Process {pid}"
        raise BadRequest(f"{who} cannot keep a slice: it has ended.", "Name one that can with --keeper PID.")
    return keeper


async def _release(pool: Pool, lease_ids: tuple[str, ...], all_mine: bool) -> list[Lease]:
    """Return what was to be given back, as it is now: a pool says nothing of another's that it keeps."""
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
    what, user = f"{safe(str(lease.request))} (lease {lease.id})", safe(lease.holder.user)
    if lease.state is not LeaseState.ENDED:
        return f"Not given back: {what} of {user} goes on."
    if lease.end_reason is EndReason.REVOKED:
        return f"Revoked {what} of {user}, who is notified."
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
        return await _of_user(pool, shown)
    if not mine:
        raise _nameless(shown)
    return mine


async def _of_user(pool: Pool, shown: Sequence[Lease]) -> list[Lease]:
    """Return those of the leases shown to us that are ours: instructors are shown their students', too."""
    for user in dict.fromkeys(lease.holder.user for lease in shown):
        theirs = [lease for lease in shown if lease.holder.user == user]
        if await _may_follow(pool, theirs[0].id):
            return theirs
    return []


async def _may_follow(pool: Pool, lease_id: str) -> bool:
    """Whether a pool lets us follow a lease, as no instructor can follow another's."""
    try:
        async for _ in pool.watch(lease_id):
            break
    except (LeaseGone, NotAllowed):
        return False
    return True


def _nameless(shown: Sequence[Lease]) -> BadRequest:
    """Say whose leases there are to somebody to whom all are shown."""
    by_user: dict[str, list[str]] = {}
    for lease in shown:
        by_user.setdefault(safe(lease.holder.user), []).append(lease.id)
    me = safe(account_of(os.getuid()))
    held = "; ".join(f"{user}: {', '.join(ids)}" for user, ids in by_user.items())
    return BadRequest(
        f"None of the leases that you can see belongs to {me}; the pool may know you by another name. "
        f"Nothing was given back. The leases belong to {held}.",
        "Name those that are yours: gpu-pool release ID",
    )


async def _of_this_shell(pool: Pool) -> list[Lease]:
    """Return what was taken with ``request``: a kernel's or a command's slice is not meant."""
    status = await pool.status()
    found = held_by(status.leases, ancestors(), os.environ)
    mine = [lease for lease in found if lease.key.startswith(f"{_VERB}-")]
    if not mine:
        what = "belongs to this kernel or command" if found else "is held by this shell"
        raise LeaseGone(
            f"No slice that was taken with gpu-pool request {what}.",
            "End the kernel or command to give its slice back, or name the lease." if found else TAKE_ONE,
        )
    return mine


def new_key(verb: str) -> str:
    """Make a key of its own for one request; it begins with the verb."""
    return f"{verb}-{uuid.uuid4().hex}"


async def acquire(
    pool: Pool,
    request: SliceRequest,
    key: str,
    purpose: str,
    keeper: Process,
    timeout: float | None,
    *,
    batch: bool = False,
) -> Lease:
    """Return a held lease that lives as long as ``keeper``.

    Until it is held it is tied to this process, so that nobody waits in the queue
    for a command that was given up. Waits ``timeout`` seconds (None: however
    long it takes); whatever goes wrong, the request is withdrawn.
    """
    course = os.environ.get(COURSE_VARIABLE)
    holder = Holder(account_of(os.getuid()), course, purpose, batch=batch)
    lease = await pool.request(request, holder, key)
    try:
        if lease.state is not LeaseState.HELD:
            lease = await _wait_in_queue(pool, lease, timeout)
        return await pool.attach(lease.id, keeper)
    except BaseException:
        # Whoever waits behind must not wait for a slice that nobody uses.
        await pool.give_back(lease.id, EndReason.WITHDRAWN)
        raise


async def _wait_in_queue(pool: Pool, lease: Lease, timeout: float | None) -> Lease:
    if timeout == 0:
        return await pool.wait(lease.id, 0)
    since = time.monotonic()
    with _QueueProgress() as progress:
        teller = asyncio.create_task(_tell(pool, lease.id, progress))
        try:
            held = await pool.wait(lease.id, timeout)
        finally:
            teller.cancel()
            # If the pool fails, `wait` says so.
            with contextlib.suppress(asyncio.CancelledError, GpuPoolError):
                await teller
    note(f"got {granted(held)} after {format_duration(time.monotonic() - since)}")
    return held


async def _tell(pool: Pool, lease_id: str, progress: _QueueProgress) -> None:
    async for lease in pool.watch(lease_id):
        if lease.state is not LeaseState.WAITING:
            return
        # It may be granted, or have ended, in between: the next round says so.
        with contextlib.suppress(BadRequest, LeaseGone):
            progress.say(waiting(lease, (await pool.explain(lease_id)).expected))


class _QueueProgress(StatusLine):
    """The position in the queue: one living line in a terminal, else one line for each change."""

    def __init__(self) -> None:
        super().__init__()
        self._said = ""

    def say(self, text: str) -> None:
        """Show ``text`` unless it already stands there."""
        if text == self._said:
            return
        self._said = text
        if self.is_live:
            self.show(f"{text} (Ctrl-C gives up)")
        else:
            note(text)
