"""Messages read from frames that anybody who has the kernel's key may have made up."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Any, Final, cast

import zmq
from jupyter_client.session import DELIM, Session

Message = dict[str, Any]

#: What jupyter_client raises on what is no message, or on one whose parts are not what they should be.
_FAILURES = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)


#: Where the delimiter, the signature and the signed parts of a message without buffers are, from its end.
_DELIMITER: Final = 6
_SIGNATURE: Final = 5
_PARTS: Final = 4


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


def is_signed(session: Session, frames: list[zmq.Frame]) -> bool:
    """Whether a message without buffers was signed with the session's key, if that has one.

    Reads nothing of it and takes no note of its signature, so it may be read before and after.
    """
    if len(frames) < _DELIMITER or frames[-_DELIMITER].bytes != DELIM:
        return False
    if session.auth is None:
        return True
    signature = session.sign([frame.bytes for frame in frames[-_PARTS:]])
    return hmac.compare_digest(signature, frames[-_SIGNATURE].bytes)


def _is_whole(message: Mapping[str, Any]) -> bool:
    """Whether the parts of a message are of the kinds that everybody relies on."""
    header = message["header"]
    return (
        all(isinstance(header.get(key), str) for key in ("msg_id", "msg_type"))
        and isinstance(message["parent_header"], dict)
        and isinstance(message["content"], dict)
    )
