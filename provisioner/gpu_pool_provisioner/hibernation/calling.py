"""How the privileged program is called: directly by root, by sudo else; and why it cannot be."""

from __future__ import annotations

import json
import os
import pwd
import select
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpu_pool_client._forks import close_in_children
from gpu_pool_provisioner.hibernation import program
from gpu_pool_provisioner.hibernation.program.gpu_pool_hibernation.callers import untrusted
from gpu_pool_provisioner.hibernation.program.gpu_pool_hibernation.values import VERSION

#: Where the administrator installs the program.
INSTALLED: Final = "/usr/local/libexec/gpu-pool-hibernation"
_SUDOERS: Final = "/etc/sudoers.d/gpu-pool-hibernation"
#: Seconds for which it is not asked again whether kernels can sleep, once it has said that they can.
_CAN_FOR: Final = 60.0
#: Until when that holds, for whom and by which program: of the process, where each kernel has a ``Program``.
_can_until: Final[dict[tuple[int, str, str, str], float]] = {}


@dataclass(frozen=True, slots=True)
class MissingRoom:
    """How many bytes are missing of what images may take on disk."""

    #: Of what those of the user may, or those of all.
    missing: int
    #: Of what those of its course may, and which that is.
    of_course: int
    course: str

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> MissingRoom | None:
        """Return what the program says; None where that is nothing, or where the disk has no room."""
        room = cls(said.get("missing", 0), said.get("of_course", 0), said.get("course", ""))
        return room if room.missing or room.of_course else None


class ProgramRefused(Exception):
    """It did not do it; the text says why, as a sentence has it."""

    def __init__(
        self,
        text: str,
        *,
        errno: int = 0,
        is_gone: bool = False,
        room: MissingRoom | None = None,
        is_of_kernel: bool = False,
    ) -> None:
        """Take what it says: whether there is no such kernel any more, and what the system said.

        ``room`` is what would have to be free, where it is for want of that; ``is_of_kernel`` whether it was
        the kernel that could not be run, or has ended, and not the program that refused.
        """
        super().__init__(text)
        self.errno, self.is_gone, self.room, self.is_of_kernel = errno, is_gone, room, is_of_kernel


class ProgramEnded(ProgramRefused):
    """It ended without an answer, as one that was killed."""


class Stays:
    """A call that stays for as long as its kernel lives, which ends with this object at the latest."""

    def __init__(self, ours: int) -> None:
        """Take the end of the pipe by which the kernel lives."""
        #: Lets go of it, and so ends the kernel. May be repeated.
        self.close: Callable[[], object] = weakref.finalize(self, os.close, ours)
        close_in_children(self)  # they have none of its kernels, which end with this process
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
    answers_within, finishes_within
        Seconds after which it is given up: of what takes no longer with a larger kernel, and of a way to disk
        or back. CRIU alone may take 10 minutes.
    """

    criu: str = ""
    folder: str = ""
    mib: int = 0
    installed: str = INSTALLED
    answers_within: float = 120.0
    finishes_within: float = 1200.0

    def command(self, *words: str) -> list[str]:
        """Return the command that does what ``words`` say."""
        if os.geteuid() == 0:
            return [sys.executable, "-I", "-S", program.FOLDER, *words]
        return ["sudo", "-n", self.installed, *words]

    def request(self, **more: Any) -> bytes:
        """Return what the program reads first."""
        if os.geteuid() == 0:
            ours = {"criu": shutil.which(self.criu) or self.criu, "folder": self.folder, "all_mib": self.mib}
            more = {**more, "settings": {name: value for name, value in ours.items() if value}}
        return json.dumps(more).encode() + b"\n"

    def call(self, *words: str, **more: Any) -> dict[str, Any]:
        """Have something done, and return what is answered. Blocks. Raises ``ProgramRefused``.

        What has not answered in time is left to itself: nobody but root can end sudo.
        """
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                self.command(*words), stdin=pipe, stdout=pipe, stderr=pipe, env=environment(), cwd="/"
            )
        except OSError as error:
            raise ProgramRefused(f"{words[0]} was not done ({error}).") from error
        try:
            done = process.communicate(self.request(**more), timeout=self.answers_within)
        except subprocess.TimeoutExpired:
            _leave(process)
            raise too_late(words[0], self.answers_within) from None
        return answered(*done)

    def start(self, *words: str, **more: Any) -> Stays:
        """Launch a kernel, or let one go on. Blocks. Raises ``ProgramRefused``."""
        within = self.answers_within if words[0] == "launch" else self.finishes_within
        try:
            return self._started(words, within, self.request(**more))
        except TimeoutError:
            raise too_late(words[0], within) from None
        except OSError as error:
            raise ProgramRefused(f"{words[0]} was not done ({error}).", errno=error.errno or 0) from error

    def _started(self, words: Sequence[str], within: float, request: bytes) -> Stays:
        """Run the program, and return once it has answered. Raises ``ProgramRefused`` and ``OSError``."""
        held, ours = os.pipe()
        stays = Stays(ours)
        said, says = os.pipe()
        with open(said, "rb", buffering=0) as answer:
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
            _reap(process)  # it ends with the kernel
            try:
                stays.answer = answered(_asked(ours, answer.fileno(), request, within))
            except BaseException:
                stays.close()
                raise
        return stays


def too_late(verb: str, within: float) -> ProgramRefused:
    """Return why something is given up that has taken longer than so many seconds."""
    return ProgramRefused(f"{verb} was not done within {within:g} seconds.")


def _leave(process: subprocess.Popen[bytes]) -> None:
    """Let a program end by itself, for which nobody waits any longer."""
    with suppress(PermissionError):  # sudo is root's
        process.kill()
    for each in (process.stdin, process.stdout, process.stderr):
        if each is not None:
            with suppress(OSError):
                each.close()
    _reap(process)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process for which nobody else does."""
    threading.Thread(target=process.wait, name="kept kernel", daemon=True).start()


