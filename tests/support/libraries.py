"""The environment of kernels that has the libraries which are preloaded: torch, TensorFlow, JAX ..."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

#: Names its Python. By default it is the one that runs the tests.
VARIABLE = "GPU_POOL_TEST_KERNELS_PYTHON"


def kernels_python(*modules: str) -> str:
    """Return the Python of kernels that has these modules, or skip the test."""
    python = os.environ.get(VARIABLE) or sys.executable
    missing = [name for name in modules if not _has(python, name.partition(".")[0])]
    if missing:
        pytest.skip(f"{python} has no {', '.join(missing)}; ${VARIABLE} may name another Python")
    return python


@functools.cache
def _has(python: str, name: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0
