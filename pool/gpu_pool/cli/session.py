"""What all verbs share: their common options, the pool they ask, how they wait, and which leases are mine.

Mine are those whose process is this one or one it descends from, and whose I am told of. There is no state
file. A shell that asked for a slice is the parent of what it starts, and a command or kernel on a slice is
the ancestor of what runs in it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import click

from gpu_pool_client import (
    BadRequest,
    GpuPoolError,
    Holder,
    Lease,
    LeaseGone,
    NeverFits,
    NotAllowed,
    Pool,
    Process,
    SliceRequest,
    connect,
    parse_duration,
)
from gpu_pool_client._pool import BATCH_VARIABLE, DEFAULT_URL, URL_VARIABLE, is_yes
from gpu_pool_client._processes import lineage

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

#: Signals that end a command which is still asking or waiting.
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class CommandSession:
    """The common options, as given before or after the verb."""

    #: The pool's URL; None for ``$GPU_POOL_URL`` or ``embedded:``.
    url: str | None = None
    #: Show tracebacks.
    debug: bool = False
    #: Print JSON, errors included.
    as_json: bool = False

    @property
    def address(self) -> str:
        """The URL of the pool that was chosen."""
        return self.url or os.environ.get(URL_VARIABLE) or DEFAULT_URL

    @property
    def is_served(self) -> bool:
        """Whether that pool is a service's, whose GPUs need not be this machine's."""
        return urlsplit(self.address).scheme != "embedded"

    def connect(self) -> Pool:
        """Return the pool that was chosen; see :func:`gpu_pool_client.connect`."""
        return connect(self.url)

    def ask(self, question: Callable[[Pool], Coroutine[Any, Any, T]]) -> T:
        """Open the pool, ask it, and return its answer. A signal becomes :class:`Interrupted`."""

        async def asked() -> T:
            async with self.connect() as pool:
                return await question(pool)

        return complete(asked())


class Interrupted(Exception):
    """A signal ended the command while it asked or waited."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        #: The exit status by the shells' convention.
        self.exit_code = 128 + signum


class Verb(click.Command):
    """A command whose help ends with examples, printed as they are written."""

    def __init__(self, *args: Any, examples: tuple[str, ...] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.examples = examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; refuse a ``--json`` that may as well be meant for the command to be run."""
        runs_a_command = any(each.type is click.UNPROCESSED for each in self.params)
        if runs_a_command and "--json" in args and "--" not in args:
            raise BadRequest(
                "It is not clear whether --json belongs to gpu-pool or to the command.",
                f"Write -- before the command. See {ctx.command_path} --help.",
            )
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the examples, one a line."""
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {example}\n" for example in self.examples))


def verb(name: str, *examples: str) -> Callable[[Callable[..., int]], Verb]:
    """Make a function that takes the :class:`Session` and returns an exit status a verb."""

    def decorate(function: Callable[..., int]) -> Verb:
        command = click.command(name, cls=Verb, examples=examples)
        return command(pool_options(click.make_pass_decorator(CommandSession)(function)))

    return decorate


def pool_options(function: F) -> F:
    """Add ``--pool`` and ``--debug``, which may stand before or after the verb."""
    for option in (
        click.option(
            "--debug", is_flag=True, expose_value=False, callback=remember("debug"), help="Show tracebacks."
        ),
        click.option(
            "--pool",
            metavar="URL",
            expose_value=False,
            is_eager=True,
            callback=remember("url"),
            help="The pool to use, by default $GPU_POOL_URL or embedded: (this user's own).",
        ),
    ):
        function = option(function)
    return function


def json_option(function: F) -> F:
    """Add ``--json``, which errors follow, too."""
    return click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=remember("as_json"),
        help="Print JSON.",
    )(function)


