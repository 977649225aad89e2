"""The description of the service's addresses (OpenAPI 3.1), made of what reads and writes there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from gpu_pool.service.routes import Operation, Route
from gpu_pool_client.remote import bodies
from gpu_pool_client.remote.problems import PROBLEM_TYPE, ProblemDocument

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
