"""Pools that keep themselves in order only when a test asks them to."""

from __future__ import annotations

from typing import Final

from gpu_pool.tuning import Tuning

#: For the setting ``tuning`` of a pool: passes are made only where a test makes one.
NO_PASSES: Final = Tuning(passes_every=None)
