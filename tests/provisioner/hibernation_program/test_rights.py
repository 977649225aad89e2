"""What rights a kernel and CRIU have, and in which processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable

import pytest

from support.hibernating import (
    COUNTS,
    CRIU,
    PYTHON,
    Installation,
    User,
    asleep,
    child_of,
    pids_in,
    said,
    started,
    status,
    until,
    why_no_users,
)

_WHY = why_no_users()
pytestmark = [pytest.mark.hibernation, pytest.mark.skipif(bool(_WHY), reason=f"no user can: {_WHY}")]


def test_a_kernel_has_no_right_of_roots_before_and_after(ada: User) -> None:
    """Neither by a program with the setuid bit, nor by what our processes have open or keep."""
    code = """
import os, subprocess, time
n = 0
while True:
    n += 1
    su = subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode
    seen = sorted(int(each) for each in os.listdir("/proc") if each.isdigit())
    try:
        first = len(os.listdir("/proc/1/fd"))
    except PermissionError:
        first = "refused"
    opens = [os.readlink(f"/proc/self/fd/{each}") for each in (0, 1, 2)]
    others = [each for each in os.listdir("/proc/self/fd") if int(each) > 3]
    with open("ready.new", "w") as file:
        print(n, su, first, len(others), *opens, seen[:3], file=file)
    os.rename("ready.new", "ready")
    time.sleep(0.01)
"""
    kernel = asleep(ada, code)
    before = (ada.home / "ready").read_text().split()
    again = ada.restore(kernel)
    assert again.answer["ok"], again.answer
    until(lambda: int((ada.home / "ready").read_text().split()[0]) > int(before[0]) + 1)
    for words in (before, (ada.home / "ready").read_text().split()):
        assert words[1:5] == ["1", "refused", "0", "/dev/null"]
        assert words[7:] == ["[1,", "2,", "3]"]
    inside, looked_at = pids_in(os.readlink(f"/proc/{again.pid}/ns/pid")), 0
    for each in inside:
        try:
            found = status(each)
        except (FileNotFoundError, ProcessLookupError):  # a sudo that has ended
            continue
        looked_at += 1
        assert set(found["Uid"].split()) == {str(ada.entry.pw_uid)}
        assert (found["NoNewPrivs"], int(found["CapPrm"], 16)) == ("1", 0)
    assert looked_at >= 3


def test_criu_has_the_users_rights_and_two_capabilities(ada: User, criu: Callable[[str], None]) -> None:
    criu(f'cat /proc/self/status > {ada.home}/"$1"')
    kernel = asleep(ada)
    assert ada.restore(kernel).answer["ok"]
    for verb in ("dump", "restore"):
        lines = (ada.home / verb).read_text().splitlines()
        found = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        assert set(found["Uid"].split()) == {str(ada.entry.pw_uid)}
        assert set(found["Groups"].split()) <= {str(each) for each in ada.identity["extra_groups"]}
        capabilities = {found[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
        assert capabilities == {f"{1 << 19 | 1 << 40:016x}"}
        assert found["NoNewPrivs"] == "1"


def test_a_number_that_is_a_process_of_the_users_by_now_has_nothing_of_theirs_run(
    ada: User, installation: Installation
) -> None:
    """It is alone in namespaces of the user's own making, with a file of theirs in CRIU's place."""
    kernel = ada.launch([PYTHON, "-c", COUNTS])
    said(ada)
    theirs = ada.home / "theirs"
    theirs.write_text(f"#!/bin/sh\ntouch {ada.home}/called\n")
    theirs.chmod(0o755)
    drops = "exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all --ambient-caps=-all sleep 600"
    mounts = f"mount --bind {theirs} {os.path.realpath(CRIU)} && touch {ada.home}/mounted && {drops}"
    words = ["unshare", "-Urmpf", "--kill-child", "sh", "-c", mounts]
    with subprocess.Popen(words, stderr=subprocess.PIPE, **ada.identity) as other:
        until(lambda: (ada.home / "mounted").exists() or other.poll() is not None)
        if other.poll() is not None:
            assert other.stderr is not None
            pytest.skip(f"users have no namespaces of their own here: {other.stderr.read().decode().strip()}")
        number = child_of(other.pid)
        until(lambda: status(number)["NoNewPrivs"] == "1")
        state = installation.asleep / kernel.id / "kernel.json"
        told = json.loads(state.read_text())
        told["run"].update(first=number, started=started(number))
        state.write_text(json.dumps(told))
        answer = ada.call("dump", kernel.id)
        other.kill()
    assert not (ada.home / "called").exists()
    assert answer.get("error") == "it is not in namespaces that this program has made"


def test_a_terminal_stops_no_call(ada: User) -> None:
    kernel = ada.launch(["sleep", "600"])
    for signum in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
        os.kill(child_of(kernel.process.pid), signum)
        os.kill(int(kernel.answer["first"]), signum)
    kernel.process.stdin.close()  # type: ignore[union-attr]
    assert kernel.process.wait(60) == 0
