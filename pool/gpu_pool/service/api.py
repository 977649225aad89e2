"""The service's API: its routes, their description (OpenAPI), and the application made of both."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from tornado.web import Application

from gpu_pool.courses import CourseFolder, Courses
from gpu_pool.service import event_streams, handlers
from gpu_pool.service.authorized_pool import AuthorizedPool
from gpu_pool.service.callers import Identify
from gpu_pool.service.connections import Network
from gpu_pool.service.event_streams import EventStreams
from gpu_pool.service.handler import Handler, InFlightRequests
from gpu_pool.service.handlers import NothingHandler
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool.service.metrics import Metrics, MetricsHandler
from gpu_pool.service.served_pool import ServedPool
from gpu_pool.settings import PoolSettings
from gpu_pool_client import EndReason, NotAllowed
from gpu_pool_client._remote import bodies
from gpu_pool_client._remote.problems import PROBLEM_TYPE, ProblemDocument

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
    TypeAdapter(event_streams.Event),
    headers={"Last-Event-ID": {"type": "string"}},
    media_type=event_streams.MEDIA_TYPE,
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
    Route("/events", event_streams.PoolEvents, {"get": _EVENTS}),
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
                    "batch": {"enum": ["0", "1"], "default": "0"},
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
                empty={204: "It is still waiting."},
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
                empty={304: "It has not changed."},
            )
        },
    ),
    Route(
        f"{_LEASE}/events",
        event_streams.LeaseEvents,
        {"get": replace(_EVENTS, empty={204: "It has ended, and the client knows: it need not reconnect."})},
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


_TEXT: Final = {"type": "string"}
_PROBLEM: Final = TypeAdapter(ProblemDocument)


def describe(routes: Iterable[Route], root: str) -> bytes:
    """Return the description, as JSON, of these addresses below ``root``."""
    routes = list(routes)
    schemas, definitions = _schemas(routes)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "GPU pool", "version": bodies.API.rpartition("/")[2]},
        "servers": [{"url": root}],
        "security": [{"token": []}],
        "paths": {route.path: _path(route, schemas) for route in routes},
        "components": {
            "schemas": definitions,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
    return json.dumps(document).encode()


_Schemas = Mapping[int, dict[str, Any]]


def _schemas(routes: Iterable[Route]) -> tuple[_Schemas, dict[str, Any]]:
    """Return the schema of every type of the routes, by its ``id``, and what those refer to."""
    operations = [each for route in routes for each in route.operations.values()]
    # Answers are described as clients read them: so leases have their requests as text.
    modes: JsonSchemaMode = "validation"
    adapters: dict[int, TypeAdapter[Any]] = {id(each.answer): each.answer for each in operations}
    adapters |= {id(each.body): TypeAdapter(each.body) for each in operations if each.body}
    adapters[id(_PROBLEM)] = _PROBLEM
    inputs = [(key, modes, adapter) for key, adapter in adapters.items()]
    found, shared = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
    definitions = dict(shared["$defs"])
    definitions["Lease"]["properties"]["request"] = {**_TEXT, "examples": ["2%"]}
    return {key: dict(schema) for (key, _), schema in found.items()}, definitions


def _path(route: Route, schemas: _Schemas) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", route.path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    return {
        "parameters": parameters,
        **{method: _operation(route, method, each, schemas) for method, each in route.operations.items()},
    }


def _operation(route: Route, method: str, operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    said = getattr(route.handler, method).__doc__.splitlines()[0]
    empty = {str(status): {"description": meaning} for status, meaning in operation.empty.items()}
    problem = {"description": "An error", "content": _content(schemas[id(_PROBLEM)], PROBLEM_TYPE)}
    described: dict[str, Any] = {
        "summary": said.rstrip("."),
        "parameters": [
            {"name": name, "in": place, "schema": schema}
            for place, schemas_of in (("query", operation.query), ("header", operation.headers))
            for name, schema in schemas_of.items()
        ],
        "responses": {
            "200": {
                "description": "Done",
                "content": _content(schemas[id(operation.answer)], operation.media_type),
            },
            **empty,
            "default": problem,
        },
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _content(schemas[id(operation.body)])}
    if route.is_public:
        described["security"] = []
    return described


def _content(schema: Mapping[str, Any], kind: str = "application/json") -> dict[str, Any]:
    return {kind: {"schema": schema}}


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """What all applications of one service share."""

    pool: ServedPool
    authorized_pool: AuthorizedPool
    changes: LeaseChanges
    in_flight: InFlightRequests
    log: logging.Logger
    settings: PoolSettings
    streams: EventStreams
    #: Or why nothing is counted: the library is not installed.
    metrics: Metrics | NotAllowed
    #: Names of administrators.
    admins: Collection[str]
    #: What the course files say, as of now.
    courses: Callable[[], Courses]
    #: Where these files are; None where there are none.
    folder: CourseFolder | None = None
    #: Seconds in which a client must have taken its answer.
    taken_within: float = 30.0
    #: Networks from which the metrics may be read without a token.
    metrics_from: Collection[Network] = ()
    #: What is to be called when the service stops.
    stops: list[Callable[[], None]] = field(default_factory=list)


def api(
    options: ApiOptions,
    identify: Identify,
    prefix: str = "/",
    more: Sequence[tuple[Any, ...]] = (),
    **settings: Any,
) -> Application:
    """Return the application with the API below ``prefix``, and with ``more`` routes."""
    shared = {
        "pool": options.authorized_pool,
        "identify": identify,
        "in_flight": options.in_flight,
        "log": options.log,
    }
    root = prefix.rstrip("/") + bodies.API
    metrics = options.metrics
    counted = {**shared, "metrics": metrics, "networks": options.metrics_from}
    return Application(
        [
            *((re.escape(root) + route.pattern, route.handler, shared) for route in ROUTES),
            (f"{re.escape(prefix)}api/.*", NothingHandler, shared),
            (f"{re.escape(prefix)}metrics", MetricsHandler, counted),
            *more,
        ],
        default_handler_class=NothingHandler,
        default_handler_args=shared,
        description=describe(ROUTES, root),
        streams=options.streams,
        taken_within=timedelta(seconds=options.taken_within),
        # Decisions are logged where they are made.
        log_function=metrics.answered if isinstance(metrics, Metrics) else lambda _: None,
        **settings,
    )
