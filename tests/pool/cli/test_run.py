"""``gpu-pool run``: a slice for as long as the command lives, however either of them ends."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from gpu_pool_client import EndReason, LeaseState
from support.terminal import eventually

#: Says its pid, and exits with 42 at the first of the signals named.
AWAITING = """
import os, signal, sys
awaited = [signal.Signals[name] for name in sys.argv[1:]]
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
print(os.getpid(), flush=True)
signal.sigwait(awaited)
sys.exit(42)
"""
#: Runs a command as ``gpu-pool run`` does, and sends itself a signal when the command awaits that, but the
#: program does not yet and has a thread that could take it.
TAKEN_ELSEWHERE = """
import os, signal, sys, threading
from pathlib import Path
from gpu_pool.cli.child import WaitingChild

name, awaits, file = sys.argv[1:]
signal.signal(signal.Signals[name], signal.SIG_DFL)  # whoever runs the tests may ignore it, as nohup does

def send():
    while not (os.path.exists(file) and Path(file).read_text().endswith("\\n")):
        pass
    os.kill(os.getpid(), signal.Signals[name])

with WaitingChild() as child:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    command = ["sh", "-c", 'exec "$@" > "$0"', file, sys.executable, "-c", awaits, name]
    status = child.supervise(command, os.environ, send)
sys.exit(status)
"""


def python(code, *words):
    return ("--", sys.executable, "-c", code, *words)


def start_awaiting(terminal, *signals):
    """Start a command on a slice; return the program and the command's pid."""
    program = terminal.start("run", "2%", *python(AWAITING, *signals))
    return program, int(program.stdout.readline())


def start_waiting(terminal, *options):
    """Start a run that has to wait; return the program, and the lease it waits behind."""
    held = terminal.hold("100%")
    program = terminal.start("run", "2%", *options, *python("print('ran')"))
    assert program.stderr.readline() == "gpu-pool: waiting for 2%: 1st in the queue\n"
    return program, held


def is_in(pid, *states):
    try:
        return psutil.Process(pid).status() in states
    except psutil.NoSuchProcess:
        return "gone" in states


@pytest.mark.parametrize("status", [0, 7])
def test_the_exit_status_is_the_commands_and_the_slice_is_back(terminal, status):
    done = terminal.run("run", "2%", "--", "sh", "-c", f"cat; exit {status}", given="in\n")
    assert (done.returncode, done.stdout) == (status, "in\n")
    assert done.stderr == "gpu-pool: running on 2% of V100-SXM2-32GB (simulated), 655MiB\n"
    assert terminal.is_empty()


def test_the_slice_is_given_back_and_not_only_found_abandoned(terminal):
    done = terminal.run("run", "-q", "2%", "--", "sh", "-c", "echo $GPU_POOL_LEASE")
    assert terminal.lease(done.stdout.strip()).end_reason is EndReason.RELEASED


def test_the_lease_hangs_on_the_command_which_knows_its_slice(terminal):
    show = "import os; print(os.environ['GPU_POOL_LEASE'], os.environ['GPU_POOL_MEMORY_MIB'], os.getpid())"
    program = terminal.start("run", "2%", "--quiet", *python(f"{show}; input()"))
    eventually(lambda: bool(terminal.status().leases))
    eventually(lambda: terminal.status().leases[0].process is not None)
    (lease,) = terminal.status().leases
    out, errors = program.communicate("\n", timeout=120)
    assert out.split() == [lease.id, "655", str(lease.process.pid)]
    assert (lease.holder.kernel, errors) == (f"run {Path(sys.executable).name}", "")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
def test_signals_are_passed_on(terminal, name):
    program, _ = start_awaiting(terminal, name)
    program.send_signal(signal.Signals[name])
    assert program.wait(60) == 42
    assert terminal.is_empty()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1"])
def test_a_signal_that_another_thread_takes_is_passed_on_and_ends_nothing(terminal, tmp_path, name):
    words = (sys.executable, "-c", TAKEN_ELSEWHERE, name, AWAITING, str(tmp_path / "awaits"))
    done = terminal.call(*words)
    assert (done.returncode, done.stderr) == (42, "")


