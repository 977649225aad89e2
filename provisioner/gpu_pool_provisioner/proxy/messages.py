"""What a waiting kernel says: texts and message contents. Pure."""

from __future__ import annotations

import platform
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from gpu_pool_client import GpuPoolError
from gpu_pool_provisioner.wait_notices import MARK

#: What a cell's error is called when it did not run for want of a slice.
NOT_GRANTED: Final = "GpuSliceNotGranted"

#: What is said while a pool has not answered and nobody knows why.
NO_ANSWER: Final = "The GPU pool does not answer at the moment."
#: Characters in a line of a cell's output that fit into a small window.
_COLUMNS: Final = 76
_THEN: Final = "The cell then runs by itself."
_WAY_OUT: Final = "Interrupt the kernel to give up."

#: What is answered at once while nothing runs, by type of request. Whatever is
#: not here is held for the kernel.
ANSWERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "comm_info_request": {"status": "ok", "comms": {}},
    # JupyterLab shows a kernel's status as unknown until this one is answered.
    "history_request": {"status": "ok", "history": []},
    "complete_request": {"status": "ok", "matches": [], "cursor_start": 0, "cursor_end": 0, "metadata": {}},
    "inspect_request": {"status": "ok", "found": False, "data": {}, "metadata": {}},
    "is_complete_request": {"status": "unknown"},
    # jupyter-resource-usage shows a reason in place of figures.
    "usage_request": {"status": "ok", "reason": "the kernel waits for its GPU slice"},
}

#: What frontends need to show and save code of a language before its kernel has
#: introduced itself: fields of kernel_info_reply's language_info.
_LANGUAGES: Final[Mapping[str, Mapping[str, Any]]] = {
    "python": {
        "mimetype": "text/x-python",
        "file_extension": ".py",
        "pygments_lexer": "ipython3",
        "codemirror_mode": {"name": "ipython", "version": 3},
        "nbconvert_exporter": "python",
    },
    "r": {"mimetype": "text/x-r-source", "file_extension": ".r", "pygments_lexer": "r"},
    "julia": {"mimetype": "application/julia", "file_extension": ".jl"},
}


def introduction(language: str, argv: Sequence[str], *, debugger: bool) -> dict[str, Any]:
    """Return the content of the kernel_info_reply of a kernel that has never run here.

    ``language`` and ``argv`` are the kernelspec's; ``debugger`` is whether it
    says in its metadata that the kernel has one.
    """
    known = _LANGUAGES.get(language.lower(), {"mimetype": "text/plain", "file_extension": ".txt"})
    same_python = language == "python" and argv[:1] == [sys.executable]
    return {
        "status": "ok",
        # The last one before iopub_welcome: no frontend may depend on what not every kernel will send.
        "protocol_version": "5.3",
        "implementation": "gpu-pool",
        "implementation_version": "0",
        "language_info": {
            "name": language,
            "version": platform.python_version() if same_python else "",
            **known,
        },
        "banner": f"This {language} kernel waits for its slice of a GPU.",
        "help_links": [],
        "debugger": debugger,
    }


def waiting(size: str, outlook: str) -> str:
    """Say what a cell waits for, what it needs, and the way out."""
    return f"Waiting for {slice_of(size)}. {outlook} {_THEN} {_WAY_OUT}"


def idle_others(kernels: Sequence[tuple[str, str]]) -> str:
    """Name kernels of one's own that are idle, each with the size that it holds; empty for none."""
    if not kernels:
        return ""
    named = ", and ".join(f"{name} holds {slice_of(size)}" for name, size in kernels)
    what = "that" if len(kernels) == 1 else "these"
    return f"Of your own idle kernels, {named}: give {what} back in the GPU slice panel, or shut {what} down."


def in_log(text: str) -> str:
    """Return what a waiting cell shows as a program's log has it, where there is no cell."""
    return text.removesuffix(f"{_THEN} {_WAY_OUT}").rstrip()


def dated(text: str, at: float) -> str:
    """Add when that was so: whatever keeps a cell's output, by accident or not, is then still true."""
    return f"{text} (As of {time.strftime('%H:%M %Z on %-d %B %Y', time.localtime(at))}.)"


def starting(size: str, progress: str = "", *, waited: bool = True) -> str:
    """Say that the slice is there, and to whom ``waited`` for it that the wait is over.

    ``progress`` says in sentences what is going on.
    """
    if waited:
        return f"The wait for {slice_of(size)} is over. {progress or 'The kernel is starting.'}"
    return f"The kernel is starting on {slice_of(size)}. {progress}".rstrip()


def unreachable(size: str, error: GpuPoolError) -> str:
    """Say that nobody knows how long it takes."""
    return waiting(size, f"{error.message} Still trying.")


def away(size: str, why: str, waited: str) -> str:
    """Say that the pool does not answer, how long that may last, and the way out."""
    return waiting(size, f"{why} Your kernel starts once the pool answers (waiting {waited}).")


def gave_up(size: str) -> str:
    """Say what an interrupt did."""
    return f"You stopped waiting for {slice_of(size)}; this cell did not run. Run it again to wait again."


def left_queue(size: str) -> str:
    """Say the same where there may be no cell."""
    return f"You stopped waiting for {slice_of(size)}. Run a cell to wait again."


def interrupted(size: str) -> str:
    """Say what an interrupt did when the slice had come already."""
    return f"Interrupted while the kernel with {slice_of(size)} was starting; this cell did not run."


def gone(reason: str) -> str:
    """Say that a kernel has been ended, and what to do."""
    return f"{reason} Its variables are gone. Run the cell again to start a new kernel."


#: What is said of a kernel whose user gave its slice back.
GIVEN_BACK: Final = "You gave this kernel's GPU slice back; its variables are kept."
PARKED: Final = "This kernel was idle, and its GPU slice was lent to others; its variables are kept."


def asks_again(size: str) -> str:
    """Say that a parked kernel's slice was asked for."""
    return f"This kernel asks for {slice_of(size)} again, and has it as soon as it is free."


def not_run(reason: str) -> str:
    """Say that a cell did not run, and why."""
    return f"This cell did not run. {reason}"


def slice_of(size: str) -> str:
    """Say a size as a sentence has it; a request for whole GPUs is written as a number."""
    if not size.isdigit():
        return f"a GPU slice of {size}"
    return "a whole GPU" if size == "1" else f"{size} whole GPUs"


def display(text: str, display_id: str) -> dict[str, Any]:
    """Return the content of display_data and of update_display_data, which a notebook's file leaves out."""
    # Pages break long lines of plain text wherever they end, in the middle of words; of HTML they do not.
    data = {
        "text/plain": textwrap.fill(text, _COLUMNS),
        "text/html": f"<div>{escape(text, quote=False)}</div>",
    }
    return {"data": data, "metadata": MARK, "transient": {"display_id": display_id}}


def error(name: str, text: str) -> dict[str, Any]:
    """Return the content of iopub's error message."""
    # Pages break lines anywhere, also within words.
    return {"ename": name, "evalue": text, "traceback": textwrap.wrap(f"{name}: {text}", _COLUMNS)}


def error_reply(name: str, text: str) -> dict[str, Any]:
    """Return the content of an execute_reply, or of any other reply, to what could not be done."""
    return {"status": "error", "execution_count": 0, **error(name, text)}
