"""The contract's errors as problem documents (RFC 9457), and back to the same class."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from pydantic import BaseModel, ValidationError

from gpu_pool_client._errors import (
    BadRequest,
    GpuPoolError,
    LeaseGone,
    NeverFits,
    NotAllowed,
    OverQuota,
    PoolUnreachable,
    TimedOut,
)

#: The media type of a problem document.
PROBLEM_TYPE: Final = "application/problem+json"

_STATUS: Final[dict[type[GpuPoolError], HTTPStatus]] = {
    BadRequest: HTTPStatus.BAD_REQUEST,
    NeverFits: HTTPStatus.UNPROCESSABLE_ENTITY,
    NotAllowed: HTTPStatus.FORBIDDEN,
    OverQuota: HTTPStatus.TOO_MANY_REQUESTS,
    # Neither the client nor a gateway was slow: the state of the pool is in the way.
    TimedOut: HTTPStatus.CONFLICT,
    PoolUnreachable: HTTPStatus.SERVICE_UNAVAILABLE,
    # Not "410 Gone": others must not learn which leases there were.
    LeaseGone: HTTPStatus.NOT_FOUND,
    GpuPoolError: HTTPStatus.INTERNAL_SERVER_ERROR,
}
_KINDS: Final = {kind.code: kind for kind in _STATUS}


class ProblemDocument(BaseModel):
    """A problem document, with what is needed to raise the error again."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    message: str
    remedy: str = ""
    #: Of ``timed-out``.
    largest_now: str | None = None
    #: Of ``lease-gone``.
    reason: str | None = None


def problem_of(error: GpuPoolError) -> ProblemDocument:
    """Describe an error. One of a class that only the service knows becomes its nearest public one."""
    kind = next(each for each in type(error).__mro__ if each in _STATUS)
    status = _STATUS[kind]
    return ProblemDocument(
        title=status.phrase,
        status=status,
        detail=str(error),
        code=kind.code,
        message=error.message,
        remedy=error.remedy,
        largest_now=error.largest_now if isinstance(error, TimedOut) else None,
        reason=error.reason if isinstance(error, LeaseGone) else None,
    )


def error_of(body: bytes | bytearray) -> GpuPoolError:
    """Return the error that a problem document describes; ``PoolUnreachable`` where it is none."""
    try:
        problem = ProblemDocument.model_validate_json(body)
    except ValidationError:
        return PoolUnreachable("That URL is not a gpu-pool service.", "Check the URL of the pool.")
    kind = _KINDS.get(problem.code, GpuPoolError)
    if kind is TimedOut:
        return TimedOut(problem.message, problem.remedy, largest_now=problem.largest_now)
    if kind is LeaseGone:
        return LeaseGone(problem.message, problem.remedy, reason=problem.reason)
    if kind is PoolUnreachable:  # the service answers, so it is there: what it lacks may come back
        return PoolUnreachable(problem.message, problem.remedy, may_pass=True)
    return kind(problem.message, problem.remedy)
