"""Who holds too much already: pure checks of a request against every quota that concerns it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpu_pool.names import all_names, is_named
from gpu_pool.policy import placement
from gpu_pool.policy.queue_state import Rules
from gpu_pool.policy.sharing import UNLIMITED, Quota, Sharing
from gpu_pool_client import (
    WHOLE,
    Device,
    OverQuota,
    SliceRequest,
    format_duration,
    format_gpus,
    format_memory,
)

#: Thousandths of a GPU x seconds in a GPU-hour.
_PER_HOUR: Final = 3_600 * WHOLE
_LARGER: Final = "Ask whoever runs the course or the pool for a larger quota."


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
    subject: str
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
            Scope(f"Together, your group {group.name} holds", group.quota, all_names(group.users))
            for group in sharing.groups
            if is_named(user, group.users)
        ),
    ]
    yield from (scope for scope in every if scope.quota != UNLIMITED)


@dataclass(frozen=True, slots=True)
class Allowed:
    """What all quotas together allow, in the terms of one request: shares, memory or whole GPUs."""

    request: SliceRequest
    #: The first device that could hold it, by which shares and memory are compared.
    device: Device
    rules: Rules
    scopes: Sequence[Scope]
    accounts: Sequence[Account]
    #: What the lease has already that asks for another size; nothing for a new one.
    before: Account = Account("", "")

    def ever(self) -> SliceRequest | None:
        """Return the largest request for those who hold nothing else; None if none would do."""
        return self._largest([(scope.quota.milli, scope.quota.memory_mib) for scope in self.scopes])

    def now(self) -> SliceRequest | None:
        """Return the largest request beside what is held already; None if none would do."""
        return self._largest([self._left(scope) for scope in self.scopes])

    def _left(self, scope: Scope) -> tuple[int | None, int | None]:
        counted = [account for account in self.accounts if scope.covers(account)]
        milli = sum(account.milli for account in counted) - self.before.milli
        memory_mib = sum(account.memory_mib for account in counted) - self.before.memory_mib
        quota = scope.quota
        return (
            None if quota.milli is None else quota.milli - milli,
            None if quota.memory_mib is None else quota.memory_mib - memory_mib,
        )

    def _largest(self, limits: Sequence[tuple[int | None, int | None]]) -> SliceRequest | None:
        milli = min((most for most, _ in limits if most is not None), default=None)
        memory_mib = min((most for _, most in limits if most is not None), default=None)
        return largest_within(self.request, self.device, self.rules, milli, memory_mib)


def largest_within(
    request: SliceRequest, device: Device, rules: Rules, milli: int | None, memory_mib: int | None
) -> SliceRequest | None:
    """Return the largest request in these terms that takes no more in all; None if none would work.

    Of whole devices that is fewer of them, and less than one where not even one is allowed.
    """

    def is_within(each: SliceRequest) -> bool:
        part = placement.cut(each, device, rules)
        return (milli is None or each.count * part.milli <= milli) and (
            memory_mib is None or each.count * part.memory_mib <= memory_mib
        )

    if request.whole_devices:
        for count in range(request.count, 0, -1):
            fewer = replace(request, count=count)
            if is_within(fewer):
                return fewer
        request = replace(request, count=1)
    size = replace(request, milli=0, memory_mib=None) if request.milli else replace(request, memory_mib=0)
    low, high = 0, request.milli or request.memory_mib or 0
    while low < high:  # the more is asked for, the more it takes
        middle = (low + high + 1) // 2
        each = _sized(size, middle)
        low, high = (middle, high) if is_within(each) else (low, middle - 1)
    found = _sized(size, low)
    return found if low and placement.holds(placement.cut(found, device, rules), rules) else None


def _sized(request: SliceRequest, amount: int) -> SliceRequest:
    if request.milli is not None:
        return replace(request, milli=amount)
    return replace(request, memory_mib=amount)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of the amounts that a quota may limit."""

    limit: Callable[[Quota], int | None]
    amount: Callable[[Account], int]
    say: Callable[[int], str]
    #: Whether a request names this amount itself, so that no other words are needed for it.
    is_named: Callable[[SliceRequest], bool]


def _slices(count: int) -> str:
    return f"{count} slice" if count == 1 else f"{count} slices"


