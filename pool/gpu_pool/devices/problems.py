"""NVML, opened and asked again and again; what is wrong with driver or GPU, in words, with a remedy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

from gpu_pool.nvml import pynvml

_UPDATED: Final = (
    "The NVIDIA driver that runs and its library have different versions, "
    "as happens when the driver was updated. What uses a GPU already goes on, and nothing new can. "
    "Restart the machine."
)

_LIBRARY: Final = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "No NVIDIA driver was found here: its library libnvidia-ml.so.1 is missing. "
        "If this machine has an NVIDIA GPU, install its driver; "
        "in a container, have it started with access to the GPUs (docker run --gpus all)."
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "The NVIDIA driver is installed, but not loaded. "
        "Load it (sudo modprobe nvidia) or restart the machine; sudo dmesg says why it did not load."
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: f"{_UPDATED} A container is to be started anew after that.",
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "This user may not use the NVIDIA driver. "
        "Ask the administrator for read and write access to /dev/nvidiactl and the other /dev/nvidia files."
    ),
    pynvml.NVML_ERROR_UNKNOWN: (
        "The NVIDIA driver does not let anything new use its GPUs (Unknown Error). "
        "A container has lost them, as happens after systemctl daemon-reload: start the container anew. "
        "Outside of containers, sudo dmesg says more; restart the machine."
    ),
    pynvml.NVML_ERROR_TIMEOUT: (
        "The NVIDIA driver does not answer. Run nvidia-smi and see what it says; restart the machine."
    ),
}
#: With these the driver is of no use to anybody here. With others it is not there, or not for this process.
_BROKEN: Final = frozenset(
    (
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_TIMEOUT,
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_OPERATING_SYSTEM,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_UNKNOWN,
    )
)

_CARD: Final = {
    pynvml.NVML_ERROR_GPU_IS_LOST: (
        "it does not answer any more (it has fallen off the bus). "
        "Restart the machine; if it happens again, have the card, its power and its cooling checked."
    ),
    pynvml.NVML_ERROR_RESET_REQUIRED: "it needs a reset. Restart the machine.",
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "this user may not use it. Ask the administrator for read and write access to its /dev/nvidia file."
    ),
    pynvml.NVML_ERROR_NOT_SUPPORTED: "it does not report its name or its memory, so it cannot be divided.",
    pynvml.NVML_ERROR_TIMEOUT: (
        "the driver's questions to it are not answered. Run nvidia-smi and see what it says; restart the "
        "machine, and have the card checked if it happens again."
    ),
    pynvml.NVML_ERROR_NOT_FOUND: (
        "it is not there any more. A MIG instance may have been removed; a GPU may have been taken from this "
        "container: start it anew."
    ),
}
#: Answers that say nothing of whether a device works.
HARMLESS: Final = frozenset(
    (
        pynvml.NVML_SUCCESS,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_CORRUPTED_INFOROM,
    )
)


def code_of(error: Exception) -> int | None:
    """Return NVML's number of an error."""
    code = getattr(error, "value", None)
    return code if isinstance(code, int) else None


def is_broken(error: Exception) -> bool:
    """Whether the driver fails for everybody here, so that nothing new can use a GPU."""
    return code_of(error) in _BROKEN


def library_problem(error: Exception) -> str:
    """Say why NVML could not be used at all."""
    known = _LIBRARY.get(code_of(error) or 0)
    return known or f"The NVIDIA driver's library failed ({error}). Run nvidia-smi and see what it says."


def card_problem(card: str, error: Exception) -> str:
    """Say why ``card``, such as ``GPU 3``, is left out while others are listed."""
    return f"{card} is left out: {_of_card(error)}"


def fault(card: str, error: Exception) -> str:
    """Say why nothing more is granted on ``card``."""
    return f"Nothing new is granted on {card}: {_of_card(error)}"


def library_fault(code: int | None) -> str:
    """Say why nothing new can use any GPU, by how the library's initialisation ended; None: it did not."""
    return library_problem(pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT if code is None else code))


