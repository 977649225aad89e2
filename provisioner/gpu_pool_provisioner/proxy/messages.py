"""The messages of the kernel protocol: how they are read, and what a proxy answers and publishes."""

from __future__ import annotations

import hmac
import platform
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final, cast

import zmq
from jupyter_client.session import DELIM, Session

from gpu_pool_provisioner.jupyter_files import NOTICE_MARK

Message = dict[str, Any]

#: What jupyter_client raises on what is no message, or on one whose parts are not what they should be.
_FAILURES = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
#: How many parts of a message are signed: header, parent header, metadata and content.
_PARTS: Final = 4
#: Where a message's header is, from its end.
HEADER: Final = 4
#: How many frames may precede the delimiter: a ROUTER socket puts one there, and each hop another.
_MOST_IDENTITIES: Final = 16
#: Characters in a line of a cell's output that fit into a small window.
_COLUMNS: Final = 76

#: What is answered at once while nothing runs, by type of request. Whatever is
#: not here is held for the kernel.
ANSWERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "comm_info_request": {"status": "ok", "comms": {}},
    # JupyterLab shows a kernel's status as unknown until this one is answered.
    "history_request": {"status": "ok", "history": []},
    "complete_request": {"status": "ok", "matches": [], "cursor_start": 0, "cursor_end": 0, "metadata": {}},
    "inspect_request": {"status": "ok", "found": False, "data": {}, "metadata": {}},
    "is_complete_request": {"status": "unknown"},
    # jupyter-resource-usage shows a reason in place of figures.
    "usage_request": {"status": "ok", "reason": "the kernel waits for its GPU slice"},
}

#: What frontends need to show and save code of a language before its kernel has
#: introduced itself: fields of kernel_info_reply's language_info.
_LANGUAGES: Final[Mapping[str, Mapping[str, Any]]] = {
    "python": {
        "mimetype": "text/x-python",
        "file_extension": ".py",
        "pygments_lexer": "ipython3",
        "codemirror_mode": {"name": "ipython", "version": 3},
        "nbconvert_exporter": "python",
    },
    "r": {"mimetype": "text/x-r-source", "file_extension": ".r", "pygments_lexer": "r"},
    "julia": {"mimetype": "application/julia", "file_extension": ".jl"},
}


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
    header = message["header"]
    # What everybody relies on.
    is_whole = (
        all(isinstance(header.get(key), str) for key in ("msg_id", "msg_type"))
        and isinstance(message["parent_header"], dict)
        and isinstance(message["content"], dict)
    )
    if not is_whole:
        raise UnreadableMessageError("its parts are not what they should be")
    return identities, message


def session_of(connection: Mapping[str, Any]) -> Session:
    """Return what signs and reads messages with the key of a connection file."""
    return Session(
        key=connection.get("key", "").encode(),
        signature_scheme=connection.get("signature_scheme") or "hmac-sha256",
    )


def is_signed(session: Session, frames: list[zmq.Frame]) -> bool:
    """Whether a whole message was signed with the session's key, if that has one; buffers are not signed.

    Reads nothing of it and takes no note of its signature, so it may be read before and after.
    """
    for index, frame in enumerate(frames[:_MOST_IDENTITIES]):
        if len(frame) == len(DELIM) and frame.bytes == DELIM:
            parts = frames[index + 2 : index + 2 + _PARTS]
            if len(parts) < _PARTS or session.auth is None:
                return len(parts) == _PARTS
            signature = session.sign([part.bytes for part in parts])
            return hmac.compare_digest(signature, frames[index + 1].bytes)
    return False


def introduction(language: str, argv: Sequence[str], *, debugger: bool) -> dict[str, Any]:
    """Return the content of the kernel_info_reply of a kernel that has never run here.

    ``language`` and ``argv`` are the kernelspec's; ``debugger`` is whether it
    says in its metadata that the kernel has one.
    """
    known = _LANGUAGES.get(language.lower(), {"mimetype": "text/plain", "file_extension": ".txt"})
    same_python = language == "python" and argv[:1] == [sys.executable]
    return {
        "status": "ok",
        # The last one before iopub_welcome: no frontend may depend on what not every kernel will send.
        "protocol_version": "5.3",
        "implementation": "gpu-pool",
        "implementation_version": "0",
        "language_info": {
            "name": language,
            "version": platform.python_version() if same_python else "",
            **known,
        },
        "banner": f"This {language} kernel waits for its slice of a GPU.",
        "help_links": [],
        "debugger": debugger,
    }


def dated(text: str, at: float) -> str:
    """Add when that was so: whatever keeps a cell's output, by accident or not, is then still true."""
    return f"{text} (As of {time.strftime('%H:%M %Z on %-d %B %Y', time.localtime(at))}.)"


def display(text: str, display_id: str) -> dict[str, Any]:
    """Return the content of display_data and of update_display_data, which a notebook's file leaves out."""
    # Pages break long lines of plain text wherever they end, in the middle of words; of HTML they do not.
    data = {
        "text/plain": textwrap.fill(text, _COLUMNS),
        "text/html": f"<div>{escape(text, quote=False)}</div>",
    }
    return {"data": data, "metadata": NOTICE_MARK, "transient": {"display_id": display_id}}


def error(name: str, text: str) -> dict[str, Any]:
    """Return the content of iopub's error message."""
    # Pages break lines anywhere, also within words.
    return {"ename": name, "evalue": text, "traceback": textwrap.wrap(f"{name}: {text}", _COLUMNS)}


def error_reply(name: str, text: str) -> dict[str, Any]:
    """Return the content of an execute_reply, or of any other reply, to what could not be done."""
    return {"status": "error", "execution_count": 0, **error(name, text)}
