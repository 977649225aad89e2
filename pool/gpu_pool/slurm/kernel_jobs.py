"""The job of a kernel: what is known of it, in which phase its kernel is, and how that is reached."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from gpu_pool.slurm import jobs, launching
from gpu_pool.slurm.jobs import Job
from gpu_pool_client import KernelCommand, KernelPod, Place, PodPhase, SliceRequest
from gpu_pool_client._log import get_logger

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
            self.ports, node = launching.read_ports(self.folder)
            if self.ports:
                self.listens_at = time.monotonic()
            if self.seen.waits and node:
                self.seen = replace(self.seen, state="RUNNING", node=node)
        if self.address or not self.ports or not self.seen.node or self.seen.is_over:
            return
        address = addresses.get(self.seen.node, self.seen.node)
        if await launching.answers(address, self.ports["supervisor"]):
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
        if self.seen.state == "RUNNING" and not self.ports and launching.is_in_profile(self.folder):
            stage = _IN_PROFILE
        return KernelPod("", PodPhase.STARTING, message=trouble or stage)

    def _failed(self, code: int) -> str:
        why = launching.never_began(self.folder, code)
        if not code and not why:
            return ""
        return f"Slurm job {self.id} ended with status {code}.{why}{launching.last_words(self.folder)}"
