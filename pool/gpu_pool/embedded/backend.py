"""The backend of one machine: its devices by their driver, and the tiers that enforce slices of them."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpu_pool.audit.callers import Caller
from gpu_pool.devices import Inventory, discover
from gpu_pool.devices.driver_check import DriverCheck
from gpu_pool.embedded.allocation import (
    Allocation,
    JobEnd,
    SlurmSilent,
    check_fits,
    others_use,
    shares_of,
)
from gpu_pool.enforcement import Isolation
from gpu_pool.enforcement.enforcer import Enforcer
from gpu_pool.enforcement.machine import owned, unowned
from gpu_pool.policy import admission
from gpu_pool.policy.queue_state import Rules
from gpu_pool.pool.backend import Adapted, Backend, DevicesFound, LeasesObserved, PoolSide
from gpu_pool.settings import PoolSettings
from gpu_pool.store import registration
from gpu_pool.store.context import StoreContext
from gpu_pool.store.device_table import SeenFrom
from gpu_pool.worker import Worker
from gpu_pool_client import (
    WHOLE,
    Device,
    Enforcement,
    Holder,
    Lease,
    Limit,
    NeverFits,
    PoolUnreachable,
    Process,
    SliceRequest,
    Strength,
)
from gpu_pool_client._log import get_logger
from gpu_pool_client._processes import boot_id

if TYPE_CHECKING:
    from gpu_pool.slurm.steps import StepHost

#: Seconds after which it is looked again for devices where there were none.
_AGAIN_AFTER: Final = 5.0
_SALLOC: Final = "See gpu-pool doctor; or ask for some: salloc --gres=gpu:1."
_UNLIMITED: Final = Limit(Strength.NONE, "nothing is enforced on another node of a Slurm job")


class LocalBackend(Backend):
    """The devices of this machine, for one user's processes or, as ``owner``, for a service's pool."""

    def __init__(
        self,
        path: Path,
        settings: PoolSettings,
        find_devices: Callable[[], Inventory] = discover,
        isolation: Isolation | None = None,
        *,
        owner: bool = False,
    ) -> None:
        self.is_owner, self.boot = owner, boot_id()
        self._settings, self._find_devices = settings, find_devices
        self._finder = DeviceFinder(self._find)
        #: What was found last, and what that was seen from.
        self._seen: tuple[Inventory, SeenFrom] | None = None
        self._driver = DriverCheck()
        #: The Slurm job that gave this process its devices, how many thousandths of each, by uuid, and when
        #: it ends. A service's pool outlives the job of whoever has started it.
        self._allocation = None if owner else Allocation.of(os.environ)
        self._shares: Mapping[str, int] = {}
        self._job_end = JobEnd(self._allocation.job) if self._allocation else None
        #: Runs kernels on the other nodes of that job; and their GPUs among those that were found.
        self._steps: StepHost | None = None
        self._others: tuple[Device, ...] = ()
        #: Whether these nodes may be asked, in a step, since something is to start; a look asks nobody.
        self._asks_nodes = False
        if self._allocation is not None and self._allocation.has_others:
            # Imported here because only few jobs have several nodes.
            from gpu_pool.slurm.steps import StepHost

            self.host = self._steps = StepHost(self._allocation.job, self._allocation.node, path)
        tiers = isolation or (owned if owner else unowned)(settings)
        self.enforcer = self.suspension = Enforcer(path, settings, tiers, owner=owner)

    def join(self, pool: PoolSide) -> None:
        """See ``Backend.join``."""
        super().join(pool)
        self.enforcer.store, self.enforcer.courses = pool.store, pool.courses
        if self._steps is not None:
            self._steps.pool = pool

    def run(self) -> AbstractAsyncContextManager[object]:
        """Begin nothing: threads are begun as they are needed."""
        return nullcontext()

    async def devices(
        self, max_age: float, patience: float = 0.0, known: Collection[Device] = ()
    ) -> DevicesFound:
        """See ``Backend.devices``: those that the driver shows, and whether something new could use them."""
        if max_age <= 0 and self._steps is not None and not self._asks_nodes:
            self._asks_nodes = True
            self._finder.forget()
        found = self._finder.known or await self._finder.found()
        is_empty = not found.devices and found.problems and self._finder.age > _AGAIN_AFTER
        if max_age <= 0 and (is_empty or self._have_others_said_more()):
            self._finder.forget()
            found = await self._finder.found()
        looked_at = known if found.is_broken or not found.devices else found.devices
        real = [each for each in looked_at if found.by_driver and not each.simulated and not each.node]
        faults = (await self._driver.faults(real, max_age, patience) or {}) if real else {}
        seen_from = self._seen[1] if self._seen and self._seen[0] is found else self._see(found)
        if self._job_end is not None:
            await self._job_end.follow()
        others = others_use(found.devices, self._shares) if self._shares else None
        return DevicesFound(found, seen_from, others, faults=faults)

    def _have_others_said_more(self) -> bool:
        """Whether other nodes have more than was found; those that were silent are asked again meanwhile."""
        if self._steps is None or self._steps.others is None:
            return False
        self._steps.look_again()
        return self._steps.others.devices != self._others

    def _see(self, found: Inventory) -> SeenFrom:
        """Return what this process sees. A service's pool has what the service has, and nothing else."""
        hidden = [each.uuid for each in found.hidden]
        everything = registration.seen_from(everything=True)
        seen = everything if self.is_owner else registration.seen_from(found.digest, hidden)
        self._seen = found, seen
        return seen

    def _find(self) -> Inventory:
        """Look for this machine's devices, and make them ready. Raises ``PoolUnreachable``."""
        job = self._allocation
        if job is not None and not job.node:  # the GPUs of this machine are none of its
            found = Inventory((), "Slurm", (f"{job} has no GPU, as far as its nodes say.", _SALLOC))
            return self._with_other_nodes(found)
        found = self._find_devices()
        divided = self._settings.unified_memory_mib
        if divided:
            found = found.with_unified_memory(divided)
        self._driver.seen_well()
        found = replace(found, devices=self.enforcer.adapt(found.devices))
        return found if job is None else self._with_other_nodes(self._of_job(job, found))

    def _of_job(self, job: Allocation, found: Inventory) -> Inventory:
        """Note how much of the devices is this process's where a Slurm job has but a part of them."""
        self._shares = {}
        if not job.may_have_parts or not found.by_driver or not found.devices:
            return found
        try:
            self._shares = shares_of(job, found.devices)
        except SlurmSilent as error:
            unknown = (
                f"{job} has {job.shards} shards of the GPUs of {job.node}, and Slurm does not say how many "
                f"shards a GPU has there: {error}. Nothing is granted until it does."
            )
            way_out = "See whether Slurm answers: scontrol show node. Or ask for whole GPUs: --gres=gpu:1."
            return replace(found, devices=(), problems=(*found.problems, unknown, way_out), is_broken=False)
        return found

    def _with_other_nodes(self, found: Inventory) -> Inventory:
        """Add the GPUs that a Slurm job has on other nodes, as far as these say which."""
        if self._steps is None or any(each.simulated for each in found.devices):
            return found
        self._finder.asks_nodes = True
        try:
            others = self._steps.look() if self._asks_nodes else self._steps.known()
        except PoolUnreachable as error:
            get_logger().warning("The other nodes of %s are not used: %s", self._allocation, error)
            return found
        finally:
            self._finder.asks_nodes = False
        if others is None:
            return found
        self._others = others.devices
        if not others.devices:
            return found
        shares = self._shares or {each.uuid: WHOLE for each in found.devices}
        self._shares = {**shares, **others.shares}
        return replace(found, devices=(*found.devices, *others.devices))

    async def adapt(
        self,
        request: SliceRequest,
        holder: Holder | None = None,
        caller: Caller | None = None,  # noqa: ARG002
    ) -> Adapted:
        """Return the request as it is: here it is granted to the thousandth, on whatever fits.

        What is no kernel runs where it was started, and has GPUs of this node alone. Raises
        ``PoolUnreachable`` where a node of the job may have what it asks for, and has not said so.
        """
        known, job = self._finder.known, self._allocation
        is_kernel = holder is None or holder.yields
        missing = self._steps.missing() if self._steps is not None and is_kernel else ""
        try:
            if self._shares and known is not None and job is not None:
                check_fits(request, known.devices, self._shares, job)
            if missing and known is not None:
                admission.check(request, known.devices, Rules())
        except NeverFits as error:
            if missing:
                raise PoolUnreachable(
                    f"You asked for {request.named}; {missing}",
                    "They are asked again once a minute: start the kernel again then.",
                ) from error
            raise
        if self._steps is None or known is None or is_kernel:
            return Adapted(request)
        here = [each.uuid for each in known.devices if not each.node]
        if not here and known.devices:
            raise NeverFits(
                f"You asked for {request.named}; {job} has GPUs on other nodes alone, where kernels can run.",
                "Start a command there by Slurm itself: srun --overlap --nodelist=NODE COMMAND.",
            )
        return Adapted(request, here)

    def describe(self, lease: Lease) -> Lease:
        """See ``Backend.describe``: by the tier of its devices, and the job that they are of."""
        lease = _on_another_node(lease) if lease.terms.in_pod else self.enforcer.state(lease)
        if self._allocation is None or self._job_end is None:
            return lease
        job_terms = replace(lease.terms, job=str(self._allocation), job_ends_at=self._job_end.at)
        return replace(lease, terms=job_terms)

    def recover(self, store: StoreContext) -> None:
        """See ``Backend.recover``: limits that are still in force, and what parked leases keep."""
        self.enforcer.recover(store)

    async def bind(self, lease: Lease, process: Process | None = None) -> Lease:
        """See ``Backend.bind``: limits are made ready, and the processes held to them."""
        if not lease.terms.in_pod:
            if process is not None:
                await self.enforcer.attach(lease, process)
            await self.enforcer.enforce(lease)
        return self.describe(lease)

    async def unbind(self, living: Callable[[], Awaitable[Sequence[Lease]]]) -> None:
        """See ``Backend.unbind``: limits are taken away."""
        if self._job_end is not None:  # each that holds something comes by here
            await self._job_end.follow()
        await self.enforcer.settle(living)
        if self._steps is not None:
            await self._steps.settle(living)

    async def observe(self, living: Callable[[], Awaitable[Sequence[Lease]]]) -> LeasesObserved:  # noqa: ARG002
        """Return nothing: leases here end with their processes, which the pool judges."""
        return LeasesObserved()

    def allows_burst(self, device: Device) -> bool:
        """See ``Backend.allows_burst``: what is counted, and held by what can follow."""
        return not device.node and self.enforcer.allows_burst(device)

    def memory_in_use(self) -> Mapping[str, Mapping[str, int]]:
        """See ``Backend.memory_in_use``: what the watchdog of this process has seen."""
        return self.enforcer.memory_in_use()

    async def close(self) -> None:
        """Enforce nothing that needs this process any more."""
        if self._job_end is not None:
            self._job_end.close()
        self._driver.close()
        self._finder.close()
        try:
            if self._steps is not None:
                await self._steps.close()
        finally:
            await self.enforcer.close()