def state_of(card: str, uuid: str, code: int | None, mode: int) -> str:
    """Say why nothing new can use ``card``, by how it answered, and its compute mode; empty if it can.

    None for one that did not answer.
    """
    code = pynvml.NVML_ERROR_TIMEOUT if code is None else code
    if code not in HARMLESS:
        return fault(card, pynvml.NVMLError(code))
    if mode == pynvml.NVML_COMPUTEMODE_PROHIBITED:
        return (
            f"Nothing new is granted on {card}: its compute mode is Prohibited, so nothing may use it. "
            f"Allow it: sudo nvidia-smi -i {uuid} -c DEFAULT"
        )
    return ""


def _of_card(error: Exception) -> str:
    return _CARD.get(code_of(error) or 0) or f"{error}. Run nvidia-smi and see what it says."


def prohibited(card: str, uuid: str) -> str:
    """Say that a GPU's compute mode admits nobody."""
    return (
        f"{card} is left out: its compute mode is Prohibited, so nothing may use it. "
        f"Allow it: sudo nvidia-smi -i {uuid} -c DEFAULT"
    )


def silent(card: str) -> str:
    """Say that a GPU is left out since it does not answer."""
    return card_problem(card, pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT))


def nominal_memory(card: str, memory_mib: int) -> str:
    """Say what the memory of a GPU is that has none of its own."""
    return (
        f"{card} has no memory of its own: it shares the machine's {memory_mib} MiB with all programs, so "
        "its slices of memory are nominal, and what a process uses of it is judged by its resident memory. "
        "c.PoolSettings.unified_memory_mib sets how much of it the pool divides."
    )


def no_gpu_problem(driver: str) -> str:
    """Say that the driver works and lists nothing."""
    return (
        f"The NVIDIA driver {driver} works, but it has no GPU. "
        "Check with lspci that the machine has one; "
        "in a container, have it started with access to the GPUs (docker run --gpus all)."
    )


def not_given(variable: str) -> str:
    """Say that a container was started without GPUs."""
    return (
        f"NVIDIA_VISIBLE_DEVICES is {variable}: this container was given no GPU. Have it started with access "
        "to the GPUs (docker run --gpus all)."
    )


def no_instance_problem(index: int) -> str:
    """Say that a GPU in MIG mode has not been divided into instances."""
    return (
        f"GPU {index} is in MIG mode and has no MIG instance, so nothing can run on it. "
        f"Make some (sudo nvidia-smi mig -i {index} -cgi 1g.5gb -C), "
        f"or end MIG mode (sudo nvidia-smi -i {index} -mig 0)."
    )


#: What NVML fails with; a function missing from an older driver's library is reported by either.
FAILURES: Final = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)


class NvmlSession:
    """NVML, and the handles of devices. Used by one thread at a time.

    After a failure it is opened anew, ``again_after`` seconds later at the
    earliest: that is slow where a card has fallen off the bus.
    """

    def __init__(self, again_after: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._again_after = again_after
        self._clock = clock
        self._handles: dict[str, Any] = {}
        #: When NVML was last opened; None while it is not.
        self._opened_at: float | None = None
        #: Why it could not be opened, and when that was.
        self._refused: tuple[str, float] | None = None
        self._failed = False

    def open(self) -> str:
        """Have NVML open; return why that cannot be, or nothing."""
        now = self._clock()
        if self._opened_at is not None and self._failed and now - self._opened_at >= self._again_after:
            self.close()
        if self._opened_at is not None:
            return ""
        if self._refused and now - self._refused[1] < self._again_after:
            return self._refused[0]
        try:
            pynvml.nvmlInit()
        except FAILURES as error:
            self._refused = library_problem(error), now
            return self._refused[0]
        self._opened_at, self._refused = now, None
        return ""

    def handle(self, uuid: str) -> Any:
        """Return the handle of a device. Raises one of ``FAILURES``."""
        if uuid not in self._handles:
            self._handles[uuid] = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return self._handles[uuid]

    def failed(self, uuid: str) -> None:
        """Take note that a device did not answer."""
        self._failed = True
        self._handles.pop(uuid, None)

    def close(self) -> None:
        """Let go of NVML; it can be opened again."""
        if self._opened_at is not None:
            with contextlib.suppress(*FAILURES):
                pynvml.nvmlShutdown()
        self._opened_at, self._failed = None, False
        self._handles.clear()
