"""Checkpoints of device memory, and what is left of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_pool.enforcement.checkpoint import Checkpoint
from gpu_pool.settings import PoolSettings
from support.cuda_stub import Driver


def checkpoint(folder: Path, **settings: Any) -> Checkpoint:
    return Checkpoint(folder / "suspended", PoolSettings(checkpoint=True, **settings))


def records(folder: Path) -> list[str]:
    return [path.name for path in (folder / "suspended").iterdir() if not path.name.startswith(".")]


def states(driver: Driver, pids: list[int]) -> list[str]:
    return [driver.state(pid) for pid in pids]
