"""CRIU: which one, whether it can, what it is told, and what it says."""

from __future__ import annotations

import os
import re
from contextlib import suppress

from .callers import untrusted
from .folders import folder_of
from .running import OF_CRIU, SYS_ADMIN, execute
from .values import VERSION, Call, Refusal, SudoUser

#: The oldest CRIU with which this was seen to work on today's kernels.
OLDEST = (4, 1)
#: How to have a newer one than a distribution's.
_GET_IT = "where this system has none, build it (https://criu.org), and name it by the setting criu."
#: What CRIU is told for either way.
BOTH = ("--no-default-config", "--manage-cgroups=ignore", "--file-locks", "--link-remap")
#: Files that are open and have no name go into the image, up to this size.
GHOST_BYTES = 64 << 20
#: What CRIU has open as itself: it is opened by its path here, and run by that.
CRIU = 8
#: Bytes that are read of CRIU's log.
_LONGEST_LOG = 256 << 10


def check(call: Call, _: str) -> dict[str, object]:
    """Say why no kernel can sleep here, and which version this is; where they can, CRIU's, too."""
    why = why_not(call)
    return {"why": why, "version": VERSION, "criu": "" if why else ".".join(map(str, _version(call)))}


def why_not(call: Call) -> str:
    """Return why no kernel of the caller's can sleep here, in a sentence; empty where one can."""
    with open("/proc/self/status", "rb") as file:
        found = re.search(rb"\nCapEff:\s*([0-9a-f]+)", file.read())
    if found is None or not int(found[1], 16) >> SYS_ADMIN & 1:
        return "it takes root with CAP_SYS_ADMIN: this is a container without it."
    for kind in ("pid", "mnt"):
        limit = f"{call.system.limits}/max_{kind}_namespaces"
        with suppress(OSError), open(limit) as file:
            if file.read().strip() == "0":
                setting = f"user.max_{kind}_namespaces"
                return f"this system allows no {kind} namespaces: set {setting} (sysctl) to more than 0."
    try:
        folder_of(call)
    except Refusal as error:
        return f"{error}."
    if not os.path.exists(criu := call.settings.criu):
        oldest = ".".join(map(str, OLDEST))
        return f"there is no {criu}: install CRIU {oldest} or newer, or say where it is."
    try:
        version = _version(call)
    except Refusal as error:
        return f"{error}."
    if version < OLDEST:
        has = f"is {version[0]}.{version[1]}" if version else "does not say its version"
        return f"{criu} {has}, and {OLDEST[0]}.{OLDEST[1]} or newer is needed: {_GET_IT}"
    status, said = said_by(call, "check", *way_of(call.caller))
    if status:
        return f"{criu} check says that this machine cannot: {first_error(said)}"
    return ""


def _version(call: Call) -> tuple[int, ...]:
    """Return CRIU's version, its first two numbers; nothing where it does not say it. Raises ``Refusal``."""
    found = re.search(rb"Version: (\d+)\.(\d+)", said_by(call, "--version")[1])
    return (int(found[1]), int(found[2])) if found else ()


def open_criu(call: Call) -> int:
    """Open CRIU. Raises ``Refusal`` where others can change what would get capabilities."""
    if call.caller.uid != 0 and (why := untrusted(call.settings.criu)):
        raise Refusal(why)
    return os.open(call.settings.criu, os.O_RDONLY | os.O_CLOEXEC)


def said_by(call: Call, *words: str) -> tuple[int, bytes]:
    """Run CRIU; return its status, and what it says."""
    criu, (output, written) = open_criu(call), os.pipe()
    pid = os.fork()
    if pid == 0:
        execute(CRIU, ["criu", *words], call.caller, OF_CRIU, {1: written, 2: written, CRIU: criu})
    os.close(written)
    said = b""
    while (read := os.read(output, _LONGEST_LOG)) and len(said) < _LONGEST_LOG:
        said += read
    os.close(output)
    return os.waitpid(pid, 0)[1], said


def way_of(caller: SudoUser) -> list[str]:
    """Return what CRIU is told where its user is not root."""
    return ["--unprivileged"] if caller.uid else []


def first_error(log: bytes) -> str:
    """Return the first error in what CRIU says, as a sentence has it."""
    lines = log.decode(errors="replace").splitlines()
    errors = [line.partition("): ")[2] or line for line in lines if "Error" in line]
    # It says of each process of root in a container that its limits cannot be raised, and goes on.
    told = [each for each in errors if "RLIMIT" not in each]
    return f"{told[0].strip().rstrip('.')[:300]}." if told else "it does not say why."


def log_says(work: str, status: int) -> str:
    """Return the first error of CRIU's log, or its status."""
    with suppress(OSError):
        log = os.open(f"{work}/log", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(log, "rb") as file:
            return f"CRIU says: {first_error(file.read(_LONGEST_LOG))}"
    return f"CRIU says: it ended with {status}."
