"""The page about JSON names every key that is printed or sent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cli.cluster import plain_nodes
from gpu_pool.cluster.dialects import NodeUse, PodUse
from gpu_pool.service.api import ROUTES, describe
from gpu_pool_client import DeviceStatus
from support.pools import V100
from support.terminal import Terminal

PAGE = (Path(__file__).parents[3] / "docs/reference/json.md").read_text()
COURSE = Path(__file__).parents[3] / "examples/courses/intro-ml.yaml"


def part(heading: str) -> str:
    """Return the words of one part of the page."""
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`([^`]+)`", text))))


def row(of: str, heading: str) -> str:
    (found,) = (
        line for line in part(heading).splitlines() if re.match(rf"\| [^|]*`{re.escape(of)}`[^|]* \|", line)
    )
    return found


def keys(value: Any) -> Iterator[str]:
    """Yield the keys of all that is printed; those of figures by name are names, not keys."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield key
            yield from keys(below) if key not in ("reasons", "orders") else ()
    elif isinstance(value, list):
        for each in value:
            yield from keys(each)


def test_every_key_that_a_verb_prints_is_named(terminal: Terminal) -> None:
    held, waiting = terminal.hold("100%"), terminal.hold("2%")
    printed: dict[str, list[str]] = {
        "list": ["list"],
        "status": ["status"],
        "why": ["why", waiting],
        "release": ["release", held, waiting],
        "request": ["request", "2%", "--no-wait"],
        "drain": ["drain", "0"],
        "undrain": ["drain", "--hibernate"],
        "history": ["history"],
        "report": ["report"],
        "courses check": ["courses", "check", str(COURSE), "--students", "60"],
        "courses list": ["courses", "list", str(COURSE)],
        "kernels list": ["kernels", "list"],
        "health": ["health"],
    }
    for verb, command in printed.items():
        done = terminal.run(*command, "--json")
        text = done.stdout.partition("\n")[0] if verb == "history" else done.stdout
        found = set(keys(json.loads(text)))
        known = words(row(verb, "What each verb prints"))
        for value in known & {"device", "lease"}:
            known |= words(part(f"A {value}"))
        assert found, verb
        assert sorted(found - known) == [], verb


def test_every_key_of_a_node_is_named() -> None:
    (node,) = plain_nodes([_node()])
    assert sorted(set(keys(node)) - words(part("A node"))) == []


def _node() -> NodeUse:
    return NodeUse("n1", (DeviceStatus(V100, 0, 0, 0, 0),), (PodUse("a", "b", ()),), exact=True)


DESCRIBED = json.loads(describe(ROUTES, "/api/v1"))["components"]["schemas"]


@pytest.mark.parametrize("name", [name for name, schema in DESCRIBED.items() if "properties" in schema])
def test_every_key_of_the_api_is_named(name: str) -> None:
    assert sorted(set(DESCRIBED[name]["properties"]) - words(row(name, "The service's API"))) == []
