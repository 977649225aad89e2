"""What ``%gpu`` shows, and the line under the traceback when a framework ran out of GPU memory.

It shows the facts in the kernel's environment, and the memory in use now. Frameworks are recognised by the
names of their errors; none is imported.
"""

import contextlib
import html
import json
import os
import subprocess
import time
from pathlib import Path

from . import caps

MISSING = (
    'This kernel has no GPU slice. Start a kernel that has one, such as "Python 3 (GPU 2%)", '
    'from the launcher or the Kernel menu; "gpu-pool kernels install 2%" adds it to the menu.'
)
#: What the first pid namespace of a machine is called (the kernel's PROC_PID_INIT_INO).
FIRST_NAMESPACE = "pid:[4026531836]"
#: Longest time to wait for nvidia-smi, in seconds.
TIMEOUT = 5.0
#: Said of the most that a slice with a limit may ever use.
WHILE_FREE = "while nobody else needs that"


class SliceInfo:
    """One kernel's slice of a GPU, as it was when asked.

    ``memory_mib`` is granted on each device, ``used_mib`` is in use on all of
    them (None if that could not be measured: ``used_words`` says why), and
    ``held_seconds`` the time since the slice was granted.
    """

    def __init__(self) -> None:
        facts = os.environ
        self.size = facts["GPU_POOL_SLICE"]
        self.devices = facts.get("GPU_POOL_DEVICE_NAMES", "unknown").split(",")
        self.simulated = facts.get("GPU_POOL_SIMULATED") == "1"
        self.enforced = facts.get("GPU_POOL_ENFORCED", "unknown")
        self.memory_mib = number("GPU_POOL_MEMORY_MIB")
        #: What may be used now, with the burst, and the most that ever may; None where nothing is on top.
        self.allowed_mib = number("GPU_POOL_ALLOWED_MIB")
        self.limit_mib = number("GPU_POOL_LIMIT_MIB")
        since = number("GPU_POOL_HELD_SINCE")
        self.held_seconds = None if since is None else max(0, int(time.time()) - since)
        self.used_mib, self.used_words = (
            (None, "use not measured: simulated device") if self.simulated else memory_used()
        )

    def rows(self) -> "list[tuple[str, str]]":
        """Return what is shown, as pairs of a label and a text."""
        return [
            ("Slice", size_name(self.size)),
            ("Device", ", ".join(self.devices)),
            ("Memory", self.memory()),
            *(() if self.limit_mib is None else (("At most", f"{in_words(self.limit_mib)} {WHILE_FREE}"),)),
            ("Enforced", self.enforced),
            *(("No limit", f"{name}: {why}") for name, why in caps.failures().items()),
            ("Held for", "unknown" if self.held_seconds is None else duration(self.held_seconds)),
            *terms(),
        ]

    def memory(self) -> str:
        """Say how much memory is in use of how much granted."""
        granted = "unknown" if self.memory_mib is None else in_words(self.memory_mib)
        if len(self.devices) > 1:
            granted = f"{len(self.devices)} x {granted}"
        has_more = self.allowed_mib is not None and self.allowed_mib > (self.memory_mib or 0)
        on_top = f", now up to {in_words(self.allowed_mib or 0)}" if has_more else ""
        if self.used_mib is None:
            return f"{granted} granted{on_top}; {self.used_words}"
        return f"{self.used_words} of {granted} granted{on_top}"

    def __repr__(self) -> str:
        return "\n".join(f"{label:<9} {text}" for label, text in self.rows())

    def _repr_html_(self) -> str:
        """Return a table without colours of its own, so that it suits every theme."""
        left = 'style="text-align: left"'
        rows = (
            f"<tr><th {left}>{html.escape(label)}</th><td {left}>{html.escape(text)}</td></tr>"
            for label, text in self.rows()
        )
        return "<table><tbody>{}</tbody></table>".format("".join(rows))


def current() -> "SliceInfo | None":
    """Return the slice of this kernel, or say how to get one and return None."""
    if not os.environ.get("GPU_POOL_SLICE"):
        print(MISSING)
        return None
    return SliceInfo()


def terms() -> "list[tuple[str, str]]":
    """Say until when the slice is held, and what becomes of it when the kernel is idle."""
    found = []
    ends_at, idle = number("GPU_POOL_ENDS_AT"), when_idle()
    if ends_at is not None:
        left = max(0, ends_at - int(time.time()))
        found.append(("Ends in", f"{duration(left)}: {why_it_ends()}"))
    if idle:
        found.append(("When idle", idle))
    return found


def when_idle() -> str:
    """Say what becomes of the slice while the kernel is idle; nothing where it stays."""
    limit, yield_after = number("GPU_POOL_IDLE_LIMIT"), number("GPU_POOL_YIELD_AFTER")
    ended = "" if limit is None else f"ended after {duration(limit)}, with a warning before"
    if ended and os.environ.get("GPU_POOL_IDLE_ENDS"):
        return ended
    goes = []
    if yield_after is not None and (limit is None or yield_after < limit):
        goes.append(
            f"given after {duration(yield_after)} to somebody who waits, or once they have waited as long"
        )
    if limit is not None:
        goes.append(f"lent to others after {duration(limit)}")
    if not goes:
        return ""
    stays = "it has used CUDA and what it keeps there cannot be moved away"
    if ended and os.environ.get("GPU_POOL_IDLE_ENDS_CUDA"):
        return f"{', '.join(goes)}; if {stays}, {ended}"
    return f"{', '.join(goes)}, unless {stays}"


