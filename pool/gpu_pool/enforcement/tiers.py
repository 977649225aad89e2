"""What every tier of isolation can do: the one interface behind which slices are enforced.

A tier is chosen per device. Its pure part, :meth:`Tier.describe`, says which
variables a lease's processes need and what is then enforced; its effects
happen before a held lease is handed to anybody (:meth:`Tier.open`), and after
it has ended (:meth:`Tier.close`).

Where nothing but accounting holds a slice, what runs on it may limit itself.
Whoever launches a process on a slice knows which frameworks take a limit there,
and states it in the process's environment (``framework_caps.with_caps``). The
system shows with which one a process was started. It may have changed it since,
or have written it itself: a limit of this kind is cooperative, and called so.
"""

from __future__ import annotations

import abc
import functools
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from gpu_pool_client import BadRequest, Device, Enforcement, Lease, LeaseState, Limit, Process, Strength
from gpu_pool_client._home import home_folder, why_homeless

if TYPE_CHECKING:
    from gpu_pool.settings import PoolSettings


#: What is said of a tier whose rules were read of, and tried with stand-ins alone.
NOT_ON_HARDWARE: Final = "not seen on hardware"
#: What is said of a tier that was.
SEEN_ON_H100: Final = "seen on an H100 with driver 580.159.04"


@dataclass(frozen=True, slots=True)
class TierStatement:
    """How a lease is enforced: the variables its processes need, and the truth about its limits."""

    variables: Mapping[str, str] = field(default_factory=dict)
    enforcement: Enforcement = field(default_factory=Enforcement)


@dataclass(frozen=True, slots=True)
class TierContext:
    """What a tier is made from."""

    settings: PoolSettings
    #: Whether the leases are those of several Unix users, for which the pool is root.
    several_users: bool = False
    #: The user as whom it is tried to evade limits; None is the pool's own.
    probe_uid: int | None = None

    @property
    def runtime(self) -> Path:
        """The folder for what lives no longer than this boot of the machine.

        A tier makes one of its own in it. Raises ``BadRequest`` where there is no place for it.
        """
        if self.settings.runtime_dir:
            return Path(self.settings.runtime_dir)
        if os.geteuid() == 0:
            return Path("/run/gpu-pool")
        base = os.environ.get("XDG_RUNTIME_DIR")
        if base:
            return Path(base) / "gpu-pool"
        home = home_folder()
        if home is None:
            raise BadRequest(
                "There is no folder for what limits the slices: XDG_RUNTIME_DIR is not set, "
                f"{why_homeless()}.",
                "Set c.PoolSettings.runtime_dir to a private folder on a local disk.",
            )
        return home / ".local/state/gpu-pool"


class TierFailed(Exception):
    """A tier cannot do what it was asked for.

    ``message`` says what was seen, ``remedy`` the command that mends it.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message, self.remedy = message, remedy
        super().__init__(f"{message} {remedy}".strip())


class Tier(abc.ABC):
    """One way to enforce slices on devices. Its methods block; they are called by one thread.

    All but :meth:`adapt` and :meth:`describe` may raise :class:`TierFailed`.
    Every effect may be repeated: after a crash it is.
    """

    #: As an administrator writes it in the settings: ``mps``.
    name: ClassVar[str]
    #: On what hardware it was used; it is said wherever the tier is offered.
    seen: ClassVar[str] = NOT_ON_HARDWARE
    #: Whether one process must own the devices for all who use them: gpu-pool serve.
    needs_owner: ClassVar[bool] = False
    #: Whether a slice may have more memory for a while than it was granted: nothing holds it to that which
    #: reads it once, when a process starts, or cannot be seen to follow.
    allows_burst: ClassVar[bool] = False
    #: Whether processes must name the devices by uuid, whatever the settings say.
    needs_uuids: ClassVar[bool] = False

    @classmethod
    def make(cls, context: TierContext) -> Tier:  # noqa: ARG003 - most tiers need nothing
        """Return the tier as the pool's settings describe it."""
        return cls()

    @abc.abstractmethod
    def adapt(self, device: Device) -> Device:
        """Return the device as placement is to see it: with its context slots, and ``one_size``."""

    @abc.abstractmethod
    def describe(self, lease: Lease) -> TierStatement:
        """Say how a held lease on devices of this tier is enforced. No effects, and fast."""

    def prepare(self, device: Device) -> None:  # noqa: B027 - most tiers need not
        """Make a device ready, before its first lease; say why where that cannot be done."""

    def probe(self, device: Device) -> object:  # noqa: B027 - most tiers need not
        """Find out, on a device that is ready and held by nobody, whether its limits can be evaded.

        What :meth:`describe` says depends on it; what it returns is for tests and logs.
        """

    def open(self, lease: Lease) -> None:  # noqa: B027 - most tiers need not
        """Enforce a held lease from now on. Called before anybody is given its environment."""

    def attach(self, lease: Lease, process: Process) -> None:  # noqa: B027 - most tiers need not
        """Hold a process that was attached to the lease, and whatever it starts, to the limits."""

    def evict(self, lease: Lease, pids: Sequence[int]) -> None:  # noqa: B027 - most tiers need not
        """Take these processes off the lease's devices safely, before they are killed."""

    def close(self, lease: Lease) -> None:  # noqa: B027 - most tiers need not
        """Enforce it no more: it has ended, or is parked. Its processes are gone, or off the device.

        One that raises ``TierFailed`` is called again later.
        """

    def tend(self) -> Mapping[str, str]:
        """Mend what has broken meanwhile; return what holders are to read, by lease id."""
        return {}

    def recover(self, leases: Sequence[Lease]) -> None:  # noqa: B027 - most tiers need not
        """After a crash: enforce exactly these held leases, and clean up after all others."""

    def stop(self) -> None:  # noqa: B027 - most tiers need not
        """Leave the devices as they were found; only when no lease is held on them."""


