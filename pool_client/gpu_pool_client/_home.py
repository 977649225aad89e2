"""The home folder of this user, which need not exist.

Containers run as users whom no passwd file knows, and some set no HOME: there
``Path.home()`` and ``expanduser()`` raise what nobody expects.
"""

from __future__ import annotations

import os
from pathlib import Path

from gpu_pool_client._errors import BadRequest


def home_folder() -> Path | None:
    """Return this user's home; None where there is none."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def why_homeless() -> str:
    """Say why there is no home."""
    return f"HOME is not set, and this machine knows no user with the id {os.geteuid()}"


def expanded(path: str | Path) -> Path:
    """Return a path whose ``~`` or ``~NAME`` stands for a home. Raises ``BadRequest`` where there is none."""
    path = Path(path)
    try:
        return path.expanduser()
    except RuntimeError:
        home = path.parts[0]
        why = why_homeless() if home == "~" else f"this machine knows no user {home[1:][:64]!a}"
        raise BadRequest(
            f"{str(path)[:200]!a} cannot be found: {why}.", "Write the whole path, from / on."
        ) from None
