"""The privileged program of hibernation as an administrator installs it, and users who call it by sudo."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_pool_provisioner.hibernation.calling import why_not
from gpu_pool_provisioner.hibernation.program import archive

CRIU = os.environ.get("CRIU", shutil.which("criu") or "/usr/sbin/criu")
#: Runs the program with settings of a test's own: an installed one reads them where the system has its own.
_INSTALLED = """#!/usr/bin/python3 -IS
import sys
sys.path.insert(0, {program!r})
from gpu_pool_hibernation.command import main
from gpu_pool_hibernation.values import System
{before}
sys.exit(main(system=System(settings={settings!r})))
"""


def why_no_users() -> str:
    """Return why no user of this machine can put a kernel to disk; empty where one can."""
    if os.geteuid() != 0:
        return "only root can install it, and make users."
    if missing := [each for each in ("sudo", "useradd") if shutil.which(each) is None]:
        return f"there is no {missing[0]}."
    why = why_not(CRIU)
    return f"{why} CRIU names the program." if why else ""


class Kernel:
    """A call that stays for as long as its kernel lives."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        assert process.stdout is not None
        self.answer: dict[str, Any] = json.loads(process.stdout.readline() or b'{"ok": false}')

    @property
    def pid(self) -> int:
        return int(self.answer["pid"])

    @property
    def id(self) -> str:
        return str(self.answer["id"])

    def close(self) -> None:
        """End its server's hold, and wait until it has ended."""
        for each in (self.process.stdin, self.process.stdout):
            assert each is not None
            each.close()
        self.process.wait()