def _on_another_node(lease: Lease) -> Lease:
    """Say that nothing limits a lease there; its kernel says which of its frameworks are."""
    slices = tuple(replace(part, limit_mib=0, burst_mib=0) for part in lease.slices)
    terms, limits = replace(lease.terms, revocable=True), Enforcement(_UNLIMITED, _UNLIMITED)
    return replace(lease, slices=slices, terms=terms, enforcement=limits)


#: Seconds after which it is said that the driver is slow, and after which nobody waits any longer.
_SLOW: Final = 5.0
_PATIENCE: Final = 180.0
#: Why the driver's first answer takes long, and what to do.
_WHY_SLOW: Final = (
    "Without persistence mode the driver sets up all GPUs anew whenever nobody uses them, which takes half a "
    "minute and more where there are many. Have it switched on: sudo nvidia-smi -pm 1, or the service "
    "nvidia-persistenced."
)
_NODES_SLOW: Final = (
    "The other nodes of this Slurm job have not answered",
    "gpu-pool doctor says of each what it has, or why not.",
)


class DeviceFinder:
    """Looks for devices in a thread of its own, and remembers what it found. Used from any event loop.

    What is to wait for the store, or for whoever has locked it, is not held up by the driver.
    """

    def __init__(
        self, find: Callable[[], Inventory], slow: float = _SLOW, patience: float = _PATIENCE
    ) -> None:
        self._find = find
        self._slow, self._patience = slow, patience
        #: What was found; None where it is to be found yet.
        self.known: Inventory | None = None
        self._worker: Worker | None = None
        self._found_at = 0.0
        #: Whether it is the other nodes of a Slurm job that are waited for, and not the driver.
        self.asks_nodes = False
        self._is_told = False

    @property
    def age(self) -> float:
        """Seconds since it was found what there is."""
        return time.monotonic() - self._found_at

    async def found(self) -> Inventory:
        """Return what there is.

        Raises what finding it does, and ``PoolUnreachable`` where that does not end.
        """
        if self.known is not None:
            return self.known
        worker = self._worker = self._worker or Worker("gpu-pool-devices")
        try:
            return await worker.run(self._find_in_thread, self._slow)
        except TimeoutError:
            self._say_slow()
        try:
            return await worker.run(self._find_in_thread, self._patience - self._slow)
        except TimeoutError as error:
            raise self._unanswered() from error

    def wait(self) -> Inventory:
        """Block until it is known what there is, and return it; see :meth:`found`."""
        if self.known is None:
            worker = self._worker = self._worker or Worker("gpu-pool-devices")
            try:
                return worker.call(self._find_in_thread, self._patience)
            except TimeoutError as error:
                raise self._unanswered() from error
        return self.known

    def forget(self) -> None:
        """Look again when it is asked for next."""
        self.known = None

    def close(self) -> None:
        """Look no more."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _find_in_thread(self) -> Inventory:
        if self.known is None:
            self.known = self._find()
            self._found_at = time.monotonic()
        return self.known

    def _say_slow(self) -> None:
        if not self._is_told:
            self._is_told = True
            who, why = self._awaited()
            get_logger().warning("%s for %g seconds. %s", who, self._slow, why)

    def _unanswered(self) -> PoolUnreachable:
        who, why = self._awaited()
        look = "" if self.asks_nodes else " Run nvidia-smi and see whether it does."
        return PoolUnreachable(
            f"{who} for {self._patience:g} seconds, so it is not known which GPUs there are.{look}", why
        )

    def _awaited(self) -> tuple[str, str]:
        """Say who does not answer, and why or how to see that."""
        return _NODES_SLOW if self.asks_nodes else ("The NVIDIA driver has not answered", _WHY_SLOW)
