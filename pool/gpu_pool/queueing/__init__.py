"""Whose turn it is: pure functions, without I/O, clock or randomness.

``decide`` says who is granted what now, and which devices are kept free for
whom; ``order`` says in which order turns come. For long lines ``grant`` says
the first half of a decision alone; ``foremost`` says which part of the line is
enough for it, and ``settled`` whether it may be asked. All follow the same rules:
higher priorities first, then courses by weight, then the users of a course by
what they hold and have used lately, then first come, first served. Whoever
cannot be placed is passed over, and gets devices emptied for it once it has
waited long enough.
"""

from gpu_pool.queueing.deciding import decide, grant, order, settled
from gpu_pool.queueing.fairness import faded_use
from gpu_pool.queueing.shortening import foremost, room
from gpu_pool.queueing.values import Decision, Holding, Policy, Situation, Usage, Waiter, Wish

__all__ = [
    "Decision",
    "Holding",
    "Policy",
    "Situation",
    "Usage",
    "Waiter",
    "Wish",
    "decide",
    "faded_use",
    "foremost",
    "grant",
    "order",
    "room",
    "settled",
]
