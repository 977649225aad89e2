"""Who asks, with what, and by which settings: all of it is looked at before anything is done."""

from __future__ import annotations

import json
import os
import pwd
import re
import stat
from contextlib import suppress
from typing import Any

from .processes import status_of
from .values import Refusal, Settings, SudoUser, System

#: Bytes of the first line.
_LONGEST_REQUEST = 2 << 20


def who_calls() -> SudoUser:
    """Return the user who has called sudo, or root. Raises ``Refusal``."""
    if os.geteuid() != 0:
        raise Refusal("this program must be run by root: sudo -n gpu-pool-hibernation")
    if others := [name for name in ("PKEXEC_UID", "DOAS_USER") if name in os.environ]:
        raise Refusal(f"{others[0]} is set: this program is called by sudo, and by nothing else of that kind")
    told = os.environ.get("SUDO_UID", "")
    if not told:
        parent = os.getppid()  # 0 where it is outside of this container
        if parent and status_of(parent)["Uid"][0] != "0":
            raise Refusal("SUDO_UID is not set, and who calls is not root: sudo -n gpu-pool-hibernation")
        told = "0"
    if not re.fullmatch("0|[1-9][0-9]{0,9}", told, re.ASCII) or int(told) >= 2**32 - 1:
        raise Refusal(f"SUDO_UID is {told[:60]!r}, which is no user")
    if told == "0":
        return SudoUser(0, 0, "root", tuple(os.getgroups()))
    try:
        user = pwd.getpwuid(int(told))
    except KeyError:
        raise Refusal(f"this machine knows no user {told}") from None
    has, groups = _groups_of_sudos_caller(user.pw_uid), os.getgrouplist(user.pw_name, user.pw_gid)
    has = {*(groups if has is None else has), user.pw_gid}
    return SudoUser(user.pw_uid, user.pw_gid, user.pw_name, tuple(each for each in groups if each in has))


def _groups_of_sudos_caller(uid: int) -> set[int] | None:
    """Return the groups of the process of the user's that has run sudo; None where there is none any more."""
    pid = os.getpid()
    with suppress(OSError):
        while pid := int(status_of(pid)["PPid"][0]):
            status = status_of(pid)
            if set(status["Uid"]) == {str(uid)}:
                return {*map(int, status["Groups"]), int(status["Gid"][0])}
    return None


def read_request() -> dict[str, Any]:
    """Return the first line of the standard input; nothing of what follows is read."""
    line = b""
    while not line.endswith(b"\n"):
        read = os.read(0, _LONGEST_REQUEST + 1 - len(line))
        line += read
        if not read or len(line) > _LONGEST_REQUEST:
            break
    try:
        if len(line) <= _LONGEST_REQUEST and isinstance(request := json.loads(line), dict):
            return request
    except (ValueError, RecursionError):
        pass
    raise Refusal(
        f"the standard input must begin with a JSON object in one line of at most {_LONGEST_REQUEST} bytes"
    )


def untrusted(path: str) -> str:
    """Return what makes a path one that others than root can change; empty where nothing does."""
    if not path.startswith("/") or os.path.realpath(path) != path:
        return f"{path} is not the full path of a file without links"
    while True:
        seen = os.lstat(path)
        others_write = seen.st_mode & 0o022 and not (
            stat.S_ISDIR(seen.st_mode) and seen.st_mode & stat.S_ISVTX
        )
        if seen.st_uid != 0 or others_write:
            return f"{path} is not root's alone: chown root {path}; chmod go-w {path}"
        if path == "/":
            return ""
        path = os.path.dirname(path)


def settings_for(system: System, caller: SudoUser, request: dict[str, Any]) -> Settings:
    """Return the settings of the file, which root may say otherwise."""
    said: Any = {}
    if os.path.lexists(system.settings):
        if why := untrusted(system.settings):
            raise Refusal(why)
        with open(system.settings, "rb") as file:
            try:
                said = json.load(file)
            except ValueError as error:
                raise Refusal(f"{system.settings} is not JSON: {error}") from None
    if caller.uid == 0 and isinstance(said, dict) and isinstance(request.get("settings"), dict):
        said = {**said, **request["settings"]}
    kinds = {name: type(value) for name, value in Settings._field_defaults.items()}
    if not isinstance(said, dict) or any(type(value) is not kinds.get(name) for name, value in said.items()):
        accepted = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
        raise Refusal(f"{system.settings} must be an object with, of these, what is to differ: {accepted}")
    settings = Settings(**said)
    of_courses = list(settings.course_mib.values())
    numbers = [settings.user_mib, settings.all_mib, settings.days - 1, *of_courses]
    are_whole = all(type(each) is int for each in of_courses)
    if not are_whole or min(numbers) < 0 or not settings.folder.startswith("/"):
        raise Refusal(
            f"{system.settings}: no number is below 0, days is 1 or more, folder is a full path, and "
            "course_mib has a whole number for each course"
        )
    return settings
