"""What this server's pages ask, and its answers; by the server's own login, XSRF and origin rules.

Nothing heavy is imported before it is needed: every Jupyter server beside this package loads this.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from typing import TYPE_CHECKING, Any, Final

from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.websocket import WebSocketClosedError, WebSocketHandler

if TYPE_CHECKING:
    from gpu_pool_provisioner.server.slices import Slices

#: Whoever may read or change this server's kernels may do so with their slices.
AUTH_RESOURCE: Final = "kernels"
#: What is answered where no kernel of ours runs, so that nothing needs to be loaded.
_NOTHING: Final = json.dumps({"slices": [], "pools": []})
#: Loaded with the first kernel of ours.
_PROVISIONER: Final = "gpu_pool_provisioner.provisioner"
_SLICES: Final = "gpu_pool_provisioner.server.slices"
#: Seconds between two looks whether a first kernel of ours has been started.
_LOOK_EVERY: Final = 1.0


def add_handlers(server: Any) -> None:
    """Let a Jupyter server answer its pages."""
    app = server.web_app
    base = url_path_join(app.settings["base_url"], "gpu-pool", "api")
    pages = {"pages": Pages(server)}
    app.add_handlers(
        ".*$",
        [
            (url_path_join(base, "slices"), SlicesHandler, pages),
            (url_path_join(base, "events"), EventsHandler, pages),
        ],
    )


class Pages:
    """What the handlers of one server share."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._slices: Slices | None = None
        self._loading: asyncio.Task[Slices] | None = None

    async def slices(self) -> Slices | None:
        """Return the slices of this server's kernels; None where no kernelspec is ours."""
        if self._slices is None and (self.is_used or await self._has_kernelspecs()):
            self._loading = self._loading or asyncio.create_task(self._load())
            self._slices = await asyncio.shield(self._loading)
        return self._slices

    @property
    def is_used(self) -> bool:
        """Whether a kernel of ours has been started here, or is about to be."""
        return _PROVISIONER in sys.modules

    async def _has_kernelspecs(self) -> bool:
        specs = await ensure_async(await asyncio.to_thread(self._server.kernel_spec_manager.get_all_specs))
        return any(is_ours(entry["spec"]) for entry in specs.values())

    async def _load(self) -> Slices:
        module = await asyncio.to_thread(importlib.import_module, _SLICES)
        made: Slices = module.Slices(self._server)
        return made


def is_ours(spec: Any) -> bool:
    """Whether kernels of a kernelspec get slices; anybody's kernelspec may be malformed."""
    metadata = spec.get("metadata") if isinstance(spec, dict) else None
    stanza = metadata.get("kernel_provisioner") if isinstance(metadata, dict) else None
    return isinstance(stanza, dict) and stanza.get("provisioner_name") == "gpu-pool"


class PoolHandler(APIHandler):
    """What all handlers here have in common."""

    auth_resource = AUTH_RESOURCE
    #: A page that looks on is not somebody who works: a server's idle culler must not take it for that.
    _track_activity = False

    def initialize(self, pages: Pages) -> None:
        """Take what the handlers share."""
        self.pages = pages


class SlicesHandler(PoolHandler):
    """The slices of this server's kernels."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Return the State."""
        slices = await self.pages.slices()
        self.finish(_NOTHING if slices is None else await slices.state())


class EventsHandler(WebSocketMixin, WebSocketHandler, JupyterHandler):
    """Tells a page of every change."""

    auth_resource = AUTH_RESOURCE

    def initialize(self, pages: Pages) -> None:
        """Take what the handlers share."""
        self.pages = pages
        self._telling: asyncio.Task[None] | None = None

    def set_default_headers(self) -> None:
        """Set none: they are those of pages."""

    @authorized("read")  # type: ignore[untyped-decorator]
    async def get(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Open the socket."""
        await super().get(*args, **kwargs)

    async def open(self) -> None:
        """Begin to tell the page."""
        super().open()
        self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        try:
            if (slices := await self.pages.slices()) is None:
                await self.write_message(_NOTHING)
            while slices is None:  # a kernelspec may be installed, and its first kernel started
                await asyncio.sleep(_LOOK_EVERY)
                slices = await self.pages.slices() if self.pages.is_used else None
            with slices.listening() as listener:
                while True:
                    await self.write_message(await listener.next())
        except WebSocketClosedError:
            return

    def on_message(self, message: str | bytes) -> None:
        """Ignore what the page says: it has nothing to say."""

    def on_close(self) -> None:
        """Tell it no more."""
        if self._telling is not None:
            self._telling.cancel()
