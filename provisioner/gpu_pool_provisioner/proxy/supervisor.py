"""Holds a running kernel to the terms of its lease: at work, idle, parked and back again, to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from gpu_pool_client import (
    Activity,
    Lease,
    LeaseGone,
    LeaseState,
    NotAllowed,
    Terms,
)
from gpu_pool_client._log import get_logger
from gpu_pool_client._values import why_over
from gpu_pool_provisioner.kernel_slice import NOT_NOW
from gpu_pool_provisioner.proxy.channels import Channels
from gpu_pool_provisioner.proxy.events import before, first_of
from gpu_pool_provisioner.proxy.lease_client import LeaseClient
from gpu_pool_provisioner.proxy.parking import Parking
from gpu_pool_provisioner.proxy.pending import PendingKernel
from gpu_pool_provisioner.proxy.relay import Relay
from gpu_pool_provisioner.proxy.runs import KernelRun
from gpu_pool_provisioner.session import expiry_policy
from gpu_pool_provisioner.session.expiry_policy import ExpiryAction, ExpiryStep, KernelObservation
from gpu_pool_provisioner.slice_state import IdleState

#: Seconds until the next look at a kernel whose slice is gone while it works.
_SOON: Final = 0.5
#: Seconds to leave a kernel alone that could not be parked.
_TRY_AGAIN: Final = 30.0
#: Seconds in which a pool may still do what it was asked for and has not answered.
_PARKS_WITHIN: Final = 600.0
#: Seconds between two looks at a lease that the pool watches over: its warnings are read that late.
_REVOCABLE_EVERY: Final = 2.0
_GIVES_BACK: Final = "This kernel gives its GPU slice back as soon as it is idle"
_GOES_PARKED: Final = f"{_GIVES_BACK}; its variables are kept."
_GOES_ENDED: Final = (
    f"{_GIVES_BACK}, and ends then, with its variables: what it may keep on the GPU cannot be moved away."
)
_STAYS: Final = (
    "This kernel keeps its GPU slice: what it keeps on the GPU cannot be moved away. Restart it or shut it "
    "down to give the slice back; its variables are gone then."
)
_NO_IDLE_LIMIT: Final = "Nothing needs to be done: this kernel keeps its GPU slice however long it is idle."
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
        #: Whether its user asked for the slice to go as soon as the kernel is idle; and knows that it ends.
        self._gives_back = False
        self._may_end = False
        self._changed = asyncio.Event()
        relay.messages[KEEP] = self._keep

    @property
    def idle_state(self) -> IdleState:
        """What idleness will come to, by what was last seen of the kernel."""
        seen = replace(self._heard(None), activity=self._lease_client.last_activity)
        gives_back_at, ends = expiry_policy.given_back_at(self._terms, seen)
        return IdleState(
            None if seen.busy else seen.idle_since,
            self._kept_until or None,
            gives_back_at,
            ends,
            self._gives_back,
            expiry_policy.keep_at_most(self._terms, time.monotonic()),
        )

    def keep(self, wanted: int) -> str:
        """Count the kernel as in use for so many seconds at most; return what its user reads."""
        now = time.monotonic()
        self._gives_back = False
        if not self._terms.acts_when_idle:
            return _NO_IDLE_LIMIT
        seconds, answer = expiry_policy.keep(self._terms, wanted, now)
        self._kept_until = now + seconds
        self._changed.set()
        return answer

    def give_back(self, activity: Activity) -> str:
        """Let the slice go as soon as the kernel is idle; return what its user reads.

        ``activity`` is what the kernel does with its device, by which its user was told what that costs.
        """
        self._gives_back, self._kept_until = True, 0.0
        self._may_end = not expiry_policy.keeps_variables(activity)
        self._changed.set()
        return _GOES_ENDED if self._may_end else _GOES_PARKED

    @property
    def is_giving_back(self) -> bool:
        """Whether its user asked for the slice to go as soon as the kernel is idle."""
        return self._gives_back

    async def is_given_back(self) -> None:
        """Return once the user has asked for the slice to go as soon as the kernel is idle."""
        while not self._gives_back:
            self._changed.clear()
            await self._changed.wait()

    async def time_is_up(self) -> ExpiryStep:
        """Return when the slice must be parked or the kernel ended; warn before that."""
        while True:
            self._changed.clear()
            step = await self._look()
            if step.act in (ExpiryAction.PARK, ExpiryAction.END):
                return step
            if step.act is ExpiryAction.WARN:
                self._relay.tell(step.message)
                self._warned |= {step.warns_of}
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
                if lease.asked_back is None and not self._may_end:
                    return self._stay()
                step = replace(step, message=f"{step.message} {lease.message}".rstrip())
            again_in = min(step.again_in, _REVOCABLE_EVERY) if lease.terms.revocable else step.again_in
            return replace(step, again_in=again_in)
        except LeaseGone as error:
            return taken(error.reason)
        except NOT_NOW as error:
            get_logger().warning("The GPU pool of a running kernel cannot answer: %s", error)
            return ExpiryStep(ExpiryAction.NOTHING)

    async def _without_slice(self, lease: Lease) -> ExpiryStep:
        """Decide what to do where the lease of a kernel that may be working has been parked."""
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

    def _stay(self) -> ExpiryStep:
        """Keep a slice that its user gave back only for as long as variables are kept."""
        self._gives_back = False
        self._relay.tell(_STAYS)
        return ExpiryStep(ExpiryAction.NOTHING)

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

    def _heard(self, lease: Lease | None) -> KernelObservation:
        """Return what is known of the kernel without a look at its device."""
        return KernelObservation(
            self._relay.busy,
            max(self._idle_since, self._relay.last_activity or 0.0),
            self._kept_until,
            self._postponed_until,
            kept=self._kept,
            asked_back=self._gives_back or (lease is not None and lease.asked_back is not None),
            warned=self._warned,
        )

    def _keep(self, content: Mapping[str, Any]) -> None:
        """Take note that the kernel's user says it is in use."""
        wanted = content.get("seconds")
        if not isinstance(wanted, int) or wanted <= 0:
            return
        self._relay.tell(self.keep(wanted))


