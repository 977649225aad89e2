"""Writes the manual pages in docs/man from the program's own help: ``make man``.

One page for the program and one for each of its verbs, in man(7). They are kept
in the repository, so that building a wheel needs nothing but its build backend;
a test compares them with the help.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from gpu_pool.cli.app import cli, subcommands
from gpu_pool.cli.session import Verb

FOLDER = Path(__file__).parent / "man"
PROGRAM = "gpu-pool"


def pages() -> dict[str, str]:
    """Return all pages by the name of their file."""
    return {f"{'-'.join(path)}.1": _page(path, command) for path, command in _commands((PROGRAM,), cli)}


def _commands(
    path: tuple[str, ...], command: click.Command
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    for name, below in subcommands(command).items() if isinstance(command, click.Group) else ():
        yield from _commands((*path, name), below)


def _page(path: tuple[str, ...], command: click.Command) -> str:
    context = _context(path, command)
    name = "-".join(path)
    lines = [
        '.\\" Written by docs/man.py from the help: change that, and run make man.',
        f'.TH {_text(name.upper())} 1 "" jupyter-gpu-pool "GPU pool"',
        ".SH NAME",
        f"{_text(name)} \\- {_text(command.get_short_help_str(limit=200).rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_text(' '.join(path))}",
        _text(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        *_paragraphs(command.help or ""),
        ".SH OPTIONS",
        *_records(command.get_params(context), context),
    ]
    if isinstance(command, click.Group):
        lines += [".SH COMMANDS", *_verbs(path, command)]
    if isinstance(command, Verb) and command.examples:
        lines += [".SH EXAMPLES", ".EX", *map(_text, command.examples), ".EE"]
    if command.epilog:
        lines += [".SH NOTES", *_paragraphs(command.epilog)]
    if command is not cli:
        lines += [".SH SEE ALSO", f"\\fB{_text(PROGRAM)}\\fR(1)"]
    return "\n".join(lines) + "\n"


def _context(path: tuple[str, ...], command: click.Command) -> click.Context:
    context: click.Context | None = None
    for name in path[:-1]:
        context = click.Context(cli, context, info_name=name)
    return click.Context(command, context, info_name=path[-1])


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; those after a ``\\b`` as they are written."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        verbatim, _, rest = paragraph.partition("\b\n")
        if rest and not verbatim.strip():
            yield from (".PP", ".EX", *map(_text, rest.splitlines()), ".EE")
        else:
            yield from (".PP", _text(" ".join(paragraph.split())))


def _records(parameters: list[click.Parameter], context: click.Context) -> Iterator[str]:
    for parameter in parameters:
        record = parameter.get_help_record(context)
        # What Click says of arguments, by some of its versions, is their name alone.
        if record is not None and isinstance(parameter, click.Option):
            yield from (".TP", f".B {_text(record[0])}", _text(record[1]))


def _verbs(path: tuple[str, ...], group: click.Group) -> Iterator[str]:
    for name, command in subcommands(group).items():
        page = _text("-".join((*path, name)))
        yield from (".TP", f"\\fB{page}\\fR(1)", _text(command.get_short_help_str(limit=200)))


def _text(text: str) -> str:
    """Write a line so that roff prints it as it is."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("^", "\\(ha")
    escaped = escaped.replace("~", "\\(ti").replace("`", "\\(ga").replace('"', "\\(dq")
    return f"\\&{escaped}" if escaped.startswith(".") else escaped


def write() -> None:
    """Write all pages anew, and remove those of verbs that there are no more."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.1"):
        old.unlink()
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    write()
    print(f"{len(pages())} manual pages are in {FOLDER.relative_to(Path.cwd())}")
