"""Which processes of a lease the driver could not move, found before any of them is touched."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpu_pool.devices.activity import environment_of

#: Libraries of RAPIDS, whose memory pools are often of managed memory.
_MANAGING: Final = re.compile(rb"/lib(rmm|cudf|cuml|cugraph)[^/\n]*\.so")
#: With it TensorFlow and JAX use managed memory.
_TOLD: Final = b"TF_FORCE_UNIFIED_MEMORY=1"


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What is known of a process that has a GPU open, or may have."""

    pid: int
    #: Whether NVML lists it among those that compute on a GPU.
    computes: bool
    #: By what it is likely to have managed memory (UVM); empty where nothing says so.
    managed_by: str = ""


def facts_of(pid: int, computing: Collection[int]) -> ProcessFacts:
    """Look at a process; ``computing`` are those that compute on a GPU."""
    return ProcessFacts(pid, pid in computing, _managed_by(pid))


def _managed_by(pid: int) -> str:
    if _TOLD in environment_of(pid):
        return _TOLD.decode()
    with contextlib.suppress(OSError):  # it has ended, or hides what it has loaded
        if found := _MANAGING.search(Path(f"/proc/{pid}/maps").read_bytes()):
            return f"lib{found[1].decode()}"
    return ""


def why_kept(processes: Sequence[ProcessFacts], *, insisted: bool) -> str:
    """Return why these processes of one lease are not to be moved; empty where it may be tried.

    ``insisted`` says that the administrator has it tried where it is not known to work.
    """
    forked = [each.pid for each in processes if not each.computes]
    if forked:
        return (
            f"process {forked[0]} has the GPU open, or may have, and computes nothing there, like one that "
            "was forked after CUDA was used, such as a DataLoader's worker: the driver cannot move that"
        )
    if insisted:
        return ""
    if len(processes) > 1:
        pids = ", ".join(str(each.pid) for each in processes)
        return f"several of its processes ({pids}) compute on the GPU, and may share memory there"
    managed = [f"process {each.pid} uses {each.managed_by}" for each in processes if each.managed_by]
    return f"{managed[0]}, and may have managed memory (UVM)" if managed else ""
