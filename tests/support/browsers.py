"""A browser for tests that look at pages."""

from __future__ import annotations

import os
import shutil

import pytest

#: If set, a browser that is missing is a failure and not a reason to skip.
REQUIRED = "GPU_POOL_REQUIRE_BROWSER"


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the browser's program."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None and os.environ.get(REQUIRED):
        pytest.fail(f"There is no chromium on the PATH, and {REQUIRED} is set.")
    if found is None:
        pytest.skip("there is no chromium on the PATH (on Debian: apt install chromium)")
    return found
