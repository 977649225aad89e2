"""``%gpu use 10%`` and ``%gpu keep 2h``: ask for another size of this kernel's slice, or to keep it.

To keep it says that this kernel uses its slice although nothing seems to run.

Whoever launched the kernel named a private folder to it. A request for another size is written
into the pipe there, and answered in a file beside it. In a pod there is nobody at that
pipe: there a request is a message, the relay prints the answer, and what changes is heard as in ``burst``.
"""

import json
import os
import re
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Callable, Mapping, Sequence  # noqa: UP035 - not generic elsewhere in Python 3.6

from . import caps, slice_info

#: The message on the kernel's output channel that the relay in front of the kernel takes, and answers.
KEEP_MESSAGE = "gpu_pool_keep"
ACCEPTED = "Write how long, such as %gpu keep 30min, %gpu keep 2h or %gpu keep 1h30min."
SECONDS = {"d": 86400, "h": 3600, "min": 60, "m": 60, "s": 1}
PART = re.compile(r"([0-9]{1,7})(d|h|min|m|s)")


def keep(text: str) -> None:
    """Ask for the slice to be kept for so long; what comes of it is printed below the cell."""
    seconds = seconds_of(text)
    if not seconds:
        print(f"{text!r} is not a duration. {ACCEPTED}", file=sys.stderr)
    elif not (os.environ.get("GPU_POOL_IDLE_LIMIT") or os.environ.get("GPU_POOL_YIELD_AFTER")):
        print(
            "Nothing needs to be done: this kernel keeps its slice however long it is idle" + until_the_end()
        )
    elif not publish({"seconds": seconds}):
        print("This kernel cannot ask for that: it is not run by ipykernel.", file=sys.stderr)


def until_the_end() -> str:
    """End a sentence about how long the slice is kept, with the end of its lease if there is one."""
    ends_at = slice_info.number("GPU_POOL_ENDS_AT")
    if ends_at is None:
        return "."
    left = max(0, ends_at - int(time.time()))
    why = slice_info.why_it_ends()
    return f", but only until its lease ends, in {slice_info.duration(left)}: {why}."


def seconds_of(text: str) -> int:
    """Return the seconds that ``text`` means, 0 if it means none."""
    parts = PART.findall(text)
    if "".join(number + unit for number, unit in parts) != text:
        return 0
    return sum(int(number) * SECONDS[unit] for number, unit in parts)


def publish(content: "dict[str, object]", message: str = KEEP_MESSAGE) -> bool:
    """Publish a message as a part of this cell's output; return whether there is where to."""
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        return False
    sys.stdout.flush()
    # ipykernel before version 6 has no get_parent.
    parent = kernel.get_parent() if hasattr(kernel, "get_parent") else kernel._parent_header
    kernel.session.send(kernel.iopub_socket, message, content, parent=parent)
    return True


#: The variable that names the folder, and what lies in it.
VARIABLE = "GPU_POOL_RESIZE_DIR"
PIPE = "requests"
#: The variable that tells a kernel that it is in a pod, and the message by which it asks there.
POD = "GPU_POOL_POD"
USE_MESSAGE = "gpu_pool_use"
#: The message by which it asks there how much memory it uses: only its node sees that.
MEMORY_MESSAGE = "gpu_pool_memory"
ANSWER = "answer"
#: The variable that changes once a request from a pod has its answer, to the request's id.
ANSWERED = "GPU_POOL_ANSWERED"
#: Seconds to wait for an answer, and between two looks.
TIMEOUT = 10.0
PAUSE = 0.05
#: Longest text that is sent; no size is as long.
LONGEST = 300

ALONE = "This kernel cannot change its size: the server that launched it does not answer."
SILENT = "There is no answer yet. Once there is, it takes effect before the next cell; %gpu shows it."
STALE = "{} was imported before the change and may keep its old memory limit until the kernel is restarted."
#: Where frameworks find their memory limits: when they are imported, or when they first use the GPU.
LIMITS = {
    "torch": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    "jax": ("XLA_PYTHON_CLIENT_MEM_FRACTION",),
    "cupy": ("CUPY_GPU_MEMORY_LIMIT",),
}


