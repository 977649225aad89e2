"""The files from which a template has imported, and whether a new process would import the same."""

import importlib.machinery
import os
import sys
import time
from pathlib import Path
from typing import Any, Iterator  # noqa: UP035 - for Python 3.8

#: Seconds for which the files need not be looked at again: many kernels may be asked for at once.
_GOOD_FOR = 0.3


class ImportedFiles:
    """What this process has imported so far."""

    def __init__(self) -> None:
        #: When the files were changed from which everything was imported.
        self._changed = dict(_changed(_files()))
        #: What can be imported from the folders of ``sys.path``.
        self._importable = {path: _importable(path) for path in filter(None, sys.path)}
        #: When they were last seen unchanged, of ``time.monotonic()``.
        self._unchanged_at = float("-inf")

    def change(self) -> "str | None":
        """Return what has changed since; None if nothing has."""
        if time.monotonic() < self._unchanged_at + _GOOD_FOR:
            return None
        for path, changed in _changed(self._changed):
            if self._changed[path] != changed:
                return f"{path} has changed"
        # A package that was added or removed; notebooks and data may be there as well, and change often.
        for path, names in self._importable.items():
            if _importable(path) != names:
                return f"what can be imported from {path} has changed"
        self._unchanged_at = time.monotonic()
        return None


def top_levels() -> "set[str]":
    """Return the first parts of the names of all imported modules."""
    return {name.partition(".")[0] for name in sys.modules}


def hiding(folder: str, modules: "set[str]") -> "str | None":
    """Return a file or a package of a folder that Python would import in place of one of these modules."""
    try:
        names = names_in(folder)
    except OSError:
        return None
    for name in names:
        if name.partition(".")[0] in modules and _is_module(Path(folder, name)):
            return name
    return None


def names_in(folder: str) -> "list[str]":
    """Return what is in a folder."""
    return os.listdir(folder)  # noqa: PTH208 - Path.iterdir takes ten times as long


def _is_module(path: Path) -> bool:
    """Whether Python would import this file or folder rather than one further behind on ``sys.path``."""
    _, dot, suffix = path.name.partition(".")
    suffixes = importlib.machinery.all_suffixes()
    if dot:
        return dot + suffix in suffixes
    return any((path / ("__init__" + each)).is_file() for each in suffixes)


def _files() -> "Iterator[str]":
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            yield file


def _importable(folder: str) -> "frozenset[str] | None":
    """Return the names in a folder that say what can be imported from it."""
    suffixes = (*importlib.machinery.all_suffixes(), ".dist-info", ".egg-info", ".egg-link", ".pth")
    try:
        names = names_in(folder)
    except OSError:
        return None
    return frozenset(name for name in names if name.endswith(suffixes) or "." not in name) - {"__pycache__"}


def _changed(paths: "Any") -> "Iterator[Any]":
    for path in paths:
        try:
            yield path, os.stat(path).st_mtime_ns  # noqa: PTH116 - Path takes five times as long
        except OSError:  # noqa: PERF203
            yield path, None
