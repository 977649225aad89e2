"""A kernel of another language, written from the protocol alone: it shouts back what is submitted.

Run by path with a connection file. It knows one identity frame more than none,
no debugger and no control beyond shutdown.
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


def main(path: str) -> None:
    """Serve until asked to shut down."""
    with open(path) as file:
        info = json.load(file)
    context = zmq.Context()
    bound = {}
    for channel, kind in {
        "shell": zmq.ROUTER,
        "control": zmq.ROUTER,
        "stdin": zmq.ROUTER,
        "iopub": zmq.PUB,
        "hb": zmq.REP,
    }.items():
        bound[channel] = context.socket(kind)
        bound[channel].bind(f"{info['transport']}://{info['ip']}:{info[channel + '_port']}")
    threading.Thread(target=zmq.proxy, args=(bound["hb"], bound["hb"]), daemon=True).start()
    poller = zmq.Poller()
    poller.register(bound["shell"], zmq.POLLIN)
    poller.register(bound["control"], zmq.POLLIN)
    while True:
        for channel, _ in poller.poll():
            frames = channel.recv_multipart()
            split = frames.index(DELIMITER)
            request = json.loads(frames[split + 2])
            content = json.loads(frames[split + 5])
            answer(info["key"].encode(), bound["iopub"], channel, frames[:split], request, content)
            if request["msg_type"] == "shutdown_request":
                os._exit(0)


def answer(key: bytes, iopub: Any, channel: Any, who: list[bytes], request: Any, content: Any) -> None:
    """Do what is asked, between busy and idle."""

    def send(socket: Any, prefix: list[bytes], kind: str, content: Any) -> None:
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

    send(iopub, [], "status", {"execution_state": "busy"})
    kind = request["msg_type"].replace("_request", "_reply")
    if kind == "execute_reply":
        text = f"{content['code'].upper()} on {os.environ.get('GPU_POOL_SLICE')}"
        send(iopub, [], "stream", {"name": "stdout", "text": text})
        send(channel, who, kind, {"status": "ok", "execution_count": 1})
    elif kind == "kernel_info_reply":
        language = {"name": "tiny", "version": "1", "mimetype": "text/plain", "file_extension": ".tiny"}
        send(channel, who, kind, {"status": "ok", "protocol_version": "5.0", "language_info": language})
    else:
        send(channel, who, kind, {"status": "ok"})
    send(iopub, [], "status", {"execution_state": "idle"})


if __name__ == "__main__":
    main(sys.argv[-1])
