"""What all verbs share: their common options, the pool they ask, and how they wait."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import click

from gpu_pool_client import BadRequest, Pool, connect, parse_duration
from gpu_pool_client._pool import BATCH_VARIABLE, is_yes

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

    def connect(self) -> Pool:
        """Return the pool that was chosen; see :func:`gpu_pool_client.connect`."""
        return connect(self.url)


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
