"""Every point at which the chaos tests strike is one of the project's functions."""

from __future__ import annotations

import importlib
from functools import reduce

import pytest

from chaos import points

NAMED = sorted(
    {each for group in vars(points).values() if isinstance(group, tuple) for each in group if ":" in each}
)


@pytest.mark.parametrize("point", NAMED)
def test_a_point_is_a_function(point: str) -> None:
    module, path, moment = point.split(":")
    assert callable(reduce(getattr, path.split("."), importlib.import_module(module)))
    assert moment in {"before", "after"}
