"""What was written last to standard error in a pod, by whichever kernel: it says why one has ended."""

import contextlib
import os

#: Bytes of it that are kept, and characters that are told.
_KEPT, _TOLD = 16_384, 600
#: How what Python says of a fatal signal begins: the calls that follow may be many.
_FATAL = "Fatal Python error: "
#: Bytes that are read at a stretch, and how often before something else is done.
_CHUNK, _CHUNKS = 65536, 16


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
            with contextlib.suppress(OSError):  # nobody keeps a log
                while data:
                    data = data[os.write(self._log, data) :]

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

    def leave(self) -> None:
        """Close what a process that is no supervisor does not need."""
        os.close(self.reading)
        os.close(self._log)
