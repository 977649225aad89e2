"""How much is measured: everything, or with ``--quick`` just enough to see that it can be measured."""

from __future__ import annotations

import os
from typing import Final, TypeVar

#: Environment variables, so that processes which benchmarks start know it, too.
QUICK: Final = "BENCHMARKS_QUICK"
PEERS_PYTHON: Final = "BENCHMARKS_PEERS_PYTHON"
KERNELS_PYTHON: Final = "BENCHMARKS_KERNELS_PYTHON"

Size = TypeVar("Size")


def sized(full: Size, quick: Size) -> Size:
    """Return the first, or the second in a quick run."""
    return quick if os.environ.get(QUICK) else full
