"""``run``, ``exec`` and ``shell``: commands on a slice."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gpu_pool.cli.child import CommandNotFound, GatedCommand, become
from gpu_pool.cli.containers import DOCKER, Container
from gpu_pool.cli.line import new_key, take
from gpu_pool.cli.mine import ancestors, choose, held_by
from gpu_pool.cli.screen import note
from gpu_pool.cli.session import Session, complete, verb
from gpu_pool.cli.surroundings import environment_for
from gpu_pool.cli.words import granted
from gpu_pool_client import GpuPoolError, Lease, LeaseState, Process, SliceRequest, parse_request

F = TypeVar("F", bound=Callable[..., Any])

#: Seconds that one may wait: a year, which is longer than any machine is up.
_LONGEST = 365 * 86_400


class _Seconds(click.FloatRange):
    """A number of seconds; "nan", which is in no range and outside none, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


def waiting_options(function: F) -> F:
    """Add ``--wait``, ``--no-wait`` and ``--timeout``."""
    for option in (
        click.option(
            "--timeout",
            type=_Seconds(min=0, max=_LONGEST),
            metavar="SECONDS",
            help="Wait this long at most, then fail with exit status 6.",
        ),
        click.option(
            "--wait/--no-wait", default=True, help="Wait in line (the default), or fail unless free."
        ),
    ):
        function = option(function)
    return function


def named_lease(function: F) -> F:
    """Add ``--lease``, for those who hold several."""
    return click.option("--lease", "lease_id", metavar="ID", help="Which slice, if there are several.")(
        function
    )


@verb(
    "run",
    "gpu-pool run 2% -- python train.py",
    "gpu-pool run 1.5GiB --timeout 600 -- python -m pytest tests/gpu",
    'gpu-pool run "50% model=V100" --no-wait -- ./simulate --steps 1000',
    "gpu-pool run 5% --docker -- pytorch/pytorch python -c 'import torch; print(torch.cuda.mem_get_info())'",
)
@click.argument("size")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@waiting_options
@click.option("-q", "--quiet", is_flag=True, help="Do not say what was granted.")
@click.option("--docker", is_flag=True, help="The command is [DOCKER OPTIONS] IMAGE [COMMAND].")
def run(
    session: Session,
    size: str,
    command: tuple[str, ...],
    wait: bool,
    timeout: float | None,
    quiet: bool,
    docker: bool,
) -> int:
    """Take a slice, run a command on it, give the slice back.

    Waits in line if nothing is free; Ctrl-C gives up. The exit status is the
    command's, 128+n if signal n ended it. Signals are passed on. If this
    program is killed, the command gets SIGTERM (on Linux, unless it is
    setuid); the slice is back when the command has ended.

    With --docker a container runs on the slice: it sees the slice's GPU alone,
    and ends when the slice is taken back.
    """
    request = parse_request(size)
    program = DOCKER if docker else command[0]
    _check_command(program)
    with GatedCommand() as child:
        lease = complete(_take(session, request, program, child.process, timeout if wait else 0))
        try:
            if not quiet:
                note(f"running on {granted(lease)}")
            if docker:
                return _run_container(session, lease, child, command)
            return child.supervise(command, environment_for(lease, program))
        finally:
            _give_back(session, lease)


def _run_container(session: Session, lease: Lease, child: GatedCommand, arguments: tuple[str, ...]) -> int:
    box = Container(lease)
    try:
        return child.supervise(
            box.command(arguments),
            {**os.environ, **lease.environment},
            meanwhile=lambda: asyncio.run(box.follow(session)),
        )
    finally:
        box.end()


@verb(
    "exec",
    "gpu-pool exec -- python train.py",
    "gpu-pool exec -- nvidia-smi",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@named_lease
def exec_(session: Session, command: tuple[str, ...], lease_id: str | None) -> int:
    """Run a command on the slice that this shell holds.

    The slice is the one taken with "gpu-pool request"; it stays with the shell
    when the command ends.
    """
    _check_command(command[0])
    lease = complete(_held(session, lease_id))
    become(command, environment_for(lease, command[0]))


@verb("shell", "gpu-pool shell")
@named_lease
def shell(session: Session, lease_id: str | None) -> int:
    """Open a shell on the slice that this shell holds.

    The shell is $SHELL; leave it with exit.
    """
    lease = complete(_held(session, lease_id))
    program = os.environ.get("SHELL") or "/bin/sh"
    note(f"a shell on {granted(lease)}; leave it with: exit")
    become([program], environment_for(lease, program))


async def _take(
    session: Session, request: SliceRequest, program: str, keeper: Process, timeout: float | None
) -> Lease:
    # The program's name alone: arguments may hold secrets, and others read the list.
    purpose = f"run {Path(program).name}"
    async with session.connect() as pool:
        return await take(pool, request, new_key("run"), purpose, keeper, timeout)


async def _held(session: Session, lease_id: str | None) -> Lease:
    async with session.connect() as pool:
        status = await pool.status()
    held = [lease for lease in status.leases if lease.state is LeaseState.HELD]
    return choose(held_by(held, ancestors(), os.environ), lease_id)


def _give_back(session: Session, lease: Lease) -> None:
    async def release() -> None:
        async with session.connect() as pool:
            await pool.release(lease.id)

    try:
        complete(release())
    except GpuPoolError as error:
        note(f"the slice returns by itself, since its command has ended. {error}")


def _check_command(program: str) -> None:
    """Refuse what cannot be run before anybody waits for it."""
    if shutil.which(program) is None:
        raise CommandNotFound(f"{program[:80]!a}: there is no such command.", "Check its name and the PATH.")
