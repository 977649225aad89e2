"""Looks at what runs on the devices: measures every lease, and warns and ends those that use too much.

``judging`` decides and is pure; ``attribution`` says whose a process is;
``guard`` is the thread in which all of it happens.
"""

from gpu_pool.isolation.guard.guard import Guard, GuardRules, Ledger
from gpu_pool.isolation.guard.judging import Patience
from gpu_pool.isolation.guard.keeping import OwnLedger
from gpu_pool.isolation.guard.strangers import Stranger, find_strangers

__all__ = ["Guard", "GuardRules", "Ledger", "OwnLedger", "Patience", "Stranger", "find_strangers"]
