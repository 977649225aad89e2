"""Settings for all tests."""

from __future__ import annotations

import signal
from typing import Any

import hypothesis
import pytest

from support import clean_environment

# Before anything looks for kernels or settings; see there.
clean_environment.enter()

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

#: Where the tests of a file are run by one process, one after the other: they share what is expensive to
#: make, as a Hub, a cluster or a build, and each process would make one of its own.
_TOGETHER = (
    "tests/acceptance/",
    "tests/fuzz/test_bodies.py",
    "tests/cluster/api_server/",
    "tests/packaging/test_distribution.py",
    "tests/spawner/test_hub.py",
    "tests/spawner/test_spawn_page.py",
)


@pytest.hookimpl(optionalhook=True)  # the Python for tests that need a GPU may lack pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand the other tests out one by one: --dist loadgroup. Called by pytest-xdist."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0] if nodeid.startswith(_TOGETHER) else nodeid

    return Scheduling(config, log) if config.getoption("dist") == "loadgroup" else None