def _share(milli: int) -> str:
    return format_gpus(milli) if milli <= WHOLE else f"{milli / WHOLE:g} GPUs"


_SLICES: Final = _Kind(lambda quota: quota.slices, lambda account: account.slices, _slices, lambda _: True)
_KINDS: Final = (
    _SLICES,
    _Kind(
        lambda quota: quota.milli,
        lambda account: account.milli,
        _share,
        lambda request: request.milli is not None,
    ),
    _Kind(
        lambda quota: quota.memory_mib,
        lambda account: account.memory_mib,
        format_memory,
        lambda request: request.memory_mib is not None,
    ),
)


def check(scope: Scope, asked: Account, accounts: Iterable[Account], allowed: Allowed | None = None) -> None:
    """Refuse, with ``OverQuota``, what would exceed a quota; say what would be allowed, and when.

    ``asked`` is what would come on top of what ``accounts`` tell. With ``allowed`` it is also said
    in the terms of the request how much may be asked for.
    """
    counted = [account for account in accounts if scope.covers(account)]
    for kind in _KINDS:
        limit, more = kind.limit(scope.quota), kind.amount(asked)
        held = sum(map(kind.amount, counted))
        if limit is None or held + more <= limit:
            continue
        whole = more + (kind.amount(allowed.before) if allowed else 0)
        if whole > limit:
            raise _never(scope, kind, limit, whole, allowed)
        raise OverQuota(
            f"{scope.subject} {kind.say(held)}, and {kind.say(limit)} is the most; "
            f"you asked for {kind.say(more)} more.",
            f"{_now(kind, limit - held, allowed)} {_when(counted)}",
        )
    _check_hours(scope, counted)


def _never(scope: Scope, kind: _Kind, limit: int, whole: int, allowed: Allowed | None) -> OverQuota:
    """Refuse what would be too much also for somebody who holds nothing."""
    wanted, most = kind.say(whole), kind.say(limit)
    if allowed and not kind.is_named(allowed.request):
        wanted = f"{allowed.request.guarantee.size}, that is {wanted}"
    message = f"{_subject(scope)} may hold {most} at most; you asked for {wanted}."
    largest = allowed.ever() if allowed and kind is not _SLICES else None
    if largest is None and (allowed or not limit):
        return OverQuota(message, f"No smaller slice would do. {_LARGER}" if limit else _LARGER)
    return OverQuota(message, f"Ask for at most {_size(largest) if largest else most}.")


def _now(kind: _Kind, left: int, allowed: Allowed | None) -> str:
    """Say what may be asked for beside what is held."""
    if left <= 0:
        return "Nothing more is allowed now."
    if allowed is None or kind is _SLICES:
        return f"Allowed now: {kind.say(left)}."
    largest = allowed.now()
    if largest is None:
        return "Nothing more is allowed now."
    if kind.is_named(allowed.request):
        return f"Allowed now: {_size(largest)}."
    return f"Allowed now: {kind.say(left)}; ask for at most {_size(largest)}."


def _size(request: SliceRequest) -> str:
    if not request.whole_devices:
        return request.size
    return "one whole GPU" if request.count == 1 else f"{request.count} whole GPUs"


def _check_hours(scope: Scope, counted: Sequence[Account]) -> None:
    quota = scope.quota
    spent = (
        (quota.gpu_hours_per_week, "this week", sum(account.in_week for account in counted)),
        (quota.gpu_hours_per_term, "this term", sum(account.in_term for account in counted)),
    )
    for hours, period, used in spent:
        if hours is None or used < hours * _PER_HOUR:
            continue
        if not hours:
            raise OverQuota(f"{_subject(scope)} may use no GPU-hours {period}.", _LARGER)
        raise OverQuota(
            f"{_subject(scope)} used {used / _PER_HOUR:.1f} GPU-hours {period}, and {hours:g} is the most.",
            "There is more from Monday on." if period == "this week" else "Ask for a larger quota.",
        )


def _subject(scope: Scope) -> str:
    return scope.subject.rsplit(" ", 1)[0]


def _when(counted: Iterable[Account]) -> str:
    ends = [account.ends_in for account in counted if account.ends_in is not None]
    by_itself = f" The next ends by itself within {format_duration(min(ends))}." if ends else ""
    return f"More is allowed once a slice is given back.{by_itself}"
