"""The program: its verbs in their order, and what becomes of its errors."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import click

from gpu_pool.cli.formatting import no_jupyter_folders, plain_error
from gpu_pool.cli.screen import note
from gpu_pool.cli.session import CommandSession, Interrupted, pool_options
from gpu_pool_client import BadRequest, GpuPoolError
from gpu_pool_client._home import home_folder
from gpu_pool_client._log import escaped

_EPILOG = """\b
Sizes:
  2% or 0.02      a share of one GPU
  1.5GiB, 655MiB  an amount of GPU memory
  4               whole GPUs
  2x50%           the same share of several
  2%..10%         2%, and up to 10% of the memory while nobody else holds it
  then filters:   "2% model=V100 memory>=16GiB driver>=550 index=0,1"

\b
Exit status:
  0    done
  1    a check failed, or an unexpected error
  2    the input is not valid
  3    no GPU of this pool could ever hold the slice
  4    the pool's rules forbid it
  5    your quota is used up
  6    nothing became free in time
  7    the pool cannot be reached or opened
  8    the lease has ended, or there is none
  124  run: the slice ended before the command, which was then ended
  126  the command cannot be executed
  127  the command was not found
  128+n  ended by signal n (130: Ctrl-C)
  run and exec end with the status of their command.

\b
Tab completion, also of leases, GPUs and kernels:
  bash  eval "$(_GPU_POOL_COMPLETE=bash_source gpu-pool)"
  zsh   eval "$(_GPU_POOL_COMPLETE=zsh_source gpu-pool)"
  fish  _GPU_POOL_COMPLETE=fish_source gpu-pool | source
"""


#: Where each verb is, those used most first. It is imported when it is asked for: the programs of one
#: verb take a part of what all take to load, which a shell's user waits for.
VERBS: Final[Mapping[str, str]] = {
    "list": "showing:list_",
    "status": "showing:status",
    "smi": "showing:smi",
    "run": "running:run",
    "request": "requesting:request",
    "exec": "running:exec_",
    "shell": "running:shell",
    "release": "requesting:release",
    "kernels": "kernels:kernels",
    "hibernated": "hibernation:hibernated",
    "why": "administering:why",
    "history": "administering:history",
    "report": "administering:report",
    "simulate": "simulate:simulate",
    "courses": "courses:courses",
    "drain": "draining:drain",
    "undrain": "draining:undrain",
    "serve": "administering:serve",
    "node-agent": "administering:node_agent",
    "health": "doctor:health",
    "doctor": "doctor:doctor",
}


class _Verbs(click.Group):
    """A group whose verbs are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - as Click calls it
        """Return the names of the verbs, those used most first."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Return the verb of this name; None where there is none."""
        if cmd_name not in VERBS:
            return None
        module, _, name = VERBS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(f"gpu_pool.cli.{module}"), name)
        return command


def subcommands(group: click.Group) -> dict[str, click.Command]:
    """Return what a group has by its names, imported all."""
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


@click.group(
    "gpu-pool",
    cls=_Verbs,
    epilog=_EPILOG,
    no_args_is_help=False,
    context_settings={"max_content_width": 100},
)
@click.version_option(package_name="jupyter-gpu-pool", prog_name="gpu-pool")
@pool_options
def cli() -> None:
    """Slices of GPUs, for commands, shells and notebook kernels."""


def execute(argv: list[str] | None) -> int:
    """Run one command; return its exit status. Nothing is raised."""
    session = CommandSession()
    arguments = sys.argv[1:] if argv is None else argv
    try:
        result: Any = cli.main(
            arguments or ["--help"], prog_name="gpu-pool", standalone_mode=False, obj=session
        )
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as left:
        # Click and Rich leave so when the reader of a pipe is gone.
        return left.code if isinstance(left.code, int) else 1
    except Exception as error:  # noqa: BLE001 - the last place where an error can be told in words
        return _explain(error, session)
    return int(result or 0)


def _reader_gone() -> int:
    """End quietly, as a program that SIGPIPE ends would."""
    # The interpreter flushes once more at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _explain(error: Exception, session: CommandSession) -> int:
    if session.debug:
        traceback.print_exception(error)
    if isinstance(error, (click.Abort, Interrupted)):
        if session.as_json:
            told = {"code": "interrupted", "message": "Interrupted before it was done.", "remedy": ""}
            click.echo(json.dumps({"error": told}), err=True)
        return getattr(error, "exit_code", 128 + signal.SIGINT)
    if isinstance(error, RuntimeError) and home_folder() is None:
        error = no_jupyter_folders()
    if isinstance(error, click.ClickException):
        error = _in_our_words(error)
    if not isinstance(error, GpuPoolError):
        note(f"unexpected {type(error).__name__}: {escaped(str(error)[:500])}. Run again with --debug.")
        return 1
    if session.as_json:
        click.echo(json.dumps(plain_error(error)), err=True)
    else:
        note("\n".join(filter(None, (error.message, error.remedy))))
    return error.exit_code


def _in_our_words(error: click.ClickException) -> BadRequest:
    """Turn what Click found wrong with the command line into an error like all others."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context else "gpu-pool"
    remedy = f"See {path} --help."
    if isinstance(error, click.NoSuchOption) and context and context.command.name in ("run", "exec"):
        remedy = f"Write -- before the command. {remedy}"
    return BadRequest(error.format_message(), remedy)
