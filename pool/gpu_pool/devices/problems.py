"""What went wrong with NVML, in words: what was found, and what to do about it."""

from __future__ import annotations

from typing import Final

import pynvml

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
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "The NVIDIA driver that runs and its library have different versions, "
        "as happens when the driver was updated. Restart the machine."
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "This user may not use the NVIDIA driver. "
        "Ask the administrator for read and write access to /dev/nvidiactl and the other /dev/nvidia files."
    ),
}

_CARD: Final = {
    pynvml.NVML_ERROR_GPU_IS_LOST: (
        "it does not answer any more (it has fallen off the bus). "
        "Restart the machine; if it happens again, have the card, its power and its cooling checked."
    ),
    pynvml.NVML_ERROR_RESET_REQUIRED: "it needs a reset. Restart the machine.",
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "this user may not use it. Ask the administrator for read and write access to its /dev/nvidia file."
    ),
    pynvml.NVML_ERROR_NOT_SUPPORTED: "it does not tell its name or its memory, so it cannot be divided.",
}


def library_problem(error: Exception) -> str:
    """Say why NVML could not be used at all."""
    known = _LIBRARY.get(getattr(error, "value", None))
    return known or f"The NVIDIA driver's library failed ({error}). Run nvidia-smi and see what it says."


def card_problem(card: str, error: Exception) -> str:
    """Say why ``card``, such as ``GPU 3``, is left out while others are listed."""
    known = _CARD.get(getattr(error, "value", None))
    return f"{card} is left out: {known or f'{error}. Run nvidia-smi and see what it says.'}"


def no_gpu_problem(driver: str) -> str:
    """Say that the driver works and lists nothing."""
    return (
        f"The NVIDIA driver {driver} works, but it has no GPU. "
        "Check with lspci that the machine has one; "
        "in a container, have it started with access to the GPUs (docker run --gpus all)."
    )


def no_instance_problem(index: int) -> str:
    """Say that a GPU in MIG mode has not been divided into instances."""
    return (
        f"GPU {index} is in MIG mode and has no MIG instance, so nothing can run on it. "
        f"Make some (sudo nvidia-smi mig -i {index} -cgi 1g.5gb -C), "
        f"or end MIG mode (sudo nvidia-smi -i {index} -mig 0)."
    )
