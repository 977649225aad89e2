"""A world around a session, without any of it being there: what its effects do, and what may happen next.

It keeps the promises that a session makes to a person, and fails when one is broken.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gpu_pool_client import (
    Activity,
    EndReason,
    GpuPoolError,
    Holder,
    Lease,
    LeaseGone,
    LeaseState,
    NotAllowed,
    Outlook,
    OverQuota,
    PoolUnreachable,
    Terms,
    WhenIdle,
    parse_request,
)
from gpu_pool_provisioner.session import TABLE, Session, State, effects, events, step
from gpu_pool_provisioner.session.expiry_policy import ExpiryAction, ExpiryStep

HOLDER = Holder("ada")
TEN = parse_request("10%")
OUTLOOK = Outlook(9, "All of it is in use.", None)
#: A state, what happened, and the state after it.
Arrow = tuple[State, type[events.Event], State]


def lease(state: LeaseState, number: int = 1) -> Lease:
    return Lease(str(number), "", parse_request("2%"), HOLDER, state, 0.0)


#: How a kernel is launched that goes to disk once it has been idle for 20 seconds, one that does where its
#: device is drained, and one that stays awake.
SLEEPER, DRAINED_ONLY = events.Launched(events.ToDisk(20.0)), events.Launched(events.ToDisk())
LAUNCHED = (events.Launched(), SLEEPER, DRAINED_ONLY)


def starting(launched: events.Launched) -> tuple[events.Event, ...]:
    """Return what happens until a kernel runs whose slice is there at once."""
    return (
        *(events.StartRequested(), events.Granted(lease(LeaseState.HELD)), events.LaunchPrepared()),
        *(launched, events.Ready(lease(LeaseState.HELD))),
    )


#: The same for one that stays awake.
STARTED = starting(events.Launched())


def after(session: Session, *happened: events.Event, now: float = 0.0) -> Session:
    """Return a session after events."""
    for event in happened:
        session, _ = step(session, event, now)
    return session


#: Where all is passed on to the kernel, and where something must be under way.
_RELAYING = (State.RUNNING, State.ASKED_BACK)
_WORKING = (
    *(State.ASKING, State.QUEUED, State.QUEUED_RESIZING, State.STARTING, State.ENDING),
    *(State.RESIZING, State.PARKING, State.RESUMING, State.HIBERNATING, State.WAKING),
)
_SLEEPING = (State.HIBERNATING, State.HIBERNATED, State.WAKING)
AWAY = PoolUnreachable("The pool is away.", may_pass=True)
#: What a pool may say instead of doing what it is asked for.
ERRORS = (
    AWAY,
    PoolUnreachable("The pool's certificate is another one's."),
    OverQuota("You have asked the pool too much."),
    GpuPoolError("Internal error in the pool.", "The service's log has the details."),
    NotAllowed("The token is not known to the JupyterHub.", "Log in again."),
    LeaseGone("There is no such lease."),
)
CHANGE = events.SizeChange(True, False, "This kernel now has 10% of a GPU.")


def a_session() -> Session:
    """Return one that begins."""
    return Session(parse_request("2%"), 1.0, 60.0)


def a_sleeper() -> Session:
    """Return one whose kernel runs, and goes to disk once it has been idle for 20 seconds."""
    return after(a_session(), *starting(SLEEPER))


def a_left_one() -> Session:
    """Return one that begins with a kernel that another server has left on disk."""
    found = events.LeftFound("", "from yesterday 18:02 (320 MiB)", events.OnDisk(-60.0, 320))
    return after(a_session(), found)


#: What may come of work that goes on all the same.
_ENDS_OF_KERNELS = (events.Died, events.TermsOver, events.CloseRequested)


@dataclass
class World:
    """One kernel, its pool, its frontends and its manager, as far as a session is concerned."""

    chance: random.Random
    now: float = 0.0
    session: Session = field(default_factory=a_session)
    #: What the session's state does while it lasts, each with whether the kernel's process is known.
    work: list[effects.Work] = field(default_factory=list)
    #: The lease that the pool knows, by number, and how often each has been given back.
    lease: int | None = None
    is_held: bool = False
    #: Whether somebody has taken it from a kernel that may be at work.
    is_taken: bool = False
    given_back: dict[int, int] = field(default_factory=dict)
    #: Whether there is a kernel, whether all is relayed to it, and whether somebody listens for it.
    kernel_lives: bool = False
    is_relayed: bool = False
    listens: bool = True
    #: Whether it is on disk.
    has_image: bool = False
    #: Code that was submitted: held by the proxy, or passed on and not answered.
    held: int = 0
    passed_on: int = 0
    #: Whether the session hears of what is submitted.
    is_answered: bool = False
    submitted: int = 0
    answered: int = 0
    #: The pairs of states that were seen, with what led from one to the other.
    seen: set[Arrow] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.has_image = bool(self.session.left)

    def walk(self) -> None:
        """Let one of the things happen that may happen now."""
        self.happen(self.chance.choice(self._possible())())

    def happen(self, event: events.Event) -> None:
        """Let something happen, and do what the session says."""
        self._before(event)
        before, there = self.session.state, (self.kernel_lives, self.has_image)
        self.session, due = step(self.session, event, self.now)
        self.seen.add((before, type(event), self.session.state))
        if self.session.state is not before:
            self.work = []
        reports = False
        for effect in due:
            reports = self._perform(effect) or reports
        if isinstance(event, events.PoolAway):
            assert (self.kernel_lives, self.has_image) == there, "an error of the pool ended a kernel"
            assert self.session.state.has_kernel or not before.has_kernel
            assert not any(isinstance(each, effects.EndKernel) for each in due)
        if isinstance(event, events.Failed):
            assert self.has_image == there[1], "a mistake of ours removed what is on disk"
        self.check()
        if reports and self.held:
            self.happen(events.WorkSubmitted())

    def _before(self, event: events.Event) -> None:
        match event:
            case events.Queued(found) | events.Granted(found):
                self.lease, self.is_held = int(found.id), found.state is LeaseState.HELD
            case events.Died():
                self.kernel_lives = False
            case events.Parked() | events.ParkedAgain():
                self.is_held, self.is_taken = False, False
            case events.Resumed() | events.Ready():
                self.is_held, self.is_taken = True, False
                self.has_image = self.has_image and not self.session.left
            case events.Launched():
                self.kernel_lives = True
            case events.Woken():
                assert not self.kernel_lives, "there are two of one kernel"
                assert self.has_image, "there is nothing to wake"
                self.kernel_lives, self.has_image = True, False
            case events.Hibernated():
                # A lease that could not be parked when its server ended ends with the process.
                self.kernel_lives, self.is_held, self.has_image = False, False, True
            case events.Gone() | events.NotReady() | events.Failed() | events.NotWoken():
                self.kernel_lives = False
            case events.LeaseSeen(lease=Lease() as found) | events.SizeChanged(lease=Lease() as found):
                self.is_held = found.state is LeaseState.HELD
            case _:
                pass

    def _perform(self, effect: effects.Effect) -> bool:
        match effect:
            case effects.Work():
                self.work.append(effect)
            case effects.Answer() | effects.HoldSilently():
                self._stop_relaying()
                self.is_answered = isinstance(effect, effects.Answer)
            case effects.HoldUnanswered():
                assert not self.is_relayed
                self.held += self.passed_on
                self.passed_on = 0
            case effects.HoldAll() | effects.HoldWork():
                # What the kernel works on already goes on.
                self.is_relayed = False
            case effects.PassOn():
                self.is_relayed, self.passed_on, self.held = True, self.passed_on + self.held, 0
                self.is_answered = True
            case effects.Refuse() | effects.Drop():
                self.answered += self.held
                self.held = 0
            case effects.ReleaseLease():
                self._release(effect)
            case effects.KillKernel():
                self.kernel_lives = False
            case effects.LetGo():
                self.kernel_lives, self.has_image = False, self.has_image and effect.leaves_image
            case effects.Close():
                self.listens, self.kernel_lives = False, False
                self._stop_relaying()
            case effects.ReportHeldCode():
                return True
            case _:
                pass
        return False

    @property
    def _has_limits(self) -> bool:
        return self.session.idling is not None and self.session.idling.terms.has_limits

    def _stop_relaying(self) -> None:
        # What a kernel that has ended was given is lost with it, as the frontends see by themselves.
        self.answered += self.passed_on
        self.passed_on, self.is_relayed = 0, False

    def _release(self, effect: effects.ReleaseLease) -> None:
        number = int(effect.lease_id)
        assert number == self.lease, "another lease was given back"
        self.given_back[number] = self.given_back.get(number, 0) + 1
        self.lease, self.is_held = None, False

    # -- What may happen -------------------------------------------------------

    def _possible(self) -> list[Callable[[], events.Event]]:
        found = [self._managed, self._time]
        if self.listens:
            found.append(self._submit)
        if self.work:
            found += [self._come_of_work] * (2 if self.session.state in _SLEEPING else 4)
        elif self.session.retry is None:
            found.append(self._pool_fails)
        if self.session.state is State.QUEUED:
            found += [self._of_its_user] * 4
        if self.session.state.has_kernel:
            found += [self._of_its_user, self._time, self._time]
            is_parked = self.session.state in (State.PARKED, State.RESUMING)
            if self.session.state is State.HIBERNATED:
                found += [self._submit] * 3
            if self.session.state in _SLEEPING:
                found += [self._of_its_user, self._of_its_user, self._managed, self._of_the_kernel] * 2
            found += [self._of_the_kernel] if self.chance.random() < (0.3 if is_parked else 0.2) else []
        return found

    def _managed(self) -> events.Event:
        common = [
            lambda: events.StartRequested(self.chance.choice([None, None, 1.0])),
            lambda: events.LaunchPrepared(self.chance.choice([None, self.now + 1.0])),
            events.ExplanationWanted,
            lambda: events.SizePending(TEN, self.chance.choice([None, 1.0])),
            lambda: events.SizeChanged(TEN),
            events.LeaseSeen,
            events.InterruptRequested,
            events.StopRequested,
            events.RestartBegan,
            lambda: events.RestartExpected(1.0),
            lambda: events.ManagerExpected(1.0),
            events.ManagerCame,
        ]
        if not self.session.is_begun:
            is_told = self.session.left or self._maybe()
            return events.StartRequested() if is_told else events.LeftFound("It was removed.")
        if not self.session.is_prepared and self._maybe():
            return self._prepared()
        if self.session.state in (State.DOWN, State.RESTARTING, State.WITHOUT_SLICE) and self._maybe():
            return events.StartRequested()
        if self.session.state.has_kernel and self.chance.random() < 0.5:
            return self._of_its_user()
        if self.chance.random() < 0.02:
            return events.CloseRequested()
        if self.chance.random() < 0.04:
            return events.Failed(ValueError("ours"))
        event = self.chance.choice(common)()
        return event if type(event) in TABLE[self.session.state] else events.TimePassed()

    def _prepared(self) -> events.Event:
        event = events.LaunchPrepared(self.chance.choice([None, self.now + 1.0]))
        return event if type(event) in TABLE[self.session.state] else events.TimePassed()

    def _time(self) -> events.Event:
        self.now += self.chance.choice([0.0, 0.5, 20.0])
        return events.TimePassed()

    def _submit(self) -> events.Event:
        self.submitted += 1
        if self.is_relayed:
            self.passed_on += 1
            # Whether the session hears of it depends on who holds it.
            return self.chance.choice([events.TimePassed(), events.WorkSubmitted()])
        self.held += 1
        silent = self.session.state in (State.DOWN, State.RESTARTING) or not self.is_answered
        return events.TimePassed() if silent else events.WorkSubmitted()

    def _lease(self, state: LeaseState = LeaseState.HELD) -> Lease:
        number = self.lease or len(self.given_back) + 1
        return lease(state, number)

    def _come_of_work(self) -> events.Event:
        """Let some of what is under way come to its end, or say how far it is."""
        work = self.chance.choice(self.work)
        event = self.chance.choice(self._results(work))()
        if not isinstance(event, (events.Launched, events.Positioned, events.SizeChanged, *_ENDS_OF_KERNELS)):
            self.work.remove(work)
        return event

    def _results(self, work: effects.Work) -> list[Callable[[], events.Event]]:
        refused = lambda: events.Refused(AWAY)  # noqa: E731
        away = lambda: self._pool_fails(work)  # noqa: E731
        granted = lambda: events.Granted(self._lease())  # noqa: E731
        queued = lambda: events.Queued(self._lease(LeaseState.WAITING))  # noqa: E731
        match work:
            case effects.Ask():
                return [granted, queued, refused, away]
            case effects.FollowQueue():
                unknown = lambda: events.Positioned(None, AWAY)  # noqa: E731
                return [
                    lambda: events.Positioned(self.chance.choice([1, 9])),
                    unknown,
                    events.LeftQueue,
                    away,
                ]
            case effects.Explain():
                return [
                    lambda: events.Explained(OUTLOOK),
                    events.Explained,
                    lambda: events.Explained(error=self.chance.choice(ERRORS)),
                    away,
                ]
            case effects.AwaitGrant() if self.session.parking is not None:
                return [granted, away]
            case effects.AwaitGrant() | effects.AskLastTime():
                return [granted, refused, *([away] if isinstance(work, effects.AwaitGrant) else [])]
            case effects.ResizeQueued():
                changed = lambda: events.SizeChanged(TEN, self._lease(self._either()))  # noqa: E731
                return [changed, lambda: events.Resized(CHANGE), away]
            case effects.StartKernel():
                one = lambda: self.chance.choice(LAUNCHED)  # noqa: E731
                launched = [] if self.session.is_launched else [one]
                ready = [lambda: events.Ready(self._lease())] if self.kernel_lives else []
                why = ValueError("It ended.")
                if self.session.left and not self.session.is_stopped:
                    return [*launched, *ready, lambda: events.NotWoken("A file has changed."), away]
                ended = [lambda: events.NotReady(why), lambda: events.NotStarted(why)]
                return [*launched, *ready, *ended, away]
            case effects.Observe():
                return [self._looked, self._looked, away]
            case effects.CheckIdle():
                return [events.FoundIdle] * 3 + [lambda: events.FoundAtWork(self._maybe()), away]
            case effects.Park():
                parked = lambda: events.Parked(self._lease(LeaseState.PARKED), self._maybe())  # noqa: E731
                gone = [events.NotNeeded] if work.yields else []
                wanted = [lambda: events.FoundAtWork(is_silent=False)] if self._is_wanted else []
                return [parked, parked, parked, events.NotParked, away, *gone, *wanted]
            case effects.GiveWay():
                return [events.Worked, events.LeaseNews, away]
            case effects.ParkAgain():
                return [events.ParkedAgain, lambda: events.Resumed(self._lease()), away]
            case effects.Resume():
                resumed = lambda: events.Resumed(self._lease(), self._maybe())  # noqa: E731
                return [resumed, resumed, away, *([queued] if work.lease is None else [])]
            case effects.ResizeKernel():
                return [lambda: events.Resized(CHANGE), away]
            case effects.Hibernate():
                stays = lambda: events.NotHibernated(self.chance.choice(["", "It works."]))  # noqa: E731
                asleep = lambda: events.Hibernated(118)  # noqa: E731
                return [asleep, asleep, stays, away]
            case effects.FollowLease():
                return [self._drained, away]
            case effects.Wake():
                return [events.Woken, events.Woken, lambda: events.NotWoken("A file has changed."), away]
            case effects.EndKernel():
                return [events.Gone, events.Gone, self._of_the_kernel, away]
        raise AssertionError(work)

    def _pool_fails(self, work: effects.Work | None = None) -> events.Event:
        """Let the pool fail at what it was asked for, which is none of its kernel's business."""
        return events.PoolAway(self.chance.choice(ERRORS), work or effects.FollowLease(False))

    def _either(self) -> LeaseState:
        return self.chance.choice([LeaseState.WAITING, LeaseState.HELD])

    @property
    def _is_wanted(self) -> bool:
        """Whether something was submitted to a kernel that is being parked."""
        parking = self.session.parking
        return parking is not None and parking.is_wanted and not parking.step.is_parked

    def _maybe(self) -> bool:
        return self.chance.random() < 0.5

    def _looked(self) -> events.Event:
        """Let the kernel be looked at: its slice may have been parked, asked back or taken meanwhile."""
        state = self.chance.choice([LeaseState.HELD] * 4 + [LeaseState.PARKED])
        if state is LeaseState.PARKED:
            # It was parked by its pool; whatever runs already cannot be held any more.
            self.is_taken = True
        terms = Terms(
            ends_at=self.chance.choice([None, None, None, self.now + 1.0]),
            idle_limit=self.chance.choice([1.0, 1.0, 100.0, None]),
            when_idle=self.chance.choice(list(WhenIdle)),
            yield_after=self.chance.choice([None, 1.0]),
        )
        asked = self.chance.choice([None, None, EndReason.REVOKED, EndReason.YIELDED])
        initialised = self.chance.random() < 0.3
        activity = Activity(initialised=initialised, working=self.chance.choice([None, False, True]))
        drained = self.chance.random() < 0.2
        found = replace(self._lease(state), terms=terms, asked_back=asked, hibernates=drained)
        is_busy, last = self.chance.random() < 0.3, self.now - self.chance.choice([0.0, 200.0])
        return events.Observed(found, is_busy, last, activity)

    def _drained(self) -> events.Event:
        """Let the device of a kernel without a slice be drained so that it goes to disk, or not any more."""
        seen = replace(self._lease(LeaseState.PARKED), hibernates=not self.session.is_to_hibernate)
        self.happen(events.LeaseSeen(seen))
        return events.LeaseNews()

    def _of_the_kernel(self) -> events.Event:
        over = ExpiryStep(ExpiryAction.END, "It is over.", reason=EndReason.IDLE)
        ours = events.Failed(ValueError("ours"))
        return self.chance.choice([events.Died(), events.TermsOver(over), ours, events.CloseRequested()])

    def _of_its_user(self) -> events.Event:
        wanted: list[events.Event] = [
            events.KeepRequested(60),
            events.GiveBackRequested(),
            events.LeaseSeen(activity=Activity(initialised=self._maybe())),
            events.ResizeRequested(TEN),
            events.ResumeRequested(),
            events.InterruptRequested(),
            *(events.RestartBegan(), events.RestartExpected(1.0), events.ManagerExpected(1.0)),
            *(events.SizeChanged(TEN), events.SizePending(TEN, 1.0), events.LaunchPrepared()),
            events.SleepRequested(),
        ]
        if self.session.state in _SLEEPING:  # which few are that are ended there, or restarted
            wanted += [events.StopRequested(), events.StopRequested(), events.StartRequested()]
            wanted += [events.ManagerCame(), events.ManagerExpected(1.0), events.ExplanationWanted()]
        possible = [each for each in wanted if type(each) in TABLE[self.session.state]]
        return self.chance.choice(possible) if possible else events.TimePassed()

    # -- What is promised ------------------------------------------------------

    def check(self) -> None:
        """Fail where a promise is broken."""
        state = self.session.state
        if self.is_relayed:
            assert self.is_held, "a cell runs without a slice"
            assert state in _RELAYING, "what is submitted is not held"
        assert all(count == 1 for count in self.given_back.values()), "a slice was given back twice"
        assert self.held + self.passed_on + self.answered == self.submitted, "what was submitted is lost"
        if state is State.ENDED:
            assert not self.held, "what was submitted is not answered"
            assert not self.listens, "somebody listens"
            assert not self.kernel_lives, "there is a process"
            assert self.session.wakes_at is None, "something is due"
        if state in _WORKING:
            assert self.work or self.session.retry is not None, "nothing goes on"
        if state in (State.HIBERNATED, State.WAKING):
            assert not self.kernel_lives, "what sleeps has a process"
            assert not self.is_held, "what sleeps has a slice"
        if state in _RELAYING:
            assert self.is_relayed, "nothing is passed on"
            assert self.work or self.session.wakes_at is not None or not self._has_limits
        if state is State.WITHOUT_SLICE:
            assert self.lease is None, "a slice is kept that nobody asks for"


def arrows() -> set[Arrow]:
    """Return every way from one state to another, or to itself, that the table allows."""
    rules = [(state, event, rule) for state, column in TABLE.items() for event, rule in column.items()]
    return {(state, event, to) for state, event, rule in rules for to in rule.to}
