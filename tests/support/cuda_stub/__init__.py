"""A stand-in for the NVIDIA driver's libraries that can checkpoint, for tests without a GPU.

NVIDIA's own cuda-bindings and nvidia-ml-py load it, in the program that the
pool runs for them. ``stub.c`` describes at its top what can be made to go wrong.
"""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.compiled import shared_library

_SOURCE = Path(__file__).with_name("stub.c")


class Driver:
    """The GPUs, and the processes that use them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: Stands in for the file that CUDA opens in every process that it is initialised in.
        self.uvm = folder / "uvm"
        self.uvm.touch()

    def scenario(self, *lines: str) -> None:
        """Let these things go wrong from now on, and no others."""
        (self.folder / "scenario").write_text("".join(f"{line}\n" for line in lines))

    @contextmanager
    def process(self, mib: int = 512, gpu: int = 1) -> Iterator[int]:
        """Run a process that holds so much memory on a GPU; give its pid."""
        with open(self.uvm) as uvm, subprocess.Popen(["sleep", "600"], stdin=uvm) as process:
            (self.folder / str(process.pid)).write_text(f"running {mib} {gpu}\n")
            try:
                yield process.pid
            finally:
                process.kill()

    def state(self, pid: int) -> str:
        """Return the state of a process."""
        return (self.folder / str(pid)).read_text().split()[0]

    def set_state(self, pid: int, state: str) -> None:
        """Leave a process in a state, as somebody does who is ended in the middle."""
        _, rest = (self.folder / str(pid)).read_text().split(maxsplit=1)
        (self.folder / str(pid)).write_text(f"{state} {rest}")

    def calls(self, pid: int) -> list[str]:
        """Return what was called for a process, in order."""
        return [call for call, whom in self._called() if whom == pid]

    def workers(self) -> list[int]:
        """Return the pids of the processes that have initialised CUDA to call it, in order."""
        return [whom for call, whom in self._called() if call == "init"]

    def _called(self) -> list[tuple[str, int]]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(call, int(whom)) for call, whom in map(str.split, lines)]


def build(folder: Path) -> Path:
    """Build both libraries into ``folder``; return it."""
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-bindings is not installed")
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        shared_library(folder, name, _SOURCE, "-ldl")
    return folder
