"""The queue under made-up or recorded days: the same pure code that grants real slices, in simulated time.

Here alone is randomness, always from a given seed: the same workload and seed
give the same figures on every machine.
"""

from gpu_pool.simulation.engine import Arrival, Outcome, Run, simulate
from gpu_pool.simulation.generator import arrivals
from gpu_pool.simulation.history import read_history
from gpu_pool.simulation.orders import ORDERS
from gpu_pool.simulation.report import Figures, figures
from gpu_pool.simulation.workloads import WORKLOADS, Workload

__all__ = [
    "ORDERS",
    "WORKLOADS",
    "Arrival",
    "Figures",
    "Outcome",
    "Run",
    "Workload",
    "arrivals",
    "figures",
    "read_history",
    "simulate",
]
