"""Who may use a course, when, and what they may ask for."""

from __future__ import annotations

import grp
import os
import pwd
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as some
from jupyterhub.auth import DummyAuthenticator

from gpu_pool.courses import CourseFile, check_offered, is_member, may_use, parse_course, system_groups
from gpu_pool_client import NotAllowed, parse_request

SLICES = "slices: [{name: Small, request: 2%}, {name: Big, request: 1.5GiB model=T4}]\n"
CLOSED = """
weeks: {from: 2026-10-12, to: 2026-12-18}
hours: [Mon 10:00-12:00, Wed 14:00-16:00]
time_zone: Asia/Tokyo
"""
#: A Monday, at five past eleven in Tokyo.
CLASS = datetime(2026, 10, 12, 2, 5, tzinfo=timezone.utc)
EVENING = datetime(2026, 10, 12, 10, 0, tzinfo=timezone.utc)


def course(more: str = "") -> CourseFile:
    return parse_course("cs101.yaml", ("title: The course\n" + SLICES + more).encode())


def test_without_names_everybody_is_in_it() -> None:
    may_use(course(), "anybody", (), CLASS)
    may_use(course("instructors: [grace]\n"), "anybody", (), CLASS)


@pytest.mark.parametrize(
    ("user", "groups", "is_in"),
    [
        ("ada", (), True),
        ("Ada", (), False),
        ("bob", ("cs101",), True),
        ("bob", ("other", "cs101"), True),
        ("bob", ("cs10",), False),
        ("cs101", (), False),
        ("bob", ("ada",), False),
        ("grace", (), True),
    ],
)
def test_with_names_only_they_are(user: str, groups: tuple[str, ...], is_in: bool) -> None:
    found = course("who: {users: [ada], groups: [cs101]}\ninstructors: [grace]\n")
    assert is_member(found, user, groups) == is_in
    if not is_in:
        with pytest.raises(NotAllowed, match="You are not in this course"):
            may_use(found, user, groups, CLASS)


@pytest.mark.parametrize(
    "typed", ["Ada.Lovelace@Uni.example", "UNI\\hopper", "Prof.Turing@Uni.example", "Grace"]
)
async def test_who_is_listed_with_a_capital_is_in_it_by_the_name_that_a_hub_gives(typed: str) -> None:
    hub = DummyAuthenticator(allow_all=True)
    given = await hub.get_authenticated_user(None, {"username": typed, "password": "x"})
    found = course(
        "who: {users: [Ada.Lovelace@Uni.example, 'UNI\\hopper', grace], groups: [CS101]}\n"
        "instructors: [Prof.Turing@Uni.example]\n"
    )
    assert given["name"] == typed.lower()
    assert is_member(found, given["name"], ())
    assert is_member(found, "mallory", ("CS101",))
    assert not is_member(found, "mallory", ("cs101",))  # groups keep their names on a Hub
    assert not is_member(found, "GRACE", ())


def test_an_instructor_with_a_capital_may_use_it_when_it_is_closed() -> None:
    may_use(course("who: {users: [ada]}\ninstructors: [Turing]\n" + CLOSED), "turing", (), EVENING)


def test_who_is_not_in_it_learns_nothing_of_it() -> None:
    with pytest.raises(NotAllowed) as raised:
        may_use(course("who: {users: [ada]}\n" + CLOSED), "bob", (), EVENING)
    assert "The course" not in str(raised.value)
    assert "ada" not in str(raised.value)


def test_without_a_hub_the_groups_are_the_systems() -> None:
    me = pwd.getpwuid(os.getuid())
    assert grp.getgrgid(me.pw_gid).gr_name in system_groups(me.pw_name)
    assert system_groups("nobody-of-that-name") == frozenset()


def test_when_it_is_closed_it_says_when_it_opens() -> None:
    may_use(course(CLOSED), "ada", (), CLASS)
    words = r"The course is not open now. It opens on Wed 2026-10-14 at 14:00 \(Asia/Tokyo\)."
    with pytest.raises(NotAllowed, match=words):
        may_use(course(CLOSED), "ada", (), EVENING)
    with pytest.raises(NotAllowed, match="The course is over"):
        may_use(course(CLOSED), "ada", (), datetime(2027, 1, 1, tzinfo=timezone.utc))


def test_instructors_may_come_at_any_time() -> None:
    may_use(course(CLOSED + "instructors: [grace]\n"), "grace", (), EVENING)


