"""How the privileged program is called: directly by root, by sudo else; and why it cannot be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpu_pool_provisioner.hibernation import program

#: Where the administrator installs the program.
INSTALLED: Final = "/usr/local/libexec/gpu-pool-hibernation"
_SUDOERS: Final = "/etc/sudoers.d/gpu-pool-hibernation"
#: Seconds in which it has answered what takes no longer with a larger kernel.
_ANSWERS_WITHIN: Final = 120.0


class ProgramRefused(Exception):
    """It did not do it; the text says why, as a sentence has it."""

    def __init__(self, text: str, *, errno: int = 0, is_gone: bool = False) -> None:
        """Take what it says: whether there is no such kernel any more, and what the system said."""
        super().__init__(text)
        self.errno, self.is_gone = errno, is_gone


class ProgramEnded(ProgramRefused):
    """It ended without an answer, as one that was killed."""


class Stays:
    """A call that stays for as long as its kernel lives, which ends with this object at the latest."""

    def __init__(self, ours: int) -> None:
        """Take the end of the pipe by which the kernel lives."""
        #: Lets go of it, and so ends the kernel. May be repeated.
        self.let_go: Callable[[], object] = weakref.finalize(self, os.close, ours)
        #: What the program says of the kernel.
        self.answer: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Program:
    """The privileged program, as this process calls it.

    Parameters
    ----------
    criu, folder, mib
        What root's kernels have in place of what the program's settings say: CRIU's name or path, the folder
        where they sleep, and the MiB that all of them may take there; 0 for as much as the disk has.
    installed
        The path of the program, for other users.
    """

    criu: str = ""
    folder: str = ""
    mib: int = 0
    installed: str = INSTALLED

    def command(self, *words: str) -> list[str]:
        """Return the command that does what ``words`` say."""
        if os.geteuid() == 0:
            return [sys.executable, "-I", "-S", program.__file__, *words]
        return ["sudo", "-n", self.installed, *words]

    def request(self, **more: Any) -> bytes:
        """Return what the program reads first."""
        if os.geteuid() == 0:
            ours = {"criu": shutil.which(self.criu) or self.criu, "folder": self.folder, "all_mib": self.mib}
            more = {**more, "settings": {name: value for name, value in ours.items() if value}}
        return json.dumps(more).encode() + b"\n"

    def call(self, *words: str, **more: Any) -> dict[str, Any]:
        """Have something done, and return what is answered. Blocks. Raises ``ProgramRefused``."""
        try:
            done = subprocess.run(
                self.command(*words),
                input=self.request(**more),
                capture_output=True,
                timeout=_ANSWERS_WITHIN,
                check=False,
                env=environment(),
                cwd="/",
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ProgramRefused(f"{words[0]} was not done ({error}).") from error
        return answered(done.stdout, done.stderr)

    def start(self, *words: str, **more: Any) -> Stays:
        """Launch a kernel, or let one go on. Blocks. Raises ``ProgramRefused`` and ``OSError``."""
        held, ours = os.pipe()
        stays = Stays(ours)
        said, says = os.pipe()
        with open(said, "rb") as file:
            try:
                process = subprocess.Popen(
                    self.command(*words),
                    stdin=held,
                    stdout=says,
                    env=environment(),
                    cwd="/",
                    start_new_session=True,
                )
            finally:
                os.close(held)
                os.close(says)
            # It ends with the kernel; nobody else would wait for that.
            threading.Thread(target=process.wait, name="kept kernel", daemon=True).start()
            try:
                _write(ours, self.request(**more))
                stays.answer = answered(file.readline())
            except BaseException:
                stays.let_go()
                raise
        return stays


def _write(descriptor: int, given: bytes) -> None:
    while given:
        given = given[os.write(descriptor, given) :]


def environment() -> dict[str, str]:
    """Return the variables of the program's process: none of the server's."""
    return {"PATH": os.environ.get("PATH", os.defpath)}


def answered(line: bytes, said: bytes = b"") -> dict[str, Any]:
    """Return what the program has answered; ``said`` is what sudo has. Raises ``ProgramRefused``."""
    try:
        answer = json.loads(line)
    except ValueError:
        words = said.decode(errors="replace").strip().splitlines()
        raise ProgramEnded(f"sudo says: {words[0][:300]}." if words else "the program was ended.") from None
    if not isinstance(answer, dict) or not answer.get("ok"):
        said_no = answer if isinstance(answer, dict) else {}
        errno = said_no.get("errno", 0)
        raise ProgramRefused(str(said_no.get("error")), errno=errno, is_gone=bool(said_no.get("gone")))
    return answer


def why_not(criu: str = "criu", installed: str = INSTALLED, folder: str = "") -> str:
    """Return why no kernel of this process can sleep on disk, in a sentence; empty where one can. Blocks.

    ``criu`` and ``folder`` are root's, ``installed`` is for other users, as in :class:`Program`.
    """
    if not sys.platform.startswith("linux"):
        return "only Linux can."
    if os.geteuid() != 0 and (why := _why_not_called(installed)):
        return why
    try:
        answer = Program(criu, folder, installed=installed).call("check")
    except ProgramEnded as error:
        line = f"%gpu-pool ALL=(root) NOPASSWD: {installed}"
        return f"{error} Whoever administers this machine allows it by a line in {_SUDOERS}: {line}"
    except ProgramRefused as error:
        return f"{error}"
    if answer.get("version") != program.VERSION:
        return f"{installed} is another version's: install that of this version."
    return str(answer["why"])


def _why_not_called(installed: str) -> str:
    if shutil.which("sudo") is None:
        return "there is no sudo, by which other users than root have their kernels written to disk."
    if not Path(installed).exists():
        return (
            f"there is no {installed}, which writes the kernels of other users than root to disk: "
            f"sudo install -D -o root -g root -m 0755 {program.__file__} {installed}"
        )
    why = program.untrusted(installed)
    return f"{why}." if why else ""


def kernels(program: Program) -> Sequence[dict[str, Any]]:
    """Return what the program says of this user's kernels, or to root of all. Raises ``ProgramRefused``."""
    found: Sequence[dict[str, Any]] = program.call("list")["kernels"]
    return found
