"""What was written last to standard error in a pod, by whichever kernel: it says why one has ended."""

import contextlib
import os
import select
import sys

#: Bytes of the end of standard error that are kept.
_KEPT = 16_384
#: Characters of it that a person is told.
_TOLD = 600
#: How what Python says of a fatal signal begins: the calls that follow may be many.
_FATAL = "Fatal Python error: "
#: Bytes that are read at a time.
_CHUNK = 65536
#: Reads in a row before something else gets its turn.
_CHUNKS = 16
#: Bytes that a pipe takes whole where it takes any (PIPE_BUF).
_TAKEN = 4096
#: Seconds after which a log that takes nothing is given up.
_STUCK_AFTER = 1.0


class LastWords:
    """Stands between what runs in this pod and the container's standard error: it passes everything on.

    To be made before anything is started that is to write there, and to be read whenever there is something.
    """

    def __init__(self) -> None:
        """Take the place of standard error."""
        self.reading, writing = os.pipe()
        os.set_blocking(self.reading, False)
        self._log = os.dup(2)
        os.dup2(writing, 2)
        os.close(writing)
        self._kept = b""
        #: Whether the log took nothing lately: what it would have to take is lost then.
        self._is_stuck = False
        # What this process says itself may not wait for that it reads it.
        sys.stderr = os.fdopen(self._log, "w", buffering=1, closefd=False)

    def fileno(self) -> int:
        """Return the descriptor that can be read once there is something."""
        return self.reading

    def read(self) -> None:
        """Pass on what was written since."""
        for _ in range(_CHUNKS):
            try:
                data = os.read(self.reading, _CHUNK)
            except BlockingIOError:
                return
            self._kept = (self._kept + data)[-_KEPT:]
            self._pass_on(data)

    def _pass_on(self, data: bytes) -> None:
        """Let the log have this; who stands here must go on also where it takes nothing."""
        room = select.poll()  # not select(2), which takes none from the 1,024th on
        room.register(self._log, select.POLLOUT)
        with contextlib.suppress(OSError):  # nobody keeps a log
            while data:
                within = 0.0 if self._is_stuck else _STUCK_AFTER
                self._is_stuck = not room.poll(within * 1000)
                if self._is_stuck:
                    return
                data = data[os.write(self._log, data[:_TAKEN]) :]

    def forget(self) -> None:
        """Begin anew: what comes now is another kernel's."""
        self.read()
        self._kept = b""

    def told(self) -> str:
        """Return what was written last; of where Python was when a signal ended it, how that begins."""
        self.read()
        text = self._kept.decode("utf-8", "replace")
        fatal = text.rfind(_FATAL)
        return text[fatal : fatal + _TOLD] if fatal >= 0 else text[-_TOLD:]

    def end(self) -> None:
        """Let everything be written to the container's standard error again."""
        self.read()
        os.dup2(self._log, 2)
        sys.stderr = sys.__stderr__

    def leave(self) -> None:
        """Close what a process that is no supervisor does not need."""
        sys.stderr = sys.__stderr__
        os.close(self.reading)
        os.close(self._log)
