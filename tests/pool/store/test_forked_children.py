"""A process that was killed has no lock any more, though a child that was forked from it lives on.

An extension of a Jupyter server may fork it at any time, as :mod:`multiprocessing` does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from gpu_pool.store.locks import FairLock, LivenessLocks, Ownership
from support.pools import running

BEGINS = """
import os, signal, sys
from pathlib import Path
from gpu_pool.store.locks import FairLock, LivenessLocks, Ownership
def stay(said):
    if not (child := os.fork()):
        os.close(sys.stdout.fileno())
        signal.pause()
    print(child, said, flush=True)
    signal.pause()
"""


@contextmanager
def killed(code: str) -> Iterator[str]:
    """Kill a process once it has forked a child, which lives inside the block; yield what it said."""
    with running(BEGINS + code) as server:
        assert server.stdout is not None
        child, _, said = server.stdout.readline().rstrip("\n").partition(" ")
        try:
            server.kill()
            server.wait()
            os.kill(int(child), 0)  # it lives
            yield said
        finally:
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)


@pytest.mark.timeout(120)
def test_whoever_is_next_has_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with killed(f"with FairLock(Path({str(path)!r})):\n    stay('')"), closing(FairLock(path)) as lock, lock:
        pass


def test_it_gives_no_sign_of_life(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        closing(LivenessLocks(path)) as locks,
        killed(f"stay(LivenessLocks(Path({str(path)!r})).own())") as said,
    ):
        assert not locks.beats(int(said))


def test_another_one_may_own_the_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with killed(f"owner = Ownership(Path({str(path)!r}), owner=True)\nstay('')"):
        Ownership(path, owner=True).close()
