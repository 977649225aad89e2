"""Names that hostile input cannot break: label values, and names of objects made from their content.

A label value has at most 63 characters, letters, digits, ``-``, ``_`` and
``.``, and begins and ends with a letter or digit
(https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

#: Longest label value.
MAX_LABEL: Final = 63
#: Prefix of the labels that this project sets.
PREFIX: Final = "jupyter-gpu-pool"

_LABEL: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII)
_MADE: Final = re.compile(r".*---[0-9a-f]{16}", re.ASCII)
_BAD: Final = re.compile(r"[^A-Za-z0-9_.]+", re.ASCII)
_HASH_LENGTH: Final = 16


def label_value(text: str) -> str:
    """Return a valid label value for any text, a user's or course's name for instance.

    A text that is a valid value stays as it is, unless it looks like one that
    was made here. Every other text becomes what is readable of it, ``---`` and
    the first 64 bits of its SHA-256: two texts share a value only if those bits
    are equal, so nobody takes another's name by spelling theirs alike.
    """
    if _LABEL.fullmatch(text) and not _MADE.fullmatch(text):
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_LENGTH]
    readable = _BAD.sub("-", text[:MAX_LABEL])[: MAX_LABEL - _HASH_LENGTH - 3].strip("-_.")
    return f"{readable or 'x'}---{digest}"


def identity_labels(user: str, course: str | None = None) -> dict[str, str]:
    """Return the labels by which a pod is found again: whose it is, and that this project made it."""
    labels = {"app.kubernetes.io/managed-by": PREFIX, f"{PREFIX}/user": label_value(user)}
    return {**labels, f"{PREFIX}/course": label_value(course)} if course is not None else labels


def content_name(content: Mapping[str, Any]) -> str:
    """Return an object's name made from what is in it, so that the same content is one object."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "gpu-pool-" + hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]
