"""What every tier of isolation can do: the one interface behind which slices are enforced.

A tier is chosen per device. Its pure part, :meth:`Tier.describe`, says which
variables a lease's processes need and what is then enforced; its effects
happen before a held lease is handed to anybody (:meth:`Tier.open`), and after
it has ended (:meth:`Tier.close`).
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from gpu_pool_client import Device, Enforcement, Lease, Limit, Process, Strength


@dataclass(frozen=True, slots=True)
class TierStatement:
    """How a lease is enforced: the variables its processes need, and the truth about its limits."""

    variables: Mapping[str, str] = field(default_factory=dict)
    enforcement: Enforcement = field(default_factory=Enforcement)


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
        """Enforce it no more: it has ended, or is parked. Its processes are gone, or off the device."""

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

    def describe(self, lease: Lease) -> TierStatement:  # noqa: ARG002 - the same for all
        """Say that the hardware divides instances, and that a process chooses its own."""
        instance = Limit(Strength.COOPERATIVE, "MIG instance")
        return TierStatement(enforcement=Enforcement(instance, instance))