@pytest.mark.parametrize("text", ["2%", "0.02", "1536MiB model=T4", "2% for 20min"])
def test_what_is_offered_may_be_asked_for(text: str) -> None:
    check_offered(course(), parse_request(text))


@pytest.mark.parametrize("text", ["1%", "3%", "2x2%", "1", "1.5GiB", "1GiB model=T4", "2% index=0"])
def test_nothing_else_may(text: str) -> None:
    asked = parse_request(text).named
    words = rf"You asked for {asked}; The course offers 2% \(Small\), 1.5GiB model=T4 \(Big\)\. Ask for one"
    with pytest.raises(NotAllowed, match=words):
        check_offered(course(), parse_request(text))


@pytest.mark.parametrize(
    ("most", "text", "is_offered"),
    [
        ("25%", "25%", True),
        ("25%", "0.1%", True),
        ("25%", "26%", False),
        ("25%", "2x10%", False),
        ("25%", "10% model=V100", True),
        ("25%", "1MiB", False),
        ("2x25%", "2x25%", True),
        ("2x25%", "50%", False),
        ("2x25%", "10%", True),
        ("2", "2", True),
        ("2", "50%", True),
        ("2", "3", False),
        ("4GiB", "4GiB", True),
        ("4GiB", "4097MiB", False),
        ("4GiB", "1%", False),
        ("25% model=T4", "10% model=T4", True),
        ("25% model=T4", "10% model=V100", False),
        ("25% model=T4", "10%", False),
        ("25%", "1.5GiB model=T4", True),
        ("25%", "10% for 20min", True),
        ("25% for 1h", "10% for 1h", True),
        ("25% for 1h", "10% for 61min", False),
        ("25% for 1h", "10%", False),
        ("25%", "2%..25%", True),
        ("25%", "2%..26%", False),
        ("2%..25%", "1%..25%", True),
        ("2%..25%", "2%", True),
        ("2%..25%", "3%", False),
        ("2%..25%", "2%..26%", False),
        ("1", "2%..100%", True),
        ("1GiB..4GiB", "512MiB..4GiB", True),
        ("1GiB..4GiB", "512MiB..5GiB", False),
        ("1GiB..4GiB", "2%..10%", False),
    ],
)
def test_with_any_up_to_whatever_is_not_more(most: str, text: str, is_offered: bool) -> None:
    found = course(f"any_up_to: {most}\n")
    if is_offered:
        check_offered(found, parse_request(text))
    else:
        with pytest.raises(NotAllowed, match=f"and whatever is not more than {most}"):
            check_offered(found, parse_request(text))


def test_a_course_may_offer_a_slice_for_a_time() -> None:
    found = parse_course("ml.yaml", b"title: ML\nslices: [{name: Short, request: 50% for 1h}]\n")
    check_offered(found, parse_request("50% for 1h"))
    check_offered(found, parse_request("50% for 20min"))
    for more in ("50%", "50% for 2h", "60% for 1h"):
        with pytest.raises(NotAllowed, match=r"ML offers 50% for 1h \(Short\)"):
            check_offered(found, parse_request(more))


def test_a_slice_with_a_limit_may_be_had_with_less_of_one() -> None:
    found = parse_course("ml.yaml", b"title: ML\nslices: [{name: Elastic, request: 2%..10%}]\n")
    for text in ("2%..10%", "2%..5%", "2%"):
        check_offered(found, parse_request(text))
    for text in ("2%..11%", "1%..10%", "3%..10%", "1%", "10%"):
        with pytest.raises(NotAllowed, match=rf"You asked for {text}; ML offers 2%..10% \(Elastic\)"):
            check_offered(found, parse_request(text))


@given(some.integers(1, 1000), some.integers(1, 1000), some.integers(1, 4), some.integers(1, 4))
def test_what_is_allowed_never_exceeds_the_most(milli: int, most: int, count: int, most_count: int) -> None:
    found = course(
        f"any_up_to: {most_count}x{most / 10:.1f}%\n" if most < 1000 else f"any_up_to: {most_count}\n"
    )
    request = parse_request(f"{count}x{milli / 10:.1f}%" if milli < 1000 else str(count))
    try:
        check_offered(found, request)
    except NotAllowed:
        assert milli > most or count > most_count
    else:
        assert (milli <= most and count <= most_count) or request == found.requests[0]