class SizeChanges:
    """What one kernel has asked for.

    ``limit_frameworks`` has them follow the environment from then on; ``listen`` hears of changes in a pod,
    and returns whether there is where to.
    """

    def __init__(self, limit_frameworks: "Callable[[], None]", listen: "Callable[[], bool]") -> None:
        self._limit_frameworks = limit_frameworks
        self._listen = listen
        #: The ids of the requests of which no answer has been taken, and no later one, in their order.
        self._pending = []  # type: list[str]
        self._catches_up = False
        #: Of the cells' thread, and that of ``burst``.
        self._taking = threading.Lock()

    def use(self, size: str) -> None:
        """Ask for the size, and print the answer."""
        if not os.environ.get("GPU_POOL_SLICE"):
            print(slice_info.MISSING)
            return
        self.catch_up()
        self._catch_up_before_cells()
        request = uuid.uuid4().hex
        asked = {"id": request, "size": size[:LONGEST]}
        self._pending.append(request)  # also where this is interrupted from here on
        if not send(asked):
            self._pending.remove(request)
            if not (os.environ.get(POD) and self._use_in_pod(asked)):
                print(ALONE, file=sys.stderr)
            return
        give_up = time.monotonic() + TIMEOUT
        while request in self._pending and time.monotonic() < give_up:
            time.sleep(PAUSE)
            self.catch_up()
        if request in self._pending:
            print(SILENT, file=sys.stderr)

    def _catch_up_before_cells(self) -> None:
        """Let no cell from now on begin on a slice that this kernel has no more, as far as that is known."""
        from IPython import get_ipython

        shell = get_ipython()
        if shell is not None and not self._catches_up:
            self._catches_up = True
            shell.events.register("pre_run_cell", self.catch_up)

    def _use_in_pod(self, asked: "dict[str, str]") -> bool:
        """Ask the relay for the size; return whether somebody is asked, once what comes of it is known here.

        So no cell after this one runs with the variables of a slice that it has no more.
        """
        before = dict(os.environ)
        hears = self._listen()
        if not publish(dict(asked), USE_MESSAGE):
            return False
        give_up = time.monotonic() + TIMEOUT
        while hears and os.environ.get(ANSWERED) != asked["id"] and time.monotonic() < give_up:
            time.sleep(PAUSE)
        self._limit_frameworks()
        tell_stale({name: None for name in os.environ if os.environ[name] != before.get(name)})
        return True

    def catch_up(self, *_: object) -> None:
        """Take the answer to the last request that has one, unless it has been taken.

        It has all variables that have changed since this kernel's start, also where nobody has read the
        answers before it.
        """
        if not self._pending:
            return
        with self._taking:
            self._take()

    def _take(self) -> None:
        try:
            answer = json.loads((Path(os.environ[VARIABLE]) / ANSWER).read_text(encoding="utf-8"))
            request = answer["id"]
        except (KeyError, OSError, TypeError, ValueError):
            return
        if request not in self._pending:
            return
        changed = apply(answer.get("variables", {}))
        self._limit_frameworks()
        # Only now: where this is interrupted before, it is done once more.
        del self._pending[: self._pending.index(request) + 1]
        print(answer["message"], file=sys.stdout if answer["granted"] else sys.stderr)
        tell_stale(changed)


def tell_stale(changed: "Mapping[str, object]") -> None:
    """Say which frameworks keep their old limits where these variables have changed."""
    for framework in stale(changed):
        print(STALE.format(framework), file=sys.stderr)
    for framework in caps.too_late(changed):
        print(caps.LATE.format(framework), file=sys.stderr)


def ask_for_memory() -> None:
    """In a pod, have it printed how much memory this kernel uses, by the relay in front of it."""
    if os.environ.get(POD) and os.environ.get("GPU_POOL_SLICE"):
        publish({}, MEMORY_MESSAGE)


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


#: What variables were set to here, None where they were removed.
_applied = {}  # type: dict[str, str | None]


def apply(changed: "Mapping[str, Sequence[str | None]]") -> "dict[str, str | None]":
    """Change the environment, but for limits that the user has changed in the meantime.

    ``changed`` has the value of each variable before and now, of which this process may know any. Return
    those that were not as they are now.
    """
    done = {}  # type: dict[str, str | None]
    for name, (before, now) in changed.items():
        found = os.environ.get(name)
        ours = name == "CUDA_VISIBLE_DEVICES" or name.startswith("GPU_POOL_")
        if not ours and found not in (before, _applied.get(name, before)):
            continue
        _applied[name] = now
        if now is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = now
        if found != now:
            done[name] = now
    return done


def stale(changed: "Mapping[str, object]") -> "list[str]":
    """Return the frameworks that may have read their limits already."""
    imported = (name for name in LIMITS if name in sys.modules)
    return [name for name in imported if any(limit in changed for limit in LIMITS[name])]
