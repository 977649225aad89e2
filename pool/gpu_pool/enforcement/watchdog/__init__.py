"""Looks at what runs on the devices: measures every lease, and warns and ends those that use too much.

``escalation`` decides and is pure; ``attribution`` says whose a process is, a lease's or nobody's;
``watchdog`` takes the steps, in a thread of its own.
"""

from gpu_pool.enforcement.watchdog.attribution import UnmanagedProcess, find_unmanaged
from gpu_pool.enforcement.watchdog.escalation import Tolerance
from gpu_pool.enforcement.watchdog.watchdog import OwnStore, WatchdogRules, WatchdogStore, WatchdogThread

__all__ = [
    "OwnStore",
    "Tolerance",
    "UnmanagedProcess",
    "WatchdogRules",
    "WatchdogStore",
    "WatchdogThread",
    "find_unmanaged",
]
