"""What a JupyterHub's users reach of the service: the API at once, the pages as soon as they are loaded.

The pages need JupyterHub's own login, whose modules take as long to load as all the rest of the service.
Kernels do not wait for that; a browser that asks meanwhile is answered once they are there.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from tornado.web import Application, HTTPError

from gpu_pool.service.api import ApiOptions, api
from gpu_pool.service.handler import Handler
from gpu_pool.service.hub import MOST_WAITING, HubIdentity, HubPlace

if TYPE_CHECKING:
    from types import ModuleType

_NEEDS: Final = "jupyterhub"


class HubSite:
    """The applications for the Hub's users, one after the other. Used in one event loop."""

    def __init__(self, options: ApiOptions, place: HubPlace, most_waiting: int = MOST_WAITING) -> None:
        """Of one address at most ``most_waiting`` requests wait for the Hub to say whose their tokens are.

        Raises ``ImportError`` where JupyterHub is not installed.
        """
        if find_spec(_NEEDS) is None:
            raise ModuleNotFoundError(f"No module named {_NEEDS!r}", name=_NEEDS)
        self._options, self._place = options, place
        self._identity = HubIdentity(
            place.hub, options.admins, options.pool.backend.boot, most_waiting=most_waiting, log=options.log
        )
        self._loading = _Loading()

    def without_pages(self) -> Application:
        """Return the API, and what keeps those who ask for a page until it is there."""
        options = self._options
        shared = {
            "served": options.served,
            "identify": self._identity,
            "in_flight": options.in_flight,
            "log": options.log,
        }
        pages = rf"{re.escape(self._place.prefix)}.*"
        waiting = [(pages, _PageLater, {**shared, "loading": self._loading})]
        return api(options, self._identity, self._place.prefix, waiting)

    async def with_pages(self) -> Application | None:
        """Load the pages, and return everything; None where they cannot be loaded, which is logged."""
        try:
            module = await asyncio.to_thread(load_pages)
            found: Application = module.site(self._options, self._place, self._identity)
        except Exception:
            self._options.log.exception("The pages for browsers cannot be loaded")
            self._loading.failed = True
            return None
        return found

    def go_on(self) -> None:
        """Answer those who wait for a page: whoever asks from now on is answered by what was loaded."""
        self._loading.over.set()


class _Loading:
    """Whether the pages are still being loaded, and whether that has failed."""

    def __init__(self) -> None:
        self.over, self.failed = asyncio.Event(), False


class _PageLater(Handler):
    """Any page, while none is there."""

    def initialize(self, loading: _Loading, **shared: Any) -> None:  # type: ignore[override]
        """Take what the application gives it. Called by tornado."""
        super().initialize(**shared)
        self._loading = loading

    async def prepare(self) -> None:
        """Have the browser ask once more, as soon as the pages are there. Called by tornado."""
        await self._loading.over.wait()
        if self._loading.failed:
            raise HTTPError(HTTPStatus.SERVICE_UNAVAILABLE)
        # The prefix is this service's own, so it leads nowhere else.
        query = f"?{self.request.query}" if self.request.query else ""
        self.redirect(f"{self.request.path}{query}", status=HTTPStatus.TEMPORARY_REDIRECT)


def load_pages() -> ModuleType:
    """Import what the pages are made of. In a thread: it takes a second, or longer beside much else."""
    from gpu_pool.service import site

    return site
