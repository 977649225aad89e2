"""Stand-ins in C for libraries that need a GPU."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest


def shared_library(folder: Path, name: str, source: Path, *more: str) -> Path:
    """Compile a shared library into ``folder``, which is returned. ``more`` are options of the compiler."""
    (folder / name).write_bytes(_compiled(name, source.read_bytes(), more))
    return folder


@functools.cache
def _compiled(name: str, source: bytes, more: tuple[str, ...]) -> bytes:
    """Compile a library; each process of the tests does so once."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip(f"no C compiler (cc or gcc) to build a stand-in for {name} with")
    flags = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
    with tempfile.TemporaryDirectory() as folder:
        made, given = Path(folder, name), Path(folder, "stub.c")
        given.write_bytes(source)
        subprocess.run([compiler, *flags, "-o", made, given, *more], check=True)
        return made.read_bytes()
