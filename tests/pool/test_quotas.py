"""Which quotas concern whom, where each ends, and what is said beyond it."""

from __future__ import annotations

import pytest

from gpu_pool import quotas
from gpu_pool.courses import UNLIMITED, Course, Group, Quota, Sharing
from gpu_pool.quotas import Account, Scope
from gpu_pool_client import OverQuota

SLICES = Quota(slices=2)
SHARED = Sharing(
    {"ml": Course("ml", quota=Quota(slices=5), per_user=Quota(milli=500)), "free": Course("free")},
    default=Course(per_user=Quota(slices=1)),
    groups=(
        Group("staff", frozenset({"ada"}), quota=Quota(memory_mib=1024)),
        Group("others", frozenset({"bob"}), quota=Quota(slices=1)),
        Group("friends", frozenset({"ada"})),
    ),
    per_user=SLICES,
)
ADA, CARL = frozenset({"ada"}), frozenset({"carl"})


def test_the_quotas_of_one_user_in_one_course() -> None:
    assert list(quotas.scopes(SHARED, "ada", "ml")) == [
        Scope("You hold", SLICES, ADA),
        Scope("In ml you hold", Quota(milli=500), ADA, "ml"),
        Scope("Together, ml hold", Quota(slices=5), None, "ml"),
        Scope("Together, your group staff holds", Quota(memory_mib=1024), ADA),
    ]


def test_the_quotas_of_those_without_a_course() -> None:
    assert list(quotas.scopes(SHARED, "carl", None)) == [
        Scope("You hold", SLICES, CARL),
        Scope("In this pool you hold", Quota(slices=1), CARL, ""),
    ]
    together = Sharing(default=Course(quota=SLICES))
    assert list(quotas.scopes(together, "carl", None)) == [
        Scope("Together, those without a course hold", SLICES, None, "")
    ]


@pytest.mark.parametrize(
    ("sharing", "count"),
    [
        (Sharing(), 0),
        (Sharing(per_user=SLICES), 1),
        (Sharing(default=Course(quota=SLICES)), 1),
        (Sharing(default=Course(per_user=SLICES)), 1),
        (Sharing(groups=(Group("staff", ADA, quota=SLICES),)), 1),
        (Sharing(groups=(Group("staff", CARL, quota=SLICES),)), 0),
        (Sharing(groups=(Group("staff", ADA, quota=UNLIMITED),)), 0),
    ],
)
def test_only_what_limits_something_is_a_quota(sharing: Sharing, count: int) -> None:
    assert len(list(quotas.scopes(sharing, "ada", ""))) == count


@pytest.mark.parametrize(
    ("scope", "covered"),
    [
        (Scope("", SLICES), True),
        (Scope("", SLICES, ADA), True),
        (Scope("", SLICES, CARL), False),
        (Scope("", SLICES, None, "ml"), True),
        (Scope("", SLICES, None, ""), False),
        (Scope("", SLICES, ADA, ""), False),
        (Scope("", SLICES, CARL, "ml"), False),
    ],
)
def test_whom_a_quota_covers(scope: Scope, covered: bool) -> None:
    assert scope.covers(Account("ada", "ml")) is covered


def check(quota: Quota, asked: Account, *accounts: Account) -> tuple[str, str] | None:
    """Return message and remedy of a refusal, or None."""
    try:
        quotas.check(Scope("In ml you hold", quota, ADA), asked, accounts)
    except OverQuota as error:
        return error.message, error.remedy
    return None


def ada(**facts: float) -> Account:
    return Account("ada", "ml", **facts)  # type: ignore[arg-type]


_LATER = "More is allowed once a slice is given back."


def test_slices() -> None:
    assert check(SLICES, ada(slices=1), ada(slices=1)) is None
    assert check(SLICES, ada(slices=1), Account("bob", "ml", slices=9)) is None
    assert check(SLICES, ada(slices=1), ada(slices=1), ada(slices=1)) == (
        "In ml you hold 2 slices, and 2 slices is the most; you asked for 1 slice more.",
        f"Nothing more is allowed now. {_LATER}",
    )
    assert check(SLICES, ada(slices=2), ada(slices=1, ends_in=90.0), ada(ends_in=60.0), ada()) == (
        "In ml you hold 1 slice, and 2 slices is the most; you asked for 2 slices more.",
        f"Allowed now: 1 slice. {_LATER} The next ends by itself within 1min.",
    )
    assert check(Quota(slices=0), ada(slices=1)) == (
        "In ml you hold 0 slices, and 0 slices is the most; you asked for 1 slice more.",
        f"Nothing more is allowed now. {_LATER}",
    )


def test_a_lowered_quota_leaves_nothing_rather_than_less() -> None:
    refusal = check(SLICES, ada(slices=1), ada(slices=4))
    assert refusal is not None
    assert refusal[1].startswith("Nothing more is allowed now.")


def test_share_and_memory() -> None:
    assert check(Quota(milli=500), ada(milli=100), ada(milli=400)) is None
    assert check(Quota(milli=500), ada(milli=200), ada(milli=400)) == (
        "In ml you hold 40% of a GPU, and 50% of a GPU is the most; you asked for 20% of a GPU more.",
        f"Allowed now: 10% of a GPU. {_LATER}",
    )
    assert check(Quota(memory_mib=2048), ada(memory_mib=512), ada(memory_mib=1536)) is None
    assert check(Quota(memory_mib=2048), ada(memory_mib=1024), ada(memory_mib=1536)) == (
        "In ml you hold 1.5GiB, and 2GiB is the most; you asked for 1GiB more.",
        f"Allowed now: 512MiB. {_LATER}",
    )


def test_gpu_hours() -> None:
    week, term = Quota(gpu_hours_per_week=2), Quota(gpu_hours_per_term=1.5)
    assert check(week, ada(slices=1), ada(in_week=7_199_999.0, in_term=9e9)) is None
    assert check(week, ada(slices=1), ada(in_week=3_600_000.0), ada(in_week=3_600_000.0)) == (
        "In ml you used 2.0 GPU-hours this week, and 2 is the most.",
        "There is more from Monday on.",
    )
    assert check(term, ada(slices=1), ada(in_term=5_399_999.0, in_week=9e9)) is None
    assert check(term, ada(slices=1), ada(in_term=5_400_000.0)) == (
        "In ml you used 1.5 GPU-hours this term, and 1.5 is the most.",
        "Ask for a larger quota.",
    )
