"""Checkpoints of device memory, and what is left of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from gpu_pool.enforcement.checkpoint import Checkpoint
from gpu_pool.settings import PoolSettings
from gpu_pool.tuning import Tuning
from support.cuda_stub import Driver


class MakeCheckpoint(Protocol):
    """Makes what suspends processes; nobody waits until memory is free that the driver's stand-in has."""

    def __call__(self, tuning: Tuning = ..., **settings: Any) -> Checkpoint: ...


@contextmanager
def checkpoints(folder: Path) -> Iterator[MakeCheckpoint]:
    """Let some be made, as the processes of one pool do; they are closed in the end."""
    with ExitStack() as made:

        def make(tuning: Tuning = Tuning(), **settings: Any) -> Checkpoint:  # noqa: B008
            settings["tuning"] = replace(tuning, memory_free_within=0)
            one = Checkpoint(folder / "suspended", PoolSettings(**{"checkpoint": "on", **settings}))
            return made.enter_context(closing(one))

        yield make


def records(folder: Path) -> list[str]:
    return [path.name for path in (folder / "suspended").iterdir() if not path.name.startswith(".")]


def states(driver: Driver, pids: list[int]) -> list[str]:
    return [driver.state(pid) for pid in pids]
