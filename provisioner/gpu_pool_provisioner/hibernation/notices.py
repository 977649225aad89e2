"""What the next server tells of a kernel that is no more, below a cell of its notebook."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from jupyter_core.paths import jupyter_data_dir

from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.hibernation.left import Owner, day_in_words
from gpu_pool_provisioner.session import texts

#: Seconds after which a notice that nobody has read is removed.
_KEPT_FOR: Final = 30 * 86_400.0


def write(owner: Owner, at: float, has: str, why: str) -> None:
    """Write down that an owner's kernel is gone, in place of what was written before. Blocks.

    Parameters
    ----------
    owner
        Whose kernel it was.
    at
        When it was there last, in Unix seconds.
    has
        What it had, in words; empty where that is not known.
    why
        Why it is gone, as the end of a sentence.
    """
    path = _path(owner)
    try:
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        for each in path.parent.iterdir():
            if time.time() - each.stat().st_mtime > _KEPT_FOR:
                each.unlink(missing_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=path.parent)  # 0600
        with open(descriptor, "w") as file:
            json.dump({"at": at, "has": has, "why": why}, file)
        Path(draft).replace(path)
    except OSError as error:
        get_logger().warning("That a kernel is gone could not be noted for its notebook: %s", error)


def take(owner: Owner) -> str:
    """Return what was written for an owner, once; empty where nothing was. Blocks."""
    path = _path(owner)
    try:
        said = json.loads(path.read_text())
        which = texts.left(day_in_words(float(said["at"]), time.time()), str(said["has"]))
        told = texts.is_gone(which, str(said["why"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        told = ""
    with suppress(OSError):
        path.unlink()
    return told


def _path(owner: Owner) -> Path:
    name = hashlib.sha256(json.dumps(asdict(owner), sort_keys=True).encode()).hexdigest()[:32]
    return Path(jupyter_data_dir(), "gpu-pool", "gone", name)
