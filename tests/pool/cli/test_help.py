"""Help and reference: every verb has examples that parse, every exit status is told."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import pytest

from gpu_pool.cli import main
from gpu_pool.cli.app import cli, subcommands
from gpu_pool.cli.session import CommandSession, Verb
from gpu_pool_client import _errors as errors

REFERENCE = (Path(__file__).parents[3] / "docs/reference/cli.md").read_text()


def verbs(group=cli, path=()):
    for name, command in subcommands(group).items():
        if isinstance(command, click.Group):
            yield from verbs(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


VERBS = dict(verbs())


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_explains_itself_with_examples(name, capsys):
    assert main([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    command = VERBS[name]
    assert isinstance(command, Verb)
    assert command.examples
    assert all(f"  {example}\n" in shown for example in command.examples)
    assert f"### `gpu-pool {name}" in REFERENCE


@pytest.mark.parametrize("example", [example for verb in VERBS.values() for example in verb.examples])
def test_every_example_parses(example):
    line = example.partition(" | ")[0].partition(" && ")[0].replace("$$", "4711")
    program, *words = shlex.split(line)
    assert program == "gpu-pool"
    command = cli
    while isinstance(command, click.Group):
        command = subcommands(command)[words.pop(0)]
    command.make_context("", words, obj=CommandSession())


def test_every_exit_status_is_told(capsys):
    main(["--help"])
    shown = capsys.readouterr().out
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    statuses = {kind.exit_code for kind in kinds if issubclass(kind, errors.GpuPoolError)} | {0, 126, 127}
    for status in statuses:
        assert f"\n    {status:<4} " in shown
        assert f"| {status} |" in REFERENCE


def test_without_a_verb_help_is_shown(capsys):
    assert main([]) == 0
    assert "Commands:" in capsys.readouterr().out