def test_a_command_ended_by_a_signal_is_told_as_shells_do(terminal):
    program, pid = start_awaiting(terminal, "SIGTERM")
    os.kill(pid, signal.SIGKILL)
    assert program.wait(60) == 128 + signal.SIGKILL
    assert terminal.is_empty()


def test_a_command_has_the_signals_of_any_other_command(terminal):
    ask = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    mask = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    assert terminal.run("run", "2%", *python(f"{ask}; {mask}")).stdout == "True\n[]\n"
    # yes(1) is ended by SIGPIPE, which Python ignores and would pass down.
    quietly = terminal.call("bash", "-c", "gpu-pool run -q 2% -- yes | head -n 1; echo ${PIPESTATUS[0]}")
    assert (quietly.stdout, quietly.stderr) == (f"y\n{128 + signal.SIGPIPE}\n", "")


def test_kill_9_of_run_ends_the_command_and_gives_the_slice_back(terminal):
    program, pid = start_awaiting(terminal, "SIGTERM")
    program.kill()
    eventually(lambda: is_in(pid, "gone", psutil.STATUS_ZOMBIE))
    assert terminal.is_empty()


def test_a_command_that_ignores_sigterm_keeps_its_slice_when_run_is_killed(terminal):
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); input()"
    program = terminal.start("run", "2%", *python(ignore))
    program.stdout.readline()
    program.kill()
    program.wait(60)
    assert [lease.state for lease in terminal.status().leases] == [LeaseState.HELD]
    program.communicate("\n", timeout=120)
    eventually(terminal.is_empty)


def test_stopping_and_continuing_takes_the_command_along(terminal):
    program, pid = start_awaiting(terminal, "SIGTERM")
    program.send_signal(signal.SIGTSTP)
    eventually(lambda: is_in(program.pid, psutil.STATUS_STOPPED) and is_in(pid, psutil.STATUS_STOPPED))
    assert not terminal.is_empty()
    program.send_signal(signal.SIGCONT)
    eventually(lambda: is_in(pid, psutil.STATUS_SLEEPING))
    program.terminate()
    assert program.wait(60) == 42


def test_run_waits_in_line_and_then_runs(terminal):
    program, held = start_waiting(terminal)
    terminal.free(held)
    out, errors = program.communicate(timeout=120)
    assert (program.returncode, out) == (0, "ran\n")
    assert errors.startswith("gpu-pool: got 2% of V100-SXM2-32GB (simulated), 655MiB after ")
    assert terminal.is_empty()


@pytest.mark.parametrize("how", [("--batch",), ()], ids=["option", "variable"])
def test_batch_work_is_listed_as_such(terminal, how):
    held = terminal.hold("100%")
    environment = {} if how else {"GPU_POOL_BATCH": "1"}
    program = terminal.start("run", "2%", *how, "--", "true", environment=environment)
    eventually(lambda: terminal.status().queue)
    assert [each.holder.batch for each in terminal.status().queue] == [True]
    assert " (batch) " in terminal.run("status").stdout
    assert [each["batch"] for each in json.loads(terminal.run("status", "--json").stdout)["queue"]] == [True]
    terminal.free(held)
    assert program.wait(60) == 0


def test_no_wait_refuses_and_says_what_there_is(terminal):
    terminal.hold("99%")
    done = terminal.run("run", "2%", "--no-wait", *python("print('ran')"))
    assert (done.returncode, done.stdout) == (6, "")
    assert "Traceback" not in done.stderr
    assert not terminal.status().queue


def test_the_timeout_ends_the_wait_and_withdraws_the_request(terminal):
    terminal.hold("100%")
    for time in ("0.2", "0.2s"):
        done = terminal.run("run", "2%", "--timeout", time, *python("print('ran')"))
        assert (done.returncode, done.stdout) == (6, "")
        assert not terminal.status().queue


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_waiting_withdraws_the_request(terminal, signum):
    program, _ = start_waiting(terminal)
    program.send_signal(signum)
    out, errors = program.communicate(timeout=120)
    assert (program.returncode, out, errors) == (128 + signum, "", "")
    assert not terminal.status().queue


