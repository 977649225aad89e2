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
from gpu_pool.service.handler import Handler
from gpu_pool_client import EndReason
from gpu_pool_client.remote import bodies

Method = Literal["get", "post", "delete"]


@dataclass(frozen=True, slots=True)
class Operation:
    """What one method of an address takes and answers."""

    answer: TypeAdapter[Any]
    body: type[bodies.Body] | None = None
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
_SECONDS: Final = {"type": "number", "minimum": 0, "maximum": bodies.LONGEST_POLL, "default": 0}
_NOTHING: Final = TypeAdapter(dict[str, str])
_EVENTS: Final = Operation(
    TypeAdapter(events.Event), headers={"Last-Event-ID": {"type": "string"}}, media_type=events.MEDIA_TYPE
)


def _change(what: str, handler: type[Handler], body: type[bodies.Body] | None = None) -> Route:
    return Route(f"{_LEASE}/{what}", handler, {"post": Operation(bodies.LEASE, body)})


ROUTES: Final = (
    Route("/health", handlers.HealthHandler, {"get": Operation(_NOTHING)}, is_public=True),
    Route(
        "/openapi.json",
        handlers.DescriptionHandler,
        {"get": Operation(TypeAdapter(dict[str, Any]))},
        is_public=True,
    ),
    Route("/events", events.PoolEvents, {"get": _EVENTS}),
    Route("/status", handlers.StatusHandler, {"get": Operation(bodies.STATUS)}),
    Route("/positions", handlers.PositionsHandler, {"get": Operation(bodies.POSITIONS)}),
    Route(
        "/history",
        handlers.HistoryHandler,
        {"get": Operation(bodies.HISTORY, query={"since": {"type": "number", "default": 0}})},
    ),
    Route(
        "/forecast",
        handlers.ForecastHandler,
        {
            "get": Operation(
                bodies.FORECAST,
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
        handlers.OffersHandler,
        {"get": Operation(bodies.OFFERS, query={"course": {"type": "string"}})},
    ),
    Route("/leases", handlers.LeasesHandler, {"post": Operation(bodies.LEASE, bodies.RequestBody)}),
    Route(
        "/heartbeat",
        handlers.HeartbeatHandler,
        {"post": Operation(TypeAdapter(bodies.HeartbeatAnswer), bodies.HeartbeatBody)},
    ),
    Route(
        _LEASE,
        handlers.LeaseHandler,
        {
            "get": Operation(bodies.LEASE),
            "delete": Operation(
                _NOTHING,
                query={"reason": {"enum": [each.value for each in EndReason], "default": "released"}},
            ),
        },
    ),
    Route(
        f"{_LEASE}/wait",
        handlers.WaitHandler,
        {
            "get": Operation(
                bodies.LEASE,
                query={"seconds": _SECONDS, "last": {"enum": ["0", "1"], "default": "0"}},
                empty={204: "It waits still."},
            )
        },
    ),
    Route(
        f"{_LEASE}/watch",
        handlers.WatchHandler,
        {
            "get": Operation(
                bodies.LEASE,
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
    Route(f"{_LEASE}/outlook", handlers.ExplanationHandler, {"get": Operation(bodies.OUTLOOK)}),
    Route(f"{_LEASE}/activity", handlers.ActivityHandler, {"get": Operation(bodies.ACTIVITY)}),
    Route(
        f"{_LEASE}/pod",
        handlers.PodHandler,
        {
            "post": Operation(bodies.POD, bodies.LaunchBody),
            "get": Operation(bodies.POD, query={"seconds": _SECONDS, "seen": {"type": "string"}}),
            "delete": Operation(_NOTHING),
        },
    ),
    _change("attach", handlers.AttachHandler, bodies.AttachBody),
    _change("renew", handlers.RenewHandler, bodies.RenewBody),
    _change("resize", handlers.ResizeHandler, bodies.ResizeBody),
    _change("park", handlers.ParkHandler),
    _change("resume", handlers.ResumeHandler),
    Route(
        "/devices/{device}/drain", handlers.DrainHandler, {"post": Operation(bodies.DEVICE, bodies.DrainBody)}
    ),
)
