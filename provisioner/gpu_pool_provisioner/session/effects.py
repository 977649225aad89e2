"""What is to be done about it: values, performed by the driver in the order in which they come."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_pool_client import EndReason, Hibernation, Lease, SliceRequest
from gpu_pool_provisioner.session.texts import NOT_GRANTED


@dataclass(frozen=True, slots=True)
class Effect:
    """Something to do at once."""


@dataclass(frozen=True, slots=True)
class Work(Effect):
    """Something that takes time. It is given up when the session's state changes; its result is an event.

    Where the pool cannot do it now, or refuses it with an error that is none of those results, that is
    ``PoolAway``.
    """


# -- Towards the frontends ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer(Effect):
    """Answer in the kernel's name, and hold what is submitted."""


@dataclass(frozen=True, slots=True)
class HoldSilently(Effect):
    """Hold what is submitted, and answer nothing."""


@dataclass(frozen=True, slots=True)
class HoldAll(Effect):
    """Hold what is submitted. What the kernel still says is passed on."""


@dataclass(frozen=True, slots=True)
class HoldUnanswered(Effect):
    """Hold what the kernel, which has ended, has not answered, before what is held already."""


@dataclass(frozen=True, slots=True)
class PassOn(Effect):
    """Pass everything on to the kernel, first of all what was held."""


@dataclass(frozen=True, slots=True)
class Refuse(Effect):
    """Let the code that is held fail."""

    text: str
    error_name: str = NOT_GRANTED


@dataclass(frozen=True, slots=True)
class Show(Effect):
    """Show a text in the waiting cell; empty for none."""

    text: str


@dataclass(frozen=True, slots=True)
class Drop(Effect):
    """Forget what is held, as a restart does."""


@dataclass(frozen=True, slots=True)
class HoldWork(Effect):
    """Hold what would make the kernel work, and pass on the rest."""


@dataclass(frozen=True, slots=True)
class Reply(Effect):
    """Answer whoever has asked for what has just happened."""

    text: str


@dataclass(frozen=True, slots=True)
class ReportHeldCode(Effect):
    """Tell whether code is held, as if it had just been submitted."""


# -- Towards the kernel -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KillKernel(Effect):
    """End it at once, if there is one."""


@dataclass(frozen=True, slots=True)
class InterruptKernel(Effect):
    """Interrupt it, where it has no process here that the manager interrupts."""


@dataclass(frozen=True, slots=True)
class Tell(Effect):
    """Print a line below the cell that runs, or else below the next one that does."""

    text: str


@dataclass(frozen=True, slots=True)
class ShowDevices(Effect):
    """Let the kernel see the devices of its lease; with None, none."""

    lease: Lease | None


