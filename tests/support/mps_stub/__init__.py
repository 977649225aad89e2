"""Stand-ins for nvidia-cuda-mps-control, its server and nvidia-smi, for machines without a GPU.

They are real programs on ``PATH`` and real processes: see the top of
``daemon.py`` and ``smi.py`` for what they can be told.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_pool.enforcement.mps import programs
from gpu_pool_client import Device, Holder, Lease, LeaseState, Slice, SliceRequest
from support.compiled import shared_library

_HERE = Path(__file__).parent
V100 = Device(
    "GPU-11111111-2222-3333-4444-555555555555", 0, "Tesla V100-SXM2-32GB", 32494, driver="550.54.14"
)
OTHER = Device(
    "GPU-99999999-2222-3333-4444-555555555555", 1, "Tesla V100-SXM2-32GB", 32494, driver="550.54.14"
)


def lease(name: str, milli: int = 20, *devices: Device, user: str = "nobody-of-that-name") -> Lease:
    """Return a held lease of that many thousandths of each device (the V100 by default)."""
    parts = [Slice(each, milli, each.memory_mib * milli // 1000, 2) for each in devices or (V100,)]
    request = SliceRequest(milli=milli, count=len(parts))
    return Lease(name, name, request, Holder(user), LeaseState.HELD, 0.0, 0.0, slices=tuple(parts))


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


@dataclass
class Stub:
    """The stand-ins in a folder."""

    folder: Path

    def tell(self, **scenario: object) -> None:
        """Tell the control daemons how to behave from now on; without anything, well."""
        (self.folder / "scenario.json").write_text(json.dumps(scenario))

    def asked(self) -> list[str]:
        """Return what the control daemons were asked, in order, and forget it."""
        log = self.folder / "asked.log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.write_text("")
        return lines

    def cards(self, **changes: object) -> dict[str, Any]:
        """Change facts of the V100 that nvidia-smi knows, and return all that it knows."""
        file = self.folder / "nvidia-smi.json"
        state: dict[str, Any] = json.loads(file.read_text())
        state[V100.uuid] |= changes
        file.write_text(json.dumps(state))
        return state

    def mode(self) -> str:
        """Return the compute mode of the V100."""
        return str(self.cards()[V100.uuid]["mode"])

    def processes(self, kind: str = "nvidia-cuda-mps-") -> list[psutil.Process]:
        """Return the daemons and servers that run from this folder."""
        named = f"{self.folder / kind}".encode()
        return [psutil.Process(pid) for pid in psutil.pids() if named in _words(pid)]

    def kill(self, kind: str = "nvidia-cuda-mps-") -> None:
        """Kill these processes, and wait until they are gone."""
        found = self.processes(kind)
        for each in found:
            each.send_signal(signal.SIGKILL)
        # Not until somebody has reaped them, which may take init a second.
        deadline = time.monotonic() + 60
        while any(_words(each.pid) for each in found):
            assert time.monotonic() < deadline, "the stand-ins do not die"
            time.sleep(0.002)

    def hide_others(self, environ: pytest.MonkeyPatch) -> None:
        """Hide all other processes from whoever looks for MPS here, as a pid namespace would.

        Tests run side by side on one machine, and each finds MPS as it left it.
        """
        everything = programs.pids

        def own() -> list[int]:
            mark = f"{self.folder}/".encode()
            return [pid for pid in everything() if mark in _words(pid)]

        environ.setattr(programs, "pids", own)

    def start_elsewhere(self, pipe: Path, **how: Any) -> None:
        """Start a daemon that is not the pool's."""
        pipe.mkdir(parents=True)
        environ = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": f"{pipe}", "CUDA_MPS_LOG_DIRECTORY": f"{pipe}"}
        subprocess.run([self.folder / "nvidia-cuda-mps-control", "-d"], env=environ, check=True, **how)


def install(folder: Path, environ: pytest.MonkeyPatch) -> Stub:
    """Put the stand-ins into ``folder``, and that first on ``PATH``."""
    folder.mkdir(parents=True, exist_ok=True)
    programs: Mapping[str, str] = {
        "nvidia-cuda-mps-control": (_HERE / "control.py").read_text(),
        "nvidia-cuda-mps-server": "import signal\nsignal.pause()\n",
        "nvidia-smi": (_HERE / "smi.py").read_text(),
    }
    for name, text in programs.items():
        # Without site-packages they start in a third of the time.
        (folder / name).write_text(f"#!{shutil.which(sys.executable)} -IS\n{text}")
        (folder / name).chmod(0o755)
    shutil.copy(_HERE / "daemon.py", folder)
    state = {V100.uuid: {"mode": "Default"}, OTHER.uuid: {"mode": "Default"}, "calls": []}
    (folder / "nvidia-smi.json").write_text(json.dumps(state))
    environ.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return Stub(folder)


@contextmanager
def installed(folder: Path, environ: pytest.MonkeyPatch, *, alone: bool = False) -> Iterator[Stub]:
    """Install the stand-ins; whatever of them still runs in the end is ended.

    Others of this machine are hidden from this process. With ``alone`` there are none: programs
    that it starts would find them, however many processes run these tests.
    """
    with open(Path(tempfile.gettempdir(), f"gpu-pool-tests-mps-{os.getuid()}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        stub = install(folder, environ)
        stub.hide_others(environ)
        yield stub
        stub.kill()


def build_cuda(folder: Path) -> Path:
    """Build a stand-in for libcuda.so.1 into ``folder``; return ``folder``."""
    return shared_library(folder, "libcuda.so.1", _HERE / "cuda.c")
