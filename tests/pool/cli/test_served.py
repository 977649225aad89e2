"""The verbs of a service's clients: what they may say of a pool of which they see their own part."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.devices.sampling import FIRST_NAMESPACE
from gpu_pool_client._processes import pid_namespace
from support import nvml_stub
from support.pools import running
from support.terminal import Terminal, eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")

NOBODY, NAMELESS = 65534, 64_999
#: A course of the one, which the other teaches.
COURSE = """
title: Machine learning
who: {{users: [uid-{student}]}}
instructors: [{instructor}]
slices: [{{name: Small, request: 2%}}]
"""
SCENARIO = "driver 550.54.14\ngpu GPU-0 Tesla V100-SXM2-32GB\nmemory 32768 258\n"
#: Another user may be unable to read what is imported later.
_AS_USER = """
import ctypes, os, sys
import gpu_pool.enforcement.watchdog, gpu_pool_client._remote.client
import gpu_pool_kernels.installer
import gpu_pool.enforcement.mps.classic, gpu_pool.enforcement.mps.programs
from gpu_pool.cli import main
from gpu_pool.cli.app import cli, subcommands
from gpu_pool.devices import discover
if "LD_LIBRARY_PATH" in os.environ:
    ctypes.CDLL("libnvidia-ml.so.1")
discover()
subcommands(cli)
os.setgroups([])
os.setgid({uid})
os.setuid({uid})
sys.exit(main({words!r}))
"""


@dataclass
class Served:
    """A service for every user of the machine, and the programs of those users."""

    terminal: Terminal
    folder: Path

    def nvml(self, scenario: str) -> dict[str, str]:
        """Let the driver say this; return the variables by which programs find it."""
        told = self.folder / "scenario.txt"
        draft = told.with_suffix(".draft")
        draft.write_text(scenario)
        draft.replace(told)
        if not (self.folder / "libnvidia-ml.so.1").exists():
            nvml_stub.build(self.folder)
        stub = {"LD_LIBRARY_PATH": f"{self.folder}", "NVML_STUB_SCENARIO": f"{told}"}
        return {"GPU_POOL_DEVICES": "", **stub}

    def start(self, **environment: str) -> None:
        socket = self.folder / "pool.sock"
        self.terminal.environment.update(environment, GPU_POOL_URL=f"unix:{socket}")
        store = f"--store={self.folder}/store.db"
        service = self.terminal.start("serve", f"--socket={socket}", "--mode=0666", store)
        eventually(lambda: socket.is_socket() or service.poll() is not None)
        assert service.poll() is None, service.communicate()

    def run(self, uid: int, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run ``gpu-pool WORDS`` as a user."""
        code = _AS_USER.format(uid=uid, words=[*words])
        return self.terminal.call(sys.executable, "-c", code, env={"HOME": str(self.folder), **environment})

    def take(self, uid: int, **environment: str) -> str:
        """Take a slice as a user; return the lease's id."""
        keeper = subprocess.Popen(["sleep", "600"], user=uid, group=uid, extra_groups=[], text=True)
        self.terminal.started.append(keeper)
        done = self.run(uid, "request", "2%", "--keeper", f"{keeper.pid}", "--json", **environment)
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["id"])

    def checks(self, uid: int, name: str, **environment: str) -> tuple[int, list[dict[str, Any]]]:
        """Return the doctor's exit status, and its checks of that name."""
        done = self.run(uid, "doctor", "--json", **environment)
        assert done.stderr == ""
        return done.returncode, [each for each in json.loads(done.stdout)["checks"] if each["name"] == name]


@pytest.fixture
def served(terminal: Terminal) -> Iterator[Served]:
    # Other users cannot come through the folders of pytest.
    folder = Path(tempfile.mkdtemp(prefix="gpu-pool-test-"))
    folder.chmod(0o755)
    yield Served(terminal, folder)
    shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.skipif(
    pid_namespace() != FIRST_NAMESPACE, reason="in a container the driver's pids mean nothing"
)
def test_only_who_sees_all_leases_is_told_who_holds_none(served: Served) -> None:
    served.start(**served.nvml(SCENARIO))
    holding = served.terminal.start("run", "10%", "--", "sh", "-c", "echo $$; exec sleep 600")
    assert holding.stdout is not None
    held = int(holding.stdout.readline())
    with running() as process:
        served.nvml(f"{SCENARIO}process {held} 300\nprocess {process.pid} 1024\n")
        [told] = served.checks(0, "unmanaged processes")[1]
        assert told["text"].startswith(f"Process {process.pid} (")
        assert served.checks(NOBODY, "unmanaged processes")[1] == []
    holding.send_signal(signal.SIGTERM)


