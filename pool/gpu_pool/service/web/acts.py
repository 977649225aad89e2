"""What forms ask for. Each answers by leading to the page that shows what became of it."""

from __future__ import annotations

from gpu_pool.service.web.screens import Screen


class Act(Screen):
    """Something that a form does."""

    def done(self, page: str, said: str) -> None:
        """Lead to a page, which says what was done."""
        self.redirect(f"{self.prefix}{page}?said={said}", status=303)


class Drain(Act):
    """Grant nothing more on a device, or grant again."""

    async def post(self, device: str, what: str) -> None:
        """Drain or undrain it."""
        await self.desk.drain(self.caller, device, what == "drain")
        self.done("admin", f"{what}ed")
