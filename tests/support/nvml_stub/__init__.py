"""A stand-in for the NVIDIA driver's library, for tests on machines without a GPU.

The real nvidia-ml-py loads it in a subprocess and is answered from a scenario,
the text that ``stub.c`` describes at its top.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from support.clean_environment import MARK
from support.compiled import shared_library

_SOURCE = Path(__file__).with_name("stub.c")


def build(folder: Path, *absent: str) -> Path:
    """Build the library into ``folder`` without the functions named in ``absent``; return ``folder``."""
    renamed = [f"-D{function}=absent_{number}" for number, function in enumerate(absent)]
    return shared_library(folder, "libnvidia-ml.so.1", _SOURCE, *renamed)


@functools.cache
def complete() -> Path:
    """Build all of the library into a folder of its own, once; return the folder."""
    return build(Path(tempfile.mkdtemp(dir=os.environ[MARK])))


def run(folder: Path, scenario: str, code: str, **environ: str) -> bytes:
    """Run Python ``code`` in a process whose NVML is the one in ``folder``; return what it printed.

    Anything on its standard error, such as the stub's complaint about a
    missing shutdown, fails the test.
    """
    told = folder / "scenario.txt"
    told.write_text(scenario)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GPU_POOL_")}
    stub = {"LD_LIBRARY_PATH": str(folder), "NVML_STUB_SCENARIO": str(told)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **stub, **environ},
        capture_output=True,
        check=False,
        timeout=120,
    )
    complaints = done.stderr.decode()
    assert not complaints, complaints
    assert done.returncode == 0
    return done.stdout


class Machine:
    """A machine whose GPUs are described by a scenario, which may be replaced while programs run."""

    def __init__(self, folder: Path, scenario: str = "") -> None:
        self._path = folder / "scenario.txt"
        #: What lets a program see them.
        self.environment = {
            "LD_LIBRARY_PATH": str(complete()),
            "NVML_STUB_SCENARIO": str(self._path),
            "GPU_POOL_DEVICES": "",
        }
        self.show(scenario)

    def show(self, scenario: str) -> None:
        """Let this be what there is from now on."""
        draft = self._path.with_suffix(".draft")
        draft.write_text(f"driver 550.54.14\n{scenario}")
        draft.replace(self._path)
