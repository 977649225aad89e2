"""``%gpu use 10%``: ask for another size of this kernel's slice, and take what comes of it.

Whoever launched the kernel named a private folder to it. A request is written
into the pipe there, and answered in a file beside it. A kernel in a pod has no
such folder: there a request is a message, and the relay prints the answer.
"""

import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Callable  # noqa: UP035 - not generic elsewhere in Python 3.6

from . import caps, keep_alive, slice_info

#: The variable that names the folder, and what lies in it.
VARIABLE = "GPU_POOL_RESIZE_DIR"
PIPE = "requests"
#: The variable that tells a kernel that it is in a pod, and the message by which it asks there.
POD = "GPU_POOL_POD"
MESSAGE = "gpu_pool_use"
ANSWER = "answer"
#: Seconds to wait for an answer, and between two looks.
TIMEOUT = 10.0
PAUSE = 0.05
#: Longest text that is sent; no size is as long.
LONGEST = 300

ALONE = "This kernel cannot change its size: the server that launched it does not answer."
SILENT = "There is no answer yet. Run %gpu in a moment to see the result."
STALE = "{} was imported before the change and may keep its old memory limit until the kernel is restarted."
#: Where frameworks find their memory limits: when they are imported, or when they first use the GPU.
LIMITS = {
    "torch": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    "jax": ("XLA_PYTHON_CLIENT_MEM_FRACTION",),
    "cupy": ("CUPY_GPU_MEMORY_LIMIT",),
}


class SizeChanges:
    """What one kernel has asked for. ``limit_frameworks`` has them follow the environment from then on."""

    def __init__(self, limit_frameworks: "Callable[[], None]") -> None:
        self._limit_frameworks = limit_frameworks
        #: The id of the last request, until its answer has been taken.
        self._pending = ""

    def use(self, size: str) -> None:
        """Ask for the size, and print the answer."""
        if not os.environ.get("GPU_POOL_SLICE"):
            print(slice_info.MISSING)
            return
        request = uuid.uuid4().hex
        if not send({"id": request, "size": size[:LONGEST]}):
            if not (os.environ.get(POD) and keep_alive.send({"size": size[:LONGEST]}, MESSAGE)):
                print(ALONE, file=sys.stderr)
            return
        self._pending = request
        give_up = time.monotonic() + TIMEOUT
        while self._pending and time.monotonic() < give_up:
            time.sleep(PAUSE)
            self.catch_up()
        if self._pending:
            print(SILENT, file=sys.stderr)

    def catch_up(self) -> None:
        """Take the answer to the last request, if there is one that has not been taken yet."""
        if not self._pending:
            return
        try:
            answer = json.loads((Path(os.environ[VARIABLE]) / ANSWER).read_text(encoding="utf-8"))
        except (KeyError, OSError, ValueError):
            return
        if answer.get("id") != self._pending:
            return
        self._pending = ""
        changed = answer.get("variables", {})
        apply(changed)
        self._limit_frameworks()
        print(answer["message"], file=sys.stdout if answer["granted"] else sys.stderr)
        for framework in stale(changed):
            print(STALE.format(framework), file=sys.stderr)
        for framework in caps.too_late(changed):
            print(caps.LATE.format(framework), file=sys.stderr)


def send(request: "dict[str, str]") -> bool:
    """Write the request into the pipe; return whether somebody is there to read it."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return False
    try:
        pipe = os.open(os.path.join(folder, PIPE), os.O_WRONLY | os.O_NONBLOCK)  # noqa: PTH118 - as os.open
        try:
            os.write(pipe, json.dumps(request).encode() + b"\n")
        finally:
            os.close(pipe)
    except OSError:
        return False
    return True


def apply(changed: "dict[str, list[str | None]]") -> None:
    """Change the environment, but for limits that the user has changed in the meantime."""
    for name, (before, now) in changed.items():
        ours = name == "CUDA_VISIBLE_DEVICES" or name.startswith("GPU_POOL_")
        if not ours and os.environ.get(name) != before:
            continue
        if now is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = now


def stale(changed: "dict[str, list[str | None]]") -> "list[str]":
    """Return the frameworks that may have read their limits already."""
    imported = (name for name in LIMITS if name in sys.modules)
    return [name for name in imported if any(limit in changed for limit in LIMITS[name])]
