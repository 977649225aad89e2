"""The privileged program of hibernation as an administrator installs it, and users who call it by sudo."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_pool_provisioner.hibernation import program

CRIU = os.environ.get("CRIU", shutil.which("criu") or "/usr/sbin/criu")
#: Runs the program with settings of a test's own: an installed one reads them where the system has its own.
_INSTALLED = """#!/usr/bin/python3 -I
import importlib.util, sys
spec = importlib.util.spec_from_file_location("program", {program!r})
sys.modules["program"] = program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)
sys.exit(program.main(system=program.System(settings={settings!r})))
"""


def why_no_users() -> str:
    """Return why no user of this machine can put a kernel to disk; empty where one can."""
    if os.geteuid() != 0:
        return "only root can install it, and make users."
    if missing := [each for each in ("sudo", "useradd") if shutil.which(each) is None]:
        return f"there is no {missing[0]}."
    if not Path(CRIU).exists():
        return f"there is no {CRIU}: CRIU names the program."
    return ""


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
        source = folder / "program.py"
        shutil.copy(program.__file__, source)
        self.program.write_text(_INSTALLED.format(program=str(source), settings=str(self._settings)))
        self.program.chmod(0o755)
        self.configure()

    def configure(self, **settings: Any) -> Path:
        """Write the settings; return their file."""
        said = {"criu": os.path.realpath(CRIU), "folder": str(self.asleep), **settings}
        self._settings.write_text(json.dumps(said))
        return self._settings


@contextmanager
def installed() -> Iterator[Installation]:
    """Install the program for as long as a test needs it."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-pool-test-", dir="/var/lib"))
    folder.chmod(0o755)
    try:
        yield Installation(folder)
    finally:
        shutil.rmtree(folder)


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
