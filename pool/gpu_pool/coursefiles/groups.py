"""The groups that this system knows a user to be in, where no JupyterHub says it."""

from __future__ import annotations

import grp
import os
import pwd


def system_groups(user: str) -> frozenset[str]:
    """Return the names of a user's groups; none for a user whom the system does not know."""
    try:
        numbers = os.getgrouplist(user, pwd.getpwnam(user).pw_gid)
    except KeyError:
        return frozenset()
    return frozenset(name for number in numbers if (name := _name(number)))


def _name(number: int) -> str | None:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return None
