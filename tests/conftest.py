"""Settings for all tests."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from support import clean_environment

# Before anything looks for kernels or settings; see there.
clean_environment.enter()

from gpu_pool_client._folders import remove_abandoned  # noqa: E402
from support.hub import hub  # noqa: E402
from support.service import children, cluster_children  # noqa: E402

#: What is expensive to make, and made once: wherever else a fixture were imported, it would be another one.
__all__ = ["children", "cluster_children", "hub"]

# A shell starts its background jobs with these ignored, and their children inherit that:
# then the programs under test could not be interrupted.
for _signum in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, signal.default_int_handler if _signum == signal.SIGINT else signal.SIG_DFL)

# A process keeps a file open for each store that it has had, and these have had thousands; many systems allow
# it 1,024 unless it asks for more.
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(_soft, min(_hard, 20_000)), _hard))

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("default", deadline=None)
# For make test; make test-all runs the same tests with as many examples as they ask for.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
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
    "tests/packaging/test_dependencies.py",
    "tests/packaging/test_distribution.py",
    "tests/pool/cli/test_checkpoint_checks.py",
    "tests/spawner/test_hub.py",
    "tests/spawner/test_spawn_page.py",
)
#: Those of the files that share the fixture ``hub``, all by one process: a JupyterHub takes seconds to start.
_WITH_HUB = (
    "tests/cluster/test_moving.py",
    *("tests/pool/service/test_audit.py", "tests/pool/service/test_browsers.py"),
    *("tests/pool/service/test_health.py", "tests/pool/service/test_heartbeats.py"),
    *("tests/pool/service/test_hub_", "tests/pool/service/test_metrics.py"),
    "tests/pool/service/test_pace.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Let the first process compile all tests; those of pytest-xdist beside it read what it has written.

    All that is imported and collected stays to the end: the garbage collector need not look through it, now
    or whenever a test lets it look.
    """
    with Path(os.environ[clean_environment.MARK], "collecting").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        gc.disable()
        try:
            return (yield)
        finally:
            gc.freeze()
            gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what the kernels of servers that were killed have left, as the next kernel would."""
    if not hasattr(config, "workerinput"):
        remove_abandoned(tempfile.gettempdir(), "gpu-pool-")


@pytest.hookimpl(optionalhook=True)  # the Python for tests that need a GPU may lack pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand the other tests out one by one: --dist loadgroup. Called by pytest-xdist."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(_WITH_HUB):
                return "hub"
            return nodeid.partition("::")[0] if nodeid.startswith(_TOGETHER) else nodeid

    return Scheduling(config, log) if config.getoption("dist") == "loadgroup" else None
