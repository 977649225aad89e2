"""Everything that can happen to a pool, in any order, and what must hold after each of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpu_pool import placement
from gpu_pool.coursefiles import BadCourseFile, CourseFile, Courses, parse_course
from gpu_pool.settings import PoolSettings
from gpu_pool_client import (
    BadRequest,
    EndReason,
    GpuPoolError,
    Holder,
    Lease,
    LeaseGone,
    LeaseState,
    NotAllowed,
    Pool,
    PoolStatus,
    Process,
    SliceRequest,
    TimedOut,
    parse_request,
)
from model.grounds import Ground, end
from model.reference import Known, Life, Reference
from support.pools import device

T = TypeVar("T")

_TWINS = [device(index, numa_node=0, nvlink=(f"SIM-V100-SXM2-32GB-{1 - index}",)) for index in (0, 1)]
#: Two that are linked, one whose contexts are counted and whose slices are of one size, and a MIG
#: instance. To the pool they are real: simulated ones are never lost.
DEVICES = [
    replace(each, simulated=False)
    for each in (
        *_TWINS,
        device(2, "T4", 16384, contexts=7, one_size=True),
        device(3, "A100", 4864, milli=142, mig_profile="1g.5gb"),
    )
]
REQUESTS = [
    "2%", "10%", "30%", "50%", "75%", "1", "2", "2x50%", "8GiB", "20GiB", "8GiB index=2", "25% model=t4",
    "50% model=t4", "10% model=a100", "1 index=0", "2x30% index=0,1", "0.5%", "5", "33GiB", "2% driver>=900",
]  # fmt: skip
_LARGE = ["50%", "75%", "1", "2", "2x50%", "20GiB"]
COURSES = [None, "cs101", "thesis", "lab", "nonsense"]
_LAB = """
title: Laboratory
slices: [{{name: Small, request: 2%}}, {{name: Half, request: 50%}}, {{name: Whole, request: 1}}]
any_up_to: 30%
weight: {weight}
priority: {priority}
per_user: {{slices: {slices}}}
"""
#: What is in the file of the course ``lab``, at one time or another.
FILES = [
    None,
    _LAB.format(weight=1, priority=0, slices=3),
    _LAB.format(weight=5, priority=0, slices=1),
    _LAB.format(weight=0, priority=2, slices=8) + "longest_lease: 5min\n",
    "title: Laboratory\nslices: [",
]
_MINE = (EndReason.RELEASED, EndReason.WITHDRAWN, EndReason.IDLE, EndReason.TOO_LONG)
_WAITING, _HELD, _PARKED, _ENDED = LeaseState.WAITING, LeaseState.HELD, LeaseState.PARKED, LeaseState.ENDED

which = st.integers(0, 31)
_indexes = st.sampled_from(range(len(DEVICES)))


@dataclass(eq=False)
class Child(Life):
    """A process that leases are attached to."""

    process: subprocess.Popen[bytes] | None = None

    @property
    def identity(self) -> Process:
        assert self.process
        found = Process.of(self.process.pid)
        assert found is not None
        return found

    def kill(self) -> None:
        assert self.process
        self.process.kill()
        self.process.communicate()
        self.alive = False


@dataclass(eq=False)
class Party(Life):
    """Another process that asks for slices."""

    process: Process | None = None


class PoolMachine(RuleBasedStateMachine):
    """Drives a pool and its model side by side; a subclass says which pool."""

    #: Steps done by all machines of this process, by ground.
    steps: ClassVar[dict[str, int]] = {}
    name: ClassVar[str]
    make: ClassVar[Callable[[], Ground]]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.ground = type(self).make()
        settings = PoolSettings(**self.ground.settings())
        self.model = Reference(
            DEVICES, settings.rules, settings.sharing, settings.attach_within, settings.max_waiting
        )
        self.me = Life()
        self.children: list[Child] = []
        self.parties: list[Party] = []
        self.ended: dict[str, EndReason] = {}
        self.keys = (f"key-{number}" for number in itertools.count())
        self.model.wall, self.model.uptime = self.ground.clocks.read()

    @initialize(file=st.sampled_from(range(len(FILES))), some=st.sets(_indexes, min_size=1))
    def begin(self, file: int, some: set[int]) -> None:
        self._write(FILES[file])
        self._show(some)
        self.pool: Pool = self.do(self.ground.open())
        self.status: PoolStatus = self.do(self.pool.status())

    def teardown(self) -> None:
        try:
            for child in self.children:
                if child.alive:
                    child.kill()
        finally:
            self.do(self.ground.close())
            self.loop.close()

    # -- Asking ------------------------------------------------------------

    @rule(text=st.sampled_from(_LARGE), course=st.sampled_from(COURSES), many=st.integers(2, 6))
    def a_class_begins(self, text: str, course: str | None, many: int) -> None:
        for who in range(many):
            self.ask(text, course, who)
            self._settle()

    @rule(text=st.sampled_from(REQUESTS), course=st.sampled_from(COURSES), who=which)
    def ask(self, text: str, course: str | None, who: int) -> None:
        request = parse_request(text)
        user = self.ground.users[who % len(self.ground.users)]
        refusal = self.model.refusal(request, user, course)
        key = next(self.keys)
        with self._refused(refusal):
            lease = self.do(self.pool.request(request, Holder(user, course), key))
        if refusal is None:
            self._asked(lease.id, key, request, user, course, self.me)
            assert self.model.leases[lease.id].state is lease.state

    @precondition(lambda self: self.model.leases)
    @rule(one=which)
    def ask_again_with_the_same_key(self, one: int) -> None:
        known = self._pick(one, *LeaseState)
        if known.keeper is self.me:
            course = None if known.course not in self.model.sharing.courses else known.course
            lease = self.do(self.pool.request(known.request, Holder(known.user, course), known.key))
            assert (lease.id, lease.state) == (known.id, known.state)

    # Another process that finds a bad file at its start knows no earlier one.
    @precondition(
        lambda self: len(self.parties) < 3 and not (self.ground.reads_alone and self.file is FILES[-1])
    )
    @rule(text=st.sampled_from(REQUESTS[:12]), course=st.sampled_from(COURSES), who=which)
    def ask_from_another_process(self, text: str, course: str | None, who: int) -> None:
        request = parse_request(text)
        user = self.ground.users[who % len(self.ground.users)]
        refusal = self.model.refusal(request, user, course)
        key = next(self.keys)
        process, answer = self.ground.party(str(request), user, course, key)
        if refusal is not None:
            assert answer == refusal.__name__
            end(process)
        else:
            self.parties.append(Party(process=process))
            self._asked(answer, key, request, user, course, self.parties[-1])

    def _reads_as_others(self) -> bool:
        """Whether another process knows of the courses what we do: of a bad file it knows no earlier one."""
        return not (self.ground.reads_alone and self.file is FILES[-1])

    def _asked(
        self, lease_id: str, key: str, request: SliceRequest, user: str, course: str | None, keeper: Life
    ) -> None:
        assert lease_id not in self.model.leases, "an id was given twice"
        known = self.model.asked(lease_id, key, request, user, course, keeper)
        self._serve()
        if known.state is _WAITING:  # then the pool looks at once for what is over
            self._look()

    # -- Waiting -----------------------------------------------------------

    @precondition(lambda self: self.model.living)
    @rule(one=which)
    def wait_no_time(self, one: int) -> None:
        known = self._pick(one, _WAITING, _HELD, _PARKED)
        refusal = {_WAITING: TimedOut, _HELD: None, _PARKED: BadRequest}[known.state]
        with self._refused(refusal):
            lease = self.do(self.pool.wait(known.id, 0))
            assert lease.state is _HELD

    @precondition(lambda self: self.model.line)
    @rule(one=which)
    def cancel_a_wait(self, one: int) -> None:
        known = self._pick(one, _WAITING)

        async def cancel() -> None:
            waiting = asyncio.ensure_future(self.pool.wait(known.id))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        self.do(cancel())
        self._end(known, EndReason.WITHDRAWN)

    @rule(text=st.sampled_from(REQUESTS[:12]), who=which)
    def acquire_in_no_time(self, text: str, who: int) -> None:
        request = parse_request(text)
        user = self.ground.users[who % len(self.ground.users)]
        refusal = self.model.refusal(request, user, None)
        key = next(self.keys)
        acquiring = self.pool.acquire(request, Holder(user), key, 0)
        if refusal is not None:
            with self._refused(refusal):
                self.do(acquiring)
            return
        with contextlib.suppress(TimedOut):
            self.do(acquiring)
        lease = self.do(self.pool.request(request, Holder(user), key))
        self._asked(lease.id, key, request, user, None, self.me)
        known = self.model.leases[lease.id]
        if known.state is _WAITING:
            assert lease.end_reason is EndReason.WITHDRAWN
            self._end(known, EndReason.WITHDRAWN)

    @precondition(lambda self: self.model.living)
    @rule(one=which)
    def ask_about_it(self, one: int) -> None:
        known = self._pick(one, _WAITING, _HELD, _PARKED)
        lease = self.do(self.pool.lease(known.id))
        seen = self.do(anext(self.pool.watch(known.id)))
        assert lease.state is seen.state is known.state
        assert lease.place == seen.place == self._place(known)
        with self._refused(None if known.state is _WAITING else BadRequest):
            outlook = self.do(self.pool.explain(known.id))
            assert outlook.place == self._place(known)

    # -- Attaching ---------------------------------------------------------

    @precondition(lambda self: self.model.living)
    @rule(
        one=which,
        other=st.integers(0, 3),
        ready_within=st.sampled_from([None, None, 0.0, 20.0]),
        grace=st.sampled_from([0.0, 0.0, 50.0]),
    )
    def attach(self, one: int, other: int, ready_within: float | None, grace: float) -> None:
        known = self._pick(one, _WAITING, _HELD, _PARKED)
        child = self._child(other)
        attaching = self.pool.attach(known.id, child.identity, ready_within=ready_within, grace=grace)
        self.do(attaching)
        self.model.attach(known, child, ready_within, grace)

    @precondition(lambda self: self.model.living)
    @rule(one=which, ttl=st.sampled_from([None, 0.0, 10.0, 100.0]))
    def renew(self, one: int, ttl: float | None) -> None:
        known = self._pick(one, _WAITING, _HELD, _PARKED)
        self.do(self.pool.renew(known.id, ttl))
        self.model.renew(known, ttl)

    def _child(self, other: int) -> Child:
        """Return a process that lives: one of a few, made anew once it was killed."""
        living = [child for child in self.children if child.alive]
        if other < len(living):
            return living[other]
        child = Child(process=subprocess.Popen(["cat"], stdin=subprocess.PIPE))
        self.children.append(child)
        return child

    # -- Changing ----------------------------------------------------------

    @precondition(lambda self: self.model.living)
    @rule(one=which)
    def park(self, one: int) -> None:
        known = self._pick(one, _WAITING, _HELD, _PARKED)
        refusal = self._not_mine(known)
        if refusal is None and known.state is _WAITING and not known.home:
            refusal = BadRequest
        with self._refused(refusal):
            assert self.do(self.pool.park(known.id)).state is _PARKED
        if refusal is None and known.state is not _PARKED:
            self.model.park(known)
            self._serve()

    @precondition(lambda self: self.model.all_in(_PARKED))
    @rule(one=which)
    def resume(self, one: int) -> None:
        known = self._pick(one, _PARKED)
        self.do(self.pool.resume(known.id))
        self.model.resume(known)
        self._serve()

    @precondition(lambda self: self.model.living)
    @rule(one=which, text=st.sampled_from(REQUESTS))
    def resize(self, one: int, text: str) -> None:
        request = parse_request(text)
        known = self._pick(one, _WAITING, _HELD, _PARKED)
        refusal = self._not_mine(known) or self.model.resize(known, request)
        with self._refused(refusal):
            assert self.do(self.pool.resize(known.id, request)).request == request
        if refusal is None:
            self._serve()

    def _not_mine(self, known: Known) -> type[GpuPoolError] | None:
        """Return the error for changing what another process asked for, or what one cannot look into."""
        unseen = known.process is not None and known.state is _HELD and not self.ground.sees
        return NotAllowed if known.keeper is not self.me or unseen else None

    @precondition(lambda self: self.model.living)
    @rule(one=which, reason=st.sampled_from(_MINE))
    def release(self, one: int, reason: EndReason) -> None:
        known = self._pick(one, _WAITING, _HELD, _PARKED)
        self.do(self.pool.release(known.id, reason))
        self._end(known, reason)

    @precondition(lambda self: self.model.all_in(_ENDED))
    @rule(one=which)
    def touch_what_has_ended(self, one: int) -> None:
        known = self._pick(one, _ENDED)
        self.do(self.pool.release(known.id, EndReason.REVOKED))
        changes: list[Callable[[str], Coroutine[Any, Any, object]]] = [
            self.pool.wait, self.pool.renew, self.pool.park, self.pool.resume, self.pool.explain,
            partial(self.pool.resize, request=known.request),
            partial(self.pool.attach, process=Process.current()),
        ]  # fmt: skip
        with self._refused(LeaseGone):
            self.do(changes[one % len(changes)](known.id))
        assert self.do(self.pool.lease(known.id)).end_reason is known.reason

    # -- Crashes -----------------------------------------------------------

    @precondition(lambda self: self.ground.sees and any(child.alive for child in self.children))
    @rule(one=which)
    def kill_what_is_attached(self, one: int) -> None:
        living = [child for child in self.children if child.alive]
        living[one % len(living)].kill()

    @precondition(lambda self: self.ground.sees and any(party.alive for party in self.parties))
    @rule(one=which)
    def kill_who_asked(self, one: int) -> None:
        living = [party for party in self.parties if party.alive]
        party = living[one % len(living)]
        assert party.process
        end(party.process)
        party.alive = False
        self.parties.remove(party)

    @precondition(lambda self: self.model.living)
    @rule(some=st.one_of(st.none(), st.sets(_indexes, min_size=1)))
    def crash_and_begin_again(self, some: set[int] | None) -> None:
        """Kill the pool's own process; perhaps other devices are there afterwards."""
        self.do(self.ground.crash())
        before = self.model.present
        if some is not None:
            self._show(some)
        self._read_courses(Courses())
        self.pool = self.do(self.ground.open())
        if self.model.present != before:
            self._serve()

    # -- The world ---------------------------------------------------------

    @precondition(lambda self: self.model.living)
    @rule(seconds=st.sampled_from([1.0, 7.0, 30.0, 30.0, 61.0, 130.0, 301.0, 90_000.0]))
    def time_passes(self, seconds: float) -> None:
        self._set_clocks(self.model.wall + seconds, self.model.uptime + seconds)

    @precondition(lambda self: self.model.living)
    @rule(seconds=st.sampled_from([-86_400.0, -3_700.0, -10.0, 45.0, 3_700.0, 700_000.0]))
    def somebody_sets_the_clock(self, seconds: float) -> None:
        self._set_clocks(self.model.wall + seconds, self.model.uptime)

    @precondition(lambda self: self.model.living)
    @rule(index=_indexes, drained=st.booleans())
    def drain(self, index: int, drained: bool) -> None:
        one = DEVICES[index]
        known = {status.device.uuid for status in self.model.statuses()}
        refusal = None if one.uuid in known else BadRequest
        with self._refused(refusal):
            assert self.do(self.pool.drain(one.uuid, drained=drained)).drained is drained
        if refusal is None:
            self.model.drained = self.model.drained - {one.uuid} | ({one.uuid} if drained else set())
            self._serve()

    @precondition(lambda self: self.model.living)
    @rule(file=st.sampled_from(range(len(FILES))))
    def the_course_changes(self, file: int) -> None:
        self._write(FILES[file])
        for _ in range(3):  # a file that was taken away is missed at the second look
            self._set_clocks(self.model.wall + 2, self.model.uptime + 2)
            self._settle()

    def _show(self, some: set[int]) -> None:
        self.model.present = {DEVICES[index].uuid for index in some}
        self.ground.show([DEVICES[index] for index in sorted(some)])

    def _write(self, file: str | None) -> None:
        self.ground.write_course("lab", file)
        self.file = file
        self._read_courses(self.model.courses)

    def _read_courses(self, before: Courses) -> None:
        """Let the model follow the file; while it is bad, what it said ``before`` is in force."""
        usable: Mapping[str, CourseFile] = {}
        try:
            if self.file is not None:
                usable = {"lab": parse_course("lab.yaml", self.file.encode())}
        except BadCourseFile:
            usable = before.usable
        refused = {} if usable or self.file is None else {"lab": "It cannot be read."}
        self.model.courses = Courses(usable, refused)

    def _set_clocks(self, wall: float, uptime: float) -> None:
        self.model.wall, self.model.uptime = wall, uptime
        self.ground.clocks.set(wall, uptime)

    # -- Helpers -----------------------------------------------------------

    def do(self, job: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(job, 120))

    def _pick(self, one: int, *states: LeaseState) -> Known:
        found = self.model.all_in(*states)
        return found[one % len(found)]

    @contextlib.contextmanager
    def _refused(self, refusal: type[GpuPoolError] | None) -> Any:
        """Expect that error, exactly, or none."""
        met: GpuPoolError | None = None
        try:
            yield
        except GpuPoolError as error:
            met = error
        assert refusal is (met and type(met)), f"{met!r}, where {refusal} was to be expected"

    def _end(self, known: Known, reason: EndReason) -> None:
        self.model.end(known, reason)
        self._serve()

    def _serve(self) -> None:
        """Let the model serve its line, now that the pool has served its own."""
        self.model.serve(self.ground.usage())

    def _look(self) -> bool:
        found = self.model.look()
        if found:
            self._serve()
        return found

    def _settle(self) -> None:
        """Look until nothing is found: what one look makes room for may be over at once."""
        while True:
            self.status = self.do(self.pool.status())
            if not self._look():
                return

    def _line(self) -> list[tuple[str, str]]:
        return [(known.id, ",".join(known.reserved)) for known in self.model.line]

    def _place(self, known: Known) -> int | None:
        return self.model.line.index(known) + 1 if known in self.model.line else None

    # -- What must hold ----------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        PoolMachine.steps[self.name] = PoolMachine.steps.get(self.name, 0) + 1
        self._settle()
        self.the_pool_is_as_it_should_be()
        self.nothing_is_granted_twice()
        self.nobody_waits_for_what_is_free_and_theirs()
        self.every_lease_ends_once_and_for_one_reason()
        self.the_history_adds_up_to_what_was_used()

    def the_pool_is_as_it_should_be(self) -> None:
        kept = self.ground.rows("SELECT id, reserved FROM lease WHERE turn IS NOT NULL ORDER BY turn")
        if kept != self._line():
            # Whoever waits has the line served now and then, though nothing has happened but time.
            self._serve()
        assert kept == self._line()
        line = [(lease.id, lease.place) for lease in self.status.line]
        assert line == [(known.id, place) for place, known in enumerate(self.model.line, 1)]
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
        assert (lease.state, lease.slices, lease.request) == (known.state, known.parts, known.request)
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

    def nobody_waits_for_what_is_free_and_theirs(self) -> None:
        reserved = dict(self.ground.rows("SELECT number, reserved FROM lease WHERE turn IS NOT NULL"))
        waiting = {int(lease.id.partition("-")[0]): lease for lease in self.status.line}
        assert reserved.keys() == waiting.keys(), "something is kept free for nobody"
        kept = [uuid for uuids in reserved.values() for uuid in uuids.split(",") if uuid]
        assert len(kept) == len(set(kept))
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
        reasons = {row["id"]: EndReason(row["reason"]) for row in history}
        assert len(reasons) == len(history)
        assert reasons.items() >= self.ended.items(), "an end was changed"
        self.ended = reasons
        ended = self.model.all_in(_ENDED)
        assert reasons == {known.id: known.reason for known in ended}
        living = {lease.id for lease in (*self.status.leases, *self.status.line)}
        assert not living & reasons.keys()
        assert living | reasons.keys() == self.model.leases.keys()
        rows = {row["id"]: row for row in history}
        for known in ended:
            row = rows[known.id]
            assert row["held_seconds"] == pytest.approx(known.held_seconds)
            assert row["gpu_seconds"] == pytest.approx(known.used / 1000)
            assert (row["held_at"], row["ended_at"]) == (known.first_held_at, known.ended_at)

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
