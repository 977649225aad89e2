"""Which quotas concern whom, where each ends, and what is said beyond it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_pool.policy import placement, quotas
from gpu_pool.policy.queue_state import Rules
from gpu_pool.policy.quotas import Account, Allowed, Scope
from gpu_pool.policy.sharing import UNLIMITED, Course, Group, Quota, Sharing
from gpu_pool_client import OverQuota, SliceRequest, parse_request
from support.pools import device

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
        "In ml you may hold 0 slices at most; you asked for 1 slice.",
        "Ask whoever runs the course or the pool for a larger quota.",
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


GPU = device(0)
RULES = Rules()


def refusal(size: str, *limits: Quota, held: str = "", before: str = "") -> tuple[str, str]:
    """Return message and remedy for whoever asks for this under all these quotas of her own."""
    limited = [Scope("You hold", quota, ADA) for quota in limits]
    has = [taken(held)] if held else []
    old = taken(before) if before else Account("", "")
    new = taken(size)
    more = Account(
        "ada", "ml", new.slices - old.slices, new.milli - old.milli, new.memory_mib - old.memory_mib
    )
    counted = [*has, old] if before else has
    allowed = Allowed(parse_request(size), GPU, RULES, limited, counted, old)

    def check_all() -> None:
        for scope in limited:
            quotas.check(scope, more, counted, allowed)

    with pytest.raises(OverQuota) as refused:
        check_all()
    return refused.value.message, refused.value.remedy


def taken(size: str) -> Account:
    request = parse_request(size)
    part = placement.cut(request, GPU, RULES)
    return Account("ada", "ml", 1, request.count * part.milli, request.count * part.memory_mib)


@pytest.mark.parametrize(
    ("size", "limits", "message", "remedy"),
    [
        (
            "60%",
            [Quota(memory_mib=16384)],
            "You may hold 16GiB at most; you asked for 60%, that is 19660MiB.",
            "Ask for at most 50%.",
        ),
        (
            "20GiB",
            [Quota(milli=500)],
            "You may hold 50% of a GPU at most; you asked for 20GiB, that is 62.5% of a GPU.",
            "Ask for at most 16GiB.",
        ),
        ("60%", [Quota(milli=500)], "You may hold 50% of a GPU at most; you asked for 60% of a GPU.", "50%."),
        # The smallest of all quotas counts, and not only the one that is told of.
        ("60%", [Quota(milli=500), Quota(memory_mib=8192)], "You may hold 50%", "Ask for at most 25%."),
        ("4", [Quota(milli=2000)], "You may hold 2 GPUs at most; you asked for 4 GPUs.", "2 whole GPUs."),
        ("4", [Quota(milli=1500)], "You may hold 1.5 GPUs at most", "Ask for at most one whole GPU."),
        ("2", [Quota(milli=500)], "You may hold 50% of a GPU at most; you asked for 2 GPUs.", "most 50%."),
        # Of what has a limit, the guarantee counts.
        (
            "60%..80%",
            [Quota(milli=500)],
            "You may hold 50% of a GPU at most; you asked for 60% of a GPU.",
            "Ask for at most 50%..80%.",
        ),
        (
            "20GiB..30GiB",
            [Quota(milli=500)],
            "You may hold 50% of a GPU at most; you asked for 20GiB, that is 62.5% of a GPU.",
            "Ask for at most 16GiB..30GiB.",
        ),
        ("2x50%", [Quota(milli=600)], "You may hold 60% of a GPU", "Ask for at most 2x30%."),
        # Less than a CUDA context needs.
        ("50%", [Quota(memory_mib=300)], "You may hold 300MiB at most", "No smaller slice would do. Ask"),
        ("50%", [Quota(slices=0)], "You may hold 0 slices at most; you asked for 1 slice.", "larger quota."),
        ("50%", [Quota(gpu_hours_per_week=0)], "You may use no GPU-hours this week.", "larger quota."),
    ],
)
def test_what_can_never_be_allowed_is_told_with_the_most_that_is(
    size: str, limits: list[Quota], message: str, remedy: str
) -> None:
    told = refusal(size, *limits)
    assert told[0].startswith(message)
    assert remedy in told[1]
    assert "given back" not in told[1]


def test_what_is_allowed_beside_what_is_held_is_told_in_the_terms_of_the_request() -> None:
    assert refusal("40%", Quota(memory_mib=16384), held="25%") == (
        "You hold 8GiB, and 16GiB is the most; you asked for 13107MiB more.",
        f"Allowed now: 8GiB; ask for at most 25%. {_LATER}",
    )
    assert refusal("40%", Quota(milli=500), held="25%")[1] == f"Allowed now: 25%. {_LATER}"
    # So little is left that no slice can be made of it.
    assert refusal("40%", Quota(milli=500), held="49.5%")[1] == f"Nothing more is allowed now. {_LATER}"


def test_a_change_of_size_counts_all_of_the_slice() -> None:
    assert refusal("60%", Quota(milli=500), before="40%")[0] == (
        "You may hold 50% of a GPU at most; you asked for 60% of a GPU."
    )
    assert refusal("40%", Quota(milli=500), before="10%", held="25%")[1] == f"Allowed now: 25%. {_LATER}"


@given(
    st.sampled_from(["60%", "1", "3", "2x50%", "20GiB", "2x9GiB"]),
    st.integers(1, 4000),
    st.integers(1, 131_072),
)
def test_the_most_that_is_advised_is_allowed_and_nothing_more(size: str, milli: int, memory_mib: int) -> None:
    request = parse_request(size)
    found = quotas.largest_within(request, GPU, RULES, milli, memory_mib)

    def is_allowed(each: SliceRequest) -> bool:
        part = placement.cut(each, GPU, RULES)
        return (
            placement.holds(part, RULES)
            and each.count * part.milli <= milli
            and each.count * part.memory_mib <= memory_mib
        )

    if found is None:
        least = {"milli": 11} if request.milli else {"memory_mib": RULES.context_mib or GPU.context_mib}
        count = 1 if request.whole_devices else request.count
        assert not is_allowed(replace(request, count=count, **least))
        return
    assert is_allowed(found)
    if found == request:
        return
    if found.whole_devices:
        assert not is_allowed(replace(found, count=found.count + 1))
    elif found.milli:
        assert not is_allowed(replace(found, milli=found.milli + 1)) or found.milli + 1 > (request.milli or 0)
    else:
        assert not is_allowed(replace(found, memory_mib=(found.memory_mib or 0) + 1))


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


def test_a_group_has_those_whom_it_names_with_capitals_by_the_names_that_a_hub_gives() -> None:
    group = Group("staff", frozenset({"Ada", "bob"}), priority=3, quota=SLICES)
    sharing = Sharing(groups=(group,))
    [scope] = quotas.scopes(sharing, "ada", None)
    assert scope.users == {"Ada", "ada", "bob"}
    assert [sharing.priority(user, None) for user in ("ada", "Ada", "bob", "Bob")] == [3, 3, 3, 0]
    assert not [*quotas.scopes(sharing, "Bob", None)]


def test_a_quota_of_each_user_counts_no_other_whose_name_differs_in_capitals() -> None:
    [scope] = quotas.scopes(Sharing(per_user=SLICES), "Ada", None)
    assert not scope.covers(Account("ada", "", 1, 0, 0))
    assert scope.covers(Account("Ada", "", 1, 0, 0))
