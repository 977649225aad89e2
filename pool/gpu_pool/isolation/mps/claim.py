"""Taking a device for MPS: exclusive where the pool may make it so, and put back as it was found."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gpu_pool.isolation.mps.card import DEFAULT, EXCLUSIVE, compute_mode, refuse_busy, refuse_others
from gpu_pool.isolation.privileged import Privileged
from gpu_pool.isolation.tier import TierFailed
from gpu_pool_client import Device

#: Holds the compute mode that was found, so that it is put back even after a crash.
_FOUND: Final = "compute-mode"


class Claim:
    """The pool's claim to one device: a file in ``folder``. The pool's own MPS has its pipes in ``pipe``."""

    def __init__(self, device: Device, folder: Path, pipe: Path, privileged: Privileged) -> None:
        self._device, self._pipe, self._privileged = device, pipe, privileged
        self._found = folder / _FOUND

    def take(self) -> None:
        """Take the device, or raise ``TierFailed`` because somebody else uses it."""
        refuse_others(self._device, self._pipe)
        mode = compute_mode(self._device)
        if not self._found.exists():  # otherwise it was ours, and processes of our leases may be on it
            refuse_busy(self._device, mode)
            self._found.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._found.write_text(mode)
        if mode != EXCLUSIVE and self._privileged.available():
            self._close_to_others()

    def give_back(self) -> None:
        """Put the compute mode back that was found, and remove the folder."""
        if self._found.exists():
            changed = self._found.read_text() == DEFAULT and compute_mode(self._device) == EXCLUSIVE
            if changed and self._privileged.available():
                self._privileged.call("compute-mode", self._device.uuid, "default")
            self._found.unlink()
        if self._found.parent.exists():
            self._found.parent.rmdir()

    def _close_to_others(self) -> None:
        try:
            self._privileged.call("compute-mode", self._device.uuid, "exclusive")
        except TierFailed:
            return  # in a container even root may not: a probe finds the device open, and nothing is hard
