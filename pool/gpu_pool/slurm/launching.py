"""A kernel's job, or step: what it is told, where that stands, how far it has come, and how it is reached."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from jupyter_core.paths import jupyter_data_dir

from gpu_pool.slurm import jobs
from gpu_pool.slurm.commands import TOKEN
from gpu_pool.slurm.jobs import Job
from gpu_pool_client import (
    BadRequest,
    KernelCommand,
    KernelPod,
    Lease,
    Place,
    PodPhase,
    PoolUnreachable,
    SliceRequest,
)
from gpu_pool_client._log import get_logger
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


_UNREACHED: Final = (
    "Its job runs on {}, which cannot be reached from here, and has not connected to this server either."
)
#: Seconds from when a kernel listens until its job is cancelled where neither way leads to it: it has a GPU.
#: Its job tries all addresses of this server beside one another, and again and again: each time takes less
#: than half as long, also where a firewall answers nothing (``gpu_pool_kernels.inkernel.reverse_tunnel``).
_REACHED_BY: Final = 30.0
_NEVER_REACHED: Final = (
    "Slurm job {job} was given up, and is cancelled: for {seconds:g} s its kernel on {node} could not be "
    "reached from here, and {node} could not connect to this server at {addresses} either. One of both has "
    "to be possible. Ask your administrator, who can set c.SlurmSettings.server_address and server_ports."
)
#: The file in a job's folder that says that one of its pool's processes has ended it.
ENDED: Final = "ended"
_SUSPENDED: Final = "Slurm has suspended its job: it goes on once it is resumed."
_IN_PROFILE: Final = "Its job has begun, and runs the profile of its login shell."
_STAGES: Final = {"CONFIGURING": "Its node is being prepared.", "RUNNING": "Its job has begun."}


@dataclass(slots=True)
class KernelJob:
    """The job of one lease's kernel, as this process knows it."""

    id: str
    folder: Path
    #: What it was launched with; None where another process has launched it.
    command: KernelCommand | None
    #: What it asks for; None there, too.
    request: SliceRequest | None = None
    #: That it is to end, and that Slurm knows it: it may not answer meanwhile.
    ended_by_us: bool = False
    is_cancelled: bool = False
    #: How it was seen last.
    seen: Job = field(default_factory=lambda: Job("", "PENDING"))
    #: What its main process has said of where it listens.
    ports: Mapping[str, int] = field(default_factory=dict)
    #: Where its kernel is reached from here; empty as long as it is not.
    address: str = ""
    #: When this process first knew of it, and that it listens, by the monotonic clock.
    known_at: float = field(default_factory=time.monotonic)
    listens_at: float = float("inf")
    #: Why it is given up; empty as long as it is not.
    given_up: str = ""

    def was_taken(self) -> str:
        """Say why it has ended, if nobody has ended it who may; empty otherwise."""
        if self.ended_by_us or not (why := self.given_up or jobs.how_ended(self.seen)):
            return ""
        # Whoever launched it removes its folder, and says before in it that the job is ended.
        return why if self.folder.is_dir() and not (self.folder / ENDED).exists() else ""

    async def reach(
        self, through: Mapping[str, int], addresses: Mapping[str, str], own: Sequence[str]
    ) -> None:
        """Find out how a kernel that runs is reached: on its node, or by the tunnel that its job opens.

        Parameters
        ----------
        through
            The ports on this machine at which that tunnel ends, by name; empty where there is none.
        addresses
            Those of nodes, by name; others have their name for one.
        own
            At which of them jobs try to reach this server.
        """
        if not self.ports:
            self.ports, node = read_ports(self.folder)
            if self.ports:
                self.listens_at = time.monotonic()
            if self.seen.waits and node:
                self.seen = replace(self.seen, state="RUNNING", node=node)
        if self.address or not self.ports or not self.seen.node or self.seen.is_over:
            return
        address = addresses.get(self.seen.node, self.seen.node)
        if await answers(address, self.ports["supervisor"]):
            self.address = address
        elif through:
            self.address, self.ports = "127.0.0.1", through
        else:
            if time.monotonic() > self.listens_at + _REACHED_BY:
                self.given_up = _NEVER_REACHED.format(
                    job=self.id, seconds=_REACHED_BY, node=self.seen.node, addresses=" or ".join(own)
                )
            return
        how = f"at {address}" if self.address == address else f"through the tunnel from {self.seen.node}"
        get_logger().info("The kernel of Slurm job %s is reached %s.", self.id, how)

    def phase(self, place: Place | None, trouble: str) -> KernelPod:
        """Return in which phase its kernel is.

        Parameters
        ----------
        place
            Its place in Slurm's queue; None once it has begun, or is over.
        trouble
            Why its queue is not known; empty where it is.
        """
        if self.ended_by_us:
            return KernelPod("", PodPhase.ENDED, message="It was ended.")
        if self.given_up:
            return KernelPod("", PodPhase.ENDED, message=self.given_up)
        if self.seen.is_over:
            why = jobs.how_ended(self.seen)
            code = None if why else self.seen.exit_status or 0
            return KernelPod("", PodPhase.ENDED, message=why or self._failed(code or 0), exit_code=code)
        trouble = trouble or (_SUSPENDED if self.seen.state in ("SUSPENDED", "STOPPED") else "")
        if self.address:
            return KernelPod("", PodPhase.RUNNING, self.address, trouble, ports=self.ports)
        if place is not None:
            return KernelPod("", PodPhase.QUEUED, message=trouble or place.told(time.time()))
        if self.ports and self.seen.node:
            trouble = trouble or _UNREACHED.format(self.seen.node)
        stage = _STAGES.get(self.seen.state, "")
        if self.seen.state == "RUNNING" and not self.ports and is_in_profile(self.folder):
            stage = _IN_PROFILE
        return KernelPod("", PodPhase.STARTING, message=trouble or stage)

    def _failed(self, code: int) -> str:
        why = never_began(self.folder, code)
        if not code and not why:
            return ""
        return f"Slurm job {self.id} ended with status {code}.{why}{last_words(self.folder)}"
