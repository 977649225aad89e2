"""Parts of the pool that may be missing: those that packages offer through entry points, and those of extras.

Through entry points this package and others offer tiers and dialects. A part that cannot be used is told of
in words, and keeps nothing else from working.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from gpu_pool_client import NotAllowed

#: Where ours are. No other package takes a name from them.
_OURS = "gpu_pool."


class PluginBroken(Exception):
    """A part that was asked for, and that cannot be used; the text says why."""


@functools.cache
def offers(group: str) -> dict[str, EntryPoint]:
    """Return what installed packages offer, by name, ours first; read once for each process."""
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda each: not each.value.startswith(_OURS)):
        found.setdefault(point.name, point)
    return found


def load(group: str, name: str, base: type) -> Any:
    """Return the class that is offered under a name, a subclass of ``base``. Raises ``PluginBroken``."""
    point = offers(group).get(name)
    if point is None:
        raise PluginBroken("no installed package has it")
    try:
        found = point.load()
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise PluginBroken(f"{name} of {_package(point)} cannot be loaded: {why}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise PluginBroken(
            f"{name} of {_package(point)} is not a subclass of {base.__module__}.{base.__name__}"
        )
    return found


def _package(point: EntryPoint) -> str:
    return f"package {point.dist.name}" if point.dist is not None else f"module {point.module}"


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Import within this what an extra brings. Raises ``NotAllowed`` where it is not installed.

    ``what`` begins the sentence: "Kubernetes support", say.
    """
    try:
        yield
    except ImportError as error:
        raise NotAllowed(
            f"{what} is not installed: {error}.", f"Install it: pip install 'jupyter-gpu-pool[{extra}]'."
        ) from error
