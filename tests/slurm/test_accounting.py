"""What Slurm's accounting says of kernels' jobs, and what its limits do to them."""

from __future__ import annotations

import getpass
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from support.frontend import Cell, Frontend
from support.jupyter_env import eventually
from support.slurm import Slurm
from support.slurm_accounting import limited, without_account
from support.slurm_sites import Site, slurm_site

_SIZES = ("40%", "39.5%", "20%", "1")
_COURSE = f"title: T\nslices: [{', '.join(f'{{name: S{size}, request: {size}}}' for size in _SIZES)}]\n"
#: Slurm counts whole seconds, and cuts off what is beyond them: of the beginning, and of the end.
_SECOND = 1.0
#: Seconds for which each kernel is used, and one waits, at least.
_USED, _WAITED = 4.0, 3.0


@pytest.fixture
async def site(accounted: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    found = slurm_site(accounted, tmp_path, monkeypatch)
    yield found
    await found.env.close()


@dataclass(frozen=True)
class Accounted:
    """One job as sacct has it. Times are Unix seconds."""

    id: str
    name: str
    course: str
    begins: float
    ends: float
    seconds: int
    resources: Mapping[str, int]

    @property
    def share(self) -> float:
        """Its part of a GPU: each has 100 shards."""
        return self.resources.get("gres/gpu", 0) or self.resources.get("gres/shard", 0) / 100


async def _accounted(slurm: Slurm) -> dict[str, Accounted]:
    """Return the jobs of courses, by these, once the accounting has heard of the end of all."""
    shown = ""

    async def have_ended() -> bool:
        nonlocal shown
        fields = "JobIDRaw,JobName,Comment,Start,End,ElapsedRaw,AllocTRES"
        shown = slurm.run(
            "sacct",
            "--noheader",
            "--parsable2",
            "--allocations",
            "--starttime=now-1days",
            f"--format={fields}",
        )
        return "Unknown" not in shown

    await eventually(have_ended)
    found = {}
    for line in shown.splitlines():
        number, name, course, begins, ends, seconds, resources = line.split("|")
        if course:
            counts = dict(each.split("=") for each in resources.split(","))
            begun, ended = (datetime.fromisoformat(each).timestamp() for each in (begins, ends))
            of_gpus = {each: int(count) for each, count in counts.items() if each.startswith("gres/")}
            found[course] = Accounted(number, name, course, begun, ended, int(seconds), of_gpus)
    return found


async def _use(page: Frontend) -> tuple[float, float]:
    """Use a kernel; return from when to when it was there for certain."""
    await page.run("1").done()
    begun = time.time()
    await page.run(f"import time; time.sleep({_USED})").done()
    return begun, time.time()


async def test_gpu_hours_by_course_agree_with_sacct(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for course in ("parts", "whole"):
        site.course(course, _COURSE)
    taken = site.slurm.submit("sleep 600", "--gres=gpu:t4:1")
    site.slurm.until(taken, "RUNNING")
    used = {}
    async with site.kernel("whole", "1") as page:
        await page.run("1").shows("Waiting for a whole GPU.")
        enough = time.time() + _WAITED
        await eventually(lambda: time.time() > enough)
        site.slurm.run("scancel", taken)
        used["whole"] = await _use(page)
    async with site.kernel("parts", "39.5%") as page:
        used["parts"] = await _use(page)
    theirs = await _accounted(site.slurm)
    lines = json.loads(site.command("report", "--by", "course", "--json"))["rows"]
    ours = {line["course"]: line["gpu_hours"] * 3600 for line in lines}
    history = [json.loads(line) for line in site.command("history", "--json").splitlines()]
    table = site.command("history")
    assert all(f"Slurm job {job.id}" in table for job in theirs.values())
    assert ours.keys() == theirs.keys() == used.keys()
    assert (theirs["whole"].share, theirs["parts"].share) == (1, 0.4)  # in whole shards
    for course, (begun, until) in used.items():
        job = theirs[course]
        [lease] = [each for each in history if each["course"] == course]
        assert job.name.endswith(lease["id"])  # how both are put together
        assert lease["job"] == f"Slurm job {job.id}"
        assert lease["held_at"] >= job.begins  # what it waits in Slurm's queue is not counted
        # Slurm's begin as the node is prepared, and end with the job's last process; ours are of the kernel.
        # So both are at least what was used for certain, and at most what is from the first to the last.
        most = job.share * (max(job.ends + _SECOND, lease["ended_at"]) - job.begins)
        assert job.share * (until - begun) <= ours[course] <= most
        assert job.share * (until - begun - _SECOND) <= job.share * job.seconds <= most
    [waited] = [each for each in history if each["course"] == "whole"]
    assert waited["requested_at"] + _WAITED <= waited["held_at"]


async def test_what_a_qos_allows_a_user_is_told_in_the_cell_that_waits(site: Site) -> None:
    site.configure(qos="one-gpu")
    taken = site.slurm.submit("sleep 600", "--qos=one-gpu", "--gres=gpu:v100:1")
    site.slurm.until(taken, "RUNNING")
    site.course("dl", _COURSE)
    async with site.kernel("dl", "1") as page:  # one of the type t4 is free
        cell = page.run("print(6 * 7)")
        await cell.shows("You use as many GPUs as its QOS allows a user.")
        site.slurm.run("scancel", taken)
        await cell.done()
        assert cell.outputs[-1] == "42\n"


async def test_a_qos_limits_shards_as_well(site: Site) -> None:
    site.configure(qos="one-gpu")
    taken = site.slurm.submit("sleep 600", "--qos=one-gpu", "--gres=shard:v100:40")
    site.slurm.until(taken, "RUNNING")
    site.course("dl", _COURSE)
    async with site.kernel("dl", "20%") as page:
        await page.run("1").shows("You use as many GPUs as its QOS allows a user.")


async def test_a_job_too_many_is_refused_in_slurms_words(site: Site) -> None:
    site.configure(qos="one-gpu")
    for _ in range(2):
        site.slurm.submit("sleep 600", "--qos=one-gpu", "--gres=gpu:t4:1")
    site.course("dl", _COURSE)
    async with site.kernel("dl") as page:
        shown = await _refused(page.run("1"))
    assert "sbatch: error: QOSMaxSubmitJobPerUserLimit" in shown
    assert "Job violates accounting/QOS policy" in shown


async def test_a_user_without_an_account_is_refused_in_slurms_words(site: Site) -> None:
    site.course("dl", _COURSE)
    with without_account(site.slurm):
        async with site.kernel("dl") as page:
            assert "Invalid account or account/partition combination specified" in await _refused(
                page.run("1")
            )


async def test_an_account_that_is_not_the_users_is_refused_in_slurms_words(site: Site) -> None:
    site.course("dl", f"{_COURSE}slurm: {{account: physics}}\n")
    async with site.kernel("dl") as page:
        shown = await _refused(page.run("1"))
    assert "Invalid account or account/partition combination specified" in shown
    assert site.slurm.run("squeue", "--noheader") == ""


async def _refused(cell: Cell) -> str:
    await cell.done()
    shown = " ".join("".join(cell.outputs).split())
    assert "Slurm refuses the kernel's job: sbatch: error:" in shown
    return shown


async def test_who_cancelled_a_job_is_said(site: Site) -> None:
    site.configure()
    site.course("dl", _COURSE)
    async with site.kernel("dl") as page:
        await page.run("1").done()
        job = site.only_job()["JobId"]
        site.slurm.run("scancel", job)
        await eventually(site.env.is_empty)
        await page.run("1").shows(f"Slurm job {job} was cancelled by {getpass.getuser()}.")


def test_the_doctor_says_which_courses_are_beyond_what_slurm_allows(site: Site) -> None:
    sizes = "slices: [{name: One, request: 1}, {name: Two, request: 2}, {name: Most, request: 60%}]"
    site.course("fits", f"title: T\n{sizes}\nslurm: {{time: 20min}}\n")
    site.course("qos", f"title: T\n{sizes}\nslurm: {{qos: one-gpu}}\n")
    site.course(
        "long", f"title: T\n{sizes.replace(', {name: Two, request: 2}', '')}\nslurm: {{time: 50min}}\n"
    )
    site.course("physics", f"title: T\n{sizes}\nslurm: {{account: physics}}\n")
    site.course("high", f"title: T\n{sizes}\nslurm: {{qos: high}}\n")
    with limited(site.slurm, maxwall="00:30:00"):
        checks = json.loads(site.command("doctor", "--json"))["checks"]
    never = "its jobs are refused, or wait for ever"
    assert [each["text"] for each in checks if each["name"] == "slurm limits"] == [
        "course high uses the QOS high, which the account teaching does not give you: its jobs are refused",
        "course long offers One, which has a time limit of 50min, and the account teaching allows 30min "
        f"(MaxWall): {never}",
        "course long offers Most, which has a time limit of 50min, and the account teaching allows 30min "
        f"(MaxWall): {never}",
        "course physics uses the account physics, in which you are not: its jobs are refused",
        "course qos offers Two, which needs gres/gpu=2, and the QOS one-gpu allows 1 (MaxTRESPerUser): "
        f"{never}",
        "course qos offers Most, which needs gres/shard=60, and the QOS one-gpu allows 50 (MaxTRESPerUser): "
        f"{never}",
    ]
