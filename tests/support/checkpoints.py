"""Checkpoints of device memory, and what is left of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_pool.enforcement.checkpoint import Checkpoint
from gpu_pool.settings import PoolSettings
from gpu_pool.tuning import Tuning
from support.cuda_stub import Driver


def checkpoint(folder: Path, tuning: Tuning = Tuning(), **settings: Any) -> Checkpoint:  # noqa: B008
    """Return what suspends processes; nobody waits until memory is free that the driver's stand-in has."""
    settings["tuning"] = replace(tuning, memory_free_within=0)
    return Checkpoint(folder / "suspended", PoolSettings(**{"checkpoint": "on", **settings}))


def records(folder: Path) -> list[str]:
    return [path.name for path in (folder / "suspended").iterdir() if not path.name.startswith(".")]


def states(driver: Driver, pids: list[int]) -> list[str]:
    return [driver.state(pid) for pid in pids]
