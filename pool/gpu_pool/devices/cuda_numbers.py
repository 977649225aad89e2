"""Asks CUDA itself which GPUs a process with some environment would see, where only CUDA knows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Final

#: Prints the uuid of each device that CUDA shows, as 32 hexadecimal digits, or how it fails. A process of
#: its own, since CUDA reads its environment once, and must not be initialised in a Jupyter server.
_PROGRAM: Final = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        sys.exit(f"{name} failed with error {code}")
call("cuInit", 0)
count = ctypes.c_int()
call("cuDeviceGetCount", ctypes.byref(count))
for place in range(count.value):
    uuid = (ctypes.c_ubyte * 16)()
    name = "cuDeviceGetUuid_v2" if hasattr(cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    call(name, uuid, place)
    print(bytes(uuid).hex())
"""
#: Seconds: without persistence mode the driver takes long to set up many GPUs.
_WITHIN: Final = 120.0
_NO_DEVICE: Final = "cuInit failed with error 100"


class CudaSilent(Exception):
    """CUDA did not say which GPUs it shows; the argument says why."""


def ask(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that CUDA shows with this environment, in its order, by the digits of their uuids.

    Raises ``CudaSilent``.
    """
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM]
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=_WITHIN, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CudaSilent(f"{type(error).__name__}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        if last == _NO_DEVICE:
            return ()
        raise CudaSilent(last[:200])
    return tuple(done.stdout.split())


def digits(uuid: str) -> str:
    """Return the digits of a uuid as NVML writes it: ``GPU-8a56a4bc-...``."""
    return uuid.partition("-")[2].replace("-", "").lower()
