"""Measure slices of a real GPU: ``python -m benchmarks.gpu FOLDER`` writes gpu.json and gpu.md there.

It needs a GPU, PyTorch with CUDA, and nothing else that is heavy; see
docs/developer/gpu.md. ``--dry-run`` runs the same code on the CPU with tiny
sizes, to see that it works.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.gpu import may_change_settings, opened, torch_facts, why_not

from benchmarks import gpu_density, gpu_report, gpu_training
from benchmarks.gpu_plan import MPS, TIER_OF, TURNS, Plan
from benchmarks.report import Line
from gpu_pool.devices import discover
from gpu_pool.enforcement import TierFailed
from gpu_pool_client import Device

#: Of the time, what training may use; the rest is for many processes at once.
TRAINING = 0.4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("folder", type=Path, help="where gpu.json and gpu.md are written")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing after that many (8)")
    parser.add_argument("--most", type=int, default=48, help="the most processes at once (48)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny sizes")
    return parser.parse_args()


def find_device() -> Device:
    """Return the GPU to measure; end the program with a plain reason where there is none."""
    found = discover({})
    whole = [device for device in found.devices if device.mig_profile is None]
    if not whole:
        sys.exit(f"No GPU to measure. {' '.join(found.problems) or 'All are divided into MIG instances.'}")
    if not torch_facts(whole[0].uuid).get("available"):
        sys.exit("This Python has no PyTorch that finds the GPU.")
    return whole[0]


def make_plan(told: argparse.Namespace, scratch: Path) -> Plan:
    ends_at = time.monotonic() + told.minutes * 60
    if told.dry_run:
        if not torch_facts():
            sys.exit("This Python has no PyTorch; a dry run needs one, for the CPU at least.")
        device = Device("SIM-dry-run", 0, "no GPU", 81920, simulated=True)
        plan = Plan(device, (TURNS,), scratch, ends_at, "cpu", training_images=512, testing_images=128)
        return replace(plan, epochs=1, rounds=1, together=0.2, most=min(told.most, 2))
    device = find_device()
    sharings = (TURNS,) if why_no_mps(device) else (TURNS, MPS)
    return Plan(device, sharings, scratch, ends_at, most=told.most)


@functools.cache
def why_no_mps(device: Device) -> str:
    """Say why MPS cannot be measured; empty where it can. It is tried, so that nothing is lost later."""
    why = why_not(TIER_OF[MPS], device)
    if why:
        return why
    try:
        with opened(TIER_OF[MPS]) as tier:
            tier.prepare(device)
    except TierFailed as failure:
        return str(failure)
    return ""


def describe(plan: Plan) -> dict[str, Any]:
    """Return on what it is measured."""
    device = plan.device
    torch = torch_facts("" if device.simulated else device.uuid)
    mode = "the pool's own compute mode" if may_change_settings() else "the compute mode that was found"
    return {
        "dry_run": device.simulated,
        "card": device.model,
        "memory_mib": device.memory_mib,
        "driver": device.driver,
        "cuda": torch["cuda"],
        "torch": torch["torch"],
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "mps": why_no_mps(device) or f"yes, in {mode}",
        "date": datetime.date.today().isoformat(),
    }


def lines(result: Mapping[str, Any]) -> Iterator[Line]:
    """Yield the ratios."""
    for row in gpu_training.summary(result["training"]):
        if row["ratio"] is not None and row["size"] != gpu_training.SIZES[0]:
            made_of = f"{row['images_per_second']:.0f} images/s, accuracy {row['accuracy']:.3f}"
            yield Line(f"{row['sharing']}: {row['size']} alone, to 100% alone", row["ratio"], made_of)
    for row in gpu_density.summary(result["density"]):
        if row["total_to_alone"] is not None:
            name = f"{row['sharing']}: {row['processes']} at {gpu_density.SIZE} in all, to one alone"
            yield Line(name, row["total_to_alone"], f"{row['total']:.0f} images/s, each {row['each']:.0f}")


def write(folder: Path, result: Mapping[str, Any]) -> None:
    """Write what is known so far: whoever ends the program keeps what was measured."""
    (folder / "gpu.json").write_text(json.dumps(result, indent=2) + "\n")
    (folder / "gpu.md").write_text(gpu_report.page(result))


def main() -> int:
    """Measure, print the ratios, and return 0."""
    told = arguments()
    told.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        plan = make_plan(told, Path(scratch))
        result: dict[str, Any] = {"facts": describe(plan), "training": [], "density": [], "finished": False}
        plan.draw()
        parts = {"training": (gpu_training, plan.within(TRAINING)), "density": (gpu_density, plan)}
        for name, (part, its_plan) in parts.items():
            for row in part.measure(its_plan):
                result[name].append(row)
                write(told.folder, result)
                print(name, json.dumps(row), flush=True)
        result["finished"] = not plan.is_over
        write(told.folder, result)
    for line in lines(result):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
