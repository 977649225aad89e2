"""Which functions of ours a process enters, written down as it goes."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

PACKAGES = ("gpu_pool", "gpu_pool_client", "gpu_pool_kernels", "gpu_pool_provisioner", "gpu_pool_spawner")


def _roots() -> tuple[str, ...]:
    specs = (importlib.util.find_spec(name) for name in PACKAGES)
    return tuple(f"{folder}/" for spec in specs if spec for folder in spec.submodule_search_locations or ())


def _is_function(code: CodeType) -> bool:
    """Whether it is a function, or a lambda: not a module, a class's body or a comprehension."""
    is_named = code.co_name == "<lambda>" or not code.co_name.startswith("<")
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and is_named


def record(path: Path) -> Callable[[], None]:
    """Append a line of JSON to ``path`` for each function of ours that this process enters from now on.

    Threads that have been started already are left out. What is returned, when it is called,
    forgets what has been entered: a function that is entered again is written down again.
    """
    roots, seen = _roots(), set[CodeType]()
    file = path.open("a", buffering=1)

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code not in seen:
            seen.add(code)
            if code.co_filename.startswith(roots) and _is_function(code):
                file.write(json.dumps([code.co_filename, code.co_firstlineno, code.co_name]) + "\n")

    def forget() -> None:
        seen.clear()
        file.truncate(0)

    threading.setprofile(profile)
    sys.setprofile(profile)
    return forget


def recorded(*paths: Path) -> tuple[int, int]:
    """Return how many files and functions are named in these, each once."""
    lines = {line for path in paths if path.exists() for line in path.read_text().splitlines()}
    return len({json.loads(line)[0] for line in lines}), len(lines)
