"""What differs at a real terminal: colours, the living line of a waiter, Ctrl-C and Ctrl-Z."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time

import pytest

from support.readable import is_readable
from support.terminal import GPU_POOL

#: Counts Ctrl-C until another signal comes: its exit status is 42 if there was exactly one.
ONE_INTERRUPT = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGUSR1])
print("ready", flush=True)
signal.sigwait([signal.SIGINT])
print("interrupted", flush=True)
signal.sigwait([signal.SIGUSR1])
sys.exit(43 if signal.SIGINT in signal.sigpending() else 42)
"""
CTRL_C, CTRL_D, CTRL_Z = b"\x03", b"\x04", b"\x1a"


class Screen:
    """A program at a terminal of its own, whose output is read as it comes."""

    def __init__(self, command, environment):
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, environment)
        self.text = ""

    def press(self, keys):
        os.write(self._fd, keys)

    def until(self, words, within=120):
        """Read until the words have appeared on the screen."""
        deadline = time.monotonic() + within
        while words not in self.text:
            assert time.monotonic() < deadline, f"{words!r} is not in {self.text!r}"
            if is_readable(self._fd, 0.1):
                self.text += os.read(self._fd, 4096).decode()

    def end(self):
        """Read to the end; return the exit status."""
        try:
            while data := os.read(self._fd, 4096):
                self.text += data.decode()
        except OSError:  # how Linux says that the other side is closed
            pass
        return os.waitstatus_to_exitcode(self._wait())

    def close(self):
        """End the program if it still runs."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self._wait()
        os.close(self._fd)

    def _wait(self):
        status = os.waitpid(self.pid, 0)[1]
        self.pid = 0
        return status


@pytest.fixture
def screen(terminal):
    opened = []

    def open_screen(*command, **environment):
        opened.append(Screen(command, {**terminal.environment, "TERM": "xterm", **environment}))
        return opened[-1]

    yield open_screen
    for each in opened:
        each.close()


def test_ctrl_c_reaches_the_command_once(terminal, screen):
    typed = screen(*GPU_POOL, "run", "2%", "--", sys.executable, "-c", ONE_INTERRUPT)
    typed.until("ready")
    typed.press(CTRL_C)
    typed.until("interrupted")
    os.kill(typed.pid, signal.SIGUSR1)
    assert typed.end() == 42
    assert terminal.is_empty()


def test_ctrl_z_stops_the_job_and_fg_goes_on(terminal, screen):
    typed = screen("bash", "--norc", "--noediting", "-i")
    typed.press(b'gpu-pool run -q 2% -- sh -c \'echo rea""dy; cat; echo do""ne\'\n')
    typed.until("ready")
    # Not before cat runs: a shell that is just forking it (by vfork) is not stopped while its child is.
    typed.press(b"first\n")
    typed.until("first\r\nfirst")
    typed.press(CTRL_Z)
    typed.until("Stopped")
    assert not terminal.is_empty()
    typed.press(b"fg && echo it was $?\n")
    typed.until("$?\r\ngpu-pool run")  # as bash tells what it continues
    typed.press(b"hello\n")
    typed.until("hello\r\nhello")
    typed.press(CTRL_D)
    typed.until("it was 0")
    typed.press(b"exit 0\n")
    assert typed.end() == 0
    assert terminal.is_empty()


def test_ctrl_c_gives_up_waiting(terminal, screen):
    terminal.hold("100%")
    typed = screen(*GPU_POOL, "run", "2%", "--", "true")
    typed.until("1st in the queue")
    typed.press(CTRL_C)
    assert typed.end() == 130
    assert "Traceback" not in typed.text
    assert not terminal.status().queue


def test_watching_shows_changes_and_ends_cleanly(terminal, screen):
    typed = screen(*GPU_POOL, "status", "--watch")
    typed.until("Nothing is held")
    terminal.hold("2%")
    typed.until("(simulated)")
    typed.press(CTRL_C)
    assert typed.end() == 0
    assert "Traceback" not in typed.text


def test_a_narrow_terminal_has_no_room_for_limits(terminal, screen):
    terminal.hold("2%")
    narrow, wide = (screen(*GPU_POOL, "status", COLUMNS=columns) for columns in ("80", "120"))
    assert (narrow.end(), wide.end()) == (0, 0)
    assert "Limits" not in narrow.text
    assert "none, none" in wide.text


@pytest.mark.long
def test_colours_follow_the_terminal(terminal, screen):
    coloured, plain = screen(*GPU_POOL, "health"), screen(*GPU_POOL, "health", NO_COLOR="1")
    assert (coloured.end(), plain.end()) == (0, 0)
    assert "\x1b[32mok" in coloured.text
    assert "\x1b[32m" not in plain.text
    assert "\x1b" not in terminal.run("health").stdout


def test_closing_the_terminal_gives_the_slice_back(terminal, screen):
    typed = screen("bash", "--norc", "-i")
    typed.press(b"gpu-pool request 2%\n")
    typed.until("You hold")
    assert not terminal.is_empty()
    os.kill(typed.pid, signal.SIGHUP)
    typed.end()
    assert terminal.is_empty()


def test_what_takes_long_says_in_one_line_how_far_it_has_come(terminal, screen):
    leases = [f'{{"requested_at": {1000 + n}, "held_seconds": 60, "request": "50%"}}\n' for n in range(500)]
    (terminal.folder / "history.jsonl").write_text("".join(leases))
    words = ["simulate", str(terminal.folder / "history.jsonl"), "--devices", "V100-SXM2-32GB:1"]
    code = f"from gpu_pool.cli import main, screen; screen._SILENT = 0.0; main({words})"
    typed = screen(sys.executable, "-c", code)
    typed.until("simulating fair, 1 of 4: ")
    assert typed.end() == 0
    assert "gpu-pool: simulating" not in typed.text
    assert "500 requests" in typed.text
