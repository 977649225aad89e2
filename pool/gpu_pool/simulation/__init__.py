"""The queue under made-up or recorded days: the same pure code that grants real slices, in simulated time.

Here alone is randomness, always from a given seed: the same workload and seed
give the same figures on every machine.
"""

from gpu_pool.simulation.engine import ORDERS, Arrival, ArrivalOutcome, SimulatedRun, Simulation, simulate
from gpu_pool.simulation.history import read_history
from gpu_pool.simulation.report import RunFigures, figures
from gpu_pool.simulation.workloads import WORKLOADS, Workload, arrivals

__all__ = [
    "ORDERS",
    "WORKLOADS",
    "Arrival",
    "ArrivalOutcome",
    "RunFigures",
    "SimulatedRun",
    "Simulation",
    "Workload",
    "arrivals",
    "figures",
    "read_history",
    "simulate",
]
