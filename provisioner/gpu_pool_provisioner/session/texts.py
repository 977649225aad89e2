"""What a kernel's user reads of its slice. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpu_pool_client import EndReason, GpuPoolError, LeaseGone
from gpu_pool_client._requests import memory_in_words

#: What a cell's error is called when it did not run for want of a slice.
NOT_GRANTED: Final = "GpuSliceNotGranted"
#: What is said while a pool has not answered and nobody knows why.
NO_ANSWER: Final = "The GPU pool does not answer at the moment."
_THEN: Final = "The cell then runs by itself."
_WAY_OUT: Final = "Interrupt the kernel to give up."


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


def kept_meanwhile(size: str, error: GpuPoolError) -> str:
    """Say what the pool answers a parked kernel instead of giving it its slice, and that nothing is lost."""
    return waiting(size, f"{error} The kernel goes on, with its variables, and its pool is asked again.")


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


def ended_by_itself(how: str) -> str:
    """Say of a kernel that was started again that the one before has ended; ``how``, in a sentence."""
    return f"The kernel ended by itself, and its variables are gone. {how}"


def gone(reason: str) -> str:
    """Say that a kernel has been ended, and what to do."""
    return f"{reason} Its variables are gone. Run the cell again to start a new kernel."


#: What is said of a kernel whose user gave its slice back.
GIVEN_BACK: Final = "You gave this kernel's GPU slice back; its variables are kept."
PARKED: Final = "This kernel was idle, and its GPU slice was lent to others; its variables are kept."


ASLEEP: Final = (
    "This kernel was idle and sleeps on disk, with all its variables. The next cell wakes it and takes a "
    "slice again."
)


def left(since: str, has: str) -> str:
    """Say which kernel another server has left; ``since`` when it fell asleep, and what it ``has``."""
    return f"from {since} ({has})" if has else f"from {since}"


def of_before(which: str) -> str:
    """Say that a kernel of before is there, and what to do; ``which`` is as :func:`left` says."""
    return (
        f"Your kernel {which} is here: the next cell goes on with it. Restart the kernel to start afresh; "
        "what it had is gone then."
    )


def is_gone(which: str, why: str) -> str:
    """Say that a kernel of before is no more; ``which`` is as :func:`left` says, ``why`` a sentence's end."""
    return f"Your kernel {which} is gone: {why}"


def gave_way(notebook: str) -> str:
    """Say why a kernel on disk was removed for a later one."""
    return f"there was no room on disk for it and for that of {notebook}, which was used after it."


#: Why a kernel on disk was removed where several servers have left one for a notebook.
A_NEWER_IS_HERE: Final = "this notebook has a newer one, which was left on disk after it."


#: Why a kernel is gone that was left on disk, and that nobody has woken or removed in a notebook.
NOT_ON_DISK: Final = "it is no longer on disk: it was removed, or nobody had asked for it for too long."


def not_left(why: str) -> str:
    """Say why a kernel is not on disk for the next server; ``why`` is in sentences."""
    return f"it ended with its server. {why}"


def goes_on(which: str) -> str:
    """Say what a cell waits for whose kernel is one of before; ``which`` is as :func:`left` says."""
    return f"Your kernel {which} comes back from disk. {_WAY_OUT}"


def went_on(which: str) -> str:
    """Say that a kernel of before goes on; ``which`` is as :func:`left` says."""
    return f"This is your kernel {which}. To start afresh, restart it."


def waking(size: str) -> str:
    """Say what a cell waits for whose kernel sleeps."""
    asks = f"asks for {slice_of(size)} again"
    return f"This kernel comes back from disk, with its variables, and {asks}. {_WAY_OUT}"


def wakes(size: str) -> str:
    """Say that a kernel that sleeps is woken."""
    return f"This kernel is woken, and asks for {slice_of(size)} again."


#: Why a kernel stays awake that has used CUDA.
USES_GPU: Final = "it has used the GPU, and what it keeps there cannot go to disk."


#: Why a kernel does not go to disk yet, as who administers its machine reads it.
AT_WORK: Final = "it is at work."
KEPT_IN_USE: Final = "its user says that it is in use (%gpu keep)."
#: Said below a cell of a kernel on disk whose machine is being emptied.
MACHINE_IS_EMPTIED: Final = (
    "An administrator empties this kernel's machine, as before it is started anew. The kernel is on disk, "
    "with all its variables: run the cell again once the machine is in use again."
)


