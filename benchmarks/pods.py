"""Kernels in pods: what the relay and its encryption cost, compared with a kernel that is spoken to directly.

A pod is a process of this machine at another loopback address, so the network is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from benchmarks.kernel_proxy import OUTPUT_BYTES, in_turn, started
from benchmarks.kernels import prepare
from benchmarks.report import Line, compared
from gpu_pool_provisioner import pools
from support.pods import PodPool


def measure() -> dict[str, dict[str, list[float]]]:
    """Run the same directly and in a pod, in turn; return seconds."""
    pools.connect = PodPool  # type: ignore[assignment]
    return in_turn({name: started(name) for name in ("stock", "ours")})


def child() -> Any:
    """Run this module in a process of its own, with kernelspecs and a store of its own."""
    with tempfile.TemporaryDirectory() as name:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.pods"],
            cwd=name,
            env={**os.environ, **prepare(Path(name)), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    found = child()
    for kind, what in (
        ("execute", "one execute in a pod, to the direct connection"),
        ("output", f"an output of {OUTPUT_BYTES // 10**6} MB from a pod, to the direct connection"),
    ):
        pairs = zip(found["ours"][kind], found["stock"][kind], strict=True)
        ms = [(1000 * ours, 1000 * stock) for ours, stock in pairs]
        yield compared(what, ms, "medians", unit="ms")


if __name__ == "__main__":
    print(json.dumps(measure()))
