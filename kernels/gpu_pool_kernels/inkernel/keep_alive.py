"""``%gpu keep 2h``: say that this kernel uses its slice although nothing seems to run."""

import os
import re
import sys
import time

#: The message on the kernel's output channel that the relay in front of the kernel takes, and answers.
MESSAGE = "gpu_pool_keep"
ACCEPTED = "Write how long, such as %gpu keep 30min, %gpu keep 2h or %gpu keep 1h30min."
SECONDS = {"d": 86400, "h": 3600, "min": 60, "m": 60, "s": 1}
PART = re.compile(r"([0-9]{1,7})(d|h|min|m|s)")


def keep(text: str) -> None:
    """Ask for the slice to be kept for so long; what comes of it is printed below the cell."""
    seconds = duration(text)
    if not seconds:
        print(f"{text!r} is not a duration. {ACCEPTED}", file=sys.stderr)
    elif not os.environ.get("GPU_POOL_IDLE_LIMIT"):
        print(
            "Nothing needs to be done: this kernel keeps its slice however long it is idle" + until_the_end()
        )
    elif not send({"seconds": seconds}):
        print("This kernel cannot ask for that: it is not run by ipykernel.", file=sys.stderr)


def until_the_end() -> str:
    """End a sentence about how long the slice is kept, with the end of its lease if there is one."""
    from . import slice_info

    ends_at = slice_info.number("GPU_POOL_ENDS_AT")
    if ends_at is None:
        return "."
    left = max(0, ends_at - int(time.time()))
    return (
        f", but only until its lease ends, in {slice_info.duration(left)}: its course allows no longer lease."
    )


def duration(text: str) -> int:
    """Return the seconds that ``text`` means, 0 if it means none."""
    parts = PART.findall(text)
    if "".join(number + unit for number, unit in parts) != text:
        return 0
    return sum(int(number) * SECONDS[unit] for number, unit in parts)


def send(content: "dict[str, object]", message: str = MESSAGE) -> bool:
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
