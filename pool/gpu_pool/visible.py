"""What can be seen of a text, and what only changes how the text around it is read. Pure."""

from __future__ import annotations

import unicodedata
from typing import Final

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
    return "".join(each if is_seen(each) or each == "\t" else _escaped(each) for each in text)


def undeceiving(text: str) -> str:
    r"""Return a text of any number of lines with what :func:`hides` in it written as ``\u202e``.

    All else stays as it is, also what only joins letters: names and titles are seen as they are meant.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(each) if each not in "\n\t" and hides(each) else each for each in text)


def visible_lines(text: str) -> str:
    """Return a text with each of its lines as :func:`visible` writes it."""
    return "\n".join(map(visible, text.split("\n")))


def named(character: str) -> str:
    """Name a character as Unicode does: ``U+202E (RIGHT-TO-LEFT OVERRIDE)``."""
    name = unicodedata.name(character, "")
    return f"U+{ord(character):04X}{f' ({name})' if name else ''}"


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
