"""``request``, ``exec``, ``shell``, ``release``: a slice for the shell one works in."""

from __future__ import annotations

import json
import re
import signal

import pytest

from support.terminal import eventually

BASH = ("bash", "-c")


def test_a_shell_takes_uses_and_returns_a_slice(terminal):
    script = """
        set -e
        gpu-pool request 2%
        gpu-pool exec -- sh -c 'echo used $GPU_POOL_MEMORY_MIB MiB'
        gpu-pool smi
        gpu-pool release
        gpu-pool status
    """
    done = terminal.call(*BASH, script)
    assert (done.returncode, done.stderr) == (0, "")
    assert "You hold 2% of V100-SXM2-32GB (simulated), 655MiB" in done.stdout
    assert "used 655 MiB" in done.stdout
    assert "Slice:         2% of V100-SXM2-32GB (simulated), 655MiB" in done.stdout
    assert done.stdout.endswith("Nothing is held, and nobody waits.\n")


def test_a_length_that_is_said_is_shown_and_is_the_lease_s_end(terminal):
    done = terminal.call(*BASH, "gpu-pool request '2% for 20min' && gpu-pool smi && gpu-pool status --json")
    assert done.stderr == ""
    shown, _, status = done.stdout.partition("{")
    assert "You hold 2% of V100-SXM2-32GB (simulated), 655MiB, for at most 20min" in shown
    assert re.search(r"Ends in: +(20min|19min\d+s): nothing longer was asked for\n", shown)
    (lease,) = json.loads("{" + status)["leases"]
    assert lease["request"] == "2% for 20min"
    assert lease["ends_at"] - lease["held_at"] == pytest.approx(1200, abs=1)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_the_slice_is_back_when_the_shell_is_killed(terminal, signum):
    shell = terminal.start("gpu-pool request 2% && read line", program=BASH)
    assert "You hold" in shell.stdout.readline()
    (lease,) = terminal.status().leases
    assert lease.process.pid == shell.pid
    shell.send_signal(signum)
    eventually(terminal.is_empty)


def test_a_shell_on_the_slice_runs_what_is_typed(terminal):
    typed = "echo $GPU_POOL_SLICE; gpu-pool smi --json\n"
    done = terminal.call(
        *BASH, "gpu-pool request 2% >/dev/null && gpu-pool shell", input=typed, env={"SHELL": "/bin/sh"}
    )
    size, _, printed = done.stdout.partition("\n")
    assert (done.returncode, size) == (0, "2%")
    assert json.loads(printed)["leases"][0]["request"] == "2%"
    assert "a shell on 2% of V100-SXM2-32GB (simulated)" in done.stderr


def test_exec_ends_as_its_command_does(terminal):
    done = terminal.call(*BASH, "gpu-pool request 2% >/dev/null; gpu-pool exec -- sh -c 'exit 5'")
    assert done.returncode == 5


@pytest.mark.parametrize("words", [("exec", "--", "true"), ("shell",), ("smi",), ("release",)])
def test_without_a_slice_it_is_said_how_to_take_one(terminal, words):
    terminal.hold("2%")  # another's
    done = terminal.run(*words)
    assert done.returncode == 8
    assert "gpu-pool request 2%" in done.stderr


def test_a_pipe_needs_to_know_the_shell_that_keeps_the_slice(terminal):
    script = "id=$(gpu-pool request 2% --keeper $$ --json | cat) && gpu-pool exec -- true && echo $id"
    done = terminal.call(*BASH, script)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["state"] == "held"


def test_a_keeper_that_is_gone_is_refused(terminal):
    gone = terminal.start("", program=BASH)
    gone.wait(60)
    done = terminal.run("request", "2%", "--keeper", str(gone.pid))
    assert done.returncode == 2
    assert "has ended" in done.stderr
    assert terminal.is_empty()


@pytest.mark.long
def test_of_several_slices_one_has_to_be_named(terminal):
    script = """
        gpu-pool request 2% >/dev/null
        id=$(gpu-pool request 4% --keeper $$ --json | sed -n 's/^  "id": "\\(.*\\)",/\\1/p')
        gpu-pool exec -- true; echo $?
        gpu-pool exec --lease "$id" -- sh -c 'echo $GPU_POOL_SLICE'
        gpu-pool release
    """
    done = terminal.call(*BASH, script)
    assert done.stdout.splitlines()[:2] == ["2", "4%"]
    assert "--lease" in done.stderr
    assert terminal.is_empty()


def test_a_named_lease_is_released_and_releasing_again_does_no_harm(terminal):
    lease_id = terminal.hold("2%")
    assert terminal.run("release", lease_id).returncode == 0
    assert terminal.is_empty()
    again = terminal.run("release", lease_id)
    assert (again.returncode, again.stdout) == (0, "You hold no slice.\n")


def test_a_lease_that_never_was_cannot_be_released(terminal):
    done = terminal.run("release", "no-such-lease")
    assert done.returncode == 8
    assert "There is no lease 'no-such-lease' in this pool.\ngpu-pool status lists the leases" in done.stderr


def test_all_of_mine_are_released_at_once_and_nobody_elses(terminal):
    other = terminal.hold("50%")
    script = (
        "gpu-pool request 2% >/dev/null; gpu-pool request 4% >/dev/null; gpu-pool release --all-mine --json"
    )
    done = terminal.call(*BASH, script)
    assert len(json.loads(done.stdout)["released"]) == 2
    assert [lease.id for lease in terminal.status().leases] == [other]


def test_a_running_command_is_not_robbed_of_its_slice_by_accident(terminal):
    done = terminal.run("run", "2%", "--", "gpu-pool", "release")
    assert done.returncode == 8
    assert "belongs to this kernel or command" in done.stderr
