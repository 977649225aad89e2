"""Warm kernels, forked from a template, against those that the stock provisioner starts.

Everything is measured through jupyter_client, in turn, in one process: ``benchmarks.warm_server``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.report import Line, Skipped, compared, interval, until_decided
from benchmarks.sizes import KERNELS_PYTHON, sized
from benchmarks.warm_server import in_server

PAIRS = sized(20, 1)
#: Of kernels that import a library, which take seconds.
LARGE_PAIRS = sized(5, 1)
#: Of those of which nothing is promised.
OTHER_PAIRS = sized(3, 1)
BURST = sized(50, 3)
#: Rounds of many kernels at once, and in how many of them stock kernels are started as well.
BURSTS, BESIDE_STOCK = sized(20, 1), sized(5, 1)
FIRSTS = sized(12, 1)
#: As many times as long, while a promise is undecided.
MORE = sized(3, 1)
IDLE_SECONDS = sized(60.0, 1.0)


@dataclass(frozen=True)
class Library:
    """Modules that are preloaded, and the first cell that uses them."""

    modules: tuple[str, ...]
    cell: str
    #: What is promised of its first cell and of its memory, to a stock kernel's.
    of_cell: float | None = None
    of_memory: float | None = None
    #: Seconds that are promised from a restart to the reply to that cell.
    of_restart: float | None = None
    #: What the cell is called.
    does: str = field(default="import {}")

    @property
    def name(self) -> str:
        """How it is called in the report."""
        return ", ".join(self.modules)

    @property
    def what(self) -> str:
        """What its cell does, in a few words."""
        return self.does.format(self.name)


LIBRARIES = (
    Library(("numpy", "pandas", "matplotlib"), "import numpy, pandas, matplotlib", of_cell=0.15),
    Library(
        ("torch",),
        "import torch\ntorch.nn.Linear(100, 10)(torch.randn(32, 100)).sum().backward()",
        of_cell=0.1,
        of_memory=0.15,
        of_restart=0.25,
        does="import torch, one forward and backward",
    ),
    Library(
        ("tensorflow",),
        "import tensorflow as tf\n"
        "with tf.GradientTape() as tape:\n"
        "    weights = tf.Variable(tf.random.normal((100, 10)))\n"
        "    loss = tf.reduce_sum(tf.random.normal((32, 100)) @ weights)\n"
        "tape.gradient(loss, weights)",
        does="import tensorflow, one forward and backward",
    ),
    Library(
        ("jax",),
        "import jax, jax.numpy as jnp\n"
        "jax.grad(lambda weights: jnp.sum(jnp.ones((32, 100)) @ weights))(jnp.ones((100, 10)))",
        does="import jax, one forward and backward",
    ),
)
#: What a student may do in the seconds in which the template starts.
WORK = "for number in range(30_000_000): number * number"

Rounds = list[dict[str, dict[str, Any]]]


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    python = os.environ.get(KERNELS_PYTHON) or sys.executable
    yield from until_decided(_measures(python, (), "None", PAIRS), _starts, 1, MORE)
    yield from until_decided(lambda: _bursts(python), _many, 1, 1)
    there = [each for each in LIBRARIES if has(python, each.modules)]
    for library in there:
        count = LARGE_PAIRS if library.of_cell else OTHER_PAIRS
        measure = _measures(python, library.modules, library.cell, count, restarts=True)
        yield from until_decided(measure, lambda rounds, of=library: _with_library(of, rounds), 1, MORE)  # type: ignore[misc]
    largest = next((each for each in there if each.of_memory), Library((), "None", does="nothing"))
    yield from until_decided(
        lambda: _first(python, largest), lambda rounds: _firsts(largest, rounds), FIRSTS, 2 * FIRSTS
    )
    yield _idle(python, largest)
    if left_out := [each.name for each in LIBRARIES if each not in there]:
        raise Skipped(f"{'; '.join(left_out)}: --kernels-python names no Python that has them.")


def has(python: str, modules: Sequence[str]) -> bool:
    """Whether a Python has all of these modules."""
    look = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {list(modules)!r})))"
    return subprocess.run([python, "-c", look], check=False).returncode == 0


def _measures(
    python: str, modules: Sequence[str], cell: str, count: int, *, restarts: bool = False
) -> Callable[[], Rounds]:
    def measure() -> Rounds:
        rounds: Rounds = in_server("pairs", python, modules, cell, str(count), "yes" if restarts else "")
        cold = sum(not each["warm"]["is_warm"] for each in rounds)
        assert not cold, f"{cold} of {count} kernels with {modules} that were to be warm started cold"
        return rounds

    return measure


def _paired(processes: Sequence[Rounds], what: str, scale: float = 1.0) -> list[tuple[float, float]]:
    """Return one figure of all rounds, the warm kernel's and the stock one's."""
    return [(scale * each["warm"][what], scale * each["stock"][what]) for some in processes for each in some]


def _starts(processes: Sequence[Rounds]) -> list[Line]:
    of = "a warm kernel's start to its first {}, to the stock provisioner"
    return [
        compared(of.format("reply"), _paired(processes, "reply", 1000), "medians", 0.3, unit="ms"),
        compared(of.format("cell's reply"), _paired(processes, "execute", 1000), "medians", 0.3, unit="ms"),
    ]


def _bursts(python: str) -> Rounds:
    found: Rounds = in_server("bursts", python, (), str(BURST), str(BURSTS), str(BESIDE_STOCK))
    return found


def _many(processes: Sequence[Rounds]) -> list[Line]:
    warm = [each["warm"] for some in processes for each in some]
    beside = [each for some in processes for each in some if "stock" in each]
    lost = sum(each["lost"] for each in warm)
    total = BURST * len(warm)
    longest = max(each["seconds"] for each in warm)
    return [
        compared(
            f"{BURST} warm kernels at once to the last first reply, to the stock provisioner",
            [(each["warm"]["seconds"], each["stock"]["seconds"]) for each in beside],
            f"{sum(each['stock']['lost'] for each in beside)} of {BURST * len(beside)} stock ones lost",
            0.25,
            unit="s",
        ),
        Line(
            f"lost of {total} warm kernels, {BURST} at once",
            lost,
            f"{sum(each['warm'] for each in warm)} were warm; the slowest {BURST} took {longest:.1f} s",
            0,
            ours=lost,
            unit="kernels",
        ),
    ]


def _with_library(library: Library, processes: Sequence[Rounds]) -> list[Line]:
    lines = [
        compared(
            f"first cell, {library.what}: warm to stock",
            _paired(processes, "cell", 1000),
            "medians",
            library.of_cell,
            unit="ms",
        ),
        compared(
            f"memory of a kernel's own after it, {library.name}: warm to stock",
            _paired(processes, "mib"),
            "Private_* of smaps_rollup",
            library.of_memory,
            unit="MiB",
        ),
        compared(
            f"restart to the reply to that cell, {library.name}: warm to stock",
            _paired(processes, "restart", 1000),
            "medians",
            unit="ms",
        ),
    ]
    if library.of_restart is not None:
        seconds = [warm for warm, _ in _paired(processes, "restart")]
        low, high = interval(seconds)
        made_of = f"median; 95% interval {low:.3g} to {high:.3g} s, of {len(seconds)}"
        figure = median(seconds)
        lines.append(
            Line(
                f"the same in seconds, {library.name}",
                figure,
                made_of,
                library.of_restart,
                ours=figure,
                unit="s",
                interval=(low, high),
            )
        )
    return lines


def _first(python: str, library: Library) -> dict[str, list[float]]:
    """Start the first kernel of a server in which it brings a template, and of one in which it does not."""
    cell = f"{library.cell}\n{WORK}"
    return {name: in_server("first", python, library.modules, name, cell) for name in ("warm", "cold")}


def _firsts(library: Library, rounds: Sequence[dict[str, list[float]]]) -> list[Line]:
    def both(place: int) -> list[tuple[float, float]]:
        return [(each["warm"][place], each["cold"][place]) for each in rounds]

    return [
        compared(
            "a server's first kernel to its first reply, with preload to without",
            both(0),
            "medians; both start cold",
            1.05,
            unit="s",
        ),
        compared(
            f"the same to the reply to its first cell, {library.what}, and work while the template starts",
            both(1),
            "medians",
            1.05,
            unit="s",
        ),
    ]


def _idle(python: str, library: Library) -> Line:
    used = {
        name: in_server("idle", python, library.modules, name, str(IDLE_SECONDS))["share"]
        for name in ("warm", "cold")
    }
    more = max(0.0, used["warm"] - used["cold"])
    return Line(
        "of a core for a server with an idle template, less a server without",
        more,
        f"processor time of {IDLE_SECONDS:.0f} s, the template's included; with it {used['warm']:.2%}",
        0.005,
        ours=more,
        unit="cores",
    )
