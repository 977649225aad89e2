"""What a service and its clients send each other: values as JSON, and errors as problem documents (RFC 9457).

A request for a slice travels as its text, everything else field by field.
Fields that the reader does not know are passed over, so that either side may
be the newer one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError, WrapSerializer

from gpu_pool_client._devices import DeviceStatus
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
from gpu_pool_client._leases import Lease, Outlook, PreparedStatus, Terms
from gpu_pool_client._requests import parse_request

#: The root of all addresses. It changes when what they mean does.
API: Final = "/api/v1"
#: The header by which a client on TCP tells its processes apart, and the one by which the
#: service says within how many seconds a lease has to be renewed.
CLIENT_HEADER: Final = "Gpu-Pool-Client"
TTL_HEADER: Final = "Gpu-Pool-Renew-Within"
#: Bytes of the largest body that the service reads.
MOST_BODY: Final = 64 * 1024
#: Seconds for which one call may wait for a change.
LONGEST_POLL: Final = 300.0
#: Seconds for which one call waits for a change of a pod, whose lease may end meanwhile.
POD_POLL: Final = 25.0


def _write_lease(lease: Lease, write: Callable[[Lease], dict[str, Any]]) -> dict[str, Any]:
    return {**write(lease), "request": str(lease.request)}


def _read_lease(fields: Any) -> Any:
    if isinstance(fields, dict) and isinstance(fields.get("request"), str):
        return {**fields, "request": parse_request(fields["request"])}
    return fields


#: A lease, its request as a text.
WireLease = Annotated[Lease, BeforeValidator(_read_lease), WrapSerializer(_write_lease)]

LEASE: Final[TypeAdapter[Lease]] = TypeAdapter(WireLease)
OUTLOOK: Final = TypeAdapter(Outlook)


class Body(BaseModel):
    """What a client says. It cannot say who it is: that is not in any body."""

    # Without this, what is no number at all would be written as null, which means "no limit".
    model_config = ConfigDict(ser_json_inf_nan="constants")


class HeartbeatBody(Body):
    """The leases that a process on the other side of TCP still wants."""

    leases: list[str]


class HeartbeatAnswer(BaseModel):
    """Which of them need not be named any more: they have ended, or are nobody's to renew."""

    unknown: list[str]


class StatusBody(BaseModel):
    """One snapshot of the pool. Its URL is the client's affair."""

    devices: tuple[DeviceStatus, ...]
    leases: tuple[WireLease, ...]
    queue: tuple[WireLease, ...]
    note: str = ""
    store_bytes: int | None = None
    prepared: tuple[PreparedStatus, ...] = ()


def version(lease: Lease) -> str:
    """Return a tag that differs as soon as anything that its holder sees of a lease does.

    Its terms are left out: they change with its state only, and the time of
    its end is reckoned anew, and so a little differently, by every look.
    """
    return hashlib.blake2s(LEASE.dump_json(replace(lease, terms=Terms())), digest_size=12).hexdigest()


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
