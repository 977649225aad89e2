"""The service describes all of its addresses, as they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpu_pool.service.api import ROUTES, describe
from gpu_pool.service.handler import Handler
from gpu_pool_client._remote import bodies
from gpu_pool_client._remote.exchange import ask
from support.service import Service


def description() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(describe(ROUTES, "/prefix/api/v1"))
    return found


async def test_it_is_served_to_everybody(service: Service) -> None:
    answer = await ask(service.socket, "GET", f"{bodies.API}/openapi.json", None, 20)
    assert (answer.status, json.loads(answer.body)["servers"]) == (200, [{"url": bodies.API}])


def test_every_address_and_method_of_the_application_is_in_it() -> None:
    described = {(path, method) for path, methods in description()["paths"].items() for method in methods}
    for route in ROUTES:
        # Every method that is answered there, and no other.
        methods = {each for each in Handler.SUPPORTED_METHODS if route.handler.has(each)}
        assert methods == set(route.exchanges)
        assert {(route.path, method.lower()) for method in methods} <= described


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_its_pattern_has_a_group_for_each_parameter(route: Any) -> None:
    assert route.pattern.count("(") == route.path.count("{")


def test_every_reference_leads_somewhere() -> None:
    found = description()
    names = set(found["components"]["schemas"])
    references = json.dumps(found).split('"$ref": "')[1:]
    assert {each.partition('"')[0].rpartition("/")[2] for each in references} <= names
    assert {"Lease", "RequestBody", "ProblemDocument"} <= names


def test_what_is_described_is_what_is_read() -> None:
    schemas = description()["components"]["schemas"]
    assert schemas["RequestBody"]["required"] == ["request", "key"]
    assert schemas["Lease"]["properties"]["request"]["type"] == "string"
