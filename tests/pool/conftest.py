"""Stores of a test's own, and a stand-in for the driver that can suspend what uses a GPU."""

from __future__ import annotations

from support.fixtures import cuda_libraries, driver
from support.stores import pools

__all__ = ["cuda_libraries", "driver", "pools"]
