"""Looks after a running kernel's slice by the terms of its lease: warns, and says when it is time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from traitlets.log import get_logger

from gpu_pool_client import (
    EndReason,
    Lease,
    LeaseGone,
    LeaseState,
    Terms,
    format_duration,
)
from gpu_pool_provisioner.patience import NOT_NOW
from gpu_pool_provisioner.room import tenure
from gpu_pool_provisioner.room.relay import Relay
from gpu_pool_provisioner.room.tenure import Act, Seen, Step
from gpu_pool_provisioner.room.turn import Turn

#: Seconds until the next look at a kernel whose slice is gone while it works.
_SOON: Final = 0.5
#: Seconds to leave a kernel alone that could not be parked.
_TRY_AGAIN: Final = 30.0
#: Seconds between two looks at a lease that the pool watches over: its warnings are read that late.
_GUARDED_EVERY: Final = 2.0
#: What a kernel publishes to say that it is in use, see gpu_pool_kernels.inkernel.keeping.
KEEP: Final = "gpu_pool_keep"


class Steward:
    """One kernel's steward, from the grant of its slice to its end or parking."""

    def __init__(self, lease: Lease, relay: Relay, turn: Turn) -> None:
        self._terms = lease.terms
        self._relay = relay
        self._turn = turn
        self._idle_since = time.monotonic()
        self._kept_until = 0.0
        self._warned: frozenset[str] = frozenset()
        self._notice = ""
        self._kept = False
        self._changed = asyncio.Event()
        relay.messages[KEEP] = self._keep

    async def time_is_up(self) -> Step:
        """Return when the slice is to be parked or the kernel ended; warn before that."""
        while True:
            step = await self._look()
            if step.act in (Act.PARK, Act.END):
                return step
            if step.act is Act.WARN:
                self._relay.tell(step.words)
                self._warned |= {step.warns_of}
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), step.again_in)
            except asyncio.TimeoutError:
                continue

    def postpone(self) -> None:
        """Leave alone a kernel that could not be parked, and for good what it keeps on its device."""
        self._kept = True
        self._kept_until = max(self._kept_until, time.monotonic() + _TRY_AGAIN)

    async def _look(self) -> Step:
        try:
            lease = await self._turn.lease()
            if lease.state is LeaseState.ENDED:
                return taken(lease.end_reason.value if lease.end_reason else None, lease.notice)
            if lease.state is not LeaseState.HELD:
                # Somebody else has parked it. Code that runs already cannot be held any more.
                return Step(Act.NOTHING, again_in=_SOON) if self._relay.busy else Step(Act.PARK)
            self._pass_on(lease.notice)
            self._terms = _on_our_clock(lease.terms)
            step = tenure.step(self._terms, await self._seen(), time.monotonic())
            return replace(step, again_in=min(step.again_in, _GUARDED_EVERY)) if lease.terms.guarded else step
        except LeaseGone as error:
            return taken(error.reason)
        except NOT_NOW as error:
            get_logger().warning("The GPU pool of a running kernel cannot answer: %s", error)
            return Step(Act.NOTHING)

    def _pass_on(self, notice: str) -> None:
        """Tell the user what the pool has to say, once."""
        if notice and notice != self._notice:
            self._relay.tell(notice)
        self._notice = notice

    async def _seen(self) -> Seen:
        idle_since = max(self._idle_since, self._relay.last_activity or 0.0)
        seen = Seen(self._relay.busy, idle_since, self._kept_until, kept=self._kept, warned=self._warned)
        at = tenure.idle_at(self._terms, seen)
        if at is None or time.monotonic() < at - self._terms.warn_before:
            return seen  # looking at the device costs more, and decides nothing yet
        return replace(seen, activity=await self._turn.activity())

    def _keep(self, content: Mapping[str, Any]) -> None:
        """Take note that the kernel's user says it is in use."""
        wanted = content.get("seconds")
        if not isinstance(wanted, int) or wanted <= 0:
            return
        seconds = min(wanted, self._terms.keep_at_most)
        self._kept_until = time.monotonic() + seconds
        self._changed.set()
        most = "" if seconds == wanted else ", the most that its course allows at once"
        self._relay.tell(f"This kernel keeps its GPU slice for {format_duration(seconds)}{most}.")


def _on_our_clock(terms: Terms) -> Terms:
    """Return the terms with the lease's end by ``time.monotonic()``, which nobody sets."""
    if terms.ends_at is None:
        return terms
    return replace(terms, ends_at=terms.ends_at - time.time() + time.monotonic())


def taken(reason: str | None, words: str = "") -> Step:
    """Return what is to be done when the pool has taken the slice; ``words`` say why, if anybody does."""
    why = f" ({reason})" if reason else ""
    ended = f"The kernel was ended: its GPU slice has gone back to the pool{why}."
    return Step(Act.END, f"{ended} {words}".rstrip())


#: How a lease ends with which step.
REASONS: Final = {tenure.IDLE_ENDED: EndReason.IDLE, tenure.LEASE_ENDED: EndReason.TOO_LONG}