def _asked(asks: int, answers: int, request: bytes, within: float) -> bytes:
    """Write a request, and return the line that is answered, or what of it came before the end.

    Raises ``TimeoutError`` after so many seconds.
    """
    give_up_at, line = time.monotonic() + within, b""
    os.set_blocking(asks, False)
    with suppress(BrokenPipeError):  # what is answered says why
        while request:
            _wait_for(asks, select.POLLOUT, give_up_at)
            with suppress(BlockingIOError):
                request = request[os.write(asks, request) :]
    while not line.endswith(b"\n"):
        _wait_for(answers, select.POLLIN, give_up_at)
        read = os.read(answers, 65_536)
        if not read:
            break
        line += read
    return line


def _wait_for(descriptor: int, event: int, give_up_at: float) -> None:
    """Return once something can be read or written. Raises ``TimeoutError``; the clock is the monotonic."""
    waits = select.poll()
    waits.register(descriptor, event)
    if not waits.poll(max(0.0, give_up_at - time.monotonic()) * 1000):
        raise TimeoutError


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
        raise ProgramRefused(
            str(said_no.get("error")),
            errno=said_no.get("errno", 0),
            is_gone=bool(said_no.get("gone")),
            room=MissingRoom.of(said_no),
            is_of_kernel=bool(said_no.get("command")),
        )
    return answer


def why_not(criu: str = "criu", installed: str = INSTALLED, folder: str = "") -> str:
    """Return why no kernel of this process can sleep on disk, in a sentence; empty where one can. Blocks.

    ``criu`` and ``folder`` are root's, ``installed`` is for other users, as in :class:`Program`. That one can
    is known for a minute: each question is a line in the system's log.
    """
    asks = os.geteuid(), criu, installed, folder
    if _can_until.get(asks, 0.0) > time.monotonic():
        return ""
    why = check(criu, installed, folder).why_not
    if not why:
        _can_until[asks] = time.monotonic() + _CAN_FOR
    return why


class CheckedProgram(NamedTuple):
    """What the program answers when it is asked whether kernels can sleep."""

    #: As :func:`why_not` says it.
    why_not: str
    #: Which CRIU it is by which they can; empty for one that does not say it.
    criu: str = ""


def check(criu: str, installed: str, folder: str) -> CheckedProgram:
    """Ask the program once whether kernels of this process can sleep on disk; as :func:`why_not`. Blocks."""
    if not sys.platform.startswith("linux"):
        return CheckedProgram("only Linux can.")
    if os.geteuid() != 0 and (why := _why_not_called(installed)):
        return CheckedProgram(why)
    try:
        answer = Program(criu, folder, installed=installed).call("check")
    except ProgramEnded as error:
        return CheckedProgram(f"{error} {_how_to_allow(str(error), installed)}")
    except ProgramRefused as error:
        return CheckedProgram(f"{error}")
    if answer.get("version") != VERSION:
        return CheckedProgram(f"{installed} is another version's: install that of this version.")
    return CheckedProgram(str(answer["why"]), str(answer.get("criu", "")))


def _how_to_allow(said: str, installed: str) -> str:
    """Return what whoever administers the machine does, so that sudo says something else."""
    who = "Whoever administers this machine"
    if "must have a tty" in said:
        return f"{who} adds to {_SUDOERS}: Defaults!{installed} !requiretty"
    line = f"%gpu-pool ALL=(root) NOPASSWD: {installed}"
    return (
        f"{who} allows it to a group by a line in {_SUDOERS}: {line}; and this account must be in "
        f"that group: sudo usermod --append --groups gpu-pool {_account()}"
    )


def _account() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _gains_no_rights() -> bool:
    """Whether sudo can do nothing for this process."""
    with suppress(OSError):
        return b"\nNoNewPrivs:\t1\n" in Path("/proc/self/status").read_bytes()
    return False


def _why_not_called(installed: str) -> str:
    if shutil.which("sudo") is None:
        return "there is no sudo, by which other users than root have their kernels written to disk."
    if not Path(installed).exists():
        return (
            f"there is no {installed}, which writes the kernels of other users than root to disk: "
            f"{program.INSTALL} {installed}"
        )
    if why := untrusted(installed):
        return f"{why}."
    if _gains_no_rights():
        return (
            "sudo can do nothing for this process, which can get no more rights (no_new_privs). Whoever "
            "started it must allow that: SystemdSpawner by disable_user_sudo = False, a unit of systemd by "
            "NoNewPrivileges=no, a container without no-new-privileges."
        )
    return ""
