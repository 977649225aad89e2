"""Stand-ins in C for libraries that need a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def shared_library(folder: Path, name: str, source: Path, *more: str) -> Path:
    """Compile a shared library into ``folder``, which is returned. ``more`` are options of the compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip(f"no C compiler (cc or gcc) to build a stand-in for {name} with")
    flags = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
    subprocess.run([compiler, *flags, "-o", folder / name, source, *more], check=True)
    return folder
