"""What the service needs of a pool: the contract of ``Pool``, asked in somebody else's name, and some more.

``EmbeddedPool`` and the cluster's pool are such pools. What a method does and raises, ``Pool`` says in full.
What is added to that contract is the caller, in whose name is asked: their groups say which courses
they may use, the server that asks is where their kernels start, and only the process that asked for a
lease may take its slices away. None stands for this process, whose groups are those that the system knows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from gpu_pool.audit import AuditLog
from gpu_pool.caller import Caller
from gpu_pool.devices.inventory import Reading
from gpu_pool.policy.revocation import Effect
from gpu_pool.policy.sharing import CourseVersion
from gpu_pool_client import (
    Activity,
    Device,
    DeviceStatus,
    EndedLease,
    EndReason,
    Holder,
    KernelCommand,
    KernelPod,
    Lease,
    Outlook,
    PoolStatus,
    Process,
    SliceRequest,
)


class ServedPool(Protocol):
    """A pool that can be served. It is open from ``async with`` to its end."""

    #: Where it is, in full.
    url: str
    #: None where decisions are not written down.
    audit: AuditLog | None

    @property
    def boot(self) -> str:
        """The boot of the machine whose end ends all leases; empty for a pool that outlives machines."""

    async def __aenter__(self) -> Any:
        """Open it."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it; leases live on."""

    # -- Requests ----------------------------------------------------------

    async def request(
        self,
        request: SliceRequest,
        holder: Holder,
        key: str,
        *,
        caller: Caller | None = None,
    ) -> Lease:
        """Ask for a slice."""

    async def wait(self, lease_id: str, timeout: float | None = None) -> Lease:
        """Wait until a lease is held; nothing changes when that is cancelled or takes too long."""

    async def forecast(
        self,
        request: SliceRequest,
        holder: Holder,
        *,
        caller: Caller | None = None,
    ) -> Outlook | None:
        """Say what a request would meet if it were made now."""

    async def offers(
        self, holder: Holder, *, caller: Caller | None = None
    ) -> tuple[SliceRequest, ...] | None:
        """Return the slices that the holder's course offers now."""

    async def find(self, key: str) -> Lease | None:
        """Return the lease of a key as the store has it; None if there was none."""

    # -- Leases ------------------------------------------------------------

    async def get_lease(self, lease_id: str) -> Lease:
        """Return the lease as it is now."""

    async def explain(self, lease_id: str) -> Outlook:
        """Say why a lease waits."""

    async def activity(self, lease_id: str) -> Activity:
        """Return what the lease's process does with its devices."""

    async def attach(
        self, lease_id: str, process: Process, *, ready_within: float | None = None, grace: float = 0.0
    ) -> Lease:
        """Tie the lease to a process."""

    async def renew(self, lease_id: str, ttl: float | None = None) -> Lease:
        """Lift the lease's deadline, or set it."""

    async def resize(
        self,
        lease_id: str,
        request: SliceRequest,
        *,
        ahead: bool = False,
        caller: Caller | None = None,
    ) -> Lease:
        """Change what a lease asks for."""

    async def park(self, lease_id: str, *, caller: Caller | None = None) -> Lease:
        """Give the slices of a held lease to others, and keep the lease."""

    async def resume(self, lease_id: str) -> Lease:
        """Ask again for the slices of a parked lease."""

    async def release(self, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
        """End the lease."""

    # -- Kernels in pods ---------------------------------------------------

    async def launch(
        self, lease_id: str, kernel: KernelCommand, *, caller: Caller | None = None
    ) -> KernelPod:
        """Start the kernel of a held lease in a pod."""

    async def pod(self, lease_id: str, seen: str = "", seconds: float = 0.0) -> KernelPod:
        """Return how the lease's pod is, once its version is not ``seen``, or after so many seconds."""

    async def end_pod(self, lease_id: str) -> None:
        """End the lease's pod, and keep the lease."""

    def stop_waiting(self) -> None:
        """Let nobody wait any more in :meth:`pod`."""

    # -- Taking slices back ------------------------------------------------

    async def effect_of_taking(self, lease_id: str) -> Effect:
        """Say what becomes of a lease's kernel if its slices are taken back now. Raises ``LeaseGone``."""

    async def withdraw(self, lease_id: str, message: str, reason: EndReason) -> Lease:
        """Take a lease's slices from its kernel, which lives on: the lease is parked.

        Raises ``NotAllowed`` where that would end the kernel, and ``LeaseGone``.
        """

    async def ask_back(self, lease_id: str, message: str, reason: EndReason) -> Lease:
        """Let a kernel's slices go as soon as it is idle."""

    async def revoke(self, lease_id: str, message: str, reason: EndReason = EndReason.REVOKED) -> None:
        """End a lease, and tell its user why. Raises ``LeaseGone``."""

    # -- The pool ----------------------------------------------------------

    async def status(self) -> PoolStatus:
        """Return devices, leases and queue as one consistent snapshot."""

    async def drain(self, device: str, *, drained: bool = True) -> DeviceStatus:
        """Grant nothing more on a device, or grant again."""

    async def history(self, since: float = 0.0, *, user: str | None = None) -> list[EndedLease]:
        """Return the leases that have ended since then; with ``user``, of that user alone."""

    async def forget_old(self) -> None:
        """Keep less of what ended long ago."""

    async def look_at_devices(self, devices: Collection[Device]) -> Mapping[str, Reading | None]:
        """Return what each real device does, by uuid; None for one that does not answer."""

    @property
    def device_problems(self) -> tuple[str, ...]:
        """What stood in the way when this machine's devices were looked for, in sentences."""

    async def device_fault(self) -> str:
        """Say why nothing new can run on any of this machine's devices; empty where something can."""

    async def try_writing(self, within: float) -> None:
        """Try whether decisions can be kept. Raises ``PoolUnreachable`` where not, after so many seconds."""

    # -- Course files ------------------------------------------------------

    async def course_versions(
        self, course: str, most: int, before: int | None = None
    ) -> tuple[CourseVersion, ...]:
        """Return the latest versions of a course file, the last first, or those ``before`` a number."""

    async def keep_versions(self, course: str, versions: Sequence[CourseVersion]) -> int:
        """Keep versions of a course file; return the number of the last."""

    async def remove_version(self, number: int) -> None:
        """Keep a version of a course file no longer."""

    async def reread_course(self, file: str) -> None:
        """Follow a course file that has been replaced, at once."""
