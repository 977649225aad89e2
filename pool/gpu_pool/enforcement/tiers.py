"""What every tier of isolation can do: the one interface behind which slices are enforced.

A tier is chosen per device. Its pure part, :meth:`Tier.describe`, says which
variables a lease's processes need and what is then enforced; its effects
happen before a held lease is handed to anybody (:meth:`Tier.open`), and after
it has ended (:meth:`Tier.close`).
"""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from gpu_pool_client import BadRequest, Device, Enforcement, Lease, Limit, Process, Strength
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
