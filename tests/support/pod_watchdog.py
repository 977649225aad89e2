"""A pool's leases, what the agents of nodes say of their pods, and the watchdog over them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from gpu_pool.cluster.node_use import NodeUseReports
from gpu_pool.cluster.pod_watchdog import PodWatchdog
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.enforcement.watchdog import Tolerance
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import Enforcement, Lease, Limit, PodDeviceUse, Strength
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import backend_of

GPU = "GPU-n1-0"
NOMINAL = Limit(Strength.NONE, "time-slicing limits nothing")
LOG = logging.getLogger("gpu_pool.tests")


@dataclass
class Watched:
    """A pool's leases, what agents say of them, and the watchdog, whose time stands still."""

    pool: GpuPool
    fake: FakeKubernetes
    tolerance: Tolerance = field(default_factory=Tolerance)
    memory: Limit = NOMINAL
    now: float = 1000.0

    def __post_init__(self) -> None:
        backend = backend_of(self.pool)
        settings = KubernetesSettings(node_agent="agents/agent")
        self.reports = NodeUseReports(backend.api, backend.view, settings, LOG, lambda: self.now)
        self.notices: dict[str, str] = {}
        self.watchdog = PodWatchdog(
            self.tolerance, self.reports, self.notices.__setitem__, 350, lambda: self.now
        )

    def describe(self, lease: Lease) -> Lease:
        """Return a lease with the limits that the cluster has here."""
        limits = Enforcement(self.memory, lease.enforcement.compute)
        return replace(backend_of(self.pool).describe(lease), enforcement=limits)

    async def say(self, lease: str, mib: int | None, device: str = GPU, node: str = "n1") -> None:
        """Let the agent of a node say that a lease's pod uses so much, and no other pod anything."""
        uid = self.fake.get("pods", f"gpu-pool-{lease}-1")["metadata"]["uid"]
        await self.reports.report(node, [device], [PodDeviceUse(uid, "", device, mib)], complete=True)

    async def look(self, seconds: float = 0.0) -> dict[str, str]:
        """Let so much time pass, and look; return what the users read whose leases are to end."""
        self.now += seconds
        leases = (await self.pool.status()).leases
        known = [replace(each, notice=self.notices.get(each.id, each.notice)) for each in leases]
        return dict(self.watchdog.watch(known, self.describe))

    async def uses(self, lease: str, mib: int | None, seconds: float = 0.0) -> dict[str, str]:
        """Let so much time pass, an agent say that so much is used, and look."""
        self.now += seconds
        await self.say(lease, mib)
        return await self.look()

    async def lease(self, lease: str) -> Lease:
        """Return a lease as its user sees it."""
        return self.watchdog.described(self.describe(await self.pool.get_lease(lease)))
