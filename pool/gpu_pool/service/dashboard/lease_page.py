"""The page of one lease, and what its forms do: give the slice back, revoke it, drain its GPU.

Each form answers by leading to the page that shows what became of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gpu_pool.service.dashboard import pool_view
from gpu_pool.service.dashboard.live_pages import DashboardPage
from gpu_pool_client import BadRequest, Effect, EndReason, Lease, LeaseGone, LeaseState, NotAllowed


class FormAction(DashboardPage):
    """Something that a form does."""

    def done(self, page: str, said: str) -> None:
        """Lead to a page, which says what was done."""
        self.redirect(f"{self.prefix}{page}?said={said}", status=303)


class DrainForm(FormAction):
    """Grant nothing more on a device, or grant again."""

    async def post(self, device: str, what: str) -> None:
        """Drain or undrain it."""
        await self.pool.drain(device, drained=what == "drain")
        self.done("admin", f"{what}ed")


_OTHERWISE_NOW: Final = (
    "Nothing was done, because the situation has changed. Read the page again, and choose."
)


class _OfLease(DashboardPage):
    """Shows a lease to its user, or to an administrator."""

    async def draw_lease(self, lease_id: str, effect: Effect, refused: str = "", why: str = "") -> None:
        """Show it, with what can be done and what each of that does."""
        data = await self.dashboard.read()
        status = data.snapshot.status
        lease = next((each for each in (*status.leases, *status.queue) if each.id == lease_id), None)
        if lease is None:
            raise LeaseGone("There is no such lease any more.", "See the history for how it ended.")
        (row,) = pool_view.lease_rows(status, data.marks, lambda each: each.id == lease_id)
        is_own = self.viewer.owns(lease)
        open_devices = {each.device.uuid for each in status.devices if not each.drained}
        held = [part.device for part in lease.slices if part.device.uuid in open_devices]
        self.show(
            "lease.html",
            row=row,
            is_own=is_own,
            title=title_of(effect, is_own=is_own),
            effect=effect,
            choices=lease_choices(lease, effect, is_own=is_own),
            drainable=held if self.viewer.is_admin else [],
            refused=refused,
            why=why,
        )


class LeasePage(_OfLease):
    """One lease, for its user who may give it back, and for administrators who may revoke it."""

    async def get(self, lease_id: str) -> None:
        """Show it, and the forms."""
        await self.draw_lease(lease_id, await self.pool.effect_of_taking(lease_id))


class _TakeBack(_OfLease, FormAction, ABC):
    """Something that the forms of a lease's page do."""

    #: What is said where the kernel lives on, and otherwise.
    kept: str
    ended: str
    asked: str
    #: The page that says it.
    page: str

    async def take_back(self, lease_id: str, why: str) -> None:
        """Do what was chosen; show the page again where that would do something else than it said."""
        if self.get_body_argument("when", NOW) == WHEN_IDLE:
            await self.pool.ask_back(lease_id, why)
            self.done(self.page, self.asked)
            return
        effect = await self.pool.effect_of_taking(lease_id)
        if self.get_body_argument("effect", effect.value) != effect.value:
            await self.draw_lease(lease_id, effect, _OTHERWISE_NOW, why)
            return
        if effect is Effect.KEEPS_KERNEL:
            await self._withdraw(lease_id, why)
        else:
            await self.end(lease_id, why)
            self.done(self.page, self.ended)

    async def _withdraw(self, lease_id: str, why: str) -> None:
        try:
            await self.pool.withdraw(lease_id, why)
        except (BadRequest, NotAllowed):  # it has used the GPU, or was parked, in this very moment
            effect = await self.pool.effect_of_taking(lease_id)
            await self.draw_lease(lease_id, effect, _OTHERWISE_NOW, why)
        else:
            self.done(self.page, self.kept)

    @abstractmethod
    async def end(self, lease_id: str, why: str) -> None:
        """End the lease, and with it its kernel."""


class GiveBack(_TakeBack):
    """Give back a slice of one's own."""

    kept, ended, asked, page = "given-back-kept", "given-back", "asked-back", ""

    async def post(self, lease_id: str) -> None:
        """Give it back, now or when its kernel is idle."""
        try:
            await self.take_back(lease_id, "")
        except LeaseGone:  # it has ended by itself, or never was theirs
            self.done(self.page, self.ended)

    async def end(self, lease_id: str, why: str) -> None:  # noqa: ARG002 - nobody needs words of their own
        """End it."""
        await self.pool.release(lease_id, EndReason.RELEASED)


