"""``gpu-pool run`` and the end of its lease: said, warned of, and the command's end, too."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gpu_pool.cli import following
from gpu_pool.cli.following import LeaseFollower
from gpu_pool.cli.session import CommandSession
from gpu_pool_client import EndReason, Lease, LeaseGone, LeaseState, PoolUnreachable, Terms
from support.mps_stub import lease as some_lease
from support.terminal import Terminal, eventually

RUNNING = "gpu-pool: running on 2% of V100-SXM2-32GB (simulated), 655MiB"
#: Its child in a session of its own, which no signal to a group of processes reaches, says its pid.
WITH_CHILDREN = 'setsid sh -c "echo \\$\\$; exec sleep 600" & wait'


def limit(terminal: Terminal, longest: str) -> None:
    folder = Path(terminal.environment["JUPYTER_CONFIG_DIR"])
    folder.mkdir(exist_ok=True)
    course = {"longest_lease": longest, "warn_before": "5min"}
    (folder / "gpu_pool_config.py").write_text(f"c.PoolSettings.default_course = {course}\n")


def start(terminal: Terminal, script: str, *options: str) -> tuple[subprocess.Popen[str], str]:
    """Start a script on a slice; return the program, and the first line that the script prints."""
    program = terminal.start("run", "2%", *options, "--", "sh", "-c", script)
    assert program.stdout is not None
    return program, program.stdout.readline().strip()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_command_ends_with_the_length_that_was_said(terminal: Terminal) -> None:
    program, _ = start(terminal, "echo; sleep 600", "--for", "3s")
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 124
    lines = errors.splitlines()
    assert lines[0] == f"{RUNNING}, for at most 3s"
    assert lines[1].endswith("and the command with it, because nothing longer was asked for")


@pytest.mark.parametrize(
    ("size", "length", "said"),
    [
        ("2% for 1h", "20min", "'2% for 1h' says for how long already."),
        ("2%", "0", "--for is not longer than zero"),
        ("2%", "soon", "'soon' is not a duration. Accepted: 90s, 15min"),
    ],
)
def test_a_length_that_is_none_is_refused(terminal: Terminal, size: str, length: str, said: str) -> None:
    program = terminal.start("run", size, "--for", length, "--", "true")
    _, errors = program.communicate(timeout=60)
    assert (program.returncode, said in errors) == (2, True), errors


def test_a_command_ends_with_its_longest_lease_and_with_all_that_it_started(terminal: Terminal) -> None:
    limit(terminal, "3s")
    program, child = start(terminal, WITH_CHILDREN)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 124
    lines = errors.splitlines()
    assert lines[0] == f"{RUNNING}, for at most 3s"
    assert lines[1].startswith("gpu-pool: the slice ends in ")
    assert "its course allows no longer lease" in lines[1]
    assert lines[2] == (
        "gpu-pool: the slice has ended: it was held for as long as its course allows. "
        "The command is being ended: SIGTERM now, SIGKILL in 10 s."
    )
    assert is_gone(int(child))
    assert terminal.is_empty()
    history = terminal.run("history", "--json").stdout
    assert json.loads(history)["reason"] == "longest-lease"


@pytest.mark.long
def test_what_ignores_sigterm_is_killed_after_the_grace_period(terminal: Terminal) -> None:
    limit(terminal, "1s")
    program, pid = start(terminal, "trap '' TERM; echo $$; while :; do sleep 1; done")
    assert program.wait(60) == 124
    assert is_gone(int(pid))


def test_a_slice_that_is_given_back_elsewhere_ends_its_command_and_json_says_so(terminal: Terminal) -> None:
    program, lease_id = start(
        terminal, "echo $GPU_POOL_LEASE; trap 'exit 0' TERM; while :; do sleep 0.1; done", "--json"
    )
    assert terminal.run("release", lease_id).returncode == 0
    _, errors = program.communicate(timeout=60)
    # The command has ended well, and yet before it was done.
    assert program.returncode == 124
    told = json.loads(errors.splitlines()[-1])
    assert (told["status"], told["lease_over"], told["lease"]["id"]) == (124, "released", lease_id)
    assert told["lease"]["state"] == "ended"


def test_a_command_that_ends_by_itself_has_its_own_status_in_json(terminal: Terminal) -> None:
    done = terminal.run("run", "2%", "--json", "--", "sh", "-c", "exit 7")
    told = json.loads(done.stderr.splitlines()[-1])
    assert (done.returncode, told["status"], told["lease_over"]) == (7, 7, None)
    assert told["lease"]["end_reason"] == "released"
    # What it held is told, though it holds nothing any more.
    assert [part["milli"] for part in told["lease"]["slices"]] == [20]


def test_signals_are_passed_on_while_the_lease_is_followed(terminal: Terminal) -> None:
    limit(terminal, "1h")
    program, _ = start(terminal, "trap 'exit 42' INT; echo; while :; do sleep 0.1; done")
    program.send_signal(signal.SIGINT)
    assert program.wait(60) == 42


def test_a_stopped_command_gets_its_sigterm_too(terminal: Terminal) -> None:
    program, pid = start(terminal, "echo $$; exec sleep 600")
    os.kill(int(pid), signal.SIGSTOP)
    eventually(lambda: psutil.Process(int(pid)).status() == psutil.STATUS_STOPPED)
    (lease,) = terminal.status().leases
    terminal.free(lease.id)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 124
    assert "it was given back" in errors


class Away:
    """A pool that answers what it is told to, one answer after the other."""

    def __init__(self, *answers: Lease | Exception) -> None:
        self._answers = [*answers]
        #: What happens to those who connect, one after the other, before it can be reached.
        self.unreachable: list[Exception] = []
        self.asked = 0

    async def __aenter__(self) -> Away:
        if self.unreachable:
            raise self.unreachable.pop()
        return self

    async def __aexit__(self, *failure: object) -> None:
        pass

    async def get_lease(self, lease_id: str) -> Lease:
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def follow(
    monkeypatch: pytest.MonkeyPatch, held: Lease, pool: Away, until: threading.Event | None = None
) -> LeaseFollower:
    """Follow a lease at that pool until its command is ended, or until the event."""
    monkeypatch.setattr(CommandSession, "connect", lambda _: pool)
    over = until or threading.Event()

    async def end() -> None:
        over.set()

    follower = LeaseFollower(CommandSession(), held, end, every=0.01)
    follower.start()
    assert over.wait(120)
    follower.finish()
    return follower


GONE = PoolUnreachable("No pool is served.")


def test_a_pool_that_is_away_for_a_while_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = replace(some_lease("a"), state=LeaseState.HELD)
    ended = replace(held, state=LeaseState.ENDED, end_reason=EndReason.REVOKED, notice="Ada needs it.")
    follower = follow(monkeypatch, held, Away(GONE, GONE, held, GONE, ended))
    assert follower.over == "revoked"
    away, again, over = capsys.readouterr().err.splitlines()
    assert (
        away
        == again
        == (
            "gpu-pool: cannot tell at the moment whether the slice is still held; the command goes on. "
            "No pool is served."
        )
    )
    assert "an administrator took it back. Ada needs it." in over


def test_the_longest_lease_ends_while_the_pool_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    held = replace(some_lease("a"), state=LeaseState.HELD, terms=Terms(ends_at=1.0))
    assert follow(monkeypatch, held, Away(GONE)).over == "longest-lease"


#: What any call may meet that opens a file, and what is a mistake of the program's.
MISHAPS = [OSError(errno.EMFILE, "Too many open files"), ValueError("mistaken")]


@pytest.mark.parametrize("mishap", MISHAPS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("where", ["connecting", "asking"])
def test_whatever_goes_wrong_the_lease_is_followed_to_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mishap: Exception, where: str
) -> None:
    held = replace(some_lease("a"), state=LeaseState.HELD)
    ended = replace(held, state=LeaseState.ENDED, end_reason=EndReason.REVOKED)
    pool = Away(mishap, mishap, ended) if where == "asking" else Away(ended)
    pool.unreachable = [mishap, mishap] if where == "connecting" else []
    assert follow(monkeypatch, held, pool).over == "revoked"
    away, over = capsys.readouterr().err.splitlines()
    assert away.endswith(
        f"whether the slice is still held; the command goes on. {type(mishap).__name__}: {mishap}"
    )
    assert "an administrator took it back" in over


@pytest.mark.parametrize("where", ["connecting", "asking"])
def test_the_longest_lease_ends_whatever_goes_wrong(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    held = replace(some_lease("a"), state=LeaseState.HELD, terms=Terms(ends_at=1.0))
    pool = Away(MISHAPS[0])
    pool.unreachable = [MISHAPS[0]] * 1_000 if where == "connecting" else []
    assert follow(monkeypatch, held, pool).over == "longest-lease"


def test_a_command_ends_with_its_lease_where_nobody_reads_what_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(following, "note", broken)
    held = replace(some_lease("a"), state=LeaseState.HELD, terms=Terms(ends_at=1.0))
    assert follow(monkeypatch, held, Away(GONE)).over == "longest-lease"


def test_a_command_that_cannot_be_ended_at_once_is_ended_later(monkeypatch: pytest.MonkeyPatch) -> None:
    held = replace(some_lease("a"), state=LeaseState.HELD, terms=Terms(ends_at=1.0))
    monkeypatch.setattr(CommandSession, "connect", lambda _: Away(GONE))
    tried, over = iter([MISHAPS[0], MISHAPS[0]]), threading.Event()

    async def end() -> None:
        with contextlib.suppress(StopIteration):
            raise next(tried)
        over.set()

    follower = LeaseFollower(CommandSession(), held, end, end_again_after=0.01)
    follower.start()
    assert over.wait(120)
    follower.finish()


@pytest.mark.parametrize("reason", ["expired", None])
def test_a_lease_that_the_pool_does_not_know_any_more_is_over(
    monkeypatch: pytest.MonkeyPatch, reason: str | None
) -> None:
    held = replace(some_lease("a"), state=LeaseState.HELD)
    follower = follow(monkeypatch, held, Away(LeaseGone("Gone.", reason=reason)))
    assert follower.over == (reason or "unknown")


def test_a_lease_that_ends_with_its_command_has_not_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held = replace(some_lease("a"), state=LeaseState.HELD)
    ended = replace(held, state=LeaseState.ENDED, end_reason=EndReason.PROCESS_GONE)
    pool, seen = Away(held, ended), threading.Event()
    seen.set()
    follower = follow(monkeypatch, held, pool, seen)
    assert follower.over is None


def test_what_the_watchdog_has_to_say_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = replace(some_lease("a"), state=LeaseState.HELD)
    warned = replace(held, notice="It uses 2GiB of 1GiB.")
    follow(monkeypatch, held, Away(held, warned, warned, LeaseGone("Gone.", reason="over-memory")))
    errors = capsys.readouterr().err
    assert errors.count("gpu-pool: It uses 2GiB of 1GiB.\n") == 1
    assert "more GPU memory than it was granted" in errors
