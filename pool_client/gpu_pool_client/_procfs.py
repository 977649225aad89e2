"""``/proc`` as the kernel writes it: bytes, in lines that end with a newline byte and with nothing else.

A process may give itself any name (prctl(2), ``PR_SET_NAME``), and so may any program file. The
kernel escapes newlines and backslashes where it writes that name into ``/proc/PID/status``, and
nothing at all in ``/proc/PID/stat``. To Python, other characters end a line too: ``\\r`` in text
and for ``bytes.splitlines``, and ``\\x0b``, ``\\x0c``, ``\\x1c`` to ``\\x1e`` and ``\\x85`` for
``str.splitlines``. Whoever reads ``status`` in one of these ways reads lines that a user has
written, such as another uid. psutil is among them, since it looks for ``Uid:`` anywhere. So
whatever the kernel writes in lines is read here, and nothing that security rests on by psutil.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

PROC: Final = Path("/proc")
#: The longest name of a process that is shown; the kernel's own threads have longer ones.
_MOST_NAME: Final = 64
#: How the kernel writes blanks, newlines and backslashes in tables of mounts (proc_pid_mounts(5)).
_ESCAPED: Final = re.compile(rb"\\([0-7]{3})")


class Stat(NamedTuple):
    """What ``/proc/PID/stat`` says of a process (proc_pid_stat(5))."""

    #: Any bytes that its user likes.
    raw_name: bytes
    state: bytes
    parent: int
    threads: int
    #: In clock ticks since the boot of the machine.
    start: int

    @property
    def name(self) -> str:
        """The name as it may be shown. It says nothing about the process."""
        return printable(self.raw_name)

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more.

        The state is that of the first thread alone: it is Z while others go on.
        """
        return self.state == b"X" or (self.state == b"Z" and self.threads <= 1)


class MountedFileSystem(NamedTuple):
    """One line of ``/proc/PID/mounts``."""

    point: bytes
    kind: bytes
    options: dict[bytes, bytes]


def lines_of(content: bytes) -> list[bytes]:
    """Return the lines of what the kernel, or a tool, has written; empty ones are left out."""
    return [line for line in content.split(b"\n") if line]


def pids() -> list[int]:
    """Return the pids of all processes that can be seen."""
    return [int(name) for name in os.listdir(PROC) if name.isascii() and name.isdecimal()]  # noqa: PTH208 - often


def stat(pid: int) -> Stat | None:
    """Return what the system says of a process; None for one that is gone, or that it hides.

    Raises ``OSError`` where that cannot be told, as when no more files may be opened.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            content = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return parse_stat(content)


def parse_stat(content: bytes) -> Stat:
    """Read a ``/proc/PID/stat``. The name may itself hold parentheses, blanks and newlines."""
    begin, end = content.index(b"("), content.rindex(b")")
    fields = content[end + 2 :].split()
    return Stat(content[begin + 1 : end], fields[0], int(fields[1]), int(fields[17]), int(fields[19]))


def status(pid: int, field: bytes) -> list[bytes]:
    """Return the words of one field of ``/proc/PID/status``; none for a process that cannot be seen."""
    try:
        return words_of((PROC / f"{pid}/status").read_bytes(), field)
    except OSError:
        return []


def words_of(content: bytes, field: bytes) -> list[bytes]:
    """Return the words of the first line of that name, as in ``Uid: 0 0 0 0``; none if there is none."""
    name = field + b":"
    return next((line.split()[1:] for line in lines_of(content) if line.startswith(name)), [])


def mounts(content: bytes) -> Iterator[MountedFileSystem]:
    """Yield the mounts of a ``/proc/PID/mounts``; lines that make no sense are passed over."""
    for line in lines_of(content):
        fields = line.split(b" ")
        if len(fields) >= 4:
            options = dict(option.partition(b"=")[::2] for option in fields[3].split(b","))
            yield MountedFileSystem(_plain(fields[1]), _plain(fields[2]), options)


def printable(name: bytes, most: int = _MOST_NAME) -> str:
    """Return a name that somebody else has chosen as it may be shown: on one line, of so many characters."""
    text = name.decode(errors="replace")[:most]
    return "".join(each if each.isprintable() else "?" for each in text)


def _plain(field: bytes) -> bytes:
    return _ESCAPED.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), field)
