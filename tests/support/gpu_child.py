"""A Python process that is told what to do, text by text, as a kernel is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any, Final

from .readable import is_readable

#: Seconds within which a process has imported PyTorch and begun to use the GPU, others beside it.
START_WITHIN: Final = 180.0

#: Runs one text of Python after another, as a kernel does, and answers each with a line of JSON.
#: Whoever interrupts it interrupts the text that runs, if one does.
_CHILD: Final = """
import json, os, signal, sys

def interrupted(signum, frame):
    if busy:
        raise KeyboardInterrupt

busy = False
signal.signal(signal.SIGINT, interrupted)
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
names = {"__name__": "__main__"}
for line in sys.stdin:
    names["answer"] = None
    try:
        busy = True
        exec(json.loads(line), names)
        busy = False
        told = json.dumps({"answer": names["answer"]})
    except BaseException as error:
        busy = False
        told = json.dumps({"error": type(error).__name__, "text": str(error)[:2000]})
    answers.write(told + chr(10))
    answers.flush()
"""


class Failed(Exception):
    """What a child was told to do failed; ``kind`` is the name of its error, or what became of it."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {text}")


class Child:
    """A Python process that runs what it is given, keeps its variables and outlives its errors."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._unread = b""
        #: Unix seconds.
        self.started_at = time.time()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=dict(environ),
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def ask(self, code: str, within: float = START_WITHIN) -> Any:
        """Run code in it; return what the code assigned to ``answer``. Raises ``Failed``."""
        self.tell(code)
        return self.hear(within)

    def tell(self, code: str) -> None:
        """Have code run in it; :meth:`hear` waits for it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(code).encode() + b"\n")
        except BrokenPipeError:
            raise self._ended() from None

    def hear(self, within: float = START_WITHIN) -> Any:
        """Wait for what it was told last; see :meth:`ask`."""
        told = json.loads(self._line(time.monotonic() + within))
        if "error" in told:
            raise Failed(told["error"], told["text"])
        return told["answer"]

    def kill(self) -> None:
        """End it at once, by SIGKILL."""
        self._process.kill()
        self._process.wait()

    def dismiss(self) -> None:
        """Tell it that nothing more is wanted: it ends by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        """Let it end by itself, or by force where it does not."""
        self.dismiss()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def _line(self, give_up_at: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            left = max(0.0, give_up_at - time.monotonic())
            if not is_readable(self._process.stdout, left):
                raise Failed("NoAnswer", f"process {self.pid} does not answer. {self._last_words()}")
            news = os.read(self._process.stdout.fileno(), 65536)
            if not news:
                raise self._ended()
            self._unread += news
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self) -> Failed:
        return Failed("Ended", f"status {self._process.wait()}. {self._last_words()}")

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-2000:].decode(errors="replace")