def why_it_ends() -> str:
    """Say why the lease ends when it does."""
    asked = os.environ.get("GPU_POOL_ENDS_AS_ASKED")
    return "nothing longer was asked for" if asked else "its course allows no longer lease"


def number(name: str) -> "int | None":
    """Read a whole number from the environment; None if there is none."""
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None


def size_name(size: str) -> str:
    """Say a size: ``2%``, ``2%, up to 10%``, and of whole GPUs, asked for by a bare number, ``whole GPU``."""
    guarantee, _, limit = size.partition("..")
    if limit:
        return f"{guarantee}, up to {limit}"
    if not size.isdigit():
        return size
    return "whole GPU" if size == "1" else f"{size} whole GPUs"


def in_words(mib: int) -> str:
    """Write an amount of memory: ``655 MiB``, ``16 GiB``, ``1.6 GiB``."""
    if mib < 1024:
        return f"{mib} MiB"
    return f"{mib / 1024.0:.1f} GiB".replace(".0 ", " ")


def duration(seconds: int) -> str:
    """Write a time: ``12 s``, ``34 min``, ``2 h 05 min``."""
    if seconds < 60:
        return f"{seconds} s"
    minutes = seconds // 60
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def memory_used() -> "tuple[int | None, str]":
    """Return the MiB that this process and its descendants use on their devices, and the words for it.

    They are None, and the reason, where that cannot be told.
    """
    if os.environ.get("GPU_POOL_POD"):
        return None, "use is measured on this kernel's node"
    if not sees_all_processes():
        return None, "use not measured: the driver counts processes outside this container"
    try:
        listing = nvidia_smi()
    except (OSError, subprocess.SubprocessError):
        return None, "use not measured: nvidia-smi does not answer"
    ours = family(os.getpid(), parents())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    # The driver lists the processes of a MIG instance under the GPU's own uuid.
    by_uuid = all(name.startswith("GPU-") for name in visible)
    used = [mib for uuid, pid, mib in listing if pid in ours and (uuid in visible or not by_uuid)]
    if not all(mib.isdigit() for mib in used):  # [N/A], or [Insufficient Permissions]
        return None, "use not measured: the driver does not report it"
    total = sum(map(int, used))
    return total, in_words(total)


def sees_all_processes() -> bool:
    """Whether the driver's process ids, which are those of the machine, mean the same here."""
    try:
        return os.readlink("/proc/self/ns/pid") == FIRST_NAMESPACE
    except OSError:
        return False


def nvidia_smi() -> "list[tuple[str, int, str]]":
    """Return (device uuid, pid, MiB as written) for each process that the driver lists."""
    done = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=TIMEOUT,
        check=True,
    )
    # A newline is all that ends a line; Python knows other characters that would.
    rows = (line.split(",") for line in done.stdout.decode("utf-8", "replace").split("\n"))
    return [
        (row[0].strip(), int(row[1]), row[2].strip())
        for row in rows
        if len(row) == 3 and row[1].strip().isdigit()
    ]


def parents() -> "dict[int, int]":
    """Return the parent of each process that can be seen."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            # The command's name, in parentheses, may itself hold parentheses.
            found[int(path.parent.name)] = int(path.read_bytes().rpartition(b")")[2].split()[1])
    return found


def family(pid: int, parents: "dict[int, int]") -> "set[int]":
    """Return ``pid`` and all its descendants."""
    found = {pid}
    grown = True
    while grown:
        children = {child for child, parent in parents.items() if parent in found} - found
        found |= children
        grown = bool(children)
    return found


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
    granted = number("GPU_POOL_MEMORY_MIB")
    amount = "" if granted is None else f", with {in_words(granted)} of memory"
    larger = next_larger(granted)
    advice = f'The next larger kernel is "{larger}".' if larger else "Ask for a larger slice."
    return f"GPU memory ran out: this kernel's slice is {size}{amount}. {burst_words()}{advice}"


def burst_words() -> str:
    """Say what may be used now where a slice has a limit, and what to do if that is less; else nothing."""
    allowed, limit = number("GPU_POOL_ALLOWED_MIB"), number("GPU_POOL_LIMIT_MIB")
    if allowed is None or limit is None:
        return ""
    if allowed >= limit:
        return f"It may use up to {in_words(limit)} now, and never more. "
    return (
        f"It may use up to {in_words(limit)} {WHILE_FREE}, and {in_words(allowed)} now. "
        "Delete what you do not need (in PyTorch, then torch.cuda.empty_cache()), or run the cell later. "
    )


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
    total = number("GPU_POOL_DEVICE_MEMORY_MIB")
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
