"""The signed messages of the kernel protocol, as they are read from a socket's frames."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Any, Final, cast

import zmq
from jupyter_client.session import DELIM, Session

Message = dict[str, Any]

#: What jupyter_client raises on what is no message, or on one whose parts are not what they should be.
_FAILURES = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)


#: How many parts of a message are signed: header, parent header, metadata and content.
_PARTS: Final = 4
#: How many frames may precede the delimiter: a ROUTER socket puts one there, and each hop another.
_MOST_IDENTITIES: Final = 16


class UnreadableMessageError(Exception):
    """It is no signed message of the protocol; the text says why."""


def read_message(
    session: Session, frames: list[zmq.Frame], *, replayed: bool = False
) -> tuple[list[bytes], Message]:
    """Return the identities and the message of these frames. Raises :class:`UnreadableMessageError`.

    Each signature is taken once, unless the message may have been read before and be ``replayed``.
    """
    try:
        identities, rest = session.feed_identities(frames, copy=False)
        if replayed:
            session.digest_history.discard(cast(zmq.Frame, rest[0]).bytes)
        message = session.deserialize(rest, copy=False)
    except _FAILURES as error:
        raise UnreadableMessageError(f"{type(error).__name__}: {error}") from error
    if not _is_whole(message):
        raise UnreadableMessageError("its parts are not what they should be")
    return identities, message


def session_of(connection: Mapping[str, Any]) -> Session:
    """Return what signs and reads messages with the key of a connection file."""
    return Session(
        key=connection.get("key", "").encode(),
        signature_scheme=connection.get("signature_scheme") or "hmac-sha256",
    )


def is_signed(session: Session, frames: list[zmq.Frame]) -> bool:
    """Whether a message was signed with the session's key, if that has one.

    Reads nothing of it and takes no note of its signature, so it may be read before and after.
    """
    delimiter = _delimiter(frames)
    if delimiter is None:
        return False
    if session.auth is None:
        return True
    parts = frames[delimiter + 2 : delimiter + 2 + _PARTS]
    signature = session.sign([frame.bytes for frame in parts])
    return hmac.compare_digest(signature, frames[delimiter + 1].bytes)


def _delimiter(frames: list[zmq.Frame]) -> int | None:
    """Return where the delimiter of a whole message is; buffers may follow its parts, and are not signed."""
    for index, frame in enumerate(frames[:_MOST_IDENTITIES]):
        if len(frame) == len(DELIM) and frame.bytes == DELIM:
            return index if len(frames) >= index + 2 + _PARTS else None
    return None


def _is_whole(message: Mapping[str, Any]) -> bool:
    """Whether the parts of a message are of the kinds that everybody relies on."""
    header = message["header"]
    return (
        all(isinstance(header.get(key), str) for key in ("msg_id", "msg_type"))
        and isinstance(message["parent_header"], dict)
        and isinstance(message["content"], dict)
    )
