"""What is different while a template imports modules, and which of them has left what it must not."""

import contextlib
import ctypes
import importlib
import os
import sys
from typing import Any, Callable, Iterator  # noqa: UP035 - for Python 3.8

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
