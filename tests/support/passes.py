"""Pools that keep themselves in order only when a test asks them to."""

from __future__ import annotations

import pytest

from gpu_pool.pool.reconciler import Reconciler


@pytest.fixture
def no_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pools make the passes alone that are asked for."""

    async def none(_: Reconciler) -> None:
        """Return at once."""

    monkeypatch.setattr(Reconciler, "run", none)
