"""A small API server for tests: lists, watches, writes, and trouble at will. It checks nothing.

For what a test must see that a real one shows seldom: a watch that is cut, a
version that is forgotten (410), no answer. What it accepts proves nothing
about pods; ``tests/cluster/api_server`` has the real one for that, with which this
one was not compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

#: ``/api/v1/namespaces/NS/KIND/NAME``, with any part of it left out, or of a group.
_PATH = re.compile(r"(/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/([^/]+))?/([^/]+)(?:/([^/]+))?(/status)?")
Key = tuple[str, str, str, str]


class FakeKubernetes:
    """Objects by group, namespace, kind and name, and who watches them."""

    def __init__(self) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        self.version = 0
        #: Versions before this one are forgotten.
        self.oldest = 0
        self.requests: list[tuple[str, str]] = []
        #: Is asked before each write; what it returns is answered in place of the object.
        self.before_write: Callable[[str, str], web.Response | None] = lambda *_: None
        #: The same before each list.
        self.before_read: Callable[[str], web.Response | None] = lambda _: None
        #: Is awaited between what a list finds and its answer.
        self.while_listing: Callable[[str], Awaitable[None]] = _at_once
        #: Changes what is created, as a webhook does.
        self.webhook: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda _, found: found
        #: What is said of a token (TokenReview), its status; of others that nobody knows them.
        self.tokens: dict[str, dict[str, Any]] = {}
        #: Who asks, as a SelfSubjectReview says it.
        self.asker: dict[str, str] = {"username": "t"}
        #: What is answered to a GET, by path, of what is not an object.
        self.pages: dict[str, Any] = {}
        #: Kinds, versions of groups (``/apis/GROUP/v1``) and kinds of these (``/apis/GROUP/v1/KIND``) that
        #: are not served.
        self.absent: set[str] = {"deviceclasses", "resourceslices", "resourceclaims", "devicetaintrules"}
        self._history: list[tuple[int, str, Key, dict[str, Any]]] = []
        self._watches: set[asyncio.Event] = set()
        self._cut = 0
        self._runner: web.AppRunner | None = None
        self.port = 0

    # -- What a test does --------------------------------------------------

    async def start(self) -> None:
        """Answer, at the same port as before."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        assert self._runner.addresses
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Answer no more."""
        self.cut()
        assert self._runner
        await self._runner.cleanup()

    def kubeconfig(self, path: Path) -> Path:
        document = {
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path.write_text(json.dumps(document))
        return path

    def put(self, kind: str, found: dict[str, Any]) -> dict[str, Any]:
        """Create or change an object of the core group."""
        return self.put_of("/api/v1", kind, found)

    def put_of(self, group: str, kind: str, found: dict[str, Any]) -> dict[str, Any]:
        """Create or change an object of a group, ``/apis/GROUP/VERSION``."""
        metadata = found["metadata"]
        return self._store((group, metadata.get("namespace", ""), kind, metadata["name"]), found)

    def change(self, kind: str, name: str, **status: Any) -> None:
        """Change the status of an object."""
        key = next(each for each in self.objects if each[2:] == (kind, name))
        known = self.objects[key]
        self._store(key, {**known, "status": {**known.get("status", {}), **status}})

    def run(self, name: str, node: str = "n1", address: str = "10.0.0.7") -> None:
        """Let a pod run."""
        (key,) = (each for each in self.objects if each[2:] == ("pods", name))
        spec = {**self.objects[key]["spec"], "nodeName": node}
        self._store(key, {**self.objects[key], "spec": spec})
        state = {"state": {"running": {}}}
        self.change("pods", name, phase="Running", podIP=address, containerStatuses=[state])

    def remove(self, kind: str, name: str) -> None:
        """Delete an object at once."""
        for key in [each for each in self.objects if each[2:] == (kind, name)]:
            found = self.objects.pop(key)
            self._tell("DELETED", key, found)

    def named(self, kind: str) -> list[str]:
        return sorted(key[3] for key in self.objects if key[2] == kind)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        return next(found for key, found in self.objects.items() if key[2:] == (kind, name))

    def cut(self) -> None:
        """Break all watches, as a proxy does that is restarted."""
        self._cut += 1
        self._wake()

    def forget(self) -> None:
        """Keep nothing of what has happened until now."""
        self.oldest = self.version
        self._history.clear()

    def asked(self, method: str, kind: str) -> int:
        """Return how often it was asked so: LIST and WATCH are methods of their own."""
        return sum(1 for each in self.requests if each == (method, kind))

    # -- What it answers ---------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path in self.pages:
            self.requests.append(("GET", request.path.rpartition("/")[2]))
            return web.json_response(self.pages[request.path])
        match = _PATH.fullmatch(request.path)
        if match is None:
            return _status(404, "NotFound")
        group, namespace, kind, name, _ = match.groups(default="")
        method = request.method
        if method == "GET" and not name:
            method = "WATCH" if request.query.get("watch") else "LIST"
        self.requests.append((method, kind))
        if self.absent & {kind, group, f"{group}/{kind}"}:
            return _status(404, "NotFound")
        if method in ("POST", "DELETE", "PATCH") and (refused := self.before_write(method, kind)) is not None:
            return refused
        if method == "LIST":
            # Not "or": an answer of aiohttp's has been false in itself, being an empty mapping.
            refused = self.before_read(kind)
            answer = self._list(kind) if refused is None else refused
            await self.while_listing(kind)
            return answer
        if method == "WATCH":
            return await self._watch(request, kind)
        key = group, namespace, kind, name
        if kind == "tokenreviews":
            asked = (await request.json())["spec"]["token"]
            return web.json_response({"status": self.tokens.get(asked, {"authenticated": False})}, status=201)
        if kind == "selfsubjectreviews":
            return web.json_response({"status": {"userInfo": self.asker}}, status=201)
        if method == "POST":
            return self._create(key, self.webhook(kind, await request.json()))
        if method == "PATCH":
            return self._patch(key, await request.json())
        return self._read_or_delete(method, key)

    def _list(self, kind: str) -> web.Response:
        items = [found for key, found in self.objects.items() if key[2] == kind]
        return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        news = asyncio.Event()
        self._watches.add(news)
        try:
            with contextlib.suppress(ConnectionResetError):  # whoever watches may be killed
                await self._write_news(answer, request, kind, news)
        finally:
            self._watches.discard(news)
        return answer

    async def _write_news(
        self, answer: web.StreamResponse, request: web.Request, kind: str, news: asyncio.Event
    ) -> None:
        seen, cut = int(request.query["resourceVersion"]), self._cut
        while cut == self._cut:
            if seen < self.oldest:
                gone = {"code": 410, "reason": "Expired", "message": "too old resource version"}
                await answer.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
                return
            news.clear()
            for version, what, key, found in list(self._history):
                if version > seen and key[2] == kind:
                    await answer.write(json.dumps({"type": what, "object": found}).encode() + b"\n")
            seen = self.version
            await news.wait()
        if request.transport is not None:
            request.transport.abort()

    def _create(self, key: Key, found: dict[str, Any]) -> web.Response:
        key = (*key[:3], found["metadata"]["name"])
        if key in self.objects:
            return _status(409, "AlreadyExists")
        return web.json_response(self._store(key, found), status=201)

    def _patch(self, key: Key, changes: dict[str, Any]) -> web.Response:
        found = self.objects.get(key)
        if found is None:
            return _status(404, "NotFound")
        return web.json_response(self._store(key, _patched(found, changes)))

    def _read_or_delete(self, method: str, key: Key) -> web.Response:
        found = self.objects.get(key)
        if found is None:
            return _status(404, "NotFound")
        if method == "DELETE":
            self.remove(*key[2:])
        return web.json_response(found)

    def _store(self, key: Key, found: dict[str, Any]) -> dict[str, Any]:
        before = self.objects.get(key)
        metadata = {"uid": f"uid-{self.version}", **found["metadata"]}
        if before is not None:
            metadata["uid"] = before["metadata"]["uid"]
        if key[1]:
            metadata["namespace"] = key[1]
        stored = {**found, "metadata": {**metadata, "resourceVersion": str(self.version + 1)}}
        self.objects[key] = stored
        self._tell("ADDED" if before is None else "MODIFIED", key, stored)
        return stored

    def _tell(self, what: str, key: Key, found: dict[str, Any]) -> None:
        self.version += 1
        metadata = {**found["metadata"], "resourceVersion": str(self.version)}
        self._history.append((self.version, what, key, {**found, "metadata": metadata}))
        self._wake()

    def _wake(self) -> None:
        for news in self._watches:
            news.set()


async def _at_once(_kind: str) -> None:
    """Wait for nothing."""


def _patched(found: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Apply a merge patch (RFC 7386)."""
    kept = dict(found) if isinstance(found, dict) else {}
    for name, value in changes.items():
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = _patched(kept.get(name), value) if isinstance(value, dict) else value
    return kept


def _status(code: int, reason: str) -> web.Response:
    return web.json_response(
        {"kind": "Status", "code": code, "reason": reason, "message": reason}, status=code
    )


def trouble(code: int, reason: str, message: str) -> web.Response:
    """Return what the API answers where it refuses."""
    return web.json_response({"code": code, "reason": reason, "message": message}, status=code)


@asynccontextmanager
async def fake_kubernetes() -> AsyncIterator[FakeKubernetes]:
    """Serve an empty cluster."""
    fake = FakeKubernetes()
    await fake.start()
    try:
        yield fake
    finally:
        with contextlib.suppress(AssertionError):
            await fake.stop()
