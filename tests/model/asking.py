"""Steps: asking for a slice and waiting for it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from gpu_pool_client import BadRequest, EndReason, Holder, LeaseState, SliceRequest, TimedOut, parse_request
from model.driving import Driving, Party, which
from model.grounds import end
from model.known import Life
from model.scenery import COURSES, LARGE, REQUESTS, SENSIBLE

_WAITING, _HELD, _PARKED = LeaseState.WAITING, LeaseState.HELD, LeaseState.PARKED


class Asking(Driving):
    """Steps of those who ask and wait."""

    # -- Asking ------------------------------------------------------------

    @rule(text=st.sampled_from(LARGE), course=st.sampled_from(COURSES), many=st.integers(2, 6))
    def a_class_begins(self, text: str, course: str | None, many: int) -> None:
        for who in range(many):
            self.ask(text, course, who)
            self.settle()

    @rule(text=st.sampled_from(REQUESTS), course=st.sampled_from(COURSES), who=which, batch=st.booleans())
    def ask(self, text: str, course: str | None, who: int, batch: bool = False) -> None:
        request = parse_request(text)
        user = self.ground.users[who % len(self.ground.users)]
        refusal = self.model.refusal(request, user, course)
        key = next(self.keys)
        with self.refused(refusal):
            lease = self.do(self.pool.request(request, Holder(user, course, batch=batch), key))
        if refusal is None:
            self.has_asked(lease.id, key, request, user, course, self.me, batch=batch)
            assert self.model.leases[lease.id].state is lease.state

    @precondition(lambda self: self.model.leases)
    @rule(one=which)
    def ask_again_with_the_same_key(self, one: int) -> None:
        known = self.pick(one, *LeaseState)
        if known.keeper is self.me:
            course = None if known.course not in self.model.sharing.courses else known.course
            # It is answered although what it asks for may be refused to anybody new by now.
            lease = self.do(self.pool.request(known.request, Holder(known.user, course), known.key))
            assert (lease.id, lease.state) == (known.id, known.state)

    @precondition(lambda self: len(self.parties) < 3 and self.reads_as_others())
    @rule(text=st.sampled_from(SENSIBLE), course=st.sampled_from(COURSES), who=which)
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
            self.has_asked(answer, key, request, user, course, self.parties[-1])

    def has_asked(
        self,
        lease_id: str,
        key: str,
        request: SliceRequest,
        user: str,
        course: str | None,
        keeper: Life,
        *,
        batch: bool = False,
    ) -> None:
        assert lease_id not in self.model.leases, "an id was given twice"
        known = self.model.asked(lease_id, key, request, user, course, keeper, batch=batch)
        self.serve()
        if known.state is _WAITING:  # then the pool looks at once for what is over
            self.look()

    # -- Waiting -----------------------------------------------------------

    @precondition(lambda self: self.model.living)
    @rule(one=which)
    def wait_no_time(self, one: int) -> None:
        known = self.pick(one, _WAITING, _HELD, _PARKED)
        refusal = {_WAITING: TimedOut, _HELD: None, _PARKED: BadRequest}[known.state]
        with self.refused(refusal):
            lease = self.do(self.pool.wait(known.id, 0))
            assert lease.state is _HELD

    @precondition(lambda self: self.model.queue)
    @rule(one=which)
    def cancel_a_wait(self, one: int) -> None:
        known = self.pick(one, _WAITING)

        async def cancel() -> None:
            waiting = asyncio.ensure_future(self.pool.wait(known.id))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        self.do(cancel())
        assert self.do(self.pool.get_lease(known.id)).state is _WAITING

    @rule(text=st.sampled_from(SENSIBLE), who=which)
    def acquire_in_no_time(self, text: str, who: int) -> None:
        request = parse_request(text)
        user = self.ground.users[who % len(self.ground.users)]
        refusal = self.model.refusal(request, user, None)
        key = next(self.keys)
        acquiring = self.pool.acquire(request, Holder(user), key, 0)
        if refusal is not None:
            with self.refused(refusal):
                self.do(acquiring)
            return
        with contextlib.suppress(TimedOut):
            self.do(acquiring)
        lease = self.do(self.pool.request(request, Holder(user), key))
        self.has_asked(lease.id, key, request, user, None, self.me)
        known = self.model.leases[lease.id]
        if known.state is _WAITING:
            assert lease.end_reason is EndReason.WITHDRAWN
            self.end(known, EndReason.WITHDRAWN)

    @precondition(lambda self: self.model.living)
    @rule(one=which)
    def ask_about_it(self, one: int) -> None:
        known = self.pick(one, _WAITING, _HELD, _PARKED)
        seen = self.do(anext(self.pool.watch(known.id)))
        self.catch_up()
        lease = self.do(self.pool.get_lease(known.id))
        assert lease.state is seen.state is known.state
        assert lease.position == seen.position == self.place_of(known)
        with self.refused(None if known.state is _WAITING else BadRequest):
            outlook = self.do(self.pool.explain(known.id))
            assert outlook.position == self.place_of(known)
