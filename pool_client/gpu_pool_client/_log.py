"""Logs in which nothing from outside can forge a line, hide one or move a cursor.

Names, and what kernels, pods and other programs say, get into the log of a service, of a Jupyter server or
of a Hub. What of that is not printable is escaped: here, through which all goes that we log.
"""

from __future__ import annotations

import logging
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:  # Python 3.10 has it without what it is of
    _Adapter = logging.LoggerAdapter

#: Seconds between two lines about the same, and what was told lately before all is forgotten.
_TELL_EVERY: Final = 60.0
_MOST_TOLD: Final = 1_024
#: What a name may consist of to be logged without quotation marks.
_PLAIN: Final = re.compile(r"[\w.@+-]+")


def escaped(text: str) -> str:
    """Return a text in one line: what is not printable, also what changes its direction, as an escape."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text
    )


def quoted(name: str) -> str:
    """Return a name as it is, or in quotation marks where it could be read as more than a name."""
    return name if _PLAIN.fullmatch(name) and name.isprintable() else escaped(repr(name))


def set_in(text: str) -> str:
    """Return the lines of a traceback, which may quote anything, so that none looks like one of the log."""
    return "\n".join(f"  {escaped(line)}" for line in text.splitlines())


class EscapingFormatter(logging.Formatter):
    """Writes each record in a line, and its traceback in lines that are set in."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as it is called
        """Return the line. Called by logging."""
        if not getattr(record, "is_escaped", False):
            record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - as it is called
        """Return the traceback's lines. Called by logging."""
        return set_in(super().formatException(ei))


class EscapingLogger(_Adapter):
    """Logs as a logger does, and escapes first: in the log of another program the format is not ours."""

    def __init__(self, logger: Any) -> None:
        super().__init__(logger, {"is_escaped": True})

    def log(self, level: int, msg: object, *args: object, exc_info: Any = None, **kwargs: Any) -> None:
        """Log a message, with the traceback of an exception where ``exc_info`` names or asks for one."""
        if self.isEnabledFor(level):
            text = escaped(str(msg) % args if args else str(msg))
            if exc_info:
                text += f"\n{set_in(_traceback(exc_info))}"
            self.logger.log(level, "%s", text, extra=self.extra, **kwargs)


def _traceback(given: Any) -> str:
    """Return the traceback that is meant by what ``logging`` accepts as ``exc_info``."""
    error = (
        given
        if isinstance(given, BaseException)
        else given[1]
        if isinstance(given, tuple)
        else sys.exc_info()[1]
    )
    return "".join(traceback.format_exception(error))


def get_logger() -> EscapingLogger:
    """Return the log of the program that this is a part of."""
    # Imported here because the client can do without it.
    import traitlets.log

    return EscapingLogger(traitlets.log.get_logger())


class RareWarnings:
    """Warns of what others can make happen as often as they like: of the same at most once in a while."""

    def __init__(self, log: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        """``log`` is a logger; by default that of the program that this is a part of."""
        self._log = log
        self._clock = clock
        #: When each was told, and how often it has happened since.
        self._told: dict[str, tuple[float, int]] = {}

    def warn(self, text: str, *args: object) -> None:
        """Log a warning, unless one of this ``text`` was logged lately; then the next one counts it."""
        now = self._clock()
        at, untold = self._told.get(text, (now - _TELL_EVERY, 0))
        if now - at < _TELL_EVERY:
            self._told[text] = at, untold + 1
            return
        if len(self._told) >= _MOST_TOLD:
            self._told.clear()
        self._told[text] = now, 0
        more = f" ({untold} times since this was said)" if untold else ""
        (self._log or get_logger()).warning(text + more, *args)
