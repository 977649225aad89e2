"""Parts of this package that need more than its base install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpu_pool_client import NotAllowed


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
