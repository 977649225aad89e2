"""One kernel's life as a state machine: pure. No I/O, no clock, no asyncio here.

:func:`step` takes a session, an event and the time, and returns the session after it and the effects to
perform, in order. :data:`TABLE` says which event is possible in which state, and where it leads. Whoever
performs the effects, ``gpu_pool_provisioner.driver``, tells what comes of them by further events.
"""

from gpu_pool_provisioner.session.session import ImpossibleEventError, Session, State
from gpu_pool_provisioner.session.table import TABLE, step
from gpu_pool_provisioner.session.times import SessionTimes

__all__ = ["TABLE", "ImpossibleEventError", "Session", "SessionTimes", "State", "step"]