class Accounting(Tier):
    """Slices are counted, and nothing holds a process to its own.

    Framework caps come on top of it where the kernel's environment has a
    framework that takes them: whoever launches the kernel knows that, and
    states it (``gpu_pool_client._framework_caps.with_caps``).
    """

    name = "accounting"
    seen = SEEN_ON_H100
    allows_burst = True

    def adapt(self, device: Device) -> Device:
        """Return the device as it is."""
        return device

    def describe(self, lease: Lease) -> TierStatement:  # noqa: ARG002 - the same for all
        """Say that nothing is enforced."""
        return TierStatement()


class WholeInstance(Accounting):
    """MIG instances. Each is granted as a whole, and the hardware divides them.

    A process can use no more than the instance it was given, but nothing keeps
    it from opening another one of the same machine, so the limit is firm for
    those alone who do not try to evade it.
    """

    name = "mig"
    seen = NOT_ON_HARDWARE
    allows_burst = False

    def describe(self, lease: Lease) -> TierStatement:  # noqa: ARG002 - the same for all
        """Say that the hardware divides instances, and that a process chooses its own."""
        instance = Limit(Strength.COOPERATIVE, "MIG instance")
        return TierStatement(enforcement=Enforcement(instance, instance))


#: In ``GPU_POOL_ENFORCED``, where ``Limit`` has written it.
_STATED: Final = re.compile(r"memory: [^;]*\((framework caps: [a-z,; ]{1,200})\)", re.ASCII)
#: Characters of an environment that are read.
_MOST: Final = 2**20
#: Seconds for which a process that could not be seen is not looked for again: the processes of
#: hundreds of kernels may be hidden from the pool's, and everybody asks for its state.
_HIDDEN_FOR: Final = 5.0


class _UnseenError(Exception):
    """The process cannot be seen, or was not launched on this lease, or not yet."""


def with_own_caps(lease: Lease) -> Lease:
    """State in a held lease that framework caps hold its memory, where its process was started with them.

    Nothing is said of a limit that is firmer, or of a process that cannot be seen: a
    kernel in a pod has none here.
    """
    is_limited = lease.enforcement.memory.strength is not Strength.NONE
    if lease.state is not LeaseState.HELD or lease.process is None or is_limited or lease.terms.in_pod:
        return lease
    words = _seen(lease.process, lease.id, int(time.monotonic() // _HIDDEN_FOR))
    memory = Limit(Strength.COOPERATIVE, words)
    return replace(lease, enforcement=replace(lease.enforcement, memory=memory)) if words else lease


@functools.lru_cache(maxsize=4096)
def _seen(process: Process, lease_id: str, when: int) -> str:
    """Return what :func:`_stated` does, empty if the process cannot be seen; looks once for each ``when``."""
    del when
    try:
        return _stated(process, lease_id)
    except (_UnseenError, OSError):
        return ""


@functools.lru_cache(maxsize=4096)
def _stated(process: Process, lease_id: str) -> str:
    """Return what a process of the lease was told of its framework caps; empty if there are none."""
    if process.is_alive() is not True:
        raise _UnseenError
    with Path(f"/proc/{process.pid}/environ").open("rb") as file:
        content = file.read(_MOST).decode(errors="replace")
    told = dict(each.partition("=")[::2] for each in content.split("\0"))
    # Asked again: whoever has the pid still has had it all the time.
    if told.get("GPU_POOL_LEASE") != lease_id or process.is_alive() is not True:
        raise _UnseenError
    found = _STATED.match(told.get("GPU_POOL_ENFORCED", ""))
    return found[1] if found else ""
