"""What is enforced of a lease in a cluster: what its dialect states. There are no effects here."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from gpu_pool.enforcement import Isolation
from gpu_pool.enforcement.tiers import Tier, TierStatement
from gpu_pool_client import Device, Enforcement, Lease, SliceRequest


class DialectTier(Tier):
    """Slices that the cluster enforces, or only counts. ``enforcement`` says which."""

    name = "kubernetes"

    def __init__(self, enforcement: Callable[[SliceRequest], Enforcement]) -> None:
        self._enforcement = enforcement

    def adapt(self, device: Device) -> Device:
        """Return the device as it is: the dialect has said all of it."""
        return device

    def describe(self, lease: Lease) -> TierStatement:
        """Say what the dialect says. Variables are set in the pod by the cluster's own parts."""
        return TierStatement(enforcement=self._enforcement(lease.request))


class ClusterIsolation(Isolation):
    """The isolation of a cluster's GPUs."""

    in_pods: ClassVar[bool] = True

    def __init__(self, enforcement: Callable[[SliceRequest], Enforcement]) -> None:
        self._tier = DialectTier(enforcement)
        super().__init__(lambda _: (self._tier,))

    def tier(self, device: Device) -> Tier:  # noqa: ARG002 - one for all, those that have gone too
        """Return the tier of a device."""
        return self._tier
