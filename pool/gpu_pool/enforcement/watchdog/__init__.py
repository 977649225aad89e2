"""Looks at what runs on the devices: measures every lease, and warns and ends those that use too much.

``escalation`` decides and is pure; ``attribution`` says whose a process is, a lease's or nobody's;
``thread`` is the thread in which all of it happens.
"""

from gpu_pool.enforcement.watchdog.attribution import UnmanagedProcess, find_unmanaged
from gpu_pool.enforcement.watchdog.escalation import Tolerance
from gpu_pool.enforcement.watchdog.thread import OwnStore, WatchdogRules, WatchdogStore, WatchdogThread

__all__ = [
    "OwnStore",
    "Tolerance",
    "UnmanagedProcess",
    "WatchdogRules",
    "WatchdogStore",
    "WatchdogThread",
    "find_unmanaged",
]
