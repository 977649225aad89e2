"""What one call of the program is about: who calls, with what, and where things are."""

from __future__ import annotations

from typing import Any, NamedTuple

#: Of what is said and written; another version's is refused.
VERSION = 1
MIB = 1 << 20


class Refusal(Exception):
    """It is not done; the text says why. ``more`` is said besides."""

    def __init__(self, text: str, **more: object) -> None:
        super().__init__(text)
        self.more = more


class System(NamedTuple):
    """Where things are. Only tests have them elsewhere."""

    settings: str = "/etc/gpu-pool/hibernation.json"
    limits: str = "/proc/sys/user"


class Settings(NamedTuple):
    """What the file says, or root."""

    criu: str = "/usr/sbin/criu"
    folder: str = "/var/lib/gpu-pool/asleep"
    #: MiB that images may take, of one user who is not root and of all; 0 for as much as the disk has.
    user_mib: int = 20_480
    all_mib: int = 0
    #: MiB that the images of a course's kernels may take, of all users, by the course's name.
    course_mib: dict[str, int] = {}  # noqa: RUF012 - nobody changes it
    #: After how many days an image is removed that nobody has asked for.
    days: int = 7


class SudoUser(NamedTuple):
    """The user for whom it is done."""

    uid: int
    gid: int
    name: str
    groups: tuple[int, ...]


class Call(NamedTuple):
    """One call: whose, with what."""

    system: System
    settings: Settings
    caller: SudoUser
    request: dict[str, Any]