def remember(field: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    """Return a callback of an option that is to be kept in that field of the :class:`Session`."""

    def callback(ctx: click.Context, _parameter: click.Parameter, value: Any) -> None:
        # An option that is not given after the verb leaves what was given before it.
        if value:
            setattr(ctx.ensure_object(CommandSession), field, value)

    return callback


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end. A signal cancels it and becomes :class:`Interrupted`."""
    return asyncio.run(_interruptible(work))


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    received: list[int] = []

    def stop(signum: int) -> None:
        received.append(signum)
        task.cancel()

    loop = asyncio.get_running_loop()
    # What is ignored stays ignored: nohup, and background jobs of scripts.
    signals = [signum for signum in _ENDING if signal.getsignal(signum) is not signal.SIG_IGN]
    for signum in signals:
        loop.add_signal_handler(signum, stop, signum)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise Interrupted(received[0]) from None
        raise
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)


#: The longest that may be given: a year, which is longer than any machine is up.
_LONGEST = 365 * 86_400


class Duration(click.ParamType):  # type: ignore[type-arg]  # older versions of Click take none
    """A duration, which the command gets in seconds. What is no time at all is refused in words.

    ``unit`` is what a plain number counts, in seconds.
    """

    name = "duration"

    def __init__(self, unit: float = 1.0) -> None:
        self._unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds that ``value`` means. Called by Click."""
        if not isinstance(value, str):  # a default, in seconds
            return float(value)
        try:
            seconds = parse_duration(value)
        except BadRequest as error:
            remedy = error.remedy if self._unit == 1 else error.remedy.replace("seconds", "minutes")
            self.fail(f"{error.message} {remedy}", param, ctx)
        if value.strip()[-1:].isdigit():
            seconds *= self._unit
        if seconds > _LONGEST:
            self.fail(f"{value[:40]!a} is more than a year. Accepted: up to 365d.", param, ctx)
        return seconds


def waiting_options(function: F) -> F:
    """Add ``--wait``, ``--no-wait``, ``--timeout`` and ``--batch``."""
    for option in (
        click.option(
            "--batch",
            is_flag=True,
            default=lambda: is_yes(os.environ.get(BATCH_VARIABLE, "")),
            help="Batch work, such as grading: come after all that is not.",
        ),
        click.option(
            "--timeout",
            type=Duration(),
            metavar="TIME",
            help="Wait this long at most (90s, 15min, 2h), then fail with exit status 6.",
        ),
        click.option(
            "--wait/--no-wait", default=True, help="Wait in the queue (the default), or fail unless free."
        ),
    ):
        function = option(function)
    return function


LEASE_VARIABLE = "GPU_POOL_LEASE"
TAKE_ONE = "Take one with: gpu-pool request 2%"


def ancestors() -> list[Process]:
    """Return this process and those it descends from, nearest first."""
    return list(lineage(os.getpid()))


def held_by(leases: Iterable[Lease], processes: Sequence[Process], environ: Mapping[str, str]) -> list[Lease]:
    """Return the leases of ``processes``, in their order; else the one named in ``environ``.

    The variable serves where ancestors cannot be seen: in a container of its own.
    """
    everything = list(leases)
    found = [lease for process in processes for lease in everything if lease.process == process]
    return found or [lease for lease in everything if lease.id == environ.get(LEASE_VARIABLE)]


async def shows_all(pool: Pool) -> bool | None:
    """Whether a service shows us everybody's leases, as to administrators, and not our own alone.

    None where that cannot be told. None but administrators may ask in nobody's name, and no
    rule of any pool forbids the smallest request: whatever else is said of it, it was heard.
    """
    try:
        await pool.forecast(SliceRequest(milli=1), Holder(""))
    except NotAllowed:
        return False
    except NeverFits:
        return True
    except GpuPoolError:
        return None
    return True


@contextmanager
def naming_leases() -> Iterator[None]:
    """Say of a named lease that is not there where those are to be seen that are."""
    try:
        yield
    except LeaseGone as error:
        remedy = "gpu-pool status lists the leases, gpu-pool history those that have ended."
        raise LeaseGone(error.message, remedy, reason=error.reason) from error


def choose(found: Sequence[Lease], lease_id: str | None = None) -> Lease:
    """Return the one lease meant: the named one, or the only one of the nearest process.

    Raises ``LeaseGone`` if there is none and ``BadRequest`` if there are several.
    """
    if lease_id is not None:
        found = [lease for lease in found if lease.id == lease_id]
    if not found:
        what = "no GPU slice" if lease_id is None else f"no lease {lease_id[:80]!a}"
        raise LeaseGone(f"This shell holds {what}.", TAKE_ONE)
    nearest = [lease for lease in found if lease.process == found[0].process]
    if len(nearest) > 1:
        ids = ", ".join(f"{lease.id} ({lease.request.size})" for lease in nearest)
        raise BadRequest(f"This shell holds several slices: {ids}.", "Name one with --lease ID.")
    return nearest[0]
