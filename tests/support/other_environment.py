"""Environments of kernels that are not those of Jupyter."""

from __future__ import annotations

import site
import venv
from pathlib import Path

_REFUSES = """
import sys
class Refuse:
    def find_spec(self, name, *rest):
        if name.startswith('gpu_pool'): raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
"""


def without_our_packages(folder: Path) -> str:
    """Make one that borrows ipykernel from the tests' environment, and refuses our packages.

    Return its Python.
    """
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
    (packages / "sitecustomize.py").write_text(_REFUSES)
    return str(folder / "bin/python3")
