"""Small promises of the values and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import gpu_pool_client
from gpu_pool_client import (
    BadRequest,
    EndReason,
    GpuPoolError,
    Holder,
    Lease,
    LeaseState,
    PoolUnreachable,
    Process,
    Slice,
    Terms,
    WhenIdle,
    connect,
    parse_request,
)
from gpu_pool_client import _processes as processes
from gpu_pool_client import _procfs as procfs
from gpu_pool_client._errors import MAX_MESSAGE
from gpu_pool_client._leases import why_over
from gpu_pool_client._remote.bodies import LEASE
from support.pools import ENDS_ITS_FIRST_THREAD, device, identity, running


def test_every_error_has_its_own_code_and_exit_status() -> None:
    names = (getattr(gpu_pool_client, name) for name in gpu_pool_client.__all__)
    errors = [each for each in names if isinstance(each, type) and issubclass(each, GpuPoolError)]
    assert len(errors) == 8
    assert len({error.code for error in errors}) == len({error.exit_code for error in errors}) == 8


def test_an_error_is_its_message_and_its_remedy_and_never_endless() -> None:
    error = BadRequest("That is wrong.", "Do this.")
    assert str(error) == "That is wrong. Do this."
    assert len(str(PoolUnreachable("x" * 10**7))) == MAX_MESSAGE


def test_connect_names_the_urls_it_serves() -> None:
    with pytest.raises(BadRequest, match="Accepted here: embedded:"):
        connect("gopher://pool")


def test_a_process_is_recognised_exactly() -> None:
    me = Process.current()
    assert me.is_alive() is True
    assert replace(me, start=me.start + 1).is_alive() is False, "the pid was used again"
    assert replace(me, boot="another").is_alive() is False, "the machine was restarted"
    assert replace(me, namespace="pid:[1]").is_alive() is None, "not ours to judge"


def test_a_process_that_ended_is_dead_before_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen = Process.of(child.pid)
    assert seen is not None
    assert seen.is_alive()
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # now a zombie
    assert seen.is_alive() is False
    child.wait()
    assert Process.of(child.pid) is None


def test_a_process_lives_while_any_thread_of_it_does() -> None:
    with running(ENDS_ITS_FIRST_THREAD) as process:
        assert process.stdout is not None
        seen = identity(process)
        assert process.stdout.readline() == "alone\n"
        assert Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "Z"
        assert (seen.is_alive(), Process.of(process.pid)) == (True, seen)
    assert seen.is_alive() is False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")
def test_a_process_belongs_to_its_real_user() -> None:
    with running("import os, sys; os.seteuid(65534); print('done', flush=True); sys.stdin.read()") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        assert (Path(f"/proc/{process.pid}").stat().st_uid, processes.owner_of(process.pid)) == (65534, 0)
    assert processes.owner_of(process.pid) is None


@pytest.mark.parametrize("pid", [0, -1, 2**31 - 1])
def test_there_is_no_such_process(pid: int) -> None:
    assert Process.of(pid) is None


def test_a_process_that_is_hidden_from_us_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another user's is where /proc is mounted with hidepid."""

    def refuse(*_: object) -> None:
        raise PermissionError

    me = Process.current()
    monkeypatch.setattr(procfs, "open", refuse, raising=False)
    assert me.is_alive() is False
    assert Process.of(me.pid) is None


def test_every_reason_is_told_in_words() -> None:
    assert [each for each in EndReason if why_over(each.value) == each.value] == []
    assert why_over("a-newer-reason") == "a-newer-reason"


@pytest.mark.parametrize(
    ("state", "asked_back", "message"),
    [
        (LeaseState.HELD, None, "Exam."),
        (
            LeaseState.HELD,
            EndReason.REVOKED,
            "An administrator asks for this kernel's GPU slice: it goes back as",
        ),
        (
            LeaseState.HELD,
            EndReason.RELEASED,
            "You asked on the pool's page for this kernel's GPU slice: it goes",
        ),
        (
            LeaseState.PARKED,
            EndReason.REVOKED,
            "An administrator took this kernel's GPU slice back; its variables",
        ),
        (
            LeaseState.PARKED,
            EndReason.RELEASED,
            "You gave this kernel's GPU slice back on the pool's page; its",
        ),
    ],
)
def test_a_lease_says_who_asks_for_its_slices(
    state: LeaseState, asked_back: EndReason | None, message: str
) -> None:
    lease = Lease("1-a", "key", parse_request("2%"), Holder("ada"), state, 0.0, notice="Exam.")
    said = replace(lease, asked_back=asked_back).message
    assert said.startswith(message)
    assert "Exam." in said


@pytest.mark.parametrize("amounts", [(0, 0), (3276, 0), (3276, 1000)])
def test_a_lease_with_a_limit_travels_whole_and_one_of_an_older_service_is_read(
    amounts: tuple[int, int],
) -> None:
    text = "2%..10% for 20min" if any(amounts) else "2%"
    slices = (Slice(device(0), 20, 655, 0, *amounts),)
    lease = Lease("1-a", "key", parse_request(text), Holder("ada"), LeaseState.HELD, 0.0, slices=slices)
    sent = LEASE.dump_json(lease)
    assert LEASE.validate_json(sent) == lease
    plain = json.loads(sent)
    assert (plain["request"], plain["slices"][0]["limit_mib"]) == (text, amounts[0])
    for name in ("limit_mib", "burst_mib"):
        del plain["slices"][0][name]
    [part] = LEASE.validate_python(plain).slices
    assert (part.limit_mib, part.allowed_mib) == (0, 655)


@pytest.mark.parametrize(
    ("terms", "told"),
    [
        (Terms(), {}),
        (Terms(yield_after=60), {"YIELD_AFTER": "60"}),
        (Terms(idle_limit=900), {"IDLE_LIMIT": "900"}),
        (
            Terms(idle_limit=900, when_idle=WhenIdle.END, yield_after=60),
            {"IDLE_LIMIT": "900", "IDLE_ENDS_CUDA": "1", "YIELD_AFTER": "60"},
        ),
        (
            Terms(idle_limit=900, when_idle=WhenIdle.END, in_pod=True),
            {"IDLE_LIMIT": "900", "IDLE_ENDS": "1"},
        ),
        (Terms(idle_limit=900, in_pod=True), {}),
        (
            Terms(idle_limit=900, when_idle=WhenIdle.END, in_pod=True, parks_in_pod=True, yield_after=60),
            {"IDLE_LIMIT": "900", "IDLE_ENDS_CUDA": "1", "YIELD_AFTER": "60"},
        ),
        (Terms(idle_limit=900, in_pod=True, parks_in_pod=True), {"IDLE_LIMIT": "900"}),
    ],
)
def test_a_kernel_is_told_what_becomes_of_its_slice_while_it_is_idle(
    terms: Terms, told: dict[str, str]
) -> None:
    part = Slice(device(0), 20, 655)
    request, holder = parse_request("2%"), Holder("ada")
    lease = Lease("1-a", "key", request, holder, LeaseState.HELD, 0.0, slices=(part,), terms=terms)
    about = {
        name.removeprefix("GPU_POOL_"): value
        for name, value in lease.environment.items()
        if "_IDLE_" in name or "_YIELD_" in name
    }
    assert about == told
