"""What this server's pages ask, and its answers; by the server's own login, XSRF and origin rules.

Nothing heavy is imported before it is needed: every Jupyter server beside this package loads this.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Awaitable, Callable
from http.client import responses
from typing import TYPE_CHECKING, Any, Final, TypeVar

from jupyter_core.utils import ensure_async
from jupyter_server.auth import decorator
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from gpu_pool_provisioner.jupyter_files import config_of

if TYPE_CHECKING:
    from gpu_pool_provisioner.server.slices import Slices

#: Whoever may read or change this server's kernels may do so with their slices.
AUTH_RESOURCE: Final = "kernels"
#: What is answered where no kernel of ours runs, so that nothing needs to be loaded.
_NOTHING: Final = json.dumps({"slices": [], "pools": []})
_NO_OFFERS: Final = json.dumps({"kernels": {}, "message": ""})
_KERNEL: Final = r"(?P<kernel_id>[^/]+)"
_ACTION: Final = r"(?P<action>keep|resize|resume|give-back|leave-queue)"
_NO_KERNEL: Final = "This server has no kernel of that id with a GPU slice."
_LOOK: Final = "GET gpu-pool/api/slices lists those that it has."
#: Bytes of what a page sends at most.
_LONGEST_BODY: Final = 10_000
#: Statuses of the pool's errors, by their code. What is "not allowed" is so as things stand.
_STATUS: Final = {
    "bad-request": 400,
    "never-fits": 422,
    "not-allowed": 409,
    "over-quota": 429,
    "timed-out": 409,
    "pool-unreachable": 503,
    "lease-gone": 409,
}
#: Why a socket is closed, by RFC 6455; reasons have 123 bytes at most.
_TRY_AGAIN_LATER: Final = 1013
_INTERNAL_ERROR: Final = 1011
_TOO_MANY: Final = "{} pages listen already, which is the limit (c.GPUPoolServer.max_streams). Close some."
#: Loaded with the first kernel of ours.
_PROVISIONER: Final = "gpu_pool_provisioner.provisioner"
_SLICES: Final = "gpu_pool_provisioner.server.slices"
#: Seconds between two looks whether a first kernel of ours has been started.
_LOOK_EVERY: Final = 1.0


M = TypeVar("M", bound=Callable[..., Any])


def _asks_for_login(method: M) -> M:
    """Mark a socket's endpoint as one that does so, for servers that demand the mark (from 2.13 on)."""
    mark = getattr(decorator, "ws_authenticated", None)
    return method if mark is None else mark(method)


def add_handlers(server: Any) -> None:
    """Let a Jupyter server answer its pages."""
    app = server.web_app
    base = url_path_join(app.settings["base_url"], "gpu-pool", "api")
    pages = {"pages": Pages(server)}
    app.add_handlers(
        ".*$",
        [
            (url_path_join(base, "slices"), SlicesHandler, pages),
            (url_path_join(base, rf"slices/{_KERNEL}/memory"), MemoryHandler, pages),
            (url_path_join(base, rf"slices/{_KERNEL}/{_ACTION}"), ActionHandler, pages),
            (url_path_join(base, "offers"), KernelOffersHandler, pages),
            (url_path_join(base, "events"), EventsHandler, pages),
        ],
    )


class Pages:
    """What the handlers of one server share."""

    def __init__(self, server: Any) -> None:
        self._server = server
        #: The sockets that are told.
        self.streams: set[EventsHandler] = set()
        self._slices: Slices | None = None
        self._loading: asyncio.Task[Slices] | None = None

    async def slices(self) -> Slices | None:
        """Return the slices of this server's kernels; None where no kernelspec is ours."""
        if self._slices is None and (self.is_used or await self._has_kernelspecs()):
            if self._loading is None or _has_failed(self._loading):
                self._loading = asyncio.create_task(self._load())
            self._slices = await asyncio.shield(self._loading)
        return self._slices

    @property
    def most_streams(self) -> int:
        """How many pages may listen at once."""
        from gpu_pool_provisioner.server.settings import GPUPoolServer

        return int(GPUPoolServer(config=self._server.config).max_streams)

    @property
    def is_used(self) -> bool:
        """Whether a kernel of ours has been started here, or is about to be."""
        return _PROVISIONER in sys.modules

    async def _has_kernelspecs(self) -> bool:
        specs = await ensure_async(await asyncio.to_thread(self._server.kernel_spec_manager.get_all_specs))
        return any(config_of(entry["spec"]) is not None for entry in specs.values())

    async def _load(self) -> Slices:
        module = await asyncio.to_thread(importlib.import_module, _SLICES)
        made: Slices = module.Slices(self._server)
        return made


