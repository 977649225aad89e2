"""Memory on top of this kernel's slice, its burst: heard of at any time, also while a cell runs.

Whoever launched the kernel, in a pod its supervisor, writes what changes in its variables into a pipe in its
private folder, as a line of JSON. A thread waits for that, and does nothing else. PyTorch's limit follows in
this process; no other framework can change its limit while it runs, and no other process is told.
"""

import json
import os
import threading
from pathlib import Path
from typing import Callable  # noqa: UP035 - not generic elsewhere in Python 3.6

from . import caps, slice_requests

PIPE = "changes"
NAME = "gpu-pool-burst"


def follow(catch_up: "Callable[[], None]") -> None:
    """Follow what may be used from now on. May be repeated.

    ``catch_up`` is called before each change: it takes what this kernel was told before that.
    """
    if any(name in os.environ for name in caps.VARIABLES.values()):
        caps.watch()
        caps.follow_torch()
    listen_to_changes(catch_up)


def listen_to_changes(catch_up: "Callable[[], None]") -> bool:
    """Hear of changes from now on; return whether there is where to. May be repeated."""
    if any(thread.name == NAME for thread in threading.enumerate()):
        return True
    folder = os.environ.get(slice_requests.VARIABLE)
    if not (folder and Path(folder, PIPE).exists()):
        return False
    threading.Thread(target=listen, args=(Path(folder, PIPE), catch_up), name=NAME, daemon=True).start()
    return True


def listen(pipe: Path, catch_up: "Callable[[], None]") -> None:
    """Take what is written, until nobody is there who could write."""
    try:
        with pipe.open("rb") as lines:
            for line in lines:
                catch_up()
                slice_requests.apply(json.loads(line.decode()))
                caps.follow_torch()
    except (OSError, ValueError, AttributeError, TypeError):  # it was removed, or somebody else writes to it
        return
