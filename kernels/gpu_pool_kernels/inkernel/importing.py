"""What a template imports: what is different meanwhile, which module left what it must not, and from where.

From the files it is seen whether a new process would import the same.
"""

import contextlib
import ctypes
import importlib
import importlib.machinery
import os
import sys
import time
from pathlib import Path
from typing import (  # noqa: UP035 - for Python 3.8
    Any,
    Callable,
    Iterator,
)

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


_MEANWHILE = {
    # What ipykernel sets before matplotlib is imported, which reads it at once.
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    # torch.cuda.is_available() then asks NVML whether there are GPUs, and not CUDA, of which a forked process
    # could make no use any more.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
#: More often than this, nobody has asked NVML to begin.
_MANY = 10_000


@contextlib.contextmanager
def prepared() -> "Iterator[None]":
    """Let modules that are imported in this block leave the GPU's driver alone, as far as they can."""
    added = {name: value for name, value in _MEANWHILE.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in added.items():
            if os.environ.get(name) == value:  # else it is a module's own
                del os.environ[name]
        _end_nvml()


def _end_nvml() -> None:
    """Close what NVML has opened for PyTorch, which never does, and asks it to begin whenever it needs it."""
    pynvml = sys.modules.get("pynvml")  # type: Any
    if "torch" not in sys.modules or getattr(pynvml, "_nvmlLib_refcount", False):
        return
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1", mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:  # nobody has loaded it
        return
    for _ in range(_MANY):
        if library.nvmlShutdown():  # there is nothing left to end
            return


class FirstSeen:
    """After the import of which module something was first there that no kernel may inherit."""

    def __init__(self) -> None:
        self._modules = {}  # type: dict[str, str]

    def note(self, module: str, doubt_now: "Callable[[], str | None]") -> None:
        """Take note of what is there now that this module was imported."""
        doubt = doubt_now()
        if doubt is not None:
            self._modules.setdefault(_kind(doubt), module)

    def with_module(self, doubt: str) -> str:
        """Return what speaks against a fork with the name of the module, if it is known."""
        module = self._modules.get(_kind(doubt))
        return doubt if module is None else f"{doubt} (first seen when {module} was imported)"


def _kind(doubt: str) -> str:
    # What follows may be more by now, such as a second thread.
    return doubt.partition(":")[0]


class EveryImport:
    """A finder that calls a function after the import of every module, the innermost first."""

    def __init__(self, then: "Callable[[str], None]") -> None:
        self._then = then

    @contextlib.contextmanager
    def watched(self) -> "Iterator[None]":
        """Do so in this block."""
        sys.meta_path.insert(0, self)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Return what the other finders find."""
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                self._watch(spec)
                return spec
        return None

    def _watch(self, spec: "Any") -> None:
        original = getattr(spec.loader, "exec_module", None)
        if original is None:
            return

        def exec_module(module: "Any") -> None:
            original(module)
            self._then(spec.name)

        # Python's own modules are loaded by classes, which are everybody's.
        if not isinstance(spec.loader, type):
            with contextlib.suppress(AttributeError, TypeError):
                spec.loader.exec_module = exec_module
