"""Every error a caller of a pool can meet, in one tree.

::

    GpuPoolError
    ├── BadRequest        what was written is not a slice request; write it differently
    ├── NeverFits         no device here could ever hold it; ask for less
    ├── NotAllowed        the pool's rules forbid it; ask for less, or ask the administrator
    ├── OverQuota         it would fit, but the caller holds too much already; release something
    ├── TimedOut          it fits, but not now; wait longer, or ask for what is free
    ├── PoolUnreachable   nobody answered; check the pool with ``gpu-pool doctor``
    └── LeaseGone         the lease has ended, or never existed; ask for a new one

The classes differ in what the caller can do about them. Their text is what a
student reads in JupyterLab's dialog, so each says what was asked, what there
is, and what to do.
"""

from __future__ import annotations

from typing import ClassVar

#: No message grows beyond this many characters, whatever was put into it.
MAX_MESSAGE = 2_000


class GpuPoolError(Exception):
    """The base of every error that a pool raises on purpose.

    ``str(error)`` is the message and the remedy.

    Parameters
    ----------
    message
        What was asked, and what there is.
    remedy
        What the caller can do about it.
    """

    #: A stable name for programs: JSON output and problem documents.
    code: ClassVar[str] = "error"
    #: The exit status of ``gpu-pool`` when a command ends with this error.
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message = message[:MAX_MESSAGE]
        self.remedy = remedy[:MAX_MESSAGE]
        super().__init__(f"{self.message} {self.remedy}".strip())


class BadRequest(GpuPoolError, ValueError):
    """What was given is not understood. The caller should write it differently."""

    code = "bad-request"
    exit_code = 2


class NeverFits(GpuPoolError):
    """No device of this pool could ever hold the request, however long one waits."""

    code = "never-fits"
    exit_code = 3


class NotAllowed(GpuPoolError):
    """The pool's rules forbid the request, whoever else holds what."""

    code = "not-allowed"
    exit_code = 4


class OverQuota(GpuPoolError):
    """The caller already holds as much as the rules give them."""

    code = "over-quota"
    exit_code = 5


class TimedOut(GpuPoolError):
    """Nothing became free in the time given. Waiting longer can help.

    Parameters
    ----------
    message, remedy
        As for :class:`GpuPoolError`.
    largest_now
        The largest slice request that would be granted at once, as
        :func:`~gpu_pool_client.parse_request` reads it; None when nothing is free.
    """

    code = "timed-out"
    exit_code = 6

    def __init__(self, message: str, remedy: str = "", *, largest_now: str | None = None) -> None:
        super().__init__(message, remedy)
        self.largest_now = largest_now


class PoolUnreachable(GpuPoolError):
    """The pool did not answer: not running, not readable, or not to be trusted.

    Parameters
    ----------
    message, remedy
        As for :class:`GpuPoolError`.
    may_pass
        Whether the same call can succeed a moment later without anybody changing a setting, as
        where a service is being restarted, or moves to another machine.
    """

    code = "pool-unreachable"
    exit_code = 7

    def __init__(self, message: str, remedy: str = "", *, may_pass: bool = False) -> None:
        super().__init__(message, remedy)
        self.may_pass = may_pass


class LeaseGone(GpuPoolError):
    """The lease has ended or never existed.

    Parameters
    ----------
    message, remedy
        As for :class:`GpuPoolError`.
    reason
        The :class:`~gpu_pool_client.EndReason` value it ended with; None for a lease that the
        pool has never heard of.
    """

    code = "lease-gone"
    exit_code = 8

    def __init__(self, message: str, remedy: str = "", *, reason: str | None = None) -> None:
        super().__init__(message, remedy)
        self.reason = reason
