"""How much memory something may take, whatever it is given."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def within(mib: int) -> Iterator[None]:
    """Fail if more memory than that is in use at any time meanwhile."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < mib << 20, f"{(peak - before) >> 20} MiB"
