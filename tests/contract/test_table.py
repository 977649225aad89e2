"""The suite goes through the whole table of operations: a verb that no test here asks for fails by name."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import Pool
from gpu_pool_client._operations import Cost, Operation
from gpu_pool_client._pool import OPERATIONS
from gpu_pool_client._remote.forms import form_of

by_name = pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: row.name)


def _asked_of_pools() -> Iterator[str]:
    """Yield the methods of pools that the tests of this folder call."""
    for file in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = node.func.value
                if isinstance(of, ast.Name) and of.id == "pool":
                    yield node.func.attr


ASKED = frozenset(_asked_of_pools())


@by_name
def test_this_suite_asks_for_it(row: Operation) -> None:
    assert row.name in ASKED, f"no test in tests/contract calls pool.{row.name}(…)"


@by_name
def test_a_pool_of_ours_does_it_or_says_that_it_cannot(row: Operation) -> None:
    is_its_own = getattr(GpuPool, row.name) is not getattr(Pool, row.name)
    assert is_its_own or row.missing[0] == "This pool starts no kernels." or row.name == "positions"


@by_name
def test_what_changes_something_says_so_in_the_log(row: Operation) -> None:
    assert bool(row.decision) == (row.cost in (Cost.DECISION, Cost.REQUEST))
    row.decision.format_map(dict.fromkeys(row.signature.parameters, ""))


@by_name
def test_only_a_question_is_asked_by_get(row: Operation) -> None:
    if row.http is not None:
        assert (row.http.method == "GET") == (not row.decision and row.cost is not Cost.REPORT)
        assert form_of(row).body is None or row.http.method == "POST"


def test_no_two_operations_are_at_one_address() -> None:
    places = [(row.http.method, row.http.path) for row in OPERATIONS if row.http is not None]
    assert len(set(places)) == len(places)


def test_every_public_verb_is_in_the_table() -> None:
    #: What a client does itself, with those that are.
    composed = {"lease", "acquire", "give_back", "without_retries", "close"}
    verbs = {name for name, _ in inspect.getmembers(Pool, inspect.isfunction) if not name.startswith("_")}
    assert verbs - composed == {row.name for row in OPERATIONS}
