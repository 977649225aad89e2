"""The tiers without effects: slices that are only counted, and MIG instances."""

from __future__ import annotations

from gpu_pool.isolation.tier import Statement, Tier
from gpu_pool_client import Device, Enforcement, Lease, Limit, Strength


class Accounting(Tier):
    """Slices are counted, and nothing holds a process to its own.

    Framework caps come on top of it where the kernel's environment has a
    framework that takes them: whoever launches the kernel knows that, and
    states it (``gpu_pool_client.framework_caps.with_caps``).
    """

    name = "accounting"

    def adapt(self, device: Device) -> Device:
        """Return the device as it is."""
        return device

    def describe(self, lease: Lease) -> Statement:  # noqa: ARG002 - the same for all
        """Say that nothing is enforced."""
        return Statement()


class WholeInstance(Accounting):
    """MIG instances. Each is granted as a whole, and the hardware divides them.

    A process can use no more than the instance it was given, but nothing keeps
    it from opening another one of the same machine, so the limit is firm for
    those alone who do not try to evade it.
    """

    name = "mig"

    def describe(self, lease: Lease) -> Statement:  # noqa: ARG002 - the same for all
        """Say that the hardware divides instances, and that a process chooses its own."""
        instance = Limit(Strength.COOPERATIVE, "MIG instance")
        return Statement(enforcement=Enforcement(instance, instance))