def _has_failed(task: asyncio.Task[Slices]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


class PoolHandler(APIHandler):
    """What all handlers here have in common."""

    auth_resource = AUTH_RESOURCE
    #: A page that looks on is not somebody who works: a server's idle culler must not take it for that.
    _track_activity = False

    def initialize(self, pages: Pages) -> None:
        """Take what the handlers share."""
        self.pages = pages

    async def slices(self) -> Slices:
        """Return the slices of this server's kernels. Raises ``HTTPError`` where no kernel can have one."""
        slices = await self.pages.slices()
        if slices is None:
            raise web.HTTPError(404, _NO_KERNEL)
        return slices

    async def answer(self, work: Awaitable[dict[str, Any]]) -> None:
        """Answer with what comes of ``work``, or with its error."""
        from gpu_pool_client import GpuPoolError
        from gpu_pool_provisioner.server.slices import NoSuchKernelError

        try:
            self.finish(json.dumps(await work))
        except GpuPoolError as error:
            self.fail(_STATUS.get(error.code, 500), error.message, error.remedy)
        except NoSuchKernelError:
            self.fail(404, _NO_KERNEL, _LOOK)

    def fail(self, status: int, message: str, advice: str = "") -> None:
        """Answer with an error."""
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps({"message": message, "advice": advice}))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer with an error of the server's own, such as a missing token. Called by tornado."""
        error = kwargs.get("exc_info", (None, None, None))[1]
        said = (error.log_message or error.reason) if isinstance(error, web.HTTPError) else ""
        self.fail(status_code, str(said or responses.get(status_code, "Unknown error")))


class SlicesHandler(PoolHandler):
    """The slices of this server's kernels."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Return the State."""
        slices = await self.pages.slices()
        self.finish(_NOTHING if slices is None else await slices.state())


class KernelOffersHandler(PoolHandler):
    """What is free for the kernels that can be started here."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Return the Offer of each kernel that gets a slice."""
        slices = await self.pages.slices()
        self.finish(_NO_OFFERS if slices is None else json.dumps(await slices.offers.answer()))


class MemoryHandler(PoolHandler):
    """The GPU memory that a kernel has used."""

    @web.authenticated
    @authorized
    async def get(self, kernel_id: str) -> None:
        """Return what was measured in the last ten minutes."""
        slices = await self.slices()

        async def memory() -> dict[str, Any]:
            return slices.memory(kernel_id)

        await self.answer(memory())


class ActionHandler(PoolHandler):
    """Does something about a kernel's slice."""

    _track_activity = True

    @web.authenticated
    @authorized
    async def post(self, kernel_id: str, action: str) -> None:
        """Do it, and say what comes of it."""
        size = len(self.request.body)
        if size > _LONGEST_BODY:
            self.fail(413, f"What was sent has {size} bytes.", f"Send {_LONGEST_BODY} at most.")
            return
        await self.answer(self._do(await self.slices(), kernel_id, action))

    async def _do(self, slices: Slices, kernel_id: str, action: str) -> dict[str, Any]:
        from gpu_pool_provisioner.server.model import EmptyBody, KeepBody, SizeBody, read_body

        slices.driver(kernel_id)  # of one that there is not, nothing else is of interest
        text = self.request.body
        if action == "keep":
            return await slices.keep(kernel_id, read_body(KeepBody, text))
        if action == "resize":
            return await slices.resize(kernel_id, read_body(SizeBody, text))
        read_body(EmptyBody, text)
        if action == "give-back":
            return await slices.give_back(kernel_id)
        if action == "resume":
            return await slices.resume(kernel_id)
        return await slices.leave_queue(kernel_id)


class EventsHandler(WebSocketMixin, WebSocketHandler, JupyterHandler):
    """Tells a page of every change."""

    auth_resource = AUTH_RESOURCE

    def initialize(self, pages: Pages) -> None:
        """Take what the handlers share."""
        self.pages = pages
        self._telling: asyncio.Task[None] | None = None

    def set_default_headers(self) -> None:
        """Set none: they are those of pages."""

    @_asks_for_login
    @authorized("read")  # type: ignore[untyped-decorator]
    async def get(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Open the socket."""
        await super().get(*args, **kwargs)

    async def open(self) -> None:
        """Begin to tell the page."""
        super().open()
        most = self.pages.most_streams
        if len(self.pages.streams) >= most:
            self.close(_TRY_AGAIN_LATER, _TOO_MANY.format(most))
            return
        self.pages.streams.add(self)
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
        except Exception:  # noqa: BLE001 - the page connects again; nothing is told meanwhile that is not so
            from gpu_pool_client._log import EscapingLogger

            EscapingLogger(self.log).exception("Telling a page of GPU slices failed.")
            self.close(_INTERNAL_ERROR)

    def on_message(self, message: str | bytes) -> None:
        """Ignore what the page says: it has nothing to say."""

    def on_close(self) -> None:
        """Tell it no more."""
        self.pages.streams.discard(self)
        if self._telling is not None:
            self._telling.cancel()
