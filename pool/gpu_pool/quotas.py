"""Who holds too much already: pure checks of a request against every quota that concerns it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gpu_pool.courses import UNLIMITED, Quota, Sharing
from gpu_pool_client import WHOLE, OverQuota, format_duration, format_memory, format_share

#: Thousandths of a GPU x seconds in a GPU-hour.
_PER_HOUR = 3_600 * WHOLE


@dataclass(frozen=True, slots=True)
class Account:
    """What one user has of one course: held, parked or asked for now, and used before."""

    user: str
    course: str
    slices: int = 0
    milli: int = 0
    memory_mib: int = 0
    #: Thousandths of a GPU x seconds, what is held now included.
    in_week: float = 0.0
    in_term: float = 0.0
    #: Seconds after which the next of its leases has ended at the latest; None where nothing limits them.
    ends_in: float | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """A quota, and whose it is."""

    #: How to address it, with the verb last: ``You hold``, ``Together, ml101 hold``.
    words: str
    quota: Quota
    #: None: everybody's.
    users: frozenset[str] | None = None
    course: str | None = None

    def covers(self, account: Account) -> bool:
        """Whether that account counts."""
        return (self.users is None or account.user in self.users) and self.course in (None, account.course)


def scopes(sharing: Sharing, user: str, course_name: str | None) -> Iterator[Scope]:
    """Yield the quotas that limit this user in this course; none where nothing is limited."""
    course = sharing.course(course_name)
    if not sharing.groups and sharing.per_user == course.per_user == course.quota == UNLIMITED:
        return
    me = frozenset((user,))
    every = [
        Scope("You hold", sharing.per_user, me),
        Scope(f"In {course.name or 'this pool'} you hold", course.per_user, me, course.name),
        Scope(f"Together, {course.name or 'those without a course'} hold", course.quota, None, course.name),
        *(
            Scope(f"Together, your group {group.name} holds", group.quota, group.users)
            for group in sharing.groups
            if user in group.users
        ),
    ]
    yield from (scope for scope in every if scope.quota != UNLIMITED)


def check(scope: Scope, asked: Account, accounts: Iterable[Account]) -> None:
    """Refuse, with ``OverQuota``, what would exceed a quota; say what would be allowed, and when."""
    counted = [account for account in accounts if scope.covers(account)]
    quota = scope.quota
    amounts: list[tuple[int | None, Callable[[Account], int], Callable[[int], str]]] = [
        (quota.slices, lambda account: account.slices, _slices),
        (quota.milli, lambda account: account.milli, lambda milli: f"{format_share(milli)} of a GPU"),
        (quota.memory_mib, lambda account: account.memory_mib, format_memory),
    ]
    for limit, amount, say in amounts:
        held, more = sum(map(amount, counted)), amount(asked)
        if limit is not None and held + more > limit:
            left = max(0, limit - held)
            now = f"Allowed now: {say(left)}." if left else "Nothing more is allowed now."
            raise OverQuota(
                f"{scope.words} {say(held)}, and {say(limit)} is the most; you asked for {say(more)} more.",
                f"{now} {_when(counted)}",
            )
    spent = (
        (quota.gpu_hours_per_week, "this week", sum(account.in_week for account in counted)),
        (quota.gpu_hours_per_term, "this term", sum(account.in_term for account in counted)),
    )
    for hours, period, used in spent:
        if hours is not None and used >= hours * _PER_HOUR:
            raise OverQuota(
                f"{scope.words.rsplit(' ', 1)[0]} used {used / _PER_HOUR:.1f} GPU-hours {period}, "
                f"and {hours:g} is the most.",
                "There is more from Monday on." if period == "this week" else "Ask for a larger quota.",
            )


def _slices(count: int) -> str:
    return f"{count} slice" if count == 1 else f"{count} slices"


def _when(counted: Iterable[Account]) -> str:
    ends = [account.ends_in for account in counted if account.ends_in is not None]
    by_itself = f" The next ends by itself within {format_duration(min(ends))}." if ends else ""
    return f"More is allowed once a slice is given back.{by_itself}"