class User:
    """A user of this machine, who calls the program by sudo."""

    def __init__(self, name: str, command: str) -> None:
        self.name, self.command = name, command
        self.entry = pwd.getpwnam(name)
        self.home = Path(self.entry.pw_dir)
        self._kernels: list[Kernel] = []

    @property
    def identity(self) -> dict[str, Any]:
        """What makes a process this user's (``subprocess.Popen``)."""
        groups = os.getgrouplist(self.name, self.entry.pw_gid)
        return {"user": self.entry.pw_uid, "group": self.entry.pw_gid, "extra_groups": groups}

    def start(self, *words: str, **request: Any) -> subprocess.Popen[bytes]:
        """Call the program, and hold its standard input."""
        process = subprocess.Popen(
            ["sudo", "-n", self.command, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env={"PATH": os.environ["PATH"]},
            start_new_session=True,
            **self.identity,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        return process

    def call(self, *words: str, **request: Any) -> dict[str, Any]:
        """Call the program, and return its answer."""
        with self.start(*words, **request) as process:
            assert process.stdout is not None
            answer: dict[str, Any] = json.loads(process.stdout.readline() or b'{"ok": false, "error": ""}')
            return answer

    def said(self, given: bytes, *words: str) -> dict[str, Any]:
        """Call the program with a standard input of any bytes, and return its answer."""
        done = subprocess.run(
            ["sudo", "-n", self.command, *words],
            input=given,
            capture_output=True,
            check=False,
            cwd="/",
            env={"PATH": os.environ["PATH"]},
            **self.identity,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def launch(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Kernel:
        """Run something in the user's home as a kernel that may sleep."""
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(self.home), **(env or {})}
        request = {"argv": list(argv), "env": environment, "cwd": str(self.home), "umask": 0o022}
        return self._kept(self.start("launch", **request))

    def restore(self, kernel: str) -> Kernel:
        return self._kept(self.start("restore", kernel))

    def _kept(self, process: subprocess.Popen[bytes]) -> Kernel:
        self._kernels.append(Kernel(process))
        return self._kernels[-1]

    def end(self) -> None:
        """End the kernels, and remove what is on disk of them."""
        for kernel in self._kernels:
            kernel.close()
        self._kernels.clear()
        for found in self.call("list")["kernels"]:
            self.call("remove", found["id"])
        for each in self.home.iterdir():
            shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()


class Installation:
    """The program, its settings and where its kernels sleep, in a folder of root's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asleep = folder, folder / "asleep"
        self.program = folder / "gpu-pool-hibernation"
        self._settings = folder / "hibernation.json"
        self.archive = folder / "archive"
        self.archive.write_bytes(archive.archive())
        self.install()
        self.configure()

    def install(self, before: str = "") -> None:
        """Write what calls the program, which does something before."""
        text = _INSTALLED.format(program=str(self.archive), settings=str(self._settings), before=before)
        self.program.write_text(text)
        self.program.chmod(0o755)

    def configure(self, **settings: Any) -> Path:
        """Write the settings; return their file."""
        said = {"criu": os.path.realpath(CRIU), "folder": str(self.asleep), **settings}
        self._settings.write_text(json.dumps(said))
        return self._settings


@contextmanager
def folder_of_root() -> Iterator[Path]:
    """Have a folder that all users can enter and that, with those above it, root alone can change."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-pool-test-", dir="/var/lib"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def installed() -> Iterator[Installation]:
    """Install the program for as long as a test needs it."""
    with folder_of_root() as folder:
        yield Installation(folder)


@contextmanager
def users(installation: Installation, *names: str) -> Iterator[list[User]]:
    """Make users of this machine who may call the program."""
    made = [f"gp{os.getpid()}{name}" for name in names]
    allowed = Path(f"/etc/sudoers.d/gpu-pool-test-{os.getpid()}")
    try:
        for name in made:
            subprocess.run(["useradd", "--create-home", name], check=True, capture_output=True)
        allowed.write_text("".join(f"{name} ALL=(root) NOPASSWD: {installation.program}\n" for name in made))
        allowed.chmod(0o440)
        yield [User(name, str(installation.program)) for name in made]
    finally:
        allowed.unlink(missing_ok=True)
        for name in made:
            subprocess.run(["userdel", "--force", "--remove", name], check=False, capture_output=True)


#: A Python of the system, which every user may run.
PYTHON = "/usr/bin/python3"


def python_for_users() -> str:
    """Return why no user can run this environment's packages by the system's Python; empty where they can."""
    said = subprocess.run(
        [PYTHON, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, check=False
    )
    if said.stdout.decode().strip() != str(sys.version_info[:2]):
        return f"{PYTHON} is not the version of Python that runs the tests."
    return ""


#: Counts in a file of its own for as long as it lives, with what kernels have besides.
COUNTS = """
import os, socket, subprocess, sys, tempfile, threading, time
log = open("count", "w+")
listening = socket.create_server(("127.0.0.1", 0))
temporary = tempfile.TemporaryFile()
temporary.write(b"x" * 1000); temporary.flush()
child = subprocess.Popen(["sleep", "600"])
beats = 0
def beat():
    global beats
    while True:
        beats += 1
        time.sleep(0.01)
threading.Thread(target=beat, daemon=True).start()
while True:
    temporary.seek(0)
    words = (beats, os.getpid(), os.readlink("/proc/self"), len(temporary.read()), child.poll())
    log.seek(0); log.truncate()
    print(*words, listening.getsockname()[1], "", file=log, flush=True)
    time.sleep(0.01)
"""


def until(is_so: Callable[[], object], within: float = 60) -> None:
    give_up_at = time.monotonic() + within
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def pids_in(namespace: str) -> list[int]:
    """Return the processes of a pid namespace."""

    def is_there(pid: str) -> bool:
        try:
            return os.readlink(f"/proc/{pid}/ns/pid") == namespace
        except OSError:
            return False

    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit() and is_there(each.name)]


def said(user: User) -> list[str]:
    words: list[str] = []

    def has_all() -> bool:
        file = user.home / "count"
        words[:] = file.read_text().split() if file.exists() else []
        return len(words) == 6

    until(has_all)
    return words


def until_it_counts(user: User) -> None:
    """Return once a kernel has counted on."""
    beats = int(said(user)[0])
    until(lambda: int(said(user)[0]) > beats)


def asleep(user: User, code: str = COUNTS) -> str:
    """Put a kernel to disk; return its ID."""
    kernel = user.launch([PYTHON, "-c", code])
    assert kernel.answer["ok"], kernel.answer
    if code is COUNTS:
        said(user)
    else:
        until((user.home / "ready").exists)
    told = user.call("dump", kernel.id)
    assert told["ok"], told
    return kernel.id


def goes_on(user: User, kernel: str) -> bool:
    (found,) = [each for each in user.call("list")["kernels"] if each["id"] == kernel]
    return bool(found["goes_on"])


def child_of(pid: int) -> int:
    """Return the program's process, which sudo has run."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def started(pid: int) -> int:
    """Return when a process has started, in ticks (proc(5))."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
