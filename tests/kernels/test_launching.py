"""Which command lines get our launcher."""

from __future__ import annotations

import pytest

from gpu_pool_kernels.launching import LAUNCHER, wrap_argv

MODULE = ["-m", "ipykernel_launcher", "-f", "{connection_file}"]


@pytest.mark.parametrize(
    "start",
    [
        ["python"],
        ["/opt/conda/envs/x/bin/python3.9"],
        ["/usr/bin/pypy3"],
        ["python", "-Xfrozen_modules=off"],
        ["python", "-X", "frozen_modules=off", "-I", "-W", "ignore"],
    ],
)
def test_the_launcher_comes_between_the_interpreters_options_and_the_module(start: list[str]) -> None:
    assert wrap_argv([*start, *MODULE]) == [*start, str(LAUNCHER), *MODULE]


def test_the_older_module_name_is_known_too() -> None:
    assert wrap_argv(["python3", "-m", "ipykernel"]) == ["python3", str(LAUNCHER), "-m", "ipykernel"]


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["python"],
        ["python", "-m"],
        ["python", "-X"],
        ["R", "--slave", "-e", "IRkernel::main()", "--args", "{connection_file}"],
        ["julia", "-i", "--color=yes", "kernel.jl", "{connection_file}"],
        ["Rscript", "-m", "ipykernel_launcher"],
        ["python", "-m", "xpython", "-f", "{connection_file}"],
        ["python", "-m", "nb_conda_kernels.runner", "env", "python", "-m", "ipykernel_launcher"],
        ["python", "-c", "pass", "-m", "ipykernel_launcher"],
        ["python", "wrapper.py", "-m", "ipykernel_launcher"],
        ["conda", "run", "-n", "x", "python", "-m", "ipykernel_launcher"],
    ],
)
def test_every_other_command_line_is_left_alone(argv: list[str]) -> None:
    assert wrap_argv(list(argv)) == argv