@dataclass(frozen=True, slots=True)
class ShowBurst(Effect):
    """Let the kernel know how much memory it may use now, also while a cell runs."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class LetGo(Effect):
    """Close the connection to a kernel that has ended, and remove what is on disk of it."""

    #: Whether that stays for the next server, if one can go on with it.
    leaves_image: bool = False


# -- Towards the pool ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReleaseLease(Effect):
    """Give the slice back, or leave the queue."""

    lease_id: str
    reason: EndReason


@dataclass(frozen=True, slots=True)
class StayBusy(Effect):
    """Tell the pool that the kernel does not give way now."""


@dataclass(frozen=True, slots=True)
class ReportHibernation(Effect):
    """Tell the pool how the kernel, which can go to disk, stands with that; unless it knows."""

    hibernation: Hibernation


@dataclass(frozen=True, slots=True)
class Unreserve(Effect):
    """Let others have what was kept for a restart that has not come."""

    lease_id: str
    #: What the kernel has.
    request: SliceRequest


# -- The end ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Close(Effect):
    """Close the ports, and have nothing more to do with the kernel."""


# -- What takes time ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask(Work):
    """Ask for the slice, or look at the lease of before. Comes to ``Queued``, ``Granted`` or ``Refused``."""

    request: SliceRequest
    #: Which of the session's requests it is.
    number: int
    #: The lease that it has already.
    lease_id: str | None = None
    #: In how many seconds it must be held; None where it may wait in the queue.
    within: float | None = None
    #: Whether it fails as soon as the pool does not answer: whoever starts the kernel need not wait for that.
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class FollowQueue(Work):
    """See where in the queue the lease is. Comes to ``Positioned`` each time, and then ``LeftQueue``."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class AwaitGrant(Work):
    """Wait until a lease that has left the queue is held. Comes to ``Granted`` or ``Refused``."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class Explain(Work):
    """Ask why the lease waits. Comes to ``Explained``."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class AskLastTime(Work):
    """Take the slice if it is free now. Comes to ``Granted``, or to ``Refused`` with why it is not."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class ResizeQueued(Work):
    """Change the size of what is waited for. Comes to ``Resized``."""

    lease_id: str
    request: SliceRequest


@dataclass(frozen=True, slots=True)
class StartKernel(Work):
    """Launch the kernel. Comes to ``Launched`` and then ``Ready``, ``NotReady`` or ``NotStarted``."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Observe(Work):
    """Look at the lease and at the kernel. Comes to ``Observed``, ``PoolAway`` or ``TermsOver``."""


@dataclass(frozen=True, slots=True)
class CheckIdle(Work):
    """Ask the kernel whether it has done all. Comes to ``FoundIdle`` or ``FoundAtWork``."""


@dataclass(frozen=True, slots=True)
class Park(Work):
    """Lend the slice to others. Comes to ``Parked``, ``NotParked``, ``PoolAway`` or ``TermsOver``.

    Where it ``yields`` and nobody waits any more, it comes to ``NotNeeded``; where something was submitted
    before the pool was told, to ``FoundAtWork``. The slice stays.
    """

    yields: bool = False


@dataclass(frozen=True, slots=True)
class GiveWay(Work):
    """Tell the pool that the kernel gives way, and follow its lease.

    Comes to ``Worked``, ``LeaseNews`` or ``PoolAway``.
    """

    #: Since when, by the session's clock.
    since: float


@dataclass(frozen=True, slots=True)
class FollowLease(Work):
    """Follow the lease of a kernel without a slice until it says something else of its way to disk.

    Comes to ``LeaseNews``.
    """

    #: What it says of that now.
    hibernates: bool


@dataclass(frozen=True, slots=True)
class ParkAgain(Work):
    """Leave the queue for a parked slice. Comes to ``ParkedAgain``, ``Resumed`` or ``TermsOver``."""


@dataclass(frozen=True, slots=True)
class Resume(Work):
    """Ask for the slice again. Comes to ``Queued``, ``Resumed`` or ``TermsOver``."""

    #: The lease, where it is held again already.
    lease: Lease | None = None


@dataclass(frozen=True, slots=True)
class Hibernate(Work):
    """Write the parked kernel to disk, and end its process. Comes to ``Hibernated`` or ``NotHibernated``."""

    #: Whether its pool does not answer when its server ends: the lease ends with the kernel's process then.
    without_pool: bool = False


@dataclass(frozen=True, slots=True)
class Wake(Work):
    """Let the kernel that is on disk go on. Comes to ``Woken`` or ``NotWoken``."""


@dataclass(frozen=True, slots=True)
class ResizeKernel(Work):
    """Change the size if the kernel is idle. Comes to ``Resized``."""

    request: SliceRequest


@dataclass(frozen=True, slots=True)
class EndKernel(Work):
    """End the kernel, if there is one, once it had so many seconds to end. Comes to ``Gone``."""

    within: float = 0.0
    #: For how many seconds its end is waited for; None for however long the system holds it.
    at_most: float | None = None
    #: Whether what it has sent last is passed on before it is taken for gone.
    reads_last: bool = False
