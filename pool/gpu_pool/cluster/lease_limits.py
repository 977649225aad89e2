"""What limits a lease on a cluster's devices, as its holder is told.

The dialect says how a slice is enforced there, the watchdog that it watches it; and where nobody sees what is
used, that nothing is lent on top of a guarantee.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from gpu_pool.cluster.node_use import NodeUseReports
from gpu_pool.cluster.pod_watchdog import PodWatchdog
from gpu_pool.cluster.view import ClusterView
from gpu_pool_client import Device, Enforcement, Lease

#: Why nothing is lent on top of a guarantee where the pool divides devices.
_NO_AGENT: Final = (
    "the limit above it changes nothing here, since no agent of the nodes sees what is used "
    "(c.KubernetesSettings.node_agent)"
)
_AGENT_AWAY: Final = "nothing on top of it at the moment, since the agent of its node does not answer"


class LeaseLimits:
    """Says of leases what limits them.

    Parameters
    ----------
    view
        The cluster, whose dialect enforces slices.
    use
        What the agents of nodes see.
    watchdog
        What holds slices to their memory; None for nothing.
    is_divided
        Whether the pool itself divides devices.
    has_agents
        Whether nodes have agents.
    """

    def __init__(
        self,
        view: ClusterView,
        use: NodeUseReports,
        watchdog: PodWatchdog | None,
        *,
        is_divided: bool,
        has_agents: bool,
    ) -> None:
        self._view, self._use, self._watchdog = view, use, watchdog
        self._is_divided, self._has_agents = is_divided, has_agents
        #: Leases as they were described last, by id, with what they are described by.
        self._described: dict[str, tuple[Lease, Enforcement | None, Lease]] = {}

    def described(self, lease: Lease) -> Lease:
        """Say what the dialect says, and whether the watchdog watches it."""
        described = self._with_limit(self.by_dialect(lease))
        if self._watchdog is None or not lease.slices:
            return described
        return self._watchdog.described(described)

    def by_dialect(self, lease: Lease) -> Lease:
        """Say what the dialect says: of thousands, few are others than when they were described last."""
        enforcement = self._view.enforcement(lease.request) if lease.slices else None
        known = self._described.get(lease.id)
        if known is not None and known[0] is lease and known[1] is enforcement:
            return known[2]
        described = _as_enforced(lease, enforcement, is_divided=self._is_divided)
        self._described[lease.id] = lease, enforcement, described
        return described

    def at_launch(self, lease: Lease) -> Lease:
        """Say what its kernel is told for as long as it runs, whichever agents report meanwhile."""
        lasting = replace(lease, enforcement=self._view.enforcement(lease.request))
        return lasting if self._has_agents else self._with_limit(lasting)

    def allows_burst(self, device: Device) -> bool:
        """Whether a device's slices may have more: the pool divides it, and an agent says what is used."""
        return self._is_divided and self._use.sees(device.node)

    def keep(self, living: Collection[str]) -> None:
        """Forget leases that are none of these, once they are many."""
        if len(self._described) > 2 * len(living):
            self._described = {name: each for name, each in self._described.items() if name in living}

    def _with_limit(self, lease: Lease) -> Lease:
        """Say so where nothing is lent on top of a guarantee, since nobody sees what is used."""
        if not self._is_divided or not (lease.slices and lease.request.has_limit):
            return lease
        words = _AGENT_AWAY
        if not self._has_agents:
            words = _NO_AGENT
            lease = replace(lease, slices=tuple(replace(part, limit_mib=0) for part in lease.slices))
        elif all(self.allows_burst(part.device) for part in lease.slices):
            return lease
        memory = lease.enforcement.memory
        memory = replace(memory, by=f"{memory.by}; {words}")
        return replace(lease, enforcement=replace(lease.enforcement, memory=memory))


def _as_enforced(lease: Lease, enforcement: Enforcement | None, *, is_divided: bool) -> Lease:
    terms = replace(lease.terms, revocable=True)
    if enforcement is None:
        return replace(lease, terms=terms)
    slices = lease.slices
    if not is_divided:  # whatever is free up to its limit the cluster leaves to it by itself
        slices = tuple(replace(part, burst_mib=max(0, part.limit_mib - part.memory_mib)) for part in slices)
    return replace(lease, terms=terms, slices=slices, enforcement=enforcement)
