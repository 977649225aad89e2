"""How soon idle kernels give way to those who wait, how soon they go on, and what being ready for it costs.

Twenty students on ten slices of one simulated GPU, with real kernels: ``benchmarks.yielding_server``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Line, interval, percentile
from benchmarks.sizes import KERNELS_PYTHON, sized
from benchmarks.warm_server import specs
from benchmarks.yielding_server import ROUNDS, SLICES, WATCHED_SECONDS

#: Short, so that the run is: what is measured begins once a kernel has idled for that long.
YIELD_AFTER = "1s"
#: For what idle kernels cost: long enough for them to be looked at as seldom as by default.
IDLE_AFTER = sized(30, 1)


def in_server(yield_after: str, *arguments: str) -> Any:
    """Run a part of the server's module in a process of its own, with a pool of its own."""
    with tempfile.TemporaryDirectory() as name:
        python = os.environ.get(KERNELS_PYTHON) or sys.executable
        settings = f"c.PoolSettings.default_course = {{'yield_after': {yield_after!r}}}"
        (Path(name) / "gpu_pool_config.py").write_text(settings)
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        environment = {
            **os.environ,
            **specs(Path(name), python, (), f"{100 // SLICES}%"),
            "GPU_POOL_DEVICES": "A100-SXM4-80GB:1",
            "JUPYTER_CONFIG_DIR": name,
            "PYTHONPATH": path,
        }
        command = [sys.executable, "-m", "benchmarks.yielding_server", *arguments]
        done = subprocess.run(command, cwd=name, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])  # such as what variable was lost
        return json.loads(done.stdout.splitlines()[-1])


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    yield from _students("warm", ROUNDS)
    yield _first("cold", in_server(YIELD_AFTER, "students", "cold", "1"))
    yield _idle()


def _students(kind: str, rounds: int) -> Iterator[Line]:
    found = in_server(YIELD_AFTER, "students", kind, str(rounds))
    yield _first(kind, found, 2.0)
    more = [parked - held for parked, held in zip(found["parked"], found["held"], strict=True)]
    yield Line(
        "a parked kernel's next cell when a slice is free, more than without yielding: median",
        median(more),
        f"{_in_words(found['parked'])}; the same kernels' cells when they had kept their slice: "
        f"{_in_words(found['held'])}; no variable lost",
        0.3,
        ours=median(more),
        unit="s",
        interval=interval(more),
    )
    longest = percentile(more, 0.95)
    yield Line("the same: 95th percentile", longest, f"of {len(more)}", 0.3, ours=longest, unit="s")
    contended = found["parked_others_idle"]
    p95 = percentile(contended, 0.95)
    yield Line(
        "a parked kernel's next cell while ten others hold all slices and idle: 95th percentile",
        p95,
        _in_words(contended),
        ours=p95,
        unit="s",
    )


def _first(kind: str, found: dict[str, Any], promise: float | None = None) -> Line:
    first, free = found["first"], found["first_when_free"]
    ours, yardstick = percentile(first, 0.95), percentile(free, 0.95)
    made_of = (
        f"{_in_words(first)}; where a slice was free: {_in_words(free)}; {found['warm']} of them forked; "
        f"no variable lost"
    )
    what = f"from a start without a free slice to its first cell's reply, {kind}: 95th percentile"
    return Line(what, ours, made_of, promise, ours=ours, yardstick=yardstick, unit="s")


def _idle() -> Line:
    """Measure both at once, so that the machine does the same to both."""
    with ThreadPoolExecutor(2) as both:
        yielding, never = both.map(
            lambda after: in_server(after, "idle", str(IDLE_AFTER)), (f"{IDLE_AFTER}s", "never")
        )
    each = 100 * (yielding - never) / SLICES
    made_of = (
        f"the server's process with {SLICES} of them, pool included: {100 * yielding:.2f}%, and "
        f"{100 * never:.2f}% with yield_after never, over {WATCHED_SECONDS:.0f} s"
    )
    what = "what an idle kernel that gives way costs its server more, % of a core"
    return Line(what, each, made_of, 0.5, ours=each, unit="% of a core")


def _in_words(seconds: list[float]) -> str:
    return (
        f"median {median(seconds):.2f}, 95% {percentile(seconds, 0.95):.2f}, longest {max(seconds):.2f} s "
        f"of {len(seconds)}"
    )
