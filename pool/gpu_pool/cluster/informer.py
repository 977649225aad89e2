"""One kind of object, kept as the API shows it: one list at the start, then a watch.

A watch that is cut goes on where it was; only where the API server has
forgotten that place (410 Gone) everything is listed again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import aclosing
from typing import Any, Final

from gpu_pool.cluster.api import Api, ApiAway, ApiRefused
from gpu_pool.cluster.dialects import Manifest
from gpu_pool_client._retries import Backoff

Key = tuple[str, str]
#: Is told what an object was and what it is; None is for one that is not there.
Changed = Callable[["Manifest | None", "Manifest | None"], None]

#: Seconds that one watch lasts, so that a connection that nobody ends is noticed.
_WATCH_FOR: Final = 240.0
#: Seconds after the first attempt that failed; they double with each further one,
_FIRST_PAUSE: Final = 0.2
#: up to so many.
_LONGEST_PAUSE: Final = 10.0
#: Seconds until the next version of a kind is looked for.
_NEXT_PAUSE: Final = 0.01
#: Seconds after which it is looked again whether what the cluster does not have is there.
_ABSENT_PAUSE: Final = 300.0
#: So often in a row it must be said that a kind is not served, before what is known of it goes.
_BELIEVED_AFTER: Final = 2
_PAGE: Final = "500"
_GONE, _NOT_FOUND, _FORBIDDEN = 410, 404, 403


class Informer:
    """All objects below one path. ``keep`` reduces an object to what is needed of it.

    Of several paths, each for another version of the same kind, it is the first that the cluster serves.
    Of a kind that is ``required``, since every cluster has it, nothing goes because it is said not to be
    served: that is not the API server's answer then, or not that of this cluster.
    """

    def __init__(
        self,
        api: Api,
        paths: str | Sequence[str],
        log: logging.Logger,
        changed: Changed,
        *,
        keep: Callable[[Manifest], Manifest] = lambda found: found,
        names_only: bool = False,
        required: bool = False,
    ) -> None:
        self._api, self._log, self._changed = api, log, changed
        self._paths = (paths,) if isinstance(paths, str) else tuple(paths)
        self._path = self._paths[0]
        self._keep, self._names_only, self._required = keep, names_only, required
        #: How often in a row it was said that the cluster does not serve this kind.
        self._absences = 0
        self._objects: dict[Key, Manifest] = {}
        self._version = ""
        #: What was put while all is listed. The list may be older, and miss it.
        self._put: set[Key] = set()
        #: Set once all objects are known; and the other one also once it is known that they may not be read.
        self.synced, self.settled = asyncio.Event(), asyncio.Event()
        #: Why it cannot be read, in words; empty if it can.
        self.problem = ""
        #: Whether the API server answered last time.
        self.answered = True

    def __iter__(self) -> Iterator[Manifest]:
        return iter(tuple(self._objects.values()))

    def get(self, namespace: str, name: str) -> Manifest | None:
        """Return one object, or None."""
        return self._objects.get((namespace, name))

    def put(self, found: Manifest) -> None:
        """Take over what a write of our own was answered, unless the watch knows better."""
        key, known = _key(found), self._objects.get(_key(found))
        newest = _version(known) if known is not None else _number(self._version)
        if _version(found) > newest:
            if not self._version:
                self._put.add(key)
            self._set(key, self._keep(found))

    async def run(self) -> None:
        """List and watch for as long as the service runs."""
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, spread=0.5)
        while True:
            pause: float | None = None
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                backoff.reset()
            except ApiRefused as refused:
                pause = self._refused(refused)
            except ApiAway as away:
                if away.no_such_path and self._is_tried_next():
                    continue
                self._absences = 0
                self._not_heard(away)
            except Exception:  # noqa: BLE001 - one odd object must not end the watch of all others
                self._log.exception("Watching %s failed", self._path)
                self._version = ""
            await asyncio.sleep(backoff.pause() if pause is None else backoff.shortened(pause))

    def _refused(self, refused: ApiRefused) -> float | None:
        """Decide what to do after a refusal; return after how many seconds, None for longer each time."""
        if refused.status == _NOT_FOUND and self._required:
            self._version = ""
            self._not_heard(refused)
            return None
        self.answered = True
        if refused.status == _GONE:
            self._version = ""
            return _FIRST_PAUSE
        if refused.status == _NOT_FOUND:
            return self._absent()
        problem = f"{self._path}: {refused}"
        if problem != self.problem:  # once, and not at every attempt
            self._log.error("The API server refuses %s", problem)
        self.problem = problem
        if refused.status == _FORBIDDEN:
            self.settled.set()
            return _LONGEST_PAUSE
        self._version = ""
        return None

    def _absent(self) -> float:
        """Go on with the next version of this kind; return after how many seconds."""
        self._version = ""
        tried = self._paths.index(self._path) + 1
        self._path = self._paths[tried % len(self._paths)]
        if tried < len(self._paths):
            return _NEXT_PAUSE
        self._absences += 1
        if self._absences < _BELIEVED_AFTER:
            return _LONGEST_PAUSE if self._objects else _FIRST_PAUSE
        self._replace({})  # the cluster does not serve this kind
        self._know_all()
        return _ABSENT_PAUSE

    def _is_tried_next(self) -> bool:
        """Go on with the next version of this kind, the first after the last; return whether it is another.

        What is known is kept: perhaps it was not the API server that answered.
        """
        self._version = ""
        tried = self._paths.index(self._path) + 1
        self._path = self._paths[tried % len(self._paths)]
        return tried < len(self._paths)

    async def _list(self) -> None:
        found: dict[Key, Manifest] = {}
        query = {"limit": _PAGE}
        self._put.clear()
        while True:
            page = await self._api.list(self._path, query, names_only=self._names_only)
            for each in page.get("items") or ():
                found[_key(each)] = self._keep(each)
            metadata = page.get("metadata", {})
            if not metadata.get("continue"):
                break
            query = {"limit": _PAGE, "continue": metadata["continue"]}
        self._heard()
        version = str(metadata.get("resourceVersion", ""))
        self._replace(found, but=self._put_after(version))
        self._version = version
        self._know_all()

    def _know_all(self) -> None:
        self.synced.set()
        self.settled.set()

    def _put_after(self, version: str) -> set[Key]:
        """Return what was put and is newer than a list; a watch from there on tells how it went on."""
        return {
            key for key in self._put & self._objects.keys() if _version(self._objects[key]) > _number(version)
        }

    async def _watch(self) -> None:
        query = {"resourceVersion": self._version, "allowWatchBookmarks": "true"}
        events = self._api.watch(self._path, query, _WATCH_FOR, names_only=self._names_only)
        async with aclosing(events):
            async for event in events:
                self._heard()
                self._take(event)

    def _heard(self) -> None:
        if not self.answered:
            self._log.info("The API server answers again (%s)", self._path)
        self.answered, self.problem, self._absences = True, "", 0

    def _not_heard(self, why: Exception) -> None:
        """Note, and log once, that whoever answered was not the API server, if anybody did."""
        if self.answered:
            self._log.warning("The API server does not answer (%s): %s", self._path, why)
        self.answered, self.problem = False, str(why)

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, found = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            raise ApiRefused(int(found.get("code", 500)), str(found.get("reason")), str(found.get("message")))
        self._version = str(found.get("metadata", {}).get("resourceVersion", self._version))
        if kind in ("ADDED", "MODIFIED"):
            known = self._objects.get(_key(found))
            if known is None or _version(found) > _version(known):
                self._set(_key(found), self._keep(found))
        elif kind == "DELETED":
            self._set(_key(found), None)

    def _replace(self, found: Mapping[Key, Manifest], *, but: Set[Key] = frozenset()) -> None:
        for key in self._objects.keys() - found.keys() - but:
            self._set(key, None)
        for key, each in found.items():
            known = self._objects.get(key)
            if key not in but and (known is None or _version(known) != _version(each)):
                self._set(key, each)

    def _set(self, key: Key, now: Manifest | None) -> None:
        before = self._objects.pop(key, None)
        if before is not None and now is not None and _uid(before) != _uid(now):
            self._changed(before, None)  # another one of the same name: its end was not seen
            before = None
        if now is not None:
            self._objects[key] = now
        if before is not None or now is not None:
            self._changed(before, now)


def _key(found: Manifest) -> Key:
    metadata = found.get("metadata", {})
    return str(metadata.get("namespace", "")), str(metadata.get("name", ""))


def _uid(found: Manifest) -> object:
    return found.get("metadata", {}).get("uid")


def _version(found: Manifest) -> int:
    return _number(str(found.get("metadata", {}).get("resourceVersion", "")))


def _number(version: str) -> int:
    # Versions of one kind may be compared as numbers (Kubernetes 1.35 promises what was always so).
    return int(version) if version.isdecimal() else 0