def _on_our_clock(terms: Terms) -> Terms:
    """Return the terms with the lease's end by ``time.monotonic()``, which nobody sets."""
    if terms.ends_at is None:
        return terms
    return replace(terms, ends_at=terms.ends_at - time.time() + time.monotonic())


async def _until_done(end: asyncio.Future[None]) -> None:
    await asyncio.wait([end])


def taken(reason: str | None, message: str = "") -> ExpiryStep:
    """Return what to do when the pool has taken the slice; ``message`` says why, where that is known."""
    why = f": {why_over(reason)}" if reason else ""
    text = f"The kernel was ended, since its GPU slice is over{why}. {message}".rstrip()
    return ExpiryStep(ExpiryAction.END, text, ended_as=reason)


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
        self._culler: IdleCuller | None = None
        #: Set unless the size changes just now.
        self._may_park = asyncio.Event()
        self._may_park.set()
        #: Done once the run is over, by its own end or by its lease's.
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Holds back what is submitted while the size is being changed.
        self._resizing: Parking | None = None

    @property
    def parking(self) -> Parking | None:
        """How the kernel is parked, or about to be; None while it has its slice."""
        return self._parking

    @property
    def idle_state(self) -> IdleState:
        """What idleness will come to."""
        culler = self._culler
        return culler.idle_state if culler is not None else IdleState()

    @property
    def culler(self) -> IdleCuller:
        """Watches a kernel that has its slice. Raises ``NotAllowed`` where there is none."""
        if self._culler is None or self._parking is not None:
            raise NotAllowed("This kernel's GPU slice is lent to others.", "Run a cell to ask for it again.")
        return self._culler

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
        try:
            return await self._until_over(lease)
        finally:
            # A change of its size that is under way must not touch what is relayed to the next kernel.
            if self._resizing is not None:
                self._resizing.is_over = True
            self._over.set_result(None)

    async def _until_over(self, lease: Lease) -> ExpiryStep | None:
        culler = self._culler = IdleCuller(lease, self._run.relay, self._lease_client)
        while True:
            if not lease.terms.has_limits:  # nothing comes of anything before its user asks
                await first_of(_until_done(self._run.end), culler.is_given_back())
                if self._run.end.done():
                    return self._run.taken
            step: ExpiryStep | None = await before(self._run.end, culler.time_is_up())
            if step is None:
                return self._run.taken
            if step.act is ExpiryAction.END and not step.if_idle:
                return step
            if not self._may_park.is_set():
                await before(self._run.end, self._may_park.wait())
                continue  # its user may have asked to keep it meanwhile
            self._parking = self._new_parking(given_back=culler.is_giving_back)
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
            lease = resumed
            culler = self._culler = IdleCuller(lease, self._run.relay, self._lease_client)

    async def resize(self, grant: Callable[[], Awaitable[Mapping[str, Any]]]) -> Mapping[str, Any]:
        """Let the kernel have another size, which ``grant`` asks for; return what that returns.

        Nothing is passed on to the kernel meanwhile, so that no code runs with the variables of a slice that
        it has no more. Raises ``NotAllowed`` where the kernel is at work, or has no slice now.
        """
        if not self._may_park.is_set():
            raise NotAllowed("This kernel's size is being changed already.", "Try again in a moment.")
        if self._parking is not None:
            raise NotAllowed("This kernel's GPU slice is lent to others.", "Run a cell to ask for it again.")
        self._may_park.clear()
        self._resizing = self._new_parking()
        try:
            answer = await before(self._over, self._resizing.while_idle(grant))
        finally:
            self._resizing = None
            self._may_park.set()
        if answer is None:
            raise NotAllowed("This kernel has ended.", "Change the size of the next one.")
        return answer

    def _new_parking(self, *, given_back: bool = False) -> Parking:
        return Parking(self._lease_client, self._run, self._front, self._pending, given_back=given_back)

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
