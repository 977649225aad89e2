"""A pool and its model side by side: how both are made, asked, looked at and ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from gpu_pool.courses import BadCourseFile, CourseFile, Courses, parse_course
from gpu_pool.settings import PoolSettings
from gpu_pool_client import EndReason, GpuPoolError, LeaseState, Pool, PoolStatus, Process
from model.grounds import Ground
from model.known import Known, Life
from model.reference import Reference
from model.scenery import BAD_FILE, DEVICES, FILES

T = TypeVar("T")

which = st.integers(0, 31)
indexes = st.sampled_from(range(len(DEVICES)))


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


class Driving(RuleBasedStateMachine):
    """What all steps need. A subclass says which pool."""

    #: Steps done by all machines of this process, by ground.
    steps: ClassVar[dict[str, int]] = {}
    name: ClassVar[str]
    make: ClassVar[Callable[[], Ground]]
    reference: ClassVar[type[Reference]] = Reference

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.ground = type(self).make()
        settings = PoolSettings(**self.ground.settings())
        self.model = self.reference(
            self.ground.devices,
            settings.rules,
            settings.sharing,
            settings.attach_within,
            settings.max_waiting,
        )
        self.me = Life()
        self.children: list[Child] = []
        self.parties: list[Party] = []
        self.ended: dict[str, EndReason] = {}
        self.keys = (f"key-{number}" for number in itertools.count())
        self.model.wall, self.model.uptime = self.ground.clocks.read()

    @initialize(file=st.sampled_from(range(len(FILES))), some=st.sets(indexes, min_size=1))
    def begin(self, file: int, some: set[int]) -> None:
        self.write(FILES[file])
        self.show(some)
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

    # -- The world ---------------------------------------------------------

    def show(self, some: set[int]) -> None:
        """Let these be the devices that are there."""
        found = self.ground.show([self.ground.devices[index] for index in sorted(some)])
        self.model.present = {each.uuid for each in found}

    def write(self, file: str | None) -> None:
        """Write the course file, or take it away."""
        self.ground.write_course("lab", file)
        self.file = file
        self.read_courses(self.model.courses)

    def read_courses(self, before: Courses) -> None:
        """Let the model follow the file; while it is bad, what it said ``before`` is in force."""
        usable: Mapping[str, CourseFile] = {}
        try:
            if self.file is not None:
                usable = {"lab": parse_course("lab.yaml", self.file.encode())}
        except BadCourseFile:
            usable = before.usable
        refused = {} if usable or self.file is None else {"lab": "It cannot be read."}
        self.model.courses = Courses(usable, refused)

    def set_clocks(self, wall: float, uptime: float) -> None:
        self.model.wall, self.model.uptime = wall, uptime
        self.ground.clocks.set(wall, uptime)

    def reads_as_others(self) -> bool:
        """Whether another process knows of the courses what we do: of a bad file it knows no earlier one."""
        return not (self.ground.reads_alone and self.file is BAD_FILE)

    # -- Helpers -----------------------------------------------------------

    def do(self, job: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(job, 120))

    def pick(self, one: int, *states: LeaseState) -> Known:
        found = self.model.all_in(*states)
        return found[one % len(found)]

    @contextlib.contextmanager
    def refused(self, refusal: type[GpuPoolError] | None) -> Any:
        """Expect that error, exactly, or none."""
        met: GpuPoolError | None = None
        try:
            yield
        except GpuPoolError as error:
            met = error
        assert refusal is (met and type(met)), f"{met!r}, where {refusal} was to be expected"

    def end(self, known: Known, reason: EndReason) -> None:
        self.model.end(known, reason)
        self.serve()

    def serve(self) -> None:
        """Let the model serve its queue, now that the pool has served its own."""
        self.model.serve(self.ground.usage())

    def look(self) -> bool:
        found = self.model.look()
        if found:
            self.serve()
        return found

    def settle(self) -> None:
        """Look until nothing is found: what one look makes room for may be over at once."""
        while True:
            self.status = self.do(self.pool.status())
            if not self.look():
                return

    def catch_up(self) -> None:
        """Serve the queue if the pool has, as it does now and then: time changes the order."""
        if self.kept() != self.line():
            self.serve()

    def kept(self) -> list[tuple[Any, ...]]:
        """Return the queue as the store has it: ids, and the devices that are kept free for each."""
        return self.ground.rows("SELECT id, reserved FROM lease WHERE turn IS NOT NULL ORDER BY turn")

    def line(self) -> list[tuple[str, str]]:
        return [(known.id, ",".join(known.reserved)) for known in self.model.queue]

    def place_of(self, known: Known) -> int | None:
        return self.model.queue.index(known) + 1 if known in self.model.queue else None