class Revoke(_TakeBack):
    """Take back anybody's slice, with a reason that its user reads."""

    kept, ended, asked, page = "revoked-kept", "revoked", "asked-back", "admin"

    async def post(self, lease_id: str) -> None:
        """Take it back, now or when its kernel is idle."""
        self.require_admin()
        message = self.get_body_argument("why", "").strip()
        if not message:
            raise BadRequest("The reason is missing.", "Write one: the student will read it.")
        await self.take_back(lease_id, message)

    async def end(self, lease_id: str, why: str) -> None:
        """End it."""
        await self.pool.revoke(lease_id, why)


#: What choices are called by, in forms.
NOW: Final = "now"
WHEN_IDLE: Final = "idle"

_ALL_LOST: Final = "All variables of the kernel are lost."
_KEPT_WHEN_IDLE: Final = (
    "A cell that runs now may finish first. The kernel lives on with its variables, unless it uses the GPU "
    "by then: in that case it is ended, and they are lost."
)
_KEPT_NOW: Final = (
    "The kernel has not used the GPU: it lives on with its variables, and its next cell waits for a slice "
    "again. A cell that runs now may go on as long as it does not use the GPU; if it does, the kernel is "
    "ended, and its variables are lost."
)
_ENDED_WHEN_IDLE: Final = (
    "A running cell, or work on the GPU, may finish first. If the pool cannot see whether the GPU is busy, "
    "it waits for a minute after the last cell. Then the kernel is ended; the notebook says so below that "
    "cell."
)
_ENDED_NOW: Final = "The kernel has used the GPU, or may have. It is ended at once, whatever it runs."
_PARKED: Final = "The slice is lent to others while the kernel is idle. The kernel is ended."
_FREED: Final = (
    "It belongs to a command or a shell. A command under gpu-pool run is ended; anything else that runs on "
    "it goes on, without being counted."
)
_QUEUE: Final = "The position in the queue is lost. The waiting cell or command says so."


@dataclass(frozen=True, slots=True)
class LeaseChoice:
    """Something that can be done, and what it comes to."""

    when: str
    title: str
    text: str
    button: str
    #: What is lost for certain; empty if nothing is.
    warning: str = ""


def title_of(effect: Effect, *, is_own: bool) -> str:
    """Return the heading of a lease's page, for its user or for an administrator."""
    if effect is Effect.LEAVES_QUEUE:
        return "Leave the queue" if is_own else "Remove from the queue"
    return "Give back a slice" if is_own else "Revoke a slice"


def lease_choices(lease: Lease, effect: Effect, *, is_own: bool) -> tuple[LeaseChoice, ...]:
    """Return what can be done, the gentlest first."""
    return tuple(_choices(lease, effect, "Give back" if is_own else "Revoke", is_own))


def _choices(lease: Lease, effect: Effect, verb: str, is_own: bool) -> Iterable[LeaseChoice]:
    this = f"{verb} this slice now"
    if effect is Effect.LEAVES_QUEUE:
        title = title_of(effect, is_own=is_own)
        yield LeaseChoice(NOW, f"{title} now", _QUEUE, f"{title} now")
    elif effect is Effect.FREES_SLICE:
        yield LeaseChoice(NOW, f"{verb} now", _FREED, this)
    elif lease.state is not LeaseState.HELD:
        yield LeaseChoice(NOW, f"{verb} now", _PARKED, this, _ALL_LOST)
    else:
        is_kept = effect is Effect.KEEPS_KERNEL
        if lease.asked_back is None:
            text, lost = (_KEPT_WHEN_IDLE, "") if is_kept else (_ENDED_WHEN_IDLE, _ALL_LOST)
            yield LeaseChoice(WHEN_IDLE, f"{verb} when idle", text, f"{verb} it when idle", lost)
        text, lost = (_KEPT_NOW, "") if is_kept else (_ENDED_NOW, _ALL_LOST)
        yield LeaseChoice(NOW, f"{verb} now", text, this, lost)