#: Said below a cell that waits for a slice when its kernel's server ends.
SERVER_ENDS: Final = (
    "This kernel's Jupyter server ends. The kernel goes to disk, if it can: run the cell again with the next "
    "server."
)


#: Said in the log where kernels are to sleep on disk, and do not; and why not.
STAY_AWAKE: Final = "Kernels do not sleep on disk (hibernate_after): %s"
CANNOT_SLEEP: Final = "it was started while its server could put none to disk; its log says why."
AWAKE_IN_POD: Final = "those in pods stay awake."
AWAKE_WITH_PROXY: Final = "those with a proxy of their own (independent, --wrap) stay awake."


def starts_awake(why: str) -> str:
    """Say why a kernel was started as one that does not sleep; ``why`` is a sentence."""
    return f"This kernel was to sleep on disk once it is idle, but stays awake until it is restarted: {why}"


def stays_awake(why: str) -> str:
    """Say why a kernel that was to go to disk did not; ``why`` is a sentence."""
    return f"This kernel was idle and was to sleep on disk, but stayed awake: {why}"


def ended_before_sleep(why: str) -> str:
    """Say that a kernel ended while it was put to sleep; ``why`` it could not sleep, in a sentence."""
    return f"The kernel ended while it was being written to disk: {why}"


def not_woken(why: str) -> str:
    """Say why a kernel sleeps on; ``why`` is a sentence."""
    return (
        f"This kernel sleeps on disk and could not be woken: {why} Nothing of it is lost: run the cell again "
        "once that is as it was. Restart the kernel to start afresh; its variables are gone then."
    )


#: Said below a cell whose kernel's image was removed while it slept.
IMAGE_GONE: Final = (
    "This kernel slept on disk, and what was there of it was removed: its variables are gone. Restart the "
    "kernel to start afresh."
)


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


def slice_lost(size: str, reason: EndReason | None) -> LeaseGone:
    """Say why a kernel that had a slice cannot be restarted."""
    why = f" ({reason.value})" if reason else ""
    return LeaseGone(
        f"This kernel no longer has its GPU slice of {size}: it went back to the pool{why}.",
        "Shut the kernel down and start it again to ask for a new slice.",
        reason=reason.value if reason else None,
    )


def wait_given_up(size: str) -> LeaseGone:
    """Say what a start is told that nobody waits for any longer."""
    return LeaseGone(f"The wait for {slice_of(size)} was given up.", "Start it again to wait again.")


def other_size(wanted: str, has: str) -> str:
    """Say that a cluster has no slice of exactly the size that was asked for."""
    return (
        f"You asked for {wanted}. This cluster has no slice of exactly that size: you have {has}, "
        "and that counts."
    )


def memory_in_use(used_mib: int | None, allowed_mib: int) -> str:
    """Say how much memory a kernel in a pod uses, as its node sees it; None where it does not say."""
    if used_mib is None:
        return (
            "How much GPU memory this kernel uses is not known: no agent of the pool's reports it from the "
            "kernel's node, or the driver there does not tell it."
        )
    of = f" of the {memory_in_words(allowed_mib)} that it may use" if allowed_mib else ""
    return f"This kernel uses {memory_in_words(used_mib)}{of}, as its node sees it."


def too_long(size: str, limit: str) -> str:
    """Say that nobody waits for a kernel any longer; ``limit`` is how long that was, empty for not at all."""
    what = slice_of(size)
    waited = f"waited for {what} for {limit}, as long as it may" if limit else f"needs {what}"
    return f"This kernel {waited}, and was not started."


_GIVES_BACK: Final = "This kernel gives its GPU slice back as soon as it is idle"
GOES_PARKED: Final = f"{_GIVES_BACK}; its variables are kept."
GOES_ENDED: Final = (
    f"{_GIVES_BACK}, and ends then, with its variables: what it may keep on the GPU cannot be moved away."
)
STAYS: Final = (
    "This kernel keeps its GPU slice: what it keeps on the GPU cannot be moved away. Restart it or shut it "
    "down to give the slice back; its variables are gone then."
)
NO_IDLE_LIMIT: Final = "Nothing needs to be done: this kernel keeps its GPU slice however long it is idle."
POISONED: Final = (
    "While this kernel's GPU slice was lent to others, something in it looked for a GPU and found none. "
    "If CUDA now says that there is no device, restart the kernel."
)
