"""No variable that may differ between the kernels of one template is read as a library is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_pool_kernels.launching import LAUNCHER
from gpu_pool_provisioner.templates import _READ_LATE
from support.compiled import shared_library
from support.libraries import kernels_python

pytestmark = pytest.mark.long

#: Imports modules, and keeps the names that Python's own os.environ is asked for.
IMPORTING = """
import importlib, os, sys, traceback
log = open(os.environ["GETENV_LOG"], "a", buffering=1)

class Asked(os._Environ):
    def __getitem__(self, name):
        log.write(f"{name}\\n")
        return super().__getitem__(name)

    def __iter__(self):
        # Who wants all of them, to start a process for example, reads none of ours.
        log.write(f"* {traceback.extract_stack()[-2].filename}\\n")
        return iter([name for name in super().__iter__() if not name.startswith(LATE)])

LATE = eval(sys.argv[2])
os.environ.__class__ = Asked
for name in sys.argv[1].split(","):
    importlib.import_module(name)
"""


def names_read(python: str, modules: str, folder: Path) -> set[str]:
    """Return the variables that are read as modules are imported, by Python or by C."""
    shim = shared_library(folder, "getenv.so", Path(__file__).parents[1] / "support" / "getenv.c", "-ldl")
    log = folder / "log"
    variables = {"GETENV_LOG": str(log), "LD_PRELOAD": str(shim / "getenv.so")}
    command = [python, "-c", IMPORTING, modules, repr(_READ_LATE)]
    subprocess.run(command, env={**os.environ, **variables}, check=True, capture_output=True)
    return set(log.read_text(errors="replace").splitlines())


def test_none_is_read_by_what_every_template_imports(tmp_path: Path) -> None:
    folder = str(LAUNCHER.parent)
    code = (
        f"import sys; sys.path.insert(0, {folder!r}); import launch, pathlib; "
        f"launch.register(pathlib.Path({folder!r})); "
        "from _gpu_pool_inkernel import template; print(*template.KERNEL_MODULES)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    read = names_read(sys.executable, ",".join(found.stdout.split()), tmp_path)
    assert "IPYTHONDIR" in read or "PATH" in read
    assert [name for name in read if name.startswith(_READ_LATE)] == []


@pytest.mark.parametrize(
    ("module", "known"),
    [
        # One of each that is known to be read then: what is found here is worth something.
        ("numpy", "NPY_DISABLE_CPU_FEATURES"),
        ("matplotlib.pyplot", "MPLBACKEND"),
        ("pandas", "PANDAS_COPY_ON_WRITE"),
        ("sklearn.ensemble", "OMP_NUM_THREADS"),
        ("torch", "PYTORCH_CUDA_ALLOC_CONF"),
        ("tensorflow", "TF_CPP_MIN_LOG_LEVEL"),
        ("jax", "JAX_COMPILATION_CACHE_DIR"),
    ],
)
def test_none_is_read_by_a_library(tmp_path: Path, module: str, known: str) -> None:
    read = names_read(kernels_python(module), module, tmp_path)
    assert known in read
    assert [name for name in read if name.startswith(_READ_LATE)] == []