def test_a_signal_while_waiting_is_told_to_programs(terminal):
    program, _ = start_waiting(terminal, "--json")
    program.send_signal(signal.SIGINT)
    out, errors = program.communicate(timeout=120)
    assert (program.returncode, out) == (130, "")
    told = json.loads(errors.splitlines()[-1])["error"]
    assert (told["code"], told["message"]) == ("interrupted", "Interrupted before it was done.")


def test_kill_9_while_waiting_leaves_nobody_in_line(terminal):
    program, _ = start_waiting(terminal)
    (child,) = psutil.Process(program.pid).children()
    program.kill()
    eventually(lambda: is_in(child.pid, "gone", psutil.STATUS_ZOMBIE))
    program.wait(60)
    assert not terminal.status().queue


def test_what_can_never_fit_is_refused_at_once(terminal):
    done = terminal.run("run", "2", "--", "true")
    assert done.returncode == 3
    assert done.stderr.startswith("gpu-pool: ")


def test_a_missing_command_is_refused_before_anything_is_taken(terminal):
    terminal.hold("100%")
    done = terminal.run("run", "2%", "--", "no-such-command")
    assert done.returncode == 127
    assert "no-such-command" in done.stderr


@pytest.mark.parametrize("verb", [("run", "2%", "--"), ("exec", "--")])
@pytest.mark.parametrize(
    ("program", "status", "words"),
    [
        ("plain", 126, "is not executable.\nIf it is a program: chmod +x "),
        ("./plain", 126, "is not executable.\nIf it is a program: chmod +x "),
        ("./folder", 126, "is a folder."),
        ("folder", 127, "command not found."),
        ("./dangling", 127, "is a broken link."),
        ("", 127, "command not found."),
    ],
)
def test_what_cannot_be_executed_is_told_from_what_is_not_there(terminal, verb, program, status, words):
    terminal.hold("100%")
    here = terminal.folder
    (here / "plain").write_text("echo ran\n")
    (here / "folder").mkdir()
    (here / "dangling").symlink_to(here / "nowhere")
    path = os.pathsep.join([str(here), terminal.environment["PATH"]])
    done = terminal.run(*verb, program, cwd=here, env={"PATH": path})
    assert (done.returncode, done.stdout) == (status, "")
    assert words in done.stderr
    assert not terminal.status().queue


def test_a_script_without_its_interpreter_is_not_called_missing(terminal):
    script = terminal.folder / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o700)
    done = terminal.run("run", "2%", "-q", "--", str(script))
    assert done.returncode == 127
    assert done.stderr == (
        f"gpu-pool: {script} cannot be run: its interpreter does not exist. See its first line.\n"
    )
    assert terminal.is_empty()


def test_a_command_that_cannot_be_executed_gives_the_slice_back(terminal):
    program = terminal.folder / "broken"
    program.write_bytes(b"\x7fELF, but not really")
    program.chmod(0o700)
    done = terminal.run("run", "2%", "--", str(program))
    assert done.returncode == 126
    assert done.stderr.endswith(f"gpu-pool: {program} cannot be run: Exec format error.\n")
    assert terminal.is_empty()


def test_an_option_of_the_command_is_not_taken_for_ours(terminal):
    assert terminal.run("run", "2%", "--", "echo", "--json", "--", "-q").stdout == "--json -- -q\n"
    forgotten = terminal.run("run", "2%", "echo", "--json")
    assert forgotten.returncode == 2
    assert "Write -- before the command." in forgotten.stderr


def test_while_a_command_runs_its_program_keeps_the_pool_in_order(terminal):
    program, command = start_awaiting(terminal, "SIGTERM")
    other, its_command = start_awaiting(terminal, "SIGTERM")
    for pid in (other.pid, its_command):
        os.kill(pid, signal.SIGKILL)
    other.wait()

    def has_ended_it():
        ended = map(json.loads, terminal.run("history", "--json").stdout.splitlines())
        return [each["reason"] for each in ended] == [EndReason.PROCESS_GONE.value]

    eventually(has_ended_it)
    os.kill(command, signal.SIGTERM)
    assert program.wait() == 42
