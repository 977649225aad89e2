"""A kernel's stay on its slice: at work, parked and back again, until one of them goes."""

from __future__ import annotations

from gpu_pool_client import Lease, LeaseGone
from gpu_pool_provisioner.outages import NOT_NOW
from gpu_pool_provisioner.proxy.channels import Wires
from gpu_pool_provisioner.proxy.expiry_policy import ExpiryAction, ExpiryStep
from gpu_pool_provisioner.proxy.idle_culler import IdleCuller, taken
from gpu_pool_provisioner.proxy.lease_client import LeaseClient
from gpu_pool_provisioner.proxy.parking import Parking
from gpu_pool_provisioner.proxy.pending import PendingKernel
from gpu_pool_provisioner.proxy.process_ends import before
from gpu_pool_provisioner.proxy.runs import KernelRun


class RunSupervisor:
    """Holds a kernel that is relayed to the terms of its lease."""

    def __init__(
        self, run: KernelRun, lease_client: LeaseClient, front: Wires, pending: PendingKernel
    ) -> None:
        self._run = run
        self._lease_client = lease_client
        self._front = front
        self._pending = pending
        self._parking: Parking | None = None

    @property
    def resuming(self) -> bool:
        """Whether something was submitted to the parked kernel, whose slice is asked for again."""
        return self._parking is not None and self._parking.resuming

    def give_up_resuming(self) -> None:
        """Let what was submitted to the parked kernel fail, and leave its slice to others."""
        if self._parking is not None:
            self._parking.give_up()

    async def until_over(self, lease: Lease) -> ExpiryStep | None:
        """Return once the kernel is over: None if it ended by itself, else what its terms say."""
        culler = IdleCuller(lease, self._run.relay, self._lease_client)
        while lease.terms.has_limits:
            step: ExpiryStep | None = await before(self._run.end, culler.time_is_up())
            if step is None:
                return self._run.taken
            if step.act is ExpiryAction.END and not step.if_idle:
                return step
            self._parking = Parking(self._lease_client, self._run, self._front, self._pending)
            try:
                if step.act is ExpiryAction.END:
                    if await before(self._run.end, self._parking.finds_idle()):
                        return step
                    culler.found_at_work()
                    continue
                if not await self._parks(step, self._parking):
                    culler.postpone(self._parking)
                    continue
                resumed = await before(self._run.end, self._parking.until_resumed())
            except LeaseGone as error:
                return await self._taken(error)
            finally:
                self._parking = None
            if resumed is None:
                return self._run.taken
            lease, culler = resumed, IdleCuller(resumed, self._run.relay, self._lease_client)
        await self._run.end
        return self._run.taken

    async def _parks(self, step: ExpiryStep, parking: Parking) -> bool:
        """Park the kernel, or complete that where its slice has gone; return whether it is parked."""
        if step.is_parked:
            await parking.complete()
            return True
        return await parking.begin()

    async def _taken(self, error: LeaseGone) -> ExpiryStep:
        """Say who took a parked kernel's lease, and in which words."""
        try:
            words = (await self._lease_client.lease()).notice
        except (LeaseGone, *NOT_NOW):
            words = ""
        return taken(error.reason, words)
