"""``run``, ``exec`` and ``shell``: commands on a slice, and the environment that they get."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from gpu_pool.cli import completing
from gpu_pool.cli.child import DOCKER, DockerContainer, WaitingChild, become, check_command
from gpu_pool.cli.following import GRACE, LEASE_ENDED, LeaseFollower, end_processes
from gpu_pool.cli.formatting import at_most, granted, plain_lease
from gpu_pool.cli.requesting import acquire, new_key
from gpu_pool.cli.screen import note
from gpu_pool.cli.session import (
    CommandSession,
    Duration,
    ancestors,
    choose,
    held_by,
    remember,
    verb,
    waiting_options,
)
from gpu_pool_client import (
    BadRequest,
    EndReason,
    GpuPoolError,
    Lease,
    LeaseState,
    SliceRequest,
    parse_request,
)
from gpu_pool_client._framework_caps import slice_environment

F = TypeVar("F", bound=Callable[..., Any])


def named_lease(function: F) -> F:
    """Add ``--lease``, for those who hold several."""
    return click.option(
        "--lease",
        "lease_id",
        metavar="ID",
        shell_complete=completing.held_leases,
        help="Which slice, if there are several.",
    )(function)


@verb(
    "run",
    "gpu-pool run 2% -- python train.py",
    "gpu-pool run 1.5GiB --timeout 10min -- python -m pytest tests/gpu",
    "gpu-pool run 50% --for 20min -- python evaluate.py",
    'gpu-pool run "50% model=V100" --no-wait -- ./simulate --steps 1000',
    "gpu-pool run 5% --docker -- pytorch/pytorch python -c 'import torch; print(torch.cuda.mem_get_info())'",
)
@click.argument("size")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@waiting_options
@click.option(
    "--for",
    "length",
    type=Duration(),
    metavar="TIME",
    help="Take the slice for so long at most: the command is ended then. A short one may come sooner.",
)
@click.option("-q", "--quiet", is_flag=True, help="Do not say what was granted.")
@click.option("--docker", is_flag=True, help="The command is [DOCKER OPTIONS] IMAGE [COMMAND].")
@click.option(
    "--json",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=remember("as_json"),
    help="Say how it ended in JSON, in the last line on standard error.",
)
def run(
    session: CommandSession,
    size: str,
    command: tuple[str, ...],
    wait: bool,
    timeout: float | None,
    batch: bool,
    length: float | None,
    quiet: bool,
    docker: bool,
) -> int:
    """Take a slice, run a command on it, give the slice back.

    Waits in the queue if nothing is free; Ctrl-C gives up. The exit status is the
    command's, 128+n if signal n ended it. Signals are passed on. If this
    program is killed, the command gets SIGTERM (on Linux, unless it is
    setuid); the slice is back when the command has ended.

    When the slice ends first, because its time limit is over or it was revoked,
    the command is ended: SIGTERM, and SIGKILL 10 s later. A warning precedes
    the time limit. The exit status is then 124.

    With --docker a container runs on the slice: it sees only the slice's GPU.
    """
    request = _for_so_long(size, length)
    program = DOCKER if docker else command[0]
    check_command(program)
    with WaitingChild() as child:
        # The program's name alone: arguments may hold secrets, and others read the list.
        purpose, within = f"run {Path(program).name}", timeout if wait else 0
        lease = session.ask(
            lambda pool: acquire(pool, request, new_key("run"), purpose, child.process, within, batch=batch)
        )
        if not quiet:
            note(f"running on {granted(lease)}{at_most(lease, time.time())}")
        if docker:
            status, over = _run_container(session, lease, child, command)
        else:
            status, over = _run_command(session, lease, child, command)
    if session.as_json:
        last = _as_it_ended(session, lease)
        found = {"lease": plain_lease(last), "status": status, "lease_over": over}
        click.echo(json.dumps(found), err=True)
    return status


def _for_so_long(size: str, length: float | None) -> SliceRequest:
    """Return the request for a size, of so many seconds where that is given beside it."""
    request = parse_request(size)
    if length is None:
        return request
    if request.length is not None:
        raise BadRequest(f"{size!a} says for how long already.", "Leave --for out, or the for in the size.")
    if not length:
        raise BadRequest("--for is not longer than zero.", "Leave it out for no limit.")
    return replace(request, length=math.ceil(length))


def _run_command(
    session: CommandSession, lease: Lease, child: WaitingChild, command: tuple[str, ...]
) -> tuple[int, str | None]:
    follower = LeaseFollower(session, lease, lambda: end_processes(child.process, lease.id))
    with _following(session, lease, follower):
        status = child.supervise(command, environment_for(lease, command[0]), follower.start)
    return _told(status, follower)


def _run_container(
    session: CommandSession, lease: Lease, child: WaitingChild, arguments: tuple[str, ...]
) -> tuple[int, str | None]:
    box = DockerContainer(lease)
    follower = LeaseFollower(session, lease, lambda: box.stop(GRACE), box.attach)
    with _following(session, lease, follower):
        try:
            environment = {**os.environ, **lease.environment}
            status = child.supervise(box.command(arguments), environment, follower.start)
        finally:
            box.end()
    return _told(status, follower)


@contextlib.contextmanager
def _following(session: CommandSession, lease: Lease, follower: LeaseFollower) -> Iterator[None]:
    """Give the lease back at the end of a command, once all that is to end with it has."""
    try:
        yield
    finally:
        try:
            follower.finish()
        finally:
            ran_out = follower.over == EndReason.TOO_LONG.value
            _give_back(session, lease, EndReason.TOO_LONG if ran_out else EndReason.RELEASED)


def _told(status: int, follower: LeaseFollower) -> tuple[int, str | None]:
    """Return the exit status of ``run``, and why the command was ended with its lease, if it was."""
    return (status if follower.over is None else LEASE_ENDED), follower.over


@verb("exec", "gpu-pool exec -- python train.py", "gpu-pool exec -- nvidia-smi")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@named_lease
def exec_(session: CommandSession, command: tuple[str, ...], lease_id: str | None) -> int:
    """Run a command on the slice that this shell holds.

    The slice is the one taken with "gpu-pool request"; it stays with the shell
    when the command ends.
    """
    check_command(command[0])
    lease = _held(session, lease_id)
    become(command, environment_for(lease, command[0]))


@verb("shell", "gpu-pool shell")
@named_lease
def shell(session: CommandSession, lease_id: str | None) -> int:
    """Open a shell on the slice that this shell holds.

    The shell is $SHELL; leave it with exit.
    """
    lease = _held(session, lease_id)
    program = os.environ.get("SHELL") or "/bin/sh"
    note(f"a shell on {granted(lease)}{at_most(lease, time.time())}; leave it with: exit")
    become([program], environment_for(lease, program))


def _held(session: CommandSession, lease_id: str | None) -> Lease:
    status = session.ask(lambda pool: pool.status())
    held = [lease for lease in status.leases if lease.state is LeaseState.HELD]
    return choose(held_by(held, ancestors(), os.environ), lease_id)


def _as_it_ended(session: CommandSession, lease: Lease) -> Lease:
    """Return the lease as it is now, with what it held, or as it was where the pool does not tell."""
    try:
        last = session.ask(lambda pool: pool.get_lease(lease.id))
    except GpuPoolError:
        return lease
    # An ended lease holds nothing: whoever counts what was used reads it here.
    return replace(last, slices=last.slices or lease.slices)


def _give_back(session: CommandSession, lease: Lease, reason: EndReason) -> None:
    try:
        session.ask(lambda pool: pool.release(lease.id, reason))
    except GpuPoolError as error:
        note(f"the slice is released by itself, since its command has ended. {error}")


_PYTHON: Final = re.compile(r"python[0-9.]*t?")
_SHEBANG: Final = re.compile(rb"#![ \t]*(/[^ \t\n]*/python[0-9.]*t?)[ \t\n]")


def environment_for(lease: Lease, command: str) -> dict[str, str]:
    """Return this process's environment with the slice's variables and framework caps added.

    The caps suit the frameworks of the Python that ``command`` is, or is
    written for, or would find on the PATH. What the user has set is kept.
    """
    return {**os.environ, **slice_environment(lease, python_of(command))}


def python_of(command: str) -> str:
    """Return the Python that ``command`` runs with, as far as its name or first line tells."""
    located = shutil.which(command)
    if located and _PYTHON.fullmatch(Path(located).name):
        return located
    match = _SHEBANG.match(_first_bytes(located)) if located else None
    if match is not None:
        return os.fsdecode(match[1])
    return next((name for name in ("python", "python3") if shutil.which(name)), "python3")


def _first_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(256)
    except OSError:
        return b""
