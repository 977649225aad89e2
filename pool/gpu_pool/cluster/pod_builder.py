"""What is ordered when a kernel is started on a slice of the cluster."""

from __future__ import annotations

from contextlib import suppress

from gpu_pool.cluster import kueue
from gpu_pool.cluster.dialects import Translation
from gpu_pool.cluster.manifests import KernelPodRequest, check_command
from gpu_pool.cluster.notebooks import Notebook
from gpu_pool.cluster.pod_choices import with_indexes
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.cluster.view import ClusterView
from gpu_pool.cluster.volume_claims import VolumeClaims
from gpu_pool_client import BadRequest, KernelCommand, Lease, NotAllowed, PoolUnreachable


class PodBuilder:
    """Makes the orders of one pool's kernels."""

    def __init__(self, settings: KubernetesSettings, view: ClusterView, volume_claims: VolumeClaims) -> None:
        self._settings, self._view, self._volume_claims = settings, view, volume_claims

    async def of(self, lease: Lease, kernel: KernelCommand, server: str) -> KernelPodRequest:
        """Return the order for a kernel on a lease that is held, beside its user's notebook server.

        Raises ``PoolUnreachable`` where the cluster shares no GPUs any more, ``BadRequest`` for a command
        that no pod may have, and ``NotAllowed`` where there is no such notebook server, or no home with it.
        """
        dialect = self._view.choice.dialect
        if dialect is None:
            raise PoolUnreachable(f"{self._view.choice}", "Tell the administrator; your slice is kept.")
        bans = dialect.table.bans
        check_command(kernel, bans, require_curve=self._settings.require_curve)
        notebook = self._notebook(lease.holder.user, server)
        body = self._volume_claims.body(lease.holder, notebook)
        queue = kueue.queue_of(lease.holder.course) if self._settings.kueue else ""
        if queue:
            node = await self._volume_claims.only_node(lease.holder, notebook)
            asked = kueue.of_its_kind(lease, self._view.devices())
            translation = self._view.translate(with_indexes(asked, ()), node)
        else:
            node = lease.slices[0].device.node
            await self._volume_claims.check(lease.holder, notebook, node)
            translation = self._translate(lease, node)
        name, at_once = self._settings.pool, dialect.table.at_once
        return KernelPodRequest(
            name, lease, notebook, kernel, node, translation.pod, bans, body, queue, at_once
        )

    def _notebook(self, user: str, server: str) -> Notebook:
        found = self._view.notebook(user, server)
        if found is None:
            name = f"server {server!a}" if server else "default server"
            raise NotAllowed(
                f"The {name} of {user!a} does not run in {self._view.namespaces}, "
                "so no kernel can be started for it.",
                "Ask from a notebook server that the JupyterHub has started there.",
            )
        return found

    def _translate(self, lease: Lease, node: str) -> Translation:
        """Ask for the very GPUs of a lease where the dialect can say which, else for any of that node."""
        indexes = tuple(sorted(part.device.index for part in lease.slices))
        exact = with_indexes(lease.request, indexes)
        with suppress(BadRequest):
            return self._view.translate(exact, node)
        return self._view.translate(with_indexes(lease.request, ()), node)
