"""Steps that only a cluster knows: kernels in pods, nodes that come and go, an API that is away."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from gpu_pool.courses import Courses
from gpu_pool_client import EndReason, GpuPoolError, LeaseGone, LeaseState, NotAllowed, PodPhase
from model.clusters import ClusterGround, ClusterReference
from model.driving import indexes, which
from model.known import Known
from model.machine import PoolMachine
from support.kernel_pods import command

_HELD, _ENDED = LeaseState.HELD, LeaseState.ENDED


@dataclass
class Kernel:
    """The newest pod of a lease."""

    name: str
    #: Of what was last seen of it.
    version: str
    #: Whether it has ended by itself.
    is_over: bool = False


class ClusterMachine(PoolMachine):
    """Drives the pool of a cluster."""

    ground: ClusterGround
    reference = ClusterReference

    def __init__(self) -> None:
        super().__init__()
        self.kernels: dict[str, Kernel] = {}

    # -- Kernels -----------------------------------------------------------

    @precondition(lambda self: self.model.held)
    @rule(one=which)
    def launch(self, one: int) -> None:
        known = self.pick(one, _HELD)
        pod = self.do(self.pool.launch(known.id, command()))
        assert pod.phase is PodPhase.STARTING
        if known.process is None:  # whoever launches has come for it
            self.model.attach(known, known.keeper, None, 0.0)
        names = [each for each in self.ground.kernels() if each.startswith(f"gpu-pool-{known.id}-")]
        newest = max(names, key=lambda name: int(name.rpartition("-")[2]))
        self.kernels[known.id] = Kernel(newest, pod.version)

    @precondition(lambda self: self.running)
    @rule(one=which)
    def a_kernel_runs(self, one: int) -> None:
        known, kernel = self._kernel(one)
        self.ground.tell("run", kernel.name, known.parts[0].device.node)
        self._see(known, PodPhase.RUNNING)

    @precondition(lambda self: self.running)
    @rule(one=which)
    def a_kernel_ends_by_itself(self, one: int) -> None:
        known, kernel = self._kernel(one)
        state = {"state": {"terminated": {"exitCode": 1}}}
        self.ground.tell("change", "pods", kernel.name, phase="Failed", containerStatuses=[state])
        self._see(known, PodPhase.ENDED)
        kernel.is_over = True

    @precondition(lambda self: self.running)
    @rule(one=which)
    def end_a_kernel(self, one: int) -> None:
        known, _ = self._kernel(one)
        self.do(self.pool.end_pod(known.id))
        del self.kernels[known.id]

    @precondition(lambda self: self.running)
    @rule(one=which, evicted=st.booleans())
    def a_kernel_is_taken(self, one: int, evicted: bool) -> None:
        known, kernel = self._kernel(one)
        self._take(kernel, evicted)
        self._has_ended(known, EndReason.TAKEN)

    @precondition(lambda self: self.running)
    @rule(one=which, evicted=st.booleans())
    def a_kernel_is_taken_while_the_service_is_away(self, one: int, evicted: bool) -> None:
        known, kernel = self._kernel(one)
        self.do(self.ground.crash())
        self._take(kernel, evicted)
        self._begin_again()
        if not evicted:  # what is gone is missed by whoever has seen it
            with self.refused(LeaseGone):
                self.do(self.pool.pod(known.id, kernel.version))
        self._has_ended(known, EndReason.TAKEN)

    # In which order the leases of several end, nobody says; where somebody waits, it decides who is next.
    @precondition(lambda self: len(self.running) == 1 or (self.running and not self.model.queue))
    @rule()
    def the_notebook_server_stops(self) -> None:
        mine = [self.model.leases[lease_id] for lease_id in self.running]
        self.ground.close_notebook()
        for known in mine:
            self._has_ended(known, EndReason.TAKEN)
        self.ground.open_notebook()

    @precondition(lambda self: self.model.held)
    @rule(one=which)
    def release_just_before_the_service_is_killed(self, one: int) -> None:
        known = self.pick(one, _HELD)
        self.do(self.pool.release(known.id))
        self.end(known, EndReason.RELEASED)
        self.do(self.ground.crash())
        self._begin_again()

    # -- The cluster -------------------------------------------------------

    @precondition(lambda self: self.model.living)
    @rule(some=st.sets(indexes), unseen=st.booleans())
    def nodes_come_and_go(self, some: set[int], unseen: bool) -> None:
        """Perhaps while the API does not answer."""
        if unseen:
            self.ground.run(self.ground.fake.stop())
        there = {n for n, each in enumerate(self.ground.devices) if each.uuid in self.model.present}
        self.show(some | there)
        if not unseen:
            self._follow()
        self.show(some)
        if unseen:
            self.ground.run(self.ground.fake.start())
        self._follow()

    @precondition(lambda self: self.model.present)
    @rule(index=indexes, ready=st.booleans())
    def a_node_answers_or_not(self, index: int, ready: bool) -> None:
        name = self.ground.devices[index].node
        mine = {each.uuid for each in self.ground.devices if each.node == name}
        if mine <= self.model.present:
            self.ground.answers(name, ready)
            self.model.closed = self.model.closed - mine if ready else self.model.closed | mine
            self._follow()

    @precondition(lambda self: self.model.living)
    @rule(forgotten=st.booleans())
    def watches_break(self, forgotten: bool) -> None:
        if forgotten:
            self.ground.tell("forget")
        self.ground.tell("cut")

    # -- Helpers -----------------------------------------------------------

    @property
    def running(self) -> list[str]:
        """The leases whose kernels have not ended."""
        return [lease_id for lease_id, kernel in self.kernels.items() if not kernel.is_over]

    def _kernel(self, one: int) -> tuple[Known, Kernel]:
        lease_id = self.running[one % len(self.running)]
        return self.model.leases[lease_id], self.kernels[lease_id]

    def _see(self, known: Known, phase: PodPhase) -> None:
        """Follow the pod of a lease until it is so."""
        kernel = self.kernels[known.id]
        pod = self.do(self.pool.pod(known.id))
        until = time.monotonic() + 60
        while pod.phase is not phase:
            assert time.monotonic() < until, f"waited in vain, and saw last {pod}"
            pod = self.do(self.pool.pod(known.id, pod.version))
        kernel.version = pod.version

    def _take(self, kernel: Kernel, evicted: bool) -> None:
        if evicted:
            self.ground.tell("change", "pods", kernel.name, phase="Failed", reason="Evicted")
        else:
            self.ground.tell("remove", "pods", kernel.name)

    def _has_ended(self, known: Known, reason: EndReason) -> None:
        self._until(lambda: self.do(self.pool.get_lease(known.id)).state is _ENDED)
        self.end(known, reason)

    def _begin_again(self) -> None:
        self.read_courses(Courses())
        self.pool = self.do(self.ground.open())

    def _follow(self) -> None:
        """Wait until the pool has taken over what the cluster shows."""
        expected = {(uuid, uuid in self.model.closed) for uuid in self.model.present}
        if self._taken_over() == expected:
            self.catch_up()  # where nothing was new, the pool has served nobody
            return
        self._until(lambda: self._taken_over() == expected)
        self.serve()

    def _taken_over(self) -> set[tuple[str, bool]]:
        return {
            (u, bool(closed))
            for u, closed in self.ground.rows("SELECT uuid, closed FROM device WHERE present")
        }

    def _until(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < until, "waited in vain"
            time.sleep(0.002)

    # -- What differs ------------------------------------------------------

    def show(self, some: set[int]) -> None:
        super().show(some)
        self.model.closed &= self.model.present

    def not_mine(self, known: Known) -> type[GpuPoolError] | None:
        """See there; what a kernel in a pod keeps on its GPU, nobody here sees."""
        return NotAllowed if known.id in self.running else super().not_mine(known)

    def look(self) -> bool:
        """See there; whoever holds something of a node that is gone has lost it."""
        found = super().look()
        for known in self.model.held:
            if any(part.device.uuid not in self.model.present for part in known.parts):
                self.end(known, EndReason.DEVICE_LOST)
                found = True
        return found

    @invariant()
    def there_are_kernels_of_living_leases_alone(self) -> None:
        for lease_id in list(self.kernels):
            if self.model.leases[lease_id].state is _ENDED:
                del self.kernels[lease_id]
        names = {kernel.name for kernel in self.kernels.values()}
        self._until(lambda: self.ground.kernels() == names)
