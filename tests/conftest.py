"""Settings for all tests."""

from __future__ import annotations

import signal
from pathlib import Path

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

#: Tests of which one process runs those of a line, one after the other: they share what is expensive to
#: make, or look at something of which the machine has one, as MPS.
_TOGETHER = (
    ("acceptance/",),
    ("cli/test_enforcement.py", "pool/isolation/", "security/test_mps.py"),
    ("fuzz/test_bodies.py",),
    ("kubernetes/",),
    ("packaging/test_distribution.py",),
    ("spawner/test_hub.py",),
    ("spawner/test_spawn_page.py",),
)
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests stay together when several processes run them: --dist loadgroup."""
    for item in items:
        name = item.path.relative_to(_HERE).as_posix()
        group = next((each for each in _TOGETHER if name.startswith(each)), None)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group[0]))
