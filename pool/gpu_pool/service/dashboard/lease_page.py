"""What forms ask for. Each answers by leading to the page that shows what became of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from gpu_pool.policy.revocation import Effect
from gpu_pool.service.dashboard import lease_view, pool_view
from gpu_pool.service.dashboard.screens import DashboardPage
from gpu_pool_client import BadRequest, EndReason, LeaseGone, NotAllowed


class FormAction(DashboardPage):
    """Something that a form does."""

    def done(self, page: str, said: str) -> None:
        """Lead to a page, which says what was done."""
        self.redirect(f"{self.prefix}{page}?said={said}", status=303)


class DrainForm(FormAction):
    """Grant nothing more on a device, or grant again."""

    async def post(self, device: str, what: str) -> None:
        """Drain or undrain it."""
        await self.desk.drain(self.caller, device, what == "drain")
        self.done("admin", f"{what}ed")


_OTHERWISE_NOW: Final = "Nothing was done: what it would do has changed meanwhile. Read it again, and choose."


class _OfLease(DashboardPage):
    """Shows a lease to its user, or to an administrator."""

    async def draw_lease(self, lease_id: str, effect: Effect, refused: str = "", why: str = "") -> None:
        """Show it, with what can be done and what each of that does."""
        scene = await self.dashboard.look()
        status = scene.snapshot.status
        lease = next((each for each in (*status.leases, *status.queue) if each.id == lease_id), None)
        if lease is None:
            raise LeaseGone("There is no such lease any more.", "See the history for how it ended.")
        (row,) = pool_view.lease_rows(status, scene.marks, lambda each: each.id == lease_id)
        is_own = self.viewer.owns(lease)
        open_devices = {each.device.uuid for each in status.devices if not each.drained}
        held = [part.device for part in lease.slices if part.device.uuid in open_devices]
        self.show(
            "lease.html",
            row=row,
            is_own=is_own,
            title=lease_view.title_of(effect, is_own=is_own),
            effect=effect,
            choices=lease_view.choices(lease, effect, is_own=is_own),
            drainable=held if self.viewer.is_admin else [],
            refused=refused,
            why=why,
        )


class LeasePage(_OfLease):
    """One lease, for its user who may give it back, and for administrators who may revoke it."""

    async def get(self, lease_id: str) -> None:
        """Show it, and the forms."""
        await self.draw_lease(lease_id, await self.desk.effect_of_taking(self.caller, lease_id))


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
        if self.get_body_argument("when", lease_view.NOW) == lease_view.WHEN_IDLE:
            await self.desk.ask_back(self.caller, lease_id, why)
            self.done(self.page, self.asked)
            return
        effect = await self.desk.effect_of_taking(self.caller, lease_id)
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
            await self.desk.withdraw(self.caller, lease_id, why)
        except (BadRequest, NotAllowed):  # it has used the GPU, or was parked, in this very moment
            effect = await self.desk.effect_of_taking(self.caller, lease_id)
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
        await self.desk.release(self.caller, lease_id, EndReason.RELEASED)


class Revoke(_TakeBack):
    """Take back anybody's slice, in words that its user reads."""

    kept, ended, asked, page = "revoked-kept", "revoked", "asked-back", "admin"

    async def post(self, lease_id: str) -> None:
        """Take it back, now or when its kernel is idle."""
        self.require_admin()
        words = self.get_body_argument("why", "").strip()
        if not words:
            raise BadRequest("There is no reason.", "Write one: the student reads it.")
        await self.take_back(lease_id, words)

    async def end(self, lease_id: str, why: str) -> None:
        """End it."""
        await self.desk.revoke(self.caller, lease_id, why)
