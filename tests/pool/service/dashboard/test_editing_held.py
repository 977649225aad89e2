"""What a change of each field of a course file does to what is held, and from when on it applies."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.courses import CourseFile
from gpu_pool_client import GpuPoolError, Lease, Terms, WhenIdle, parse_request
from support.course_editing import folder, send, site, text_of
from support.dashboard import ADMIN, PREFIX, Site

__all__ = ["folder", "site"]

DOCS = Path(__file__).parents[4] / "docs" / "reference" / "course-files.md"
#: Every field of a file, generously, and then as little as it can be.
GENEROUS = {
    "title": "Machine Learning",
    "who": "{users: [ada]}",
    "instructors": "[turing]",
    "slices": "[{name: Large, request: 40%}]",
    "any_up_to": "50%",
    "per_user": "{slices: 4}",
    "quota": "{share: 100%}",
    "weight": "5",
    "priority": "5",
    "batch": "false",
    "longest_lease": "8h",
    "idle_limit": "6h",
    "yield_after": "never",
    "when_idle": "keep",
    "warn_before": "10min",
    "keep_at_most": "4h",
    "hibernate_after": "4h",
    "preload": "[numpy]",
    "preload_with_server": "true",
    "weeks": "{from: 2020-01-01, to: 2199-12-31}",
    "hours": "Mon-Sun 00:00-24:00",
    "time_zone": "Europe/Berlin",
    "kubernetes": "{cpu: 4}",
    "slurm": "{time: 4h}",
}
STRICT = {
    "title": "Other",
    "who": "{users: [grace]}",
    "instructors": "[hopper]",
    "slices": "[{name: Small, request: 1%}]",
    "any_up_to": "1%",
    "per_user": "{slices: 0}",
    "quota": "{slices: 0}",
    "weight": "0",
    "priority": "-5",
    "batch": "true",
    "longest_lease": "1s",
    "idle_limit": "1s",
    "yield_after": "1s",
    "when_idle": "end",
    "warn_before": "1s",
    "keep_at_most": "1s",
    "hibernate_after": "1s",
    "preload": "[]",
    "preload_with_server": "false",
    "weeks": "{from: 2020-01-01, to: 2020-01-02}",
    "hours": "Mon 00:00-00:01",
    "time_zone": "Asia/Tokyo",
    "kubernetes": "{cpu: 1}",
    "slurm": "{time: 1min}",
}
#: The fields that are a slice's terms: they travel with it from when it is granted.
TERMS = (
    *("longest_lease", "idle_limit", "yield_after", "when_idle", "warn_before", "keep_at_most"),
    "hibernate_after",
)


def text(fields: dict[str, str]) -> str:
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


async def lease(site: Site, lease_id: str) -> Lease:
    status = await site.pool.status()
    found = next(each for each in (*status.leases, *status.queue) if each.id == lease_id)
    # The end is reckoned anew by every look.
    ends_at = found.terms.ends_at and round(found.terms.ends_at)
    return replace(found, terms=replace(found.terms, ends_at=ends_at), slices=tuple(found.slices))


def test_there_is_a_change_of_every_field() -> None:
    assert [*GENEROUS] == [*STRICT] == [*CourseFile.model_fields]


def test_the_reference_says_of_every_field_from_when_on_a_change_applies() -> None:
    rows = dict(re.findall(r"(?m)^\| `(\w+)` \|[^|]*\|[^|]*\| ([^|]+) \|$", DOCS.read_text()))
    assert {name: bool(rows.get(name, "").strip()) for name in GENEROUS} == dict.fromkeys(GENEROUS, True)
    assert {name for name, says in rows.items() if says == "slices granted from then on"} == {*TERMS}


@pytest.mark.parametrize("name", GENEROUS)
async def test_a_stricter_field_takes_nothing_from_what_is_held(site: Site, name: str) -> None:
    await send(site, text(GENEROUS), ADMIN)
    held = await site.take("40%", "ada", "ml")
    before = await lease(site, held)
    stricter = {**GENEROUS, name: STRICT[name]}
    answer = await send(site, text(stricter), ADMIN)
    page = text_of(await site.get(answer.headers["Location"].removeprefix(PREFIX), ADMIN))
    assert "Slices that are held keep the terms with which they were granted" in page
    after = await lease(site, held)
    assert replace(after, holder=before.holder) == before  # of the holder it is said whether it is batch work
    assert after.holder.user == "ada"


async def test_the_terms_are_those_of_the_grant_and_of_the_next_one_after_parking(site: Site) -> None:
    await send(site, text(GENEROUS), ADMIN)
    held = await site.take("40%", "ada", "ml")
    before = await lease(site, held)
    assert replace(before.terms, ends_at=None) == Terms(
        None, 21_600, WhenIdle.KEEP, 600, 14_400, yield_after=None, hibernate_after=14_400
    )
    strict = {**GENEROUS, **{name: STRICT[name] for name in TERMS}, "longest_lease": "1h"}
    await send(site, text(strict), ADMIN)
    later = await site.take("40%", "ada", "ml")
    new = Terms(None, 1, WhenIdle.END, 1, 1, yield_after=1, hibernate_after=1)
    assert replace((await lease(site, later)).terms, ends_at=None) == new
    assert (await lease(site, held)).terms == before.terms
    await site.pool.resize(held, parse_request("50%"))
    assert (await lease(site, held)).terms == before.terms
    await site.pool.park(held)
    assert replace((await lease(site, held)).terms, ends_at=None) == new
    await site.pool.resume(held)
    again = await lease(site, held)
    assert again.slices
    assert again.terms.ends_at is not None
    assert before.terms.ends_at is not None
    assert again.terms.ends_at < before.terms.ends_at - 3_600
    assert replace(again.terms, ends_at=None) == new


@pytest.mark.parametrize("name", ["who", "slices", "per_user", "quota", "weeks"])
async def test_what_is_asked_for_from_then_on_follows_the_new_text(site: Site, name: str) -> None:
    await send(site, text({**GENEROUS, "any_up_to": "1%"}), ADMIN)
    await site.pool.release(await site.take("40%", "ada", "ml"))
    await send(site, text({**GENEROUS, "any_up_to": "1%", name: STRICT[name]}), ADMIN)
    with pytest.raises(GpuPoolError):
        await site.take("40%", "ada", "ml")
