"""The line under the traceback when a framework ran out of GPU memory.

Frameworks are recognised by the names of their errors; none is imported.
"""

import contextlib
import json
import os
from pathlib import Path

from . import slice_info

#: Names of errors, the packages they come from, and a word their text must hold.
ERRORS = {
    "OutOfMemoryError": (("torch", "cupy"), ""),
    "ResourceExhaustedError": (("tensorflow",), ""),
    "XlaRuntimeError": (("jaxlib", "jax"), "RESOURCE_EXHAUSTED"),
    "JaxRuntimeError": (("jaxlib", "jax"), "RESOURCE_EXHAUSTED"),
    # torch before 1.13
    "RuntimeError": (("builtins",), "CUDA out of memory"),
}
#: Longest chain of causes that is followed.
DEPTH = 50


def explanation(error: BaseException) -> "str | None":
    """Return the line to add for ``error``; None if it is about something else, or no slice is held."""
    size = os.environ.get("GPU_POOL_SLICE")
    if not size or not any(is_exhausted(link) for link in chain(error)):
        return None
    granted = slice_info.number("GPU_POOL_MEMORY_MIB")
    amount = "" if granted is None else f", with {slice_info.in_words(granted)} of memory"
    larger = next_larger(granted)
    advice = f'The next larger kernel is "{larger}".' if larger else "Ask for a larger slice."
    return f"GPU memory ran out: this kernel's slice is {size}{amount}. {advice}"


def is_exhausted(error: BaseException) -> bool:
    """Whether this very error says that GPU memory ran out."""
    for kind in type(error).__mro__:
        packages, word = ERRORS.get(kind.__name__, ((), ""))
        if kind.__module__.partition(".")[0] in packages and word in str(error):
            return True
    return False


def chain(error: BaseException) -> "list[BaseException]":
    """Return the error and the causes that its traceback shows, each once."""
    found = []  # type: list[BaseException]
    link = error  # type: BaseException | None
    while link is not None and len(found) < DEPTH and not any(link is seen for seen in found):
        found.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return found


def next_larger(granted: "int | None") -> "str | None":
    """Return the display name of the installed kernel with the next larger slice, over the same base."""
    total = slice_info.number("GPU_POOL_DEVICE_MEMORY_MIB")
    base = os.environ.get("GPU_POOL_KERNEL_BASE")
    if granted is None or total is None or not base:
        return None
    found = []
    for folder in os.environ.get("GPU_POOL_KERNEL_DIRS", "").split(os.pathsep):
        for path in Path(folder).glob("*/kernel.json") if folder else ():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # broken, or not ours
                found.append(candidate(path, base, total))
    larger = [kernel for kernel in found if granted < kernel[0] <= total]
    return min(larger)[3] if larger else None


def candidate(path: Path, base: str, total: int) -> "tuple[int, int, str, str]":
    """Return memory (MiB on each of its devices), devices, name and display name of a kernel of ours.

    Raises KeyError, TypeError or ValueError for other kernels. ``total`` is the
    memory of the device that its share is of.
    """
    spec = json.loads(path.read_text(encoding="utf-8"))
    ours = spec["metadata"]["gpu_pool"]
    if ours["base"] != base:
        raise ValueError(base)
    memory = int(ours["memory_mib"] or ours["milli"] * total // 1000)
    return memory, int(ours["count"]), path.parent.name, spec["display_name"].replace("  ", " ")
