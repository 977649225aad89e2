"""Small disks that can be filled, where root is at hand."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Disk:
    """A file system of its own, in memory."""

    path: Path

    def fill(self) -> None:
        """Leave no room for another byte."""
        with (self.path / "fill").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 20)):
                pass

    def take_all_inodes(self) -> None:
        """Leave no room for another file."""
        with contextlib.suppress(OSError):
            for number in range(10_000):
                (self.path / f"fill-{number}").touch()

    def empty(self) -> None:
        """Make room again."""
        for file in self.path.glob("fill*"):
            file.unlink()

    def write_protect(self) -> None:
        """Let nobody write any more."""
        _mount("-o", "remount,ro", str(self.path))


@contextmanager
def small_disk(folder: Path, size: str = "1m", inodes: int = 64) -> Iterator[Disk]:
    """Mount a disk at ``folder``, which 0 inodes do not limit; skip the test where that is not allowed."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if os.geteuid() != 0:
        pytest.skip("only root can mount a disk")
    try:
        _mount("-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes},mode=700", "tmpfs", str(folder))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    try:
        yield Disk(folder)
    finally:
        # Lazily: a process that a failed test has left behind may have files open there.
        subprocess.run(["umount", "--lazy", folder], check=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True)
