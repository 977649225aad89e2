"""Holds a running kernel to the terms of its lease: at work, idle, parked and back again, to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from traitlets.log import get_logger

from gpu_pool_client import (
    Lease,
    LeaseGone,
    LeaseState,
    Terms,
)
from gpu_pool_client._values import why_over
from gpu_pool_provisioner.kernel_slice import NOT_NOW
from gpu_pool_provisioner.proxy import expiry_policy
from gpu_pool_provisioner.proxy.channels import Channels
from gpu_pool_provisioner.proxy.events import before
from gpu_pool_provisioner.proxy.expiry_policy import ExpiryAction, ExpiryStep, KernelObservation
from gpu_pool_provisioner.proxy.lease_client import LeaseClient
from gpu_pool_provisioner.proxy.parking import Parking
from gpu_pool_provisioner.proxy.pending import PendingKernel
from gpu_pool_provisioner.proxy.relay import Relay
from gpu_pool_provisioner.proxy.runs import KernelRun

#: Seconds until the next look at a kernel whose slice is gone while it works.
_SOON: Final = 0.5
#: Seconds to leave a kernel alone that could not be parked.
_TRY_AGAIN: Final = 30.0
#: Seconds in which a pool may still do what it was asked for and has not answered.
_PARKS_WITHIN: Final = 600.0
#: Seconds between two looks at a lease that the pool watches over: its warnings are read that late.
_REVOCABLE_EVERY: Final = 2.0
_USED_MEANWHILE: Final = "The kernel was ended: it used the GPU after its slice had been taken back."
#: What a kernel publishes to say that it is in use, see gpu_pool_kernels.inkernel.keep_alive.
KEEP: Final = "gpu_pool_keep"


class IdleCuller:
    """Watches one kernel from the grant of its slice to its end or parking."""

    def __init__(self, lease: Lease, relay: Relay, lease_client: LeaseClient) -> None:
        self._terms = _on_our_clock(lease.terms)
        self._relay = relay
        self._lease_client = lease_client
        self._idle_since = time.monotonic()
        self._kept_until = 0.0
        self._warned: frozenset[str] = frozenset()
        self._notice = ""
        self._postponed_until = 0.0
        self._kept = False
        #: Until when the pool may park the lease because this side has asked for it and heard no answer.
        self._parks_until = 0.0
        self._changed = asyncio.Event()
        relay.messages[KEEP] = self._keep

    async def time_is_up(self) -> ExpiryStep:
        """Return when the slice is to be parked or the kernel ended; warn before that."""
        while True:
            step = await self._look()
            if step.act in (ExpiryAction.PARK, ExpiryAction.END):
                return step
            if step.act is ExpiryAction.WARN:
                self._relay.tell(step.message)
                self._warned |= {step.warns_of}
            self._changed.clear()
            again_in = min(step.again_in, _REVOCABLE_EVERY) if self._may_be_parked() else step.again_in
            try:
                await asyncio.wait_for(self._changed.wait(), again_in)
            except asyncio.TimeoutError:
                continue

    def postpone(self, parking: Parking) -> None:
        """Leave alone a kernel that could not be parked, and for good what must stay on its device."""
        now = time.monotonic()
        self._postponed_until = now + _TRY_AGAIN
        self._kept = self._kept or parking.is_refused
        if parking.is_unanswered:
            self._parks_until = now + _PARKS_WITHIN

    def found_at_work(self) -> None:
        """Begin to count anew how long the kernel has been idle."""
        self._idle_since = time.monotonic()

    async def _look(self) -> ExpiryStep:
        try:
            lease = await self._lease_client.lease()
            if lease.state is LeaseState.ENDED:
                return taken(lease.end_reason.value if lease.end_reason else None, lease.notice)
            self._pass_on(lease.message)
            if lease.state is not LeaseState.HELD:
                return await self._without_slice(lease)
            self._terms = _on_our_clock(lease.terms)
            step = expiry_policy.step(self._terms, await self._seen(lease), time.monotonic())
            if step.message == expiry_policy.ASKED_BACK:
                step = replace(step, message=f"{step.message} {lease.message}")
            again_in = min(step.again_in, _REVOCABLE_EVERY) if lease.terms.revocable else step.again_in
            return replace(step, again_in=again_in)
        except LeaseGone as error:
            return taken(error.reason)
        except NOT_NOW as error:
            get_logger().warning("The GPU pool of a running kernel cannot answer: %s", error)
            return ExpiryStep(ExpiryAction.NOTHING)

    async def _without_slice(self, lease: Lease) -> ExpiryStep:
        """Say what is to be done where the lease of a kernel that may be at work has been parked."""
        if self._may_be_parked() and lease.state is LeaseState.PARKED:
            return ExpiryStep(ExpiryAction.PARK, is_parked=True)  # as this side has asked for
        if lease.asked_back and (await self._lease_client.activity()).initialised:
            return ExpiryStep(ExpiryAction.END, f"{_USED_MEANWHILE} {lease.message}".rstrip())
        # Code that runs already cannot be held any more.
        return (
            ExpiryStep(ExpiryAction.NOTHING, again_in=_SOON)
            if self._relay.busy
            else ExpiryStep(ExpiryAction.PARK)
        )

    def _may_be_parked(self) -> bool:
        return time.monotonic() < self._parks_until

    def _pass_on(self, message: str) -> None:
        """Tell the user what the pool has to say, once."""
        if message and message != self._notice:
            self._relay.tell(message)
        self._notice = message

    async def _seen(self, lease: Lease) -> KernelObservation:
        if not self._device_decides(self._heard(lease)):
            return self._heard(lease)  # looking at the device costs more, and decides nothing yet
        activity = await self._lease_client.activity()
        # Cells may have begun and ended meanwhile.
        return replace(self._heard(lease), activity=activity)

    def _device_decides(self, seen: KernelObservation) -> bool:
        now = time.monotonic()
        if seen.asked_back and not seen.busy and now >= seen.postponed_until:
            return True
        at = expiry_policy.idle_at(self._terms, seen)
        return at is not None and now >= at - self._terms.warn_before

    def _heard(self, lease: Lease) -> KernelObservation:
        """Return what is known of the kernel without a look at its device."""
        return KernelObservation(
            self._relay.busy,
            max(self._idle_since, self._relay.last_activity or 0.0),
            self._kept_until,
            self._postponed_until,
            kept=self._kept,
            asked_back=lease.asked_back is not None,
            warned=self._warned,
        )

    def _keep(self, content: Mapping[str, Any]) -> None:
        """Take note that the kernel's user says it is in use."""
        wanted = content.get("seconds")
        if not isinstance(wanted, int) or wanted <= 0:
            return
        now = time.monotonic()
        seconds, answer = expiry_policy.keep(self._terms, wanted, now)
        self._kept_until = now + seconds
        self._changed.set()
        self._relay.tell(answer)


def _on_our_clock(terms: Terms) -> Terms:
    """Return the terms with the lease's end by ``time.monotonic()``, which nobody sets."""
    if terms.ends_at is None:
        return terms
    return replace(terms, ends_at=terms.ends_at - time.time() + time.monotonic())


def taken(reason: str | None, message: str = "") -> ExpiryStep:
    """Return what is to be done when the pool has taken the slice; ``message`` says why, if anybody does."""
    why = f": {why_over(reason)}" if reason else ""
    return ExpiryStep(
        ExpiryAction.END, f"The kernel was ended, since its GPU slice is over{why}. {message}".rstrip()
    )


class RunSupervisor:
    """Holds a kernel that is relayed to the terms of its lease."""

    def __init__(
        self, run: KernelRun, lease_client: LeaseClient, front: Channels, pending: PendingKernel
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
        """Say who took a parked kernel's lease, and why."""
        try:
            message = (await self._lease_client.lease()).notice
        except (LeaseGone, *NOT_NOW):
            message = ""
        return taken(error.reason, message)
