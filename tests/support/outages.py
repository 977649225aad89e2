"""An API server that a test stops and starts again over the same etcd, and whose past it can take away."""

from __future__ import annotations

import base64
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from support.api_server import ApiServer, Program, etcd_running


class Outage:
    """One API server and its etcd. All methods block."""

    def __init__(self, program: Program, etcd: str) -> None:
        self._program, self._etcd = program, etcd
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def server(self) -> ApiServer:
        """How to talk to it."""
        return self._program.server

    def start(self) -> None:
        """Let it answer, at the same address as before."""
        self._process = self._stack.enter_context(self._program.running())

    def stop(self) -> None:
        """Kill it; etcd lives on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._stack.close()

    def close(self) -> None:
        """Stop it in an orderly way, if it runs."""
        self._stack.close()

    def remove(self, kind: str, namespace: str, name: str) -> None:
        """Take an object out of etcd, as another API server does."""
        answer = self._ask("kv/deleterange", {"key": _text(f"/registry/{kind}/{namespace}/{name}")})
        assert answer["deleted"] == "1", answer

    def compact(self) -> None:
        """Let etcd forget all that has happened until now."""
        revision = self._ask("kv/range", {"key": _text("/")})["header"]["revision"]
        self._ask("kv/compaction", {"revision": revision, "physical": True})

    def _ask(self, what: str, question: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"{self._etcd}/v3/{what}", json.dumps(question).encode())
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())


def _text(key: str) -> str:
    return base64.b64encode(key.encode()).decode()


@contextmanager
def stoppable_api(folder: Path) -> Iterator[Outage]:
    """Run a fresh, empty API server that can be stopped."""
    folder.mkdir()
    with etcd_running(folder) as etcd:
        outage = Outage(Program.prepared(folder, etcd), etcd)
        try:
            outage.start()
            yield outage
        finally:
            outage.close()