def test_a_client_of_a_pool_that_works_needs_no_gpu(served: Served) -> None:
    served.start()
    bare = served.nvml("driver 550.54.14\n")
    status, [told] = served.checks(NOBODY, "gpus", **bare)
    assert (status, told["state"], told["remedy"]) == (0, "note", "")
    assert "it has no GPU" in told["text"]
    status, [told] = served.checks(NOBODY, "gpus", **bare, GPU_POOL_URL=f"unix:{served.folder}/none")
    assert (status, told["state"]) == (1, "broken")


def test_all_of_mine_is_what_a_service_shows_to_who_is_no_administrator(served: Served) -> None:
    """It knows its user by a name that nothing on this machine has."""
    served.start()
    roots = served.terminal.hold("10%")
    theirs = served.take(NAMELESS)
    released = json.loads(served.run(NAMELESS, "release", "--all-mine", "--json").stdout)["released"]
    assert released == [theirs]
    assert [lease.id for lease in served.terminal.status().leases] == [roots]
    again = served.run(NAMELESS, "release", "--all-mine")
    assert (again.returncode, again.stdout) == (0, "You hold no slice.\n")


@pytest.mark.long
def test_an_administrator_who_is_shown_others_leases_is_told_to_name_theirs(served: Served) -> None:
    served.start()
    theirs = served.take(NAMELESS)
    done = served.run(0, "release", "--all-mine")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"The leases belong to uid-{NAMELESS}: {theirs}." in done.stderr
    assert "gpu-pool release ID" in done.stderr
    assert [lease.id for lease in served.terminal.status().leases] == [theirs]
    mine = served.terminal.hold("10%")
    assert f"lease {mine}" in served.run(0, "release", "--all-mine").stdout
    assert [lease.id for lease in served.terminal.status().leases] == [theirs]


def test_an_instructor_is_not_told_that_a_student_s_lease_was_given_back(served: Served) -> None:
    courses = served.folder / "courses"
    courses.mkdir()
    instructor = pwd.getpwuid(NOBODY).pw_name
    (courses / "ml.yaml").write_text(COURSE.format(student=NAMELESS, instructor=instructor))
    config = served.terminal.folder / "config/gpu_pool_config.py"
    config.parent.mkdir(exist_ok=True)
    config.write_text(f"c.PoolSettings.courses_dir = {str(courses)!r}\n")
    served.start()
    theirs = served.take(NAMELESS, GPU_POOL_COURSE="ml")
    other = served.take(NAMELESS, GPU_POOL_COURSE="ml")
    seen = json.loads(served.run(NOBODY, "status", "--json").stdout)["leases"]
    assert [lease["id"] for lease in seen] == [theirs, other]
    none = served.run(NOBODY, "release", "--all-mine")
    assert (none.returncode, none.stdout) == (0, "You hold no slice.\n")
    own = served.take(NOBODY, GPU_POOL_COURSE="ml")
    done = served.run(NOBODY, "release", theirs, own, other)
    assert (done.returncode, done.stdout) == (4, f"Gave back 2% (lease {own}).\n")
    for lease in (theirs, other):
        assert f"Not given back: 2% (lease {lease}) of uid-{NAMELESS} goes on.\n" in done.stderr
    assert done.stderr.endswith("\nOnly its user and administrators can end a lease.\n")
    done = served.run(NOBODY, "release", theirs, "--json")
    assert (done.returncode, json.loads(done.stdout)) == (4, {"released": []})
    assert json.loads(done.stderr)["error"]["code"] == "not-allowed"
    own = served.take(NOBODY, GPU_POOL_COURSE="ml")
    released = json.loads(served.run(NOBODY, "release", "--all-mine", "--json").stdout)["released"]
    assert released == [own]
    assert [lease.id for lease in served.terminal.status().leases] == [theirs, other]
