"""What forms ask for. Each answers by leading to the page that shows what became of it."""

from __future__ import annotations

from gpu_pool.service.web.screens import Screen
from gpu_pool_client import BadRequest, EndReason


class Act(Screen):
    """Something that a form does."""

    def done(self, page: str, said: str) -> None:
        """Lead to a page, which says what was done."""
        self.redirect(f"{self.prefix}{page}?said={said}", status=303)


class GiveBack(Act):
    """End a lease of one's own."""

    async def post(self, lease_id: str) -> None:
        """End it."""
        await self.desk.release(self.caller, lease_id, EndReason.RELEASED)
        self.done("", "given-back")


class Revoke(Act):
    """End anybody's lease, in words that its user reads."""

    async def post(self, lease_id: str) -> None:
        """End it."""
        self.require_admin()
        words = self.get_body_argument("why", "").strip()
        if not words:
            raise BadRequest("There is no reason.", "Write one: the student reads it.")
        await self.desk.revoke(self.caller, lease_id, words)
        self.done("admin", "revoked")


class Drain(Act):
    """Grant nothing more on a device, or grant again."""

    async def post(self, device: str, what: str) -> None:
        """Drain or undrain it."""
        await self.desk.drain(self.caller, device, what == "drain")
        self.done("admin", f"{what}ed")
