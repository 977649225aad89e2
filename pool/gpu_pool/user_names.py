"""What people are called in the pool: each differently, and so that it can be shown anywhere. Pure.

A JupyterHub, or the system, can have people whose names differ in what nobody sees: a space of no
width, a mark that turns the writing round. Two of them must never be one, and a name must not change how
the text around it is read. Whatever can be seen stays as it is, in any script: names that only look
alike, or are the same by Unicode's normal forms, are different names here as they are there.
"""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections.abc import Collection
from typing import Final

from gpu_pool.visible import is_seen
from gpu_pool_client import BadRequest

#: Characters of the longest name.
LONGEST: Final = 200
#: What a part of a longer name is followed by, and a digest of all of it. It is no character's UTF-8.
_SHORTENED: Final = "%FF"
_DIGEST_BYTES: Final = 16
#: What looks like the name of a character, and would be taken for one.
_ESCAPE: Final = re.compile("%(?=[0-9A-Fa-f]{2})")


def name_of(text: str, apart_from: str = "") -> str:
    """Return what somebody is called in the pool.

    That is their own name, with ``%XX`` for each byte of the UTF-8 of what cannot be seen, and of
    characters in ``apart_from``. Of two names that differ none becomes the other's; one that is too long
    is shortened, and ends in a digest of all of it.
    """
    if text.isascii() and is_name(text) and not _ESCAPE.search(text) and not set(text) & set(apart_from):
        return text
    escaped = "".join(
        _escaped(each) if not is_seen(each) or each in apart_from else each
        for each in _ESCAPE.sub("%25", text)
    )
    # A mark that is put onto the letter before it would be put onto what stands before the name.
    if escaped and unicodedata.category(escaped[0]).startswith("M"):
        escaped = _escaped(escaped[0]) + escaped[1:]
    if len(escaped) <= LONGEST:
        return escaped
    digest = hashlib.blake2s(text.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{escaped[: LONGEST - len(_SHORTENED) - len(digest)]}{_SHORTENED}{digest}"


def is_name(text: str) -> bool:
    """Whether somebody may be called so in the pool: all of it can be seen, and it is not too long."""
    return len(text) <= LONGEST and all(map(is_seen, text))


def is_named(user: str, names: Collection[str]) -> bool:
    """Whether a user is one of those that somebody has listed by their names.

    JupyterHub writes all names in lower case, while rosters and addresses have capitals: so a name
    with capitals stands for that in lower case as well. Otherwise only what is the same is the same.
    """
    return user in all_names(frozenset(names))


@functools.lru_cache(maxsize=4096)
def all_names(names: frozenset[str]) -> frozenset[str]:
    """Return all that those whom somebody has listed may be called; see :func:`is_named`."""
    return names.union(each.lower() for each in names)


@functools.lru_cache(maxsize=1024)
def checked_name(text: str) -> str:
    """Return a name as it is. Raises ``BadRequest`` for one that nobody may be called in the pool."""
    if is_name(text):
        return text
    raise BadRequest(
        f"{text[:LONGEST]!a} is not a valid user name.",
        f"Accepted: at most {LONGEST} characters, all of them visible.",
    )


def _escaped(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode(errors="surrogatepass"))
