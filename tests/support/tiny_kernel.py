"""A kernel of another language, written from the protocol alone: it shouts back what is submitted.

Run by path with a connection file. It knows one identity frame more than none,
no debugger and no control beyond shutdown. It begins to listen for what is typed
(stdin) only once it is asked nothing for a moment: late, and not against the protocol.
It welcomes who subscribes to its output as xeus does, with no parent at all. Two words
of code leave out one half of a cell's end: *stay busy* the status, *say nothing* the reply.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys
import threading
import uuid
from typing import Any

import zmq

DELIMITER = b"<IDS|MSG>"
_QUIET_MS = 500


def main(path: str) -> None:
    """Serve until asked to shut down."""
    with open(path) as file:
        info = json.load(file)
    bound = {}
    for channel, kind in {
        "shell": zmq.ROUTER,
        "control": zmq.ROUTER,
        "stdin": zmq.ROUTER,
        "iopub": zmq.XPUB,
        "hb": zmq.REP,
    }.items():
        # Each in a context of its own, so that one can be emptied before this ends.
        bound[channel] = zmq.Context().socket(kind)
        if channel != "stdin":
            bound[channel].bind(address(info, channel))
    threading.Thread(target=zmq.proxy, args=(bound["hb"], bound["hb"]), daemon=True).start()
    poller = zmq.Poller()
    poller.register(bound["shell"], zmq.POLLIN)
    poller.register(bound["control"], zmq.POLLIN)
    poller.register(bound["iopub"], zmq.POLLIN)
    listening, parent = False, int(os.environ.get("JPY_PARENT_PID") or os.getppid())
    while os.getppid() == parent:  # it ends with its server, as ipykernel does
        asked = poller.poll(_QUIET_MS)
        if not asked and not listening:
            bound["stdin"].bind(address(info, "stdin"))
            listening = True
        for channel, _ in asked:
            frames = channel.recv_multipart()
            if channel is bound["iopub"]:
                if frames[0][:1] == b"\x01":
                    topic = frames[0][1:].decode()
                    say(info["key"].encode(), channel, [], None, "iopub_welcome", {"subscription": topic})
                continue
            split = frames.index(DELIMITER)
            request = json.loads(frames[split + 2])
            content = json.loads(frames[split + 5])
            if content.get("code") == "ask":
                key = info["key"].encode()
                say(key, bound["stdin"], frames[:split], request, "input_request", {"prompt": "what? "})
                reply = bound["stdin"].recv_multipart()
                content["code"] = json.loads(reply[-1])["value"]
            answer(info["key"].encode(), bound["iopub"], channel, frames[:split], request, content)
            if request["msg_type"] == "shutdown_request":
                context = channel.context
                channel.close(linger=1_000)
                context.term()  # once the answer is on its way
                os._exit(0)


def address(info: dict[str, Any], channel: str) -> str:
    """Where a channel is to be."""
    return f"{info['transport']}://{info['ip']}:{info[channel + '_port']}"


def say(key: bytes, socket: Any, prefix: list[bytes], request: Any, kind: str, content: Any) -> None:
    """Send one signed message."""
    header = {
        "msg_id": uuid.uuid4().hex,
        "msg_type": kind,
        "session": "tiny",
        "username": "",
        "version": "5.0",
    }
    parts = [json.dumps(part).encode() for part in (header, request, {}, content)]
    signature = hmac.new(key, b"".join(parts), hashlib.sha256).hexdigest().encode()
    socket.send_multipart([*prefix, DELIMITER, signature, *parts])


def answer(key: bytes, iopub: Any, channel: Any, who: list[bytes], request: Any, content: Any) -> None:
    """Do what is asked, between busy and idle."""

    def send(socket: Any, prefix: list[bytes], kind: str, content: Any) -> None:
        say(key, socket, prefix, request, kind, content)

    send(iopub, [], "status", {"execution_state": "busy"})
    kind = request["msg_type"].replace("_request", "_reply")
    if kind == "execute_reply":
        text = f"{content['code'].upper()} on {os.environ.get('GPU_POOL_SLICE')}"
        send(iopub, [], "stream", {"name": "stdout", "text": text})
        if content["code"] != "say nothing":
            send(channel, who, kind, {"status": "ok", "execution_count": 1})
    elif kind == "kernel_info_reply":
        language = {"name": "tiny", "version": "1", "mimetype": "text/plain", "file_extension": ".tiny"}
        send(channel, who, kind, {"status": "ok", "protocol_version": "5.0", "language_info": language})
    else:
        send(channel, who, kind, {"status": "ok"})
    if content.get("code") != "stay busy":
        send(iopub, [], "status", {"execution_state": "idle"})


if __name__ == "__main__":
    main(sys.argv[-1])
