"""The service's API: its routes and their description (OpenAPI), both from the table of operations."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core.core_schema import TupleSchema
from tornado.web import Application

from gpu_pool.courses import CourseFolder, Courses
from gpu_pool.pool.pool import GpuPool
from gpu_pool.service import handlers
from gpu_pool.service.callers import Identify
from gpu_pool.service.connections import Network
from gpu_pool.service.event_streams import EventStreams
from gpu_pool.service.handler import Handler, InFlightRequests
from gpu_pool.service.handlers import NothingHandler, OperationHandler
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool.service.metrics import Metrics, MetricsHandler
from gpu_pool.service.served_pool import ServedPool
from gpu_pool.settings import PoolSettings
from gpu_pool_client import EndReason, NotAllowed
from gpu_pool_client._operations import NODE_AGENTS, Operation
from gpu_pool_client._pool import OPERATIONS
from gpu_pool_client._remote import bodies
from gpu_pool_client._remote.bodies import PROBLEM_TYPE, ProblemDocument
from gpu_pool_client._remote.forms import WireField, form_of


@dataclass(frozen=True, slots=True)
class Exchange:
    """What is said at an address by one method, and what is answered."""

    #: What it does, in one line.
    summary: str
    answer: TypeAdapter[Any]
    body: type[bodies.Body] | None = None
    #: The parameters of the query, each with its JSON Schema. None of them is required.
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: What else it may answer, without a body: the HTTP status, and what that means.
    empty: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Route:
    """One address, below the API's root."""

    path: str
    handler: type[Handler]
    #: By the method of HTTP.
    exchanges: Mapping[str, Exchange]
    #: Whether anybody may ask.
    is_public: bool = False
    #: Whether node agents and nobody else may ask.
    is_for_agents: bool = False

    @property
    def pattern(self) -> str:
        """The regular expression of the path, a group for each of its parameters."""
        return re.sub(r"{\w+}", "([^/]{0,400})", self.path)


_TEXT: Final = {"type": "string"}
_FLAG: Final = {"enum": ["0", "1"], "default": "0"}
_SECONDS: Final = {"type": "number", "minimum": 0, "maximum": bodies.LONGEST_POLL, "default": 0}
#: What handlers are called in the metrics whose address ends otherwise.
_CALLED: Final = {"{lease}": "lease", "outlook": "explanation"}


def routes_of(table: Iterable[Operation]) -> list[Route]:
    """Return an address for each path in a table of operations."""
    by_path: dict[str, dict[str, Operation]] = {}
    for row in table:
        if row.http is not None:
            by_path.setdefault(row.http.path, {})[row.http.method] = row
    return [
        Route(
            path,
            _handler_of(path, rows),
            {method: _exchange_of(row) for method, row in rows.items()},
            is_for_agents=all(row.may == NODE_AGENTS for row in rows.values()),
        )
        for path, rows in by_path.items()
    ]


def _handler_of(path: str, rows: Mapping[str, Operation]) -> type[OperationHandler]:
    last = path.rpartition("/")[2]
    name = _CALLED.get(last, last)
    return type(f"{name.title()}Handler", (OperationHandler,), {"operations": rows})


def _exchange_of(row: Operation) -> Exchange:
    form = form_of(row)
    fields = form.fields if form.body is None else ()
    query = {each.name: _schema_of(each) for each in fields}
    empty: dict[int, str] = {}
    if row.poll is not None:
        query |= {"seconds": _SECONDS, row.poll.says: _FLAG if row.poll.says == "last" else _TEXT}
        empty = {row.poll.unchanged: row.poll.meaning} if row.poll.unchanged is not None else {}
    return Exchange(row.summary, form.answer, form.body, query, empty=empty)


def _schema_of(field: WireField) -> Mapping[str, Any]:
    """Return the JSON Schema of a value in a query."""
    if isinstance(field.default, bool):
        return _FLAG
    if isinstance(field.default, float):
        return {"type": "number", "default": field.default}
    if isinstance(field.default, EndReason):
        return {"enum": [each.value for each in EndReason], "default": field.default.value}
    return _TEXT


_NOTHING: Final = TypeAdapter(dict[str, str])

ROUTES: Final = (
    Route(
        "/health",
        handlers.HealthHandler,
        {"GET": Exchange("Say whether the pool works: its store can be read and written", _NOTHING)},
        is_public=True,
    ),
    Route(
        "/openapi.json",
        handlers.DescriptionHandler,
        {"GET": Exchange("Return this description (OpenAPI 3.1)", TypeAdapter(dict[str, Any]))},
        is_public=True,
    ),
    Route(
        "/heartbeat",
        handlers.HeartbeatHandler,
        {
            "POST": Exchange(
                "Renew leases, and say which need no renewing",
                TypeAdapter(bodies.HeartbeatAnswer),
                bodies.HeartbeatBody,
            )
        },
    ),
    *routes_of(OPERATIONS),
)

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


class _PlainTuples(GenerateJsonSchema):
    """Describes pairs of one kind as lists of two: not every program knows ``prefixItems``."""

    def tuple_schema(self, schema: TupleSchema) -> JsonSchemaValue:
        found = super().tuple_schema(schema)
        items = found.get("prefixItems", ())
        if items and all(each == items[0] for each in items):
            del found["prefixItems"]
            found["items"] = items[0]
        return found


def _schemas(routes: Iterable[Route]) -> tuple[_Schemas, dict[str, Any]]:
    """Return the schema of every type of the routes, by its ``id``, and what those refer to."""
    operations = [each for route in routes for each in route.exchanges.values()]
    # Answers are described as clients read them: so leases have their requests as text.
    modes: JsonSchemaMode = "validation"
    adapters: dict[int, TypeAdapter[Any]] = {id(each.answer): each.answer for each in operations}
    adapters |= {id(each.body): TypeAdapter(each.body) for each in operations if each.body}
    adapters[id(_PROBLEM)] = _PROBLEM
    inputs = [(key, modes, adapter) for key, adapter in adapters.items()]
    found, shared = TypeAdapter.json_schemas(
        inputs, ref_template="#/components/schemas/{model}", schema_generator=_PlainTuples
    )
    definitions = dict(shared["$defs"])
    definitions["Lease"]["properties"]["request"] = {**_TEXT, "examples": ["2%"]}
    return {key: dict(schema) for (key, _), schema in found.items()}, definitions


def _path(route: Route, schemas: _Schemas) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", route.path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    return {
        "parameters": parameters,
        **{method.lower(): _operation(route, each, schemas) for method, each in route.exchanges.items()},
    }


def _operation(route: Route, operation: Exchange, schemas: _Schemas) -> dict[str, Any]:
    empty = {str(status): {"description": meaning} for status, meaning in operation.empty.items()}
    problem = {"description": "An error", "content": _content(schemas[id(_PROBLEM)], PROBLEM_TYPE)}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": [
            {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
        ],
        "responses": {
            "200": {
                "description": "Done",
                "content": _content(schemas[id(operation.answer)]),
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

    pool: GpuPool
    served: ServedPool
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
    #: Who finds out which node's agent asks; None where there are none.
    agents: Identify | None = None
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
        "served": options.served,
        "identify": identify,
        "in_flight": options.in_flight,
        "log": options.log,
    }
    of_agents = {**shared, "identify": options.agents or identify}
    root = prefix.rstrip("/") + bodies.API
    metrics = options.metrics
    counted = {**shared, "metrics": metrics, "networks": options.metrics_from}
    return Application(
        [
            *(
                (re.escape(root) + each.pattern, each.handler, of_agents if each.is_for_agents else shared)
                for each in ROUTES
            ),
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
