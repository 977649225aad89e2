"""Steps: what a lease meets between its grant and its end."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from gpu_pool_client import (
    BadRequest,
    EndReason,
    GpuPoolError,
    LeaseGone,
    LeaseState,
    NotAllowed,
    Process,
    parse_request,
)
from model.driving import Child, Driving, which
from model.known import Known
from model.scenery import REQUESTS

_MINE = (EndReason.RELEASED, EndReason.WITHDRAWN, EndReason.IDLE, EndReason.TOO_LONG)
#: Why what is about to end is not parked.
_NOT_PARKED = (EndReason.PROCESS_GONE, EndReason.NOT_READY)
_WAITING, _HELD, _PARKED, _ENDED = LeaseState.WAITING, LeaseState.HELD, LeaseState.PARKED, LeaseState.ENDED


class Changing(Driving):
    """Steps of those who have a lease."""

    # -- Attaching ---------------------------------------------------------

    @precondition(lambda self: self.model.living)
    @rule(
        one=which,
        other=st.integers(0, 3),
        ready_within=st.sampled_from([None, None, 0.0, 20.0]),
        grace=st.sampled_from([0.0, 0.0, 50.0]),
    )
    def attach(self, one: int, other: int, ready_within: float | None, grace: float) -> None:
        known = self.pick(one, _WAITING, _HELD, _PARKED)
        child = self._child(other)
        attaching = self.pool.attach(known.id, child.identity, ready_within=ready_within, grace=grace)
        self.do(attaching)
        self.model.attach(known, child, ready_within, grace)

    @precondition(lambda self: self.model.living)
    @rule(one=which, ttl=st.sampled_from([None, 0.0, 10.0, 100.0]))
    def renew(self, one: int, ttl: float | None) -> None:
        known = self.pick(one, _WAITING, _HELD, _PARKED)
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
        known = self.pick(one, _WAITING, _HELD, _PARKED)
        refusal = self.not_mine(known)
        if refusal is None and known.state is _WAITING and not known.home:
            refusal = BadRequest
        if refusal is None and known.state is _HELD and known.deadline and known.deadline[1] in _NOT_PARKED:
            refusal = NotAllowed
        with self.refused(refusal):
            assert self.do(self.pool.park(known.id)).state is _PARKED
        if refusal is None and known.state is not _PARKED:
            self.model.park(known)
            self.serve()

    @precondition(lambda self: self.model.all_in(_PARKED))
    @rule(one=which)
    def resume(self, one: int) -> None:
        known = self.pick(one, _PARKED)
        self.do(self.pool.resume(known.id))
        self.model.resume(known)
        self.serve()

    @precondition(lambda self: self.model.living)
    @rule(one=which, text=st.sampled_from(REQUESTS))
    def resize(self, one: int, text: str) -> None:
        request = parse_request(text)
        known = self.pick(one, _WAITING, _HELD, _PARKED)
        refusal = self.not_mine(known) or self.model.resize(known, request)
        with self.refused(refusal):
            assert self.do(self.pool.resize(known.id, request)).request == known.request
        if refusal is None:
            self.serve()

    def not_mine(self, known: Known) -> type[GpuPoolError] | None:
        """Return the error for changing what another process asked for, or what one cannot look into."""
        unseen = known.process is not None and known.state is _HELD and not self.ground.sees
        return NotAllowed if known.keeper is not self.me or unseen else None

    @precondition(lambda self: self.model.living)
    @rule(one=which, reason=st.sampled_from(_MINE))
    def release(self, one: int, reason: EndReason) -> None:
        known = self.pick(one, _WAITING, _HELD, _PARKED)
        self.do(self.pool.release(known.id, reason))
        self.end(known, reason)

    @precondition(lambda self: self.model.all_in(_ENDED))
    @rule(one=which)
    def touch_what_has_ended(self, one: int) -> None:
        known = self.pick(one, _ENDED)
        self.do(self.pool.release(known.id, EndReason.REVOKED))
        changes: list[Callable[[str], Coroutine[Any, Any, object]]] = [
            self.pool.wait, self.pool.renew, self.pool.park, self.pool.resume, self.pool.explain,
            partial(self.pool.resize, request=known.request),
            partial(self.pool.attach, process=Process.current()),
        ]  # fmt: skip
        with self.refused(LeaseGone):
            self.do(changes[one % len(changes)](known.id))
        assert self.do(self.pool.get_lease(known.id)).end_reason is known.reason
