"""What people are called in the pool, each differently, and what can be seen of any text. Pure.

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

from gpu_pool_client import BadRequest

#: Characters that Unicode calls printable, and that show nothing (Default_Ignorable_Code_Point, and blanks).
_INVISIBLE: Final = frozenset(
    map(
        chr,
        (
            *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0),
            *range(0x180B, 0x1810),
            *range(0xFE00, 0xFE10),
            *range(0xE0100, 0xE01F0),
        ),
    )
)
#: Kinds of characters that have no place in a text that people decide by: controls and line ends of all
#: kinds, formats such as those that turn the direction of writing, and what has no meaning to others.
_HIDDEN: Final = ("Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp")
#: What joins letters, or keeps them apart, in the writing of many languages and in emoji.
_JOINERS: Final = "\u200c\u200d"


def is_seen(character: str) -> bool:
    """Whether a character shows something."""
    return character.isprintable() and character not in _INVISIBLE


def hides(character: str) -> bool:
    """Whether a character can make a text read as something else than it is, or hide a part of it."""
    is_plain = character.isprintable() or character in _JOINERS
    return not is_plain and unicodedata.category(character) in _HIDDEN


def visible(text: str) -> str:
    r"""Return a text with all that cannot be seen in it, but for tabs, written as ``\u202e``."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(each if is_seen(each) or each == "\t" else _written(each) for each in text)


def undeceiving(text: str) -> str:
    r"""Return a text of any number of lines with what :func:`hides` in it written as ``\u202e``.

    All else stays as it is, also what only joins letters: names and titles are seen as they are meant.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_written(each) if each not in "\n\t" and hides(each) else each for each in text)


def visible_lines(text: str) -> str:
    """Return a text with each of its lines as :func:`visible` writes it."""
    return "\n".join(map(visible, text.split("\n")))


def named(character: str) -> str:
    """Name a character as Unicode does: ``U+202E (RIGHT-TO-LEFT OVERRIDE)``."""
    name = unicodedata.name(character, "")
    return f"U+{ord(character):04X}{f' ({name})' if name else ''}"


def _written(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


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
