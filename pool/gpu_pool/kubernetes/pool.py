"""The pool over a cluster: the ledger of any pool, the cluster's GPUs, and kernels in pods."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

from gpu_pool.coursefiles import Courses
from gpu_pool.dialects import Translation
from gpu_pool.embedded import EmbeddedPool
from gpu_pool.inventory import Inventory
from gpu_pool.kubernetes.api import Api, connect
from gpu_pool.kubernetes.choosing import with_indexes
from gpu_pool.kubernetes.homes import Homes
from gpu_pool.kubernetes.kernels import Kernels
from gpu_pool.kubernetes.manifests import Order, check_command
from gpu_pool.kubernetes.settings import KubernetesSettings
from gpu_pool.kubernetes.states import NODE_GONE, VANISHED, Taken
from gpu_pool.kubernetes.tier import ClusterIsolation
from gpu_pool.kubernetes.view import View
from gpu_pool.kubernetes.writing import Writer
from gpu_pool.ledger.book import Book
from gpu_pool.ledger.devices import Others
from gpu_pool.ledger.leases import gone
from gpu_pool.readings import Reading
from gpu_pool.settings import PoolSettings
from gpu_pool_client import (
    Activity,
    BadRequest,
    Device,
    Holder,
    KernelCommand,
    KernelPod,
    Lease,
    LeaseGone,
    LeaseState,
    NotAllowed,
    PoolStatus,
    Process,
    SliceRequest,
)
from gpu_pool_client.remote import wire

#: What devices are seen from, in the ledger: whichever pod the service runs in, it is the same cluster.
_SEEN_FROM: Final = "kubernetes"
#: Seconds between two looks at what has changed: many changes are looked at once.
_REST: Final = 0.5
#: Seconds after which it is looked whether anything was missed.
_LOOK_EVERY: Final = 30.0


class ClusterPool(EmbeddedPool):
    """A pool whose devices are a cluster's, and whose kernels run in pods. Made by :func:`open_cluster`."""

    def __init__(
        self,
        path: Path,
        settings: PoolSettings,
        kubernetes: KubernetesSettings,
        api: Api,
        courses: Callable[[], Courses],
        log: logging.Logger,
    ) -> None:
        self._kubernetes, self._api, self._log = kubernetes, api, log
        self._view = View(api, kubernetes, log)
        self._kernels = Kernels(Writer(api, log), self._view, log, self._end_taken)
        self._homes = Homes(api, kubernetes, courses, log)
        self._live: frozenset[str] = frozenset()
        self._seen: tuple[tuple[Device, ...], Mapping[str, Others]] | None = None
        self._launching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._following: asyncio.Task[None] | None = None
        super().__init__(
            path,
            settings,
            # The devices come from the watches, in the event loop.
            lambda: Inventory((), "the cluster"),
            ClusterIsolation(self._view.enforcement),
            owner=True,
        )

    async def __aenter__(self) -> ClusterPool:
        """Learn what the cluster has, and follow it. Raises ``PoolUnreachable`` in words."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self) -> None:
        await self._view.start()
        self._log.info("The cluster shares its GPUs by %s", self._view.choice)
        self._view.changed.clear()
        await self._follow_once()
        await self.status()
        self._kernels.start()
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Follow the cluster no more, and close the ledger. Kernels live on."""
        if self._following is not None:
            self._following.cancel()
        await self._kernels.stop()
        await self._view.stop()
        await super().close()
        await self._api.close()

    def stop_waiting(self) -> None:
        """Let nobody wait for news of a pod any more."""
        self._kernels.stop_waiting()

    # -- The cluster's GPUs --------------------------------------------------

    async def _follow(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._view.changed.wait(), _LOOK_EVERY)
            except asyncio.TimeoutError:
                self._kernels.look_at_all()
            self._view.changed.clear()
            try:
                await self._follow_once()
            except Exception:  # noqa: BLE001 - one odd node must not keep the pool from following the others
                self._log.exception("What the cluster has could not be written down")
                self._view.changed.set()
            await asyncio.sleep(_REST)

    async def _follow_once(self) -> None:
        seen = self._view.devices(), self._view.others(self._live)
        if seen == self._seen:
            return

        def take_over(book: Book) -> None:
            book.register(seen[0], _SEEN_FROM)
            book.set_others(seen[1])

        await self._do(take_over)
        self._seen = seen

    async def status(self) -> PoolStatus:
        """See ``Pool.status``. Ends the kernels of leases that have ended."""
        known = self._view.leases()
        status = await super().status()
        self._live = frozenset(each.id for each in (*status.leases, *status.line))
        self._kernels.settle(known, self._live)
        for lease in status.leases:
            if any(not self._view.has_node(part.device.node) for part in lease.slices):
                await self._end_taken(lease.id, NODE_GONE)
        return status

    async def _devices_for(
        self, request: SliceRequest, holder: Holder, server: str | None
    ) -> Collection[str]:
        """Return the GPUs beside the holder's home, if it can be used on one machine alone."""
        self._view.translate(request)
        notebook = self._view.notebook(holder.user, server or "")
        if notebook is None:
            return ()
        rules = self._settings.rules
        return await self._homes.devices_beside(request, holder, notebook, self._view.devices(), rules)

    # -- Kernels -------------------------------------------------------------

    async def launch(self, lease_id: str, kernel: KernelCommand, *, server: str | None = None) -> KernelPod:
        """See ``Pool.launch``."""
        async with self._launching.setdefault(lease_id, asyncio.Lock()):
            lease = await self._living(lease_id)
            if lease.state is not LeaseState.HELD:
                raise BadRequest(f"The lease is {lease.state.value}.", "Start the kernel once it is held.")
            found = await self._kernels.launch(await self._order(lease, kernel, server or ""))
        if lease.process is None:
            # Its image may take minutes, and whoever launches has come for it.
            await self.attach(lease_id, lease.holder.process or Process.current())
        return found

    async def _order(self, lease: Lease, kernel: KernelCommand, server: str) -> Order:
        node = lease.slices[0].device.node
        dialect = self._view.choice.dialect
        translation = self._translate(lease, node)
        assert dialect is not None
        bans = dialect.table.bans
        check_command(kernel, bans, require_curve=self._kubernetes.require_curve)
        notebook = self._view.notebook(lease.holder.user, server)
        if notebook is None:
            name = f"server {server!a}" if server else "default server"
            raise NotAllowed(
                f"The {name} of {lease.holder.user!a} does not run in {self._view.namespace}, "
                "so no kernel can be started for it.",
                "Ask from a notebook server that the JupyterHub has started there.",
            )
        body = self._homes.body(lease.holder, notebook)
        await self._homes.check(lease.holder, notebook, node)
        name = self._kubernetes.pool
        return Order(name, lease, notebook, kernel, node, translation.pod, bans, body)

    def _translate(self, lease: Lease, node: str) -> Translation:
        """Ask for the very GPUs of a lease where the dialect can say which, else for any of that node."""
        indexes = tuple(sorted(part.device.index for part in lease.slices))
        exact = with_indexes(lease.request, indexes)
        with suppress(BadRequest):
            return self._view.translate(exact, node)
        return self._view.translate(with_indexes(lease.request, ()), node)

    async def pod(self, lease_id: str, seen: str = "", seconds: float = wire.LONGEST_POLL) -> KernelPod:
        """See ``Pool.pod``; ``seconds`` is for how long to wait for news."""
        give_up_at = time.monotonic() + seconds
        while True:
            await self._living(lease_id)
            found = await self._state(lease_id, seen)
            left = give_up_at - time.monotonic()
            if found.version != seen or left <= 0:
                return found
            await self._kernels.news(lease_id, left)
            if self._kernels.stopped:
                return found

    async def _state(self, lease_id: str, seen: str) -> KernelPod:
        found = self._kernels.state(lease_id)
        if found is not None:
            return found
        if not seen:
            raise BadRequest("No kernel was started on this slice, or it has ended.", "Start one.")
        # It was seen, and went while nobody looked.
        await self._end_taken(lease_id, VANISHED)
        raise gone(await self.lease(lease_id))

    async def end_pod(self, lease_id: str) -> None:
        """See ``Pool.end_pod``."""
        await self._living(lease_id)
        async with self._launching.setdefault(lease_id, asyncio.Lock()):  # what is being started is ended too
            self._kernels.end(lease_id)

    async def park(self, lease_id: str, *, caller: Process | None = None) -> Lease:
        """See ``Pool.park``. What a pod keeps on its GPU stays there."""
        if self._kernels.has_any(lease_id):
            raise NotAllowed(
                "The slice of a kernel in a pod cannot be lent to others.", "End the kernel to give it back."
            )
        return await super().park(lease_id, caller=caller)

    async def _activity(self, lease: Lease) -> Activity:
        """Return what is known of a lease's kernel: whether there is one. Nobody here sees its GPU."""
        return Activity() if self._kernels.has_any(lease.id) else Activity(initialised=False)

    async def _living(self, lease_id: str) -> Lease:
        lease = await self.lease(lease_id)
        if lease.state is LeaseState.ENDED:
            raise gone(lease)
        return lease

    async def look_at_devices(self, devices: Collection[Device]) -> Mapping[str, Reading | None]:  # noqa: ARG002
        """Return nothing: the GPUs of other machines cannot be looked at from here."""
        return {}

    async def _end_taken(self, lease_id: str, taken: Taken) -> None:
        with suppress(LeaseGone):
            await self.revoke(lease_id, taken.words, taken.reason)
            self._log.info("Lease %s ended: %s", ascii(lease_id), taken.words)


async def open_cluster(
    path: Path,
    settings: PoolSettings,
    kubernetes: KubernetesSettings,
    courses: Callable[[], Courses],
    log: logging.Logger,
) -> ClusterPool:
    """Return the pool of the cluster that the settings name. Raises ``PoolUnreachable`` in words."""
    settings.in_pods = True
    return ClusterPool(path, settings, kubernetes, await connect(kubernetes.kubeconfig), courses, log)
