"""Everything that can happen to a pool, in any order, and what must hold after each of it."""

from __future__ import annotations

from model.asking import Asking
from model.changing import Changing
from model.checks import Checks
from model.world import World


class PoolMachine(Asking, Changing, World, Checks):
    """Drives a pool and its model side by side; a subclass says which pool."""
