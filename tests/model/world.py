"""Steps: crashes, clocks, devices and course files."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from gpu_pool.courses import Courses
from gpu_pool_client import BadRequest
from model.driving import Driving, indexes, which
from model.grounds import end
from model.scenery import FILES


class World(Driving):
    """Steps of nobody who asks."""

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
    @rule(some=st.one_of(st.none(), st.sets(indexes, min_size=1)))
    def crash_and_begin_again(self, some: set[int] | None) -> None:
        """Kill the pool's own process; perhaps other devices are there afterwards."""
        self.do(self.ground.crash())
        before = self.model.present
        if some is not None:
            self.show(some)
        self.read_courses(Courses())
        self.pool = self.do(self.ground.open())
        if self.model.present != before:
            self.serve()

    # -- The world ---------------------------------------------------------

    @precondition(lambda self: self.model.living)
    @rule(seconds=st.sampled_from([1.0, 7.0, 30.0, 30.0, 61.0, 130.0, 301.0, 90_000.0]))
    def time_passes(self, seconds: float) -> None:
        self.set_clocks(self.model.wall + seconds, self.model.uptime + seconds)

    @precondition(lambda self: self.model.living)
    @rule(seconds=st.sampled_from([-86_400.0, -3_700.0, -10.0, 45.0, 3_700.0, 700_000.0]))
    def somebody_sets_the_clock(self, seconds: float) -> None:
        self.set_clocks(self.model.wall + seconds, self.model.uptime)

    @precondition(lambda self: self.model.living)
    @rule(index=indexes, drained=st.booleans())
    def drain(self, index: int, drained: bool) -> None:
        one = self.ground.devices[index]
        known = {status.device.uuid for status in self.model.statuses()}
        refusal = None if one.uuid in known else BadRequest
        with self.refused(refusal):
            status = self.do(self.pool.drain(one.uuid, drained=drained))
            assert status.drained is (drained or one.uuid in self.model.closed)
        if refusal is None:
            if drained:
                self.model.drained_at.setdefault(one.uuid, self.model.wall)
            else:
                self.model.drained_at.pop(one.uuid, None)
            self.serve()

    @precondition(lambda self: self.model.living)
    @rule(file=st.sampled_from(range(len(FILES))))
    def the_course_changes(self, file: int) -> None:
        self.write(FILES[file])
        for _ in range(3):  # a file that was taken away is missed at the second look
            self.set_clocks(self.model.wall + 2, self.model.uptime + 2)
            self.settle()
