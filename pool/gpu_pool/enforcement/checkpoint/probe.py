"""Whether what processes keep on a device can be moved here: reads the facts, and asks the driver."""

from __future__ import annotations

import importlib.util
import os
import platform
from typing import Final

from gpu_pool.enforcement.checkpoint.driver_worker import DriverWorkers, in_words
from gpu_pool.enforcement.checkpoint.eligibility import CheckpointFacts, Hindrance, hindrances
from gpu_pool.enforcement.checkpoint.host_memory import available_mib, budget_mib
from gpu_pool.settings import PoolSettings
from gpu_pool_client import Device

_REMEDY: Final = "Where the driver does not permit it: sudo nvidia-smi -pm 1. Then ask again: gpu-pool doctor"


class CheckpointProbe:
    """Finds out what keeps processes on a device from being moved to host memory."""

    def __init__(self, settings: PoolSettings, workers: DriverWorkers) -> None:
        self._settings = settings
        self._workers = workers
        #: Why the driver would do it to no process, empty if it would; None until it was asked.
        self._refusal: str | None = None

    def hindrances(self, device: Device, tier: str) -> list[Hindrance]:
        """Return all that stands in the way on a device that this tier enforces, what is decisive first.

        The driver is asked where nothing else is decisive, once: that takes a second.
        """
        found = hindrances(
            self._facts(device, tier),
            insisted=self._settings.checkpoint == "on",
            under_mps=self._settings.checkpoint_under_mps,
        )
        if not any(each.decisive for each in found) and (refusal := self._refused(device)):
            found.insert(0, Hindrance(refusal, _REMEDY))
        return found

    def _facts(self, device: Device, tier: str) -> CheckpointFacts:
        budget = budget_mib(self._settings.checkpoint_host_mib)
        return CheckpointFacts(
            device=device,
            tier=tier,
            machine=platform.machine(),
            has_bindings=_has_bindings(),
            host_mib=min(budget, available_mib([os.getpid()])),
        )

    def _refused(self, device: Device) -> str:
        """Return why the driver would do it to no process; empty if it would."""
        if self._refusal is None:
            worker = self._workers.of(device.uuid)
            self._refusal = in_words(worker.ask("probe", limit=self._settings.tuning.driver_within).problem)
        return self._refusal


def _has_bindings() -> bool:
    # Other packages, too, have modules under that name.
    return (
        importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None
    )
