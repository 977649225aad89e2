"""Settings for all tests."""

from __future__ import annotations

import signal

import hypothesis
import pytest

# A shell starts its background jobs with these ignored, and their children inherit that:
# then the programs under test could not be interrupted.
for _signum in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, signal.default_int_handler if _signum == signal.SIGINT else signal.SIG_DFL)

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("default", deadline=None)
# For make mutation, which runs the same tests thousands of times.
hypothesis.settings.register_profile(
    "mutation",
    deadline=None,
    max_examples=20,
    derandomize=True,
    database=None,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def _no_pool_of_my_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tester's own pool, slice and settings out of every test."""
    for name in ("GPU_POOL_URL", "GPU_POOL_DEVICES", "GPU_POOL_DEFAULT_SLICE", "GPU_POOL_LEASE"):
        monkeypatch.delenv(name, raising=False)
