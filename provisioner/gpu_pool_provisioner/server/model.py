"""What pages are told of slices, as JSON has it, and what they send. Pure: values in, dictionaries out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpu_pool_client import Activity, BadRequest, Lease, Outlook, SliceRequest, format_share, parse_request
from gpu_pool_provisioner.session.expiry_policy import keeps_variables
from gpu_pool_provisioner.session.view import SlicePhase, SliceView

#: Longer than any size that there is, and than any time for which a kernel is kept.
_LONGEST_SIZE: Final = 200
_LONGEST_KEEP: Final = 366 * 86_400
#: Mistakes of one body that are named.
_MOST_NAMED: Final = 3


B = TypeVar("B", bound="EmptyBody")
#: Turns a time of ``time.monotonic()`` into Unix seconds.
Clock = Callable[[float], float]

#: Where a kernel's slice is its own, and where it has asked for one.
_HAS_SLICE: Final = (SlicePhase.HELD, SlicePhase.STARTING)
_NO_LEASE: Final = (SlicePhase.NONE, SlicePhase.ASKING)
_MAY_SLEEP: Final = (SlicePhase.HELD, SlicePhase.PARKED)
_WAITS: Final = (SlicePhase.WAITING, SlicePhase.RESUMING, SlicePhase.ASKING)


@dataclass(frozen=True, slots=True)
class KernelName:
    """What people call a kernel."""

    kernel_id: str
    kernelspec: str
    display_name: str
    #: The path of its session; None where it has none.
    notebook: str | None


def slice_of(name: KernelName, state: SliceView, sizes: Sequence[str], clock: Clock) -> dict[str, Any]:
    """Return a Slice of the API; ``sizes`` are those that the kernel may ask for."""
    lease = state.lease
    size, offered = (
        size_of(state).size,
        actions(state, [each for each in sizes if each != size_of(state).size]),
    )
    if state.phase is SlicePhase.STARTING and lease is not None and lease.is_queued:
        # Its job, or its pod, is what waits; to its user it is the same wait.
        state = replace(state, phase=SlicePhase.WAITING)
    return {
        "kernel_id": name.kernel_id,
        "kernel_name": name.kernelspec,
        "display_name": name.display_name,
        "notebook": name.notebook,
        "state": state.phase.value,
        "size": size,
        "pending_size": state.pending.size if state.pending is not None else None,
        "message": state.message,
        **_queue(state),
        **_times(state, clock),
        **_devices(lease, state.phase),
        **_limits(lease, state.activity, state.phase),
        **_end(state),
        "given_back": state.given_back,
        "actions": offered,
    }


def size_of(state: SliceView) -> SliceRequest:
    """Return what a kernel has, or asks for."""
    return state.lease.request if state.lease is not None else state.request


def _queue(state: SliceView) -> dict[str, Any]:
    lease = state.lease
    waits = state.phase in _WAITS
    return {
        "position": state.position if waits else None,
        "expected_wait": expected_wait(state.outlook) if waits else None,
        "requested_at": lease.requested_at if lease is not None else None,
    }


def expected_wait(outlook: Outlook | None) -> list[float] | None:
    """Return the soonest and the latest, in seconds; None where nothing is known."""
    return None if outlook is None or outlook.wait is None else [round(each, 1) for each in outlook.wait]


def _times(state: SliceView, clock: Clock) -> dict[str, Any]:
    lease, idle = state.lease, state.idle
    held = state.phase is SlicePhase.HELD

    def at(seconds: float | None) -> float | None:
        return None if seconds is None or not held else clock(seconds)

    terms = lease.terms if lease is not None else None
    sleeps_at = idle.sleeps_at if state.phase in _MAY_SLEEP else None
    return {
        "held_at": lease.held_at if lease is not None and state.phase in _HAS_SLICE else None,
        "ends_at": terms.over_at if terms is not None and state.phase not in _NO_LEASE else None,
        "job": terms.job if terms is not None and state.phase not in _NO_LEASE else "",
        "idle_since": at(idle.idle_since),
        "idle_limit": terms.idle_limit if terms is not None and terms.acts_when_idle else None,
        "gives_back_at": at(idle.gives_back_at),
        "ends_when_idle": held and idle.ends,
        "yields_at": at(idle.yields_at),
        "kept_until": at(idle.kept_until),
        "sleeps_at": clock(sleeps_at) if sleeps_at is not None else None,
        "asked_back": held
        and not state.gives_way
        and (idle.gives_back_when_idle or (lease is not None and lease.asked_back is not None)),
        "gives_way": state.gives_way,
        "asleep_since": clock(state.on_disk.since) if state.on_disk is not None else None,
        "image_mib": state.on_disk.image_mib if state.on_disk is not None else None,
        "left_kernel": state.left,
        "wake_error": state.failed_wake.why if state.failed_wake is not None else "",
        "wake_failed_at": clock(state.failed_wake.at) if state.failed_wake is not None else None,
    }


def _devices(lease: Lease | None, phase: SlicePhase) -> dict[str, Any]:
    slices = lease.slices if lease is not None and phase in _HAS_SLICE else ()
    devices = [part.device for part in slices]
    return {
        "devices": [{"name": each.name, "simulated": each.simulated} for each in devices],
        "node": devices[0].node if devices else "",
    }


def _limits(lease: Lease | None, activity: Activity | None, phase: SlicePhase) -> dict[str, Any]:
    held = lease is not None and phase in _HAS_SLICE and bool(lease.slices)
    memory = compute = None
    if lease is not None and held:
        memory, compute = lease.enforcement.memory, lease.enforcement.compute
    return {
        "memory": {
            "granted_mib": sum(part.memory_mib for part in lease.slices) if lease is not None and held else 0,
            **_burst(lease if held else None),
            "used_mib": activity.memory_mib if activity is not None and held else None,
            "strength": memory.strength.value if memory is not None else "none",
            "by": memory.by if memory is not None else "",
        },
        "compute": {
            "share": format_share(lease.slices[0].milli) if lease is not None and held else "",
            "strength": compute.strength.value if compute is not None else "none",
            "by": compute.by if compute is not None else "",
        },
    }


def _burst(lease: Lease | None) -> dict[str, Any]:
    """Return what may be used now, and the most that ever may, where that is more than what is granted."""
    if lease is None or not lease.limit_mib:
        return {"allowed_mib": None, "limit_mib": None}
    return {
        "allowed_mib": sum(part.allowed_mib for part in lease.slices),
        "limit_mib": sum(part.limit_mib for part in lease.slices),
    }


def _end(state: SliceView) -> dict[str, Any]:
    end = state.end
    if end is None or (end.reason is None and state.phase is not SlicePhase.NONE):
        return {"end_reason": None, "end_message": ""}
    return {"end_reason": end.reason, "end_message": end.message}


def actions(state: SliceView, sizes: list[str]) -> dict[str, Any]:
    """Return what is possible now, and what it costs."""
    phase, lease = state.phase, state.lease
    found: dict[str, Any] = {}
    if phase is SlicePhase.HELD and lease is not None and lease.terms.can_be_kept:
        # By the minute, so that pages are not told of each second.
        found["keep"] = {"at_most": int(state.idle.keep_at_most // 60) * 60}
    # Where there is no kernel any more, the size is that of the next.
    at_once = sizes
    if not state.resizes_live and phase is not SlicePhase.NONE:
        at_once = [each for each in sizes if state.takes_at_once(parse_request(each))]
    if at_once:
        found["resize"] = {"sizes": at_once, "keeps_variables": True}
    if phase is SlicePhase.HELD and sizes:
        found["restart"] = {"sizes": sizes, "keeps_variables": False}
    if phase in (SlicePhase.PARKED, SlicePhase.ASLEEP):
        found["resume"] = {"keeps_variables": True}
    if phase is SlicePhase.HELD:
        kept = keeps_variables(state.activity or Activity())
        found["give-back"] = {"keeps_variables": kept, "shuts_down": False}
    if phase in _WAITS:
        found["leave-queue"] = {"keeps_variables": True}
    return found


class EmptyBody(BaseModel):
    """What is sent where nothing needs to be said."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class KeepBody(EmptyBody):
    """For how long a kernel counts as in use, in seconds."""

    seconds: Annotated[int, Field(ge=1, le=_LONGEST_KEEP)]


class SizeBody(EmptyBody):
    """Another size, and whether it is to change only when the kernel is restarted."""

    size: Annotated[str, Field(min_length=1, max_length=_LONGEST_SIZE)]
    at_restart: bool = False


def read_body(kind: type[B], text: bytes) -> B:
    """Read a body. Raises ``BadRequest`` that says what was given and what is accepted."""
    try:
        return kind.model_validate_json(text or b"{}")
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)[:_MOST_NAMED]
        said = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'the body'}: {each['msg']}, and not {each['input']!r:.60}"
            for each in wrong
        )
        raise BadRequest(f"What was sent is not accepted: {said}.", _accepted(kind)) from error


def _accepted(kind: type[EmptyBody]) -> str:
    examples = {KeepBody: '{"seconds": 3600}', SizeBody: '{"size": "10%", "at_restart": false}'}
    return f"Send JSON like {examples.get(kind, '{}')}."
