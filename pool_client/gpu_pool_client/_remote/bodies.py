"""What travels between a pool's service and its clients: the contract's values as JSON.

A request for a slice travels as its text, everything else field by field.
Fields that the reader does not know are passed over, so that either side may
be the newer one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, WrapSerializer

from gpu_pool_client._processes import Process
from gpu_pool_client._requests import parse_request
from gpu_pool_client._values import Activity, DeviceStatus, EndedLease, KernelPod, Lease, Outlook, Terms

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
FORECAST: Final[TypeAdapter[Outlook | None]] = TypeAdapter(Outlook | None)
ACTIVITY: Final = TypeAdapter(Activity)
DEVICE: Final = TypeAdapter(DeviceStatus)
POD: Final = TypeAdapter(KernelPod)
HISTORY: Final = TypeAdapter(list[EndedLease])
POSITIONS: Final = TypeAdapter(dict[str, int])
OFFERS: Final[TypeAdapter[list[str] | None]] = TypeAdapter(list[str] | None)


class Body(BaseModel):
    """What a client says. It cannot say who it is: that is not in any body."""

    # Without this, what is no number at all would be written as null, which means "no limit".
    model_config = ConfigDict(ser_json_inf_nan="constants")


class RequestBody(Body):
    """A request for a slice."""

    request: str
    key: str
    course: str | None = None
    kernel: str | None = None
    batch: bool = False


#: Seconds: of the number of a body that is none, such as true, that is said.
_Seconds = Annotated[float, Field(strict=True)]


class AttachBody(Body):
    """The process to tie a lease to, as its client sees it."""

    process: Process
    ready_within: _Seconds | None = None
    grace: _Seconds = 0.0


class RenewBody(Body):
    """Until when all is well, in seconds from now; None lifts the deadline."""

    ttl: _Seconds | None = None


class HeartbeatBody(Body):
    """The leases that a process on the other side of TCP still wants."""

    leases: list[str]


class HeartbeatAnswer(BaseModel):
    """Which of them need not be named any more: they have ended, or are nobody's to renew."""

    unknown: list[str]


class ResizeBody(Body):
    """What a lease is to have from now on, or, ``ahead``, once its process has ended."""

    request: str
    ahead: bool = False


class LaunchBody(Body):
    """The kernel that is to run in a pod. Its connection is secret."""

    argv: tuple[str, ...]
    connection: dict[str, str | int]
    environment: dict[str, str] = {}
    folder: str | None = None


class DrainBody(Body):
    """Whether a device grants nothing more."""

    drained: bool


class StatusBody(BaseModel):
    """One snapshot of the pool. Its URL is the client's affair."""

    devices: tuple[DeviceStatus, ...]
    leases: tuple[WireLease, ...]
    queue: tuple[WireLease, ...]
    note: str = ""
    store_bytes: int | None = None


STATUS: Final = TypeAdapter(StatusBody)


def version(lease: Lease) -> str:
    """Return a tag that differs as soon as anything that its holder sees of a lease does.

    Its terms are left out: they change with its state only, and the time of
    its end is reckoned anew, and so a little differently, by every look.
    """
    return hashlib.blake2s(LEASE.dump_json(replace(lease, terms=Terms())), digest_size=12).hexdigest()
