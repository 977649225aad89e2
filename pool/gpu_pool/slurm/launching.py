"""What a kernel's job, or step, is told, where that stands, and how its node is reached."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from jupyter_core.paths import jupyter_data_dir

from gpu_pool.slurm.commands import TOKEN
from gpu_pool_client import BadRequest, KernelCommand, Lease, PoolUnreachable
from gpu_pool_client._pods import POD_VARIABLE, ROOM

#: Seconds without its server after which a kernel's job ends.
ALONE: Final = 120
#: Seconds for which a node is tried.
_REACHED_WITHIN: Final = 2.0
#: Seconds between two attempts meanwhile: the supervisor may just be starting.
_REACHED_EVERY: Final = 0.02
#: Characters of a job's last line that are shown.
_MOST_SHOWN: Final = 200
#: The file in a job's folder in which its main process says where it listens.
_ADDRESS: Final = "address.json"
#: And the one that says what it is to run, which its main process removes as it reads it.
_ORDER: Final = "kernel.json"
#: And the one that its script makes first.
_BEGUN: Final = "begun"
_NO_SCRIPT: Final = (
    " Its script was not reached: a profile (/etc/profile, ~/.bash_profile or ~/.profile) has ended its "
    "login shell, or has started another shell in its place. Let it do so only where somebody types: "
    "case $- in *i*) exec zsh;; esac"
)
_NO_KERNEL: Final = " A line of its prologue has ended it, before the kernel was started."
#: Seconds after which the folder of a job, or of a step, may be left over.
LEFT_OVER_AFTER: Final = 600.0
#: Bytes of the end of a job's output that are read.
_MOST_READ: Final = 1 << 16
#: How a line begins that Slurm adds to that output; newer versions (seen with 26.05) write the time alone.
SLURMS_OWN: Final = r"^(?:slurmstepd\S*:|\[\d{4}-\d\d-\d\dT[\d:.]+\])"
#: Where a job's output goes, in its folder.
OUTPUT: Final = "output.txt"


def base() -> Path:
    """Return where the folders of jobs are, which nodes see as well."""
    return Path(jupyter_data_dir()) / "gpu-pool-jobs"


def write_order(
    name: str,
    lease: Lease,
    kernel: KernelCommand,
    *,
    alone: float,
    tunnel: Mapping[str, object],
    variables: Mapping[str, str],
) -> Path:
    """Write what a job is to run where only this user reads it; return the folder.

    Parameters
    ----------
    name
        How the folder's name begins.
    lease, kernel
        What the kernel has, and which it is.
    alone
        Seconds without its server after which it ends.
    tunnel
        How it connects to its server, see ``gpu_pool_kernels.inkernel.reverse_tunnel``; empty if it does not.
    variables
        The kernel's variables besides its own and the pool's.

    Raises ``BadRequest`` where the command is not that of a machine with the same files.
    """
    if not kernel.argv_here:
        raise BadRequest(
            "This kernel's command cannot be run in a Slurm job.", "Start it by a Jupyter server."
        )
    base().mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = base() / f"{name}-{time.time_ns()}"
    folder.mkdir(mode=0o700)
    ours = {name: value for name, value in lease.environment.items() if name.startswith("GPU_POOL_")}
    told = {
        "connection": {**kernel.connection, "ip": "0.0.0.0", "transport": "tcp"},  # noqa: S104
        "argv": kernel.argv_here,
        "environment": {**kernel.environment, **ours, **variables, POD_VARIABLE: "1"},
        "folder": kernel.folder_here,
        "preload": kernel.preload,
        "alone": alone,
        "tunnel": tunnel,
    }
    with open(os.open(folder / _ORDER, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(told, file)
    return folder


def launcher() -> Path:
    """Return what a job's main process runs, which is known before there is anything to remove again.

    Raises ``PoolUnreachable`` where that is not installed.
    """
    found = find_spec("gpu_pool_kernels")
    if found is None or not found.submodule_search_locations:
        raise PoolUnreachable("The kernels' part of jupyter-gpu-pool is not installed.", "Install it again.")
    return Path(next(iter(found.submodule_search_locations)), "inkernel", "launch.py")


def command(kernel: KernelCommand, launcher: Path, folder: Path) -> list[str]:
    """Return the command of a job's main process, which runs what :func:`write_order` has written."""
    return [kernel.argv_here[0], str(launcher), "job", str(folder)]


def script(prologue: str, command: Sequence[str], folder: Path) -> str:
    """Return the script of a job, which runs a prologue and then this command.

    Its shell is a login shell, as the site's profile makes it: Slurm takes a second or more where it is to do
    that. After its first line sbatch takes no comment of the prologue for an option of its own. The user's
    token for Slurm is in each job that is submitted with it, whatever sbatch is told; it ends here.
    """
    begins = f": > {shlex.quote(str(folder / _BEGUN))}\nunset {TOKEN}"
    return f"#!/bin/bash -l\n{begins}\n{prologue}\n{ROOM}exec {shlex.join(command)}\n"


def is_in_profile(folder: Path) -> bool:
    """Whether a job that runs has not come to its script."""
    return not (folder / _BEGUN).exists()


def never_began(folder: Path, status: int) -> str:
    """Return why nothing was started in a job that has ended, in a sentence; empty where something was."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - one look at all
    except OSError:
        return ""
    if _ORDER not in names:
        return ""
    if _BEGUN not in names:
        return _NO_SCRIPT
    return "" if status else _NO_KERNEL


def has_begun(folder: Path) -> bool:
    """Whether a job's main process has said where it listens."""
    return (folder / _ADDRESS).exists()


def read_ports(folder: Path) -> tuple[dict[str, int], str]:
    """Return the ports at which a job's main process has said that it listens, and its node; or nothing."""
    with suppress(OSError, ValueError):
        told = json.loads((folder / _ADDRESS).read_text())
        node = told.pop("node")
        return told, node
    return {}, ""


def output_end(folder: Path) -> str:
    """Return the end of what a job has written; empty where nothing can be read. It may be gigabytes."""
    with suppress(OSError), (folder / OUTPUT).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MOST_READ))
        return file.read().decode(errors="replace")
    return ""


def last_words(folder: Path) -> str:
    """Return a sentence with the last line that a job has written; empty where there is none.

    What Slurm adds to say that it has ended counts only where there is nothing else.
    """
    lines = output_end(folder).strip().splitlines()
    own = [line for line in lines if not (line.startswith("srun: ") or re.match(SLURMS_OWN, line))]
    last = (own or lines)[-1:]
    return f" Its last words: {last[0][:_MOST_SHOWN]}" if last else ""


async def answers(address: str, port: int) -> bool:
    """Whether somebody listens there, or soon does."""
    give_up_at = time.monotonic() + _REACHED_WITHIN
    while (left := give_up_at - time.monotonic()) > 0:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), left)
        except ConnectionRefusedError:  # noqa: PERF203 - it waits most of the time
            await asyncio.sleep(_REACHED_EVERY)
        except (OSError, asyncio.TimeoutError):
            return False
        else:
            writer.close()
            return True
    return False
