"""What must hold after every step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis.stateful import invariant

from gpu_pool.policy import placement
from gpu_pool_client import EndReason, Lease, LeaseState
from model.driving import Driving
from model.known import Known

_HELD, _PARKED, _ENDED = LeaseState.HELD, LeaseState.PARKED, LeaseState.ENDED


class Checks(Driving):
    """The invariants."""

    # -- What must hold ----------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        self.steps[self.name] = self.steps.get(self.name, 0) + 1
        self.settle()
        self.the_pool_is_as_it_should_be()
        self.nothing_is_granted_twice()
        self.nothing_is_given_twice()
        self.nobody_waits_for_what_is_free_and_theirs()
        self.every_lease_ends_once_and_for_one_reason()
        self.the_history_adds_up_to_what_was_used()

    def the_pool_is_as_it_should_be(self) -> None:
        self.catch_up()
        assert self.kept() == self.line()
        line = [(lease.id, lease.position) for lease in self.status.queue]
        assert line == [(known.id, place) for place, known in enumerate(self.model.queue, 1)]
        leases = {lease.id: lease for lease in self.status.leases}
        assert list(leases) == [known.id for known in self.model.all_in(_HELD, _PARKED)]
        for known in self.model.all_in(_HELD, _PARKED):
            self._compare(known, leases[known.id])
        there = [status for status in self.status.devices if status.device.uuid in self.model.present]
        lost = {status.device.uuid: status for status in self.status.devices if status not in there}
        expected = self.model.statuses()
        assert there == [status for status in expected if status.device.uuid in self.model.present]
        assert lost == {s.device.uuid: s for s in expected if s.device.uuid not in self.model.present}

    def _compare(self, known: Known, lease: Lease) -> None:
        # How much is on top is for the pool to choose, within what there is.
        slices = tuple(replace(part, burst_mib=0) for part in lease.slices)
        assert (lease.state, slices, lease.request) == (known.state, known.parts, known.request)
        assert all(0 <= p.burst_mib <= max(0, p.limit_mib - p.memory_mib) for p in lease.slices)
        assert (lease.held_at, lease.holder.user) == (known.held_at, known.user)
        # What only stands for a process is not shown.
        assert (lease.process is None) == (known.process is None or not self.ground.sees)

    def nothing_is_granted_twice(self) -> None:
        for status in self.status.devices:
            parts = [
                part
                for lease in self.status.leases
                for part in lease.slices
                if part.device.uuid == status.device.uuid
            ]
            assert status.held_milli == sum(part.milli for part in parts) <= status.milli
            assert (
                status.held_memory_mib == sum(part.memory_mib for part in parts) <= status.device.memory_mib
            )
            assert status.held_contexts == sum(part.contexts for part in parts)
            assert status.device.contexts is None or status.held_contexts <= status.device.contexts
            assert not status.device.one_size or len({(p.milli, p.memory_mib) for p in parts}) <= 1

    def nothing_is_given_twice(self) -> None:
        """See that what is granted and what may be used on top of it are no more than there is."""
        for status in self.status.devices:
            parts = [part for lease in self.status.leases for part in lease.slices]
            here = [part.allowed_mib for part in parts if part.device.uuid == status.device.uuid]
            assert sum(here) <= status.device.memory_mib

    def nobody_waits_for_what_is_free_and_theirs(self) -> None:
        reserved = dict(self.ground.rows("SELECT number, reserved FROM lease WHERE turn IS NOT NULL"))
        waiting = {int(lease.id.partition("-")[0]): lease for lease in self.status.queue}
        assert reserved.keys() == waiting.keys(), "something is kept free for nobody"
        # Those who ask for the same go one after another on what is kept free for the first of them.
        kept = [uuid for uuids in set(reserved.values()) for uuid in uuids.split(",") if uuid]
        assert len(kept) == len(set(kept)), "one device is kept free for two"
        for number, lease in waiting.items():
            home = self.model.leases[lease.id].home
            others = set(kept) - set(reserved[number].split(","))
            usable = [
                status
                for status in self.status.devices
                if status.device.uuid in self.model.present - others
                and not status.drained
                and (not home or status.device.uuid in home)
            ]
            assert placement.place(lease.request, usable, self.model.rules) is None

    def every_lease_ends_once_and_for_one_reason(self) -> None:
        history = self.do(self.pool.history())
        reasons = {row.id: EndReason(row.reason) for row in history}
        assert len(reasons) == len(history)
        assert reasons.items() >= self.ended.items(), "an end was changed"
        self.ended = reasons
        ended = self.model.all_in(_ENDED)
        assert reasons == {known.id: known.reason for known in ended}
        living = {lease.id for lease in (*self.status.leases, *self.status.queue)}
        assert not living & reasons.keys()
        assert living | reasons.keys() == self.model.leases.keys()
        rows = {row.id: row for row in history}
        for known in ended:
            row = rows[known.id]
            assert row.held_seconds == pytest.approx(known.held_seconds)
            assert row.gpu_seconds == pytest.approx(known.used / 1000)
            assert (row.held_at, row.ended_at) == (known.first_held_at, known.ended_at)

    def the_history_adds_up_to_what_was_used(self) -> None:
        used = {}
        for known in self.model.leases.values():
            account = known.course, known.user
            if known.stretches:
                used[account] = used.get(account, 0.0) + known.used
        counted = {
            (course, user): of
            for course, user, of in self.ground.rows("SELECT course, user, in_term FROM use")
        }
        assert counted == pytest.approx(used)
