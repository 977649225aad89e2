"""Keeping the claims of the devices that the pool has, and giving them back. See ``device_claims``.

What there is, is read from the cluster, so a service that starts anew goes on where the last one was; only
since when a device is empty begins anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from gpu_pool.cluster.api import Api, ApiAway, ApiRefused, ApiWriter, path_of
from gpu_pool.cluster.device_claims import (
    Claim,
    DeviceFacts,
    DeviceMemory,
    HolderShape,
    Limits,
    ServiceAccount,
    Todo,
    by_device,
    claims_of,
    decide,
    device_of,
    holder,
    holds,
    owned,
)
from gpu_pool.cluster.dialects import Manifest
from gpu_pool.cluster.dialects.amounts import tolerations
from gpu_pool.cluster.dialects.objects import mapping
from gpu_pool.cluster.dialects.shared import API, Shared, claim_name
from gpu_pool.cluster.pod_states import PodTaken
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.cluster.view import ClusterView
from gpu_pool_client import GpuPoolError, Lease, PoolUnreachable

#: Where anybody may ask who they are.
_WHO: Final = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
_ACCOUNT: Final = "system:serviceaccount:"

#: Ends a lease, since its device is gone.
OnTaken = Callable[[str, PodTaken], Awaitable[None]]


class DeviceClaims:
    """The claims of one pool's devices, in the namespace of its kernels. Used in one event loop."""

    def __init__(
        self,
        api: Api,
        writer: ApiWriter,
        view: ClusterView,
        settings: KubernetesSettings,
        log: logging.Logger,
        end_lease: OnTaken,
    ) -> None:
        self._api, self._writer, self._view, self._log = api, writer, view, log
        self._settings, self._end_lease = settings, end_lease
        times = settings.times
        self._limits = Limits(settings.shared_empty_for, times.assigned_within, times.unlisted_for)
        self._shape = HolderShape(
            settings.pool,
            view.namespace,
            settings.placeholder_image,
            tuple(settings.tolerations),
            settings.lost_after,
        )
        self._path = f"/apis/{API}/namespaces/{view.namespace}/resourceclaims"
        self._memory: dict[str, DeviceMemory] = {}
        #: Devices of which something is being written, by uuid, and the last trouble with each.
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._told: dict[str, str] = {}
        #: Leases whose devices are gone and that are being ended.
        self._ending: set[str] = set()

    async def start(self) -> None:
        """Find out whose the claims are to be, so that they go with the service."""
        self._shape = replace(self._shape, owner=await self._own_account())

    async def stop(self) -> None:
        """Do nothing more; what is not done is found by the next service."""
        for task in self._busy.values():
            task.cancel()
        await asyncio.gather(*self._busy.values(), return_exceptions=True)

    async def _own_account(self) -> ServiceAccount | None:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        try:
            found = await self._api.ask("POST", _WHO, body)
        except (ApiAway, ApiRefused) as error:
            self._log.warning("The API server does not say who the service is: %s", error)
            return None
        user = mapping(mapping(found.get("status")).get("userInfo"))
        namespace, _, name = str(user.get("username", "")).removeprefix(_ACCOUNT).partition(":")
        if namespace == self._shape.namespace and name and user.get("uid"):
            return ServiceAccount(name, str(user["uid"]))
        self._log.warning(
            "The service has no account in %s: its claims of devices stay when it is uninstalled. "
            "They are listed by kubectl get resourceclaims -n %s -l jupyter-gpu-pool/pool",
            self._shape.namespace,
            self._shape.namespace,
        )
        return None

    # -- For one lease -----------------------------------------------------------

    def expect(self, lease: Lease) -> None:
        """Begin to claim the devices of a lease that is held: nobody waits for that yet."""
        for uuid in self._claimed(lease):
            if uuid not in self._busy and self._claim_of(uuid) is None:
                self._do(uuid, self._make_claim(uuid))

    def _claimed(self, lease: Lease) -> list[str]:
        """Return the devices of a lease that are had by claims."""
        shared, uuids = self._view.shared, {part.device.uuid for part in lease.slices}
        return sorted(uuid for uuid in uuids if shared is None or not shared.is_replicated(uuid))

    async def ready(self, lease: Lease) -> None:
        """Return once the claims of a lease's devices are there, which its pod is to name.

        Raises ``NotAllowed`` and ``PoolUnreachable``, in words.
        """
        for uuid in self._claimed(lease):
            busy = self._busy.get(uuid)
            if busy is not None:
                await asyncio.wait([busy])
            found = self._claim_of(uuid)
            if found is not None and Claim.read(found).is_ending:
                raise PoolUnreachable(
                    "The pool is just giving the GPU of your slice back to the cluster, and claims it anew.",
                    "Your slice is kept, and your kernel starts soon.",
                )
            if found is None:
                await self._make_claim(uuid)

    def parked_on(self, uuids: Collection[str], leases: Iterable[Lease]) -> list[str]:
        """Return the ids of those leases that hold nothing, and have pods on one of these devices."""
        named, pool = self._named_by_kernels(), self._shape.pool
        with_pods = set[str]().union(*(named.get(claim_name(pool, uuid), ()) for uuid in uuids))
        without_slices = [lease.id for lease in leases if not lease.slices]
        drained = set(uuids)
        return [
            each
            for each in without_slices
            if each in with_pods or not drained.isdisjoint(self._view.devices_of([each]))
        ]

    # -- For all of them -----------------------------------------------------------

    def reconcile(self, leases: Sequence[Lease]) -> None:
        """Do what there is to do about all devices, for the leases that live."""
        shared = self._view.shared
        if shared is None:
            return
        living = [lease for lease in leases if lease.id not in self._ending]
        users: dict[str, list[str]] = {}
        for lease in living:
            for part in lease.slices:
                users.setdefault(part.device.uuid, []).append(lease.id)
        parked = {lease.id for lease in living if not lease.slices}
        claims, holders = by_device(self._view.claims()), by_device(self._view.holders.values())
        named = self._named_by_kernels()
        now = time.monotonic()
        for uuid in sorted({*users, *claims, *holders, *self._memory}):
            if uuid in self._busy or shared.is_replicated(uuid):
                continue
            with_pods = named.get(claim_name(self._shape.pool, uuid), set())
            # What is parked holds nothing of the device, and its pod cannot go on without it.
            affected = [*users.get(uuid, ()), *sorted(with_pods & parked)]
            facts = self._facts(shared, uuid, bool(affected or with_pods), claims, holders)
            made = decide(self._memory.get(uuid, DeviceMemory()), facts, now, self._limits)
            self._memory.pop(uuid, None)
            if made.memory is not None:
                self._memory[uuid] = made.memory
            if made.todo != Todo():
                self._do(uuid, self._carry_out(uuid, made.todo, facts, affected))

    def _named_by_kernels(self) -> dict[str, set[str]]:
        """Return the ids of the leases whose pods, also those that are ending, name a claim, by its name."""
        own, found = self._view.own, dict[str, set[str]]()
        for lease_id in own.leases():
            for name in (name for pod in own.of(lease_id) for name in claims_of(pod)):
                found.setdefault(name, set()).add(lease_id)
        return found

    def _facts(
        self,
        shared: Shared,
        uuid: str,
        in_use: bool,
        claims: Mapping[str, Sequence[Manifest]],
        holders: Mapping[str, Sequence[Manifest]],
    ) -> DeviceFacts:
        found = next(iter(claims.get(uuid, ())), None)
        pods = tuple(holders.get(uuid, ()))
        node = device_of(found)[1] if found is not None else ""
        return DeviceFacts(
            in_use,
            None if found is None else Claim.read(found),
            pods,
            any(map(holds, pods)),
            shared.is_listed(uuid),
            shared.taken(uuid),
            self._view.takes_pods(node),
        )

    def _claim_of(self, uuid: str) -> Manifest | None:
        return self._view.claim(claim_name(self._shape.pool, uuid))

    def _do(self, uuid: str, work: Coroutine[Any, Any, None]) -> None:
        """Write something of one device, and nothing else of it meanwhile."""
        task = asyncio.create_task(self._telling(uuid, work))
        self._busy[uuid] = task
        task.add_done_callback(lambda _: self._busy.pop(uuid, None))

    async def _telling(self, uuid: str, work: Coroutine[Any, Any, None]) -> None:
        """Write down what goes wrong, once: the next look tries again."""
        try:
            await work
        except GpuPoolError as error:
            if self._told.get(uuid) != str(error):
                self._log.error("The claim of GPU %s cannot be kept: %s", ascii(uuid), error)
            self._told[uuid] = str(error)
        else:
            self._told.pop(uuid, None)

    async def _carry_out(self, uuid: str, todo: Todo, facts: DeviceFacts, leases: Sequence[str]) -> None:
        if todo.end_leases is not None:
            if todo.vanished and await self._is_there(uuid, todo.vanished):
                return
            await self._end_leases(uuid, todo.end_leases, leases)
        if todo.make_claim:
            await self._make_claim(uuid)
        if todo.make_holder:
            await self._make_holder(uuid, facts)
        if todo.end_holders:
            for pod in filter(holds, facts.holders):
                await self._writer.delete(pod)
        if todo.end_claim and facts.claim is not None:
            self._log.info("GPU %s is empty: the cluster has it back", ascii(uuid))
            name = claim_name(self._shape.pool, uuid)
            made = {"metadata": {"name": name, "namespace": self._shape.namespace, "uid": facts.claim.uid}}
            await self._writer.delete(made, self._path)

    async def _end_leases(self, uuid: str, why: PodTaken, leases: Sequence[str]) -> None:
        if leases:
            self._log.warning("%d leases on GPU %s end: %s", len(leases), ascii(uuid), why.message)
        for lease_id in leases:
            self._ending.add(lease_id)
            try:
                await self._end_lease(lease_id, why)
            finally:
                self._ending.discard(lease_id)

    async def _is_there(self, uuid: str, uid: str) -> bool:
        """Ask whether the very claim of a device is there that the watch does not show."""
        name = claim_name(self._shape.pool, uuid)
        found = await self._writer.read(f"{self._path}/{name}")
        return found is not None and found["metadata"]["uid"] == uid

    async def _make_claim(self, uuid: str) -> None:
        shared = self._view.shared
        made = None if shared is None else shared.claim(uuid)
        if made is None:
            return  # it is not listed: leases on it end by that
        created = await self._writer.create(self._path, owned(made, self._shape.owner))
        if created is None:  # there is one of that name, which the watch may not show yet
            created = await self._writer.read(f"{self._path}/{made['metadata']['name']}")
        if created is not None:
            self._view.put_claim(created)

    async def _make_holder(self, uuid: str, facts: DeviceFacts) -> None:
        found = self._claim_of(uuid)
        node = "" if found is None else device_of(found)[1]
        names = [str(each["metadata"]["name"]) for each in facts.holders]
        taints = tolerations([self._view.node(node)])
        while True:
            made = holder(self._shape, uuid, node, taints, names)
            created = await self._writer.create(path_of(self._shape.namespace, "pods"), made)
            if created is not None:
                self._view.pods.put(created)
                return
            names.append(made["metadata"]["name"])
