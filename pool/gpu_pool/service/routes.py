"""The service's addresses: what is understood at each, and what is answered.

The web application and its description (``openapi``) are made of this table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from pydantic import TypeAdapter

from gpu_pool.service import events, handlers
from gpu_pool.service.answering import Handler
from gpu_pool_client import EndReason
from gpu_pool_client.remote import wire

Method = Literal["get", "post", "delete"]


@dataclass(frozen=True, slots=True)
class Operation:
    """What one method of an address takes and answers."""

    answer: TypeAdapter[Any]
    body: type[wire.Body] | None = None
    #: The parameters of the query, each with its JSON Schema. None of them is required.
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: The parameters in headers, likewise.
    headers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: What the answer is called among media types.
    media_type: str = "application/json"
    #: What else it may answer, without a body: the HTTP status, and what that means.
    empty: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Route:
    """One address, below the API's root."""

    path: str
    handler: type[Handler]
    operations: Mapping[Method, Operation]
    #: Whether anybody may ask.
    is_public: bool = False

    @property
    def pattern(self) -> str:
        """The regular expression of the path, a group for each of its parameters."""
        return re.sub(r"{\w+}", "([^/]{0,400})", self.path)


_LEASE: Final = "/leases/{lease}"
_SECONDS: Final = {"type": "number", "minimum": 0, "maximum": wire.LONGEST_POLL, "default": 0}
_NOTHING: Final = TypeAdapter(dict[str, str])
_EVENTS: Final = Operation(
    TypeAdapter(events.Event), headers={"Last-Event-ID": {"type": "string"}}, media_type=events.MEDIA_TYPE
)


def _change(what: str, handler: type[Handler], body: type[wire.Body] | None = None) -> Route:
    return Route(f"{_LEASE}/{what}", handler, {"post": Operation(wire.LEASE, body)})


ROUTES: Final = (
    Route("/health", handlers.Health, {"get": Operation(_NOTHING)}, is_public=True),
    Route(
        "/openapi.json",
        handlers.Description,
        {"get": Operation(TypeAdapter(dict[str, Any]))},
        is_public=True,
    ),
    Route("/events", events.PoolEvents, {"get": _EVENTS}),
    Route("/status", handlers.Status, {"get": Operation(wire.STATUS)}),
    Route("/places", handlers.Places, {"get": Operation(wire.PLACES)}),
    Route(
        "/history",
        handlers.History,
        {"get": Operation(wire.HISTORY, query={"since": {"type": "number", "default": 0}})},
    ),
    Route(
        "/forecast",
        handlers.Forecast,
        {
            "get": Operation(
                wire.FORECAST,
                query={
                    "request": {"type": "string"},
                    "course": {"type": "string"},
                    "anybody": {"enum": ["0", "1"], "default": "0"},
                },
            )
        },
    ),
    Route(
        "/offers",
        handlers.Offers,
        {"get": Operation(wire.OFFERS, query={"course": {"type": "string"}})},
    ),
    Route("/leases", handlers.Leases, {"post": Operation(wire.LEASE, wire.Wanted)}),
    Route("/heartbeat", handlers.Heartbeat, {"post": Operation(TypeAdapter(wire.Beaten), wire.Beat)}),
    Route(
        _LEASE,
        handlers.OneLease,
        {
            "get": Operation(wire.LEASE),
            "delete": Operation(
                _NOTHING,
                query={"reason": {"enum": [each.value for each in EndReason], "default": "released"}},
            ),
        },
    ),
    Route(
        f"{_LEASE}/wait",
        handlers.Wait,
        {
            "get": Operation(
                wire.LEASE,
                query={"seconds": _SECONDS, "last": {"enum": ["0", "1"], "default": "0"}},
                empty={204: "It waits still."},
            )
        },
    ),
    Route(
        f"{_LEASE}/watch",
        handlers.Watch,
        {
            "get": Operation(
                wire.LEASE,
                query={"seconds": _SECONDS, "seen": {"type": "string"}},
                empty={304: "It is as it was seen."},
            )
        },
    ),
    Route(
        f"{_LEASE}/events",
        events.LeaseEvents,
        {"get": replace(_EVENTS, empty={204: "It has ended, as the client knows: it need not come back."})},
    ),
    Route(f"{_LEASE}/outlook", handlers.Explanation, {"get": Operation(wire.OUTLOOK)}),
    Route(f"{_LEASE}/activity", handlers.Doings, {"get": Operation(wire.ACTIVITY)}),
    Route(
        f"{_LEASE}/pod",
        handlers.Pod,
        {
            "post": Operation(wire.POD, wire.Launch),
            "get": Operation(wire.POD, query={"seconds": _SECONDS, "seen": {"type": "string"}}),
            "delete": Operation(_NOTHING),
        },
    ),
    _change("attach", handlers.Attach, wire.Attachment),
    _change("renew", handlers.Renew, wire.Renewal),
    _change("resize", handlers.Resize, wire.NewSize),
    _change("park", handlers.Park),
    _change("resume", handlers.Resume),
    Route("/devices/{device}/drain", handlers.Drain, {"post": Operation(wire.DEVICE, wire.Draining)}),
)
