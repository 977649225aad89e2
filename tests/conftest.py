"""Settings for all tests."""

from __future__ import annotations

import hypothesis
import pytest

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def _no_pool_of_my_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tester's own pool, slice and settings out of every test."""
    for name in ("GPU_POOL_URL", "GPU_POOL_DEVICES", "GPU_POOL_DEFAULT_SLICE", "GPU_POOL_LEASE"):
        monkeypatch.delenv(name, raising=False)
