"""``drain`` and ``undrain``: nothing more is granted on a GPU; its kernels go to disk where that is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import click

from gpu_pool.cli import completing, screen
from gpu_pool.cli.formatting import Plain, safe
from gpu_pool.cli.session import CommandSession, Duration, json_option, verb
from gpu_pool_client import BadRequest, DeviceStatus, Lease, LeaseState, Pool, PoolUnreachable, format_memory

#: Seconds between two looks at kernels that are to go to disk.
_EVERY: Final = 1.0
_COLUMNS: Final = ("Lease", "User", "For", "Kernel", "Why")
_NOT_ABLE: Final = (
    "it is no IPython kernel, or its server does not put kernels to disk (hibernate_after, "
    "hibernate_with_server)."
)
_NOT_IN_POD: Final = "it runs in a pod, and those stay awake."
_WAITS: Final = "a cell of it waits for its slice: interrupt it."
_LOST: Final = (
    " On disk, and gone all the same once their servers or this machine end: {}. Only kernels with "
    "hibernate_with_server stay. To keep these, leave their servers running, or undo this (gpu-pool undrain) "
    "until their users are done."
)
_ENDS_WITH_SERVER: Final = "it is gone when its server ends (hibernate_with_server)."


@dataclass(frozen=True, slots=True)
class _DrainedKernel:
    """What has become of the kernel of a lease that was to go to disk."""

    lease: Lease
    #: MiB of its image; None while it is awake.
    image_mib: int | None
    #: Why it is awake, or what is to be known of its image; empty for nothing.
    why: str = ""
    #: Whether it may still go to disk.
    may_go: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether it is on disk, and stays there when its server ends."""
        said = self.lease.hibernation
        return self.image_mib is not None and said is not None and said.outlives_server


def _kernel(lease: Lease) -> _DrainedKernel:
    said = lease.hibernation
    if lease.terms.in_pod:
        return _DrainedKernel(lease, None, _NOT_IN_POD)
    if said is None:
        return _DrainedKernel(lease, None, _NOT_ABLE)
    if said.image_mib is not None and lease.state is LeaseState.PARKED:
        return _DrainedKernel(lease, said.image_mib, "" if said.outlives_server else _ENDS_WITH_SERVER)
    if lease.state is LeaseState.WAITING:
        return _DrainedKernel(lease, None, _WAITS)
    may_go = said.is_for_now or not said.why_awake
    return _DrainedKernel(
        lease, None, said.why_awake or "it goes to disk now, or as soon as it is idle.", may_go
    )


@verb(
    "drain",
    "gpu-pool drain 0",
    "gpu-pool drain GPU-8f2a6c11",
    "gpu-pool drain --hibernate --timeout 5min",
)
@click.argument("device", required=False, shell_complete=completing.devices)
@click.option(
    "--hibernate",
    is_flag=True,
    help="Let its idle kernels go to disk, and wait for that; without DEVICE, those of all GPUs.",
)
@click.option(
    "--timeout",
    type=Duration(),
    metavar="TIME",
    help="With --hibernate: wait this long at most for kernels that work (90s, 15min); 10min by default.",
)
@json_option
def drain(session: CommandSession, device: str | None, hibernate: bool, timeout: float | None) -> int:
    """Let a GPU's leases end and grant nothing more on it.

    DEVICE is an index or a uuid, as "gpu-pool list" shows them. Waiting
    requests get other GPUs, or wait until it is undrained.

    With --hibernate, kernels go to disk as soon as they are idle, where their
    servers can do that, and stay there until it is undrained. At the end stands
    which do, and why others do not; the exit status is 1 if any stays awake, or
    is on disk only for as long as its server runs.
    """
    if hibernate:
        return _hibernate(session, device, 600.0 if timeout is None else timeout)
    if timeout is not None:
        raise BadRequest("--timeout is for --hibernate alone.", "Leave it out: nothing is waited for.")
    if device is None:
        remedy = 'Name one, as "gpu-pool list" shows them; with --hibernate, all are meant.'
        raise BadRequest("It is not said which GPU is to be drained.", remedy)
    return _drain(session, device, drained=True)


@verb("undrain", "gpu-pool undrain 0", "gpu-pool undrain")
@click.argument("device", required=False, shell_complete=completing.devices)
@json_option
def undrain(session: CommandSession, device: str | None) -> int:
    """Grant slices of a drained GPU again; without DEVICE, of all that are drained."""
    if device is not None:
        return _drain(session, device, drained=False)
    found = session.ask(_undrain_all)
    if session.as_json:
        screen.show_json({"devices": [each.device.uuid for each in found], "drained": False})
    elif not found:
        click.echo("No GPU is drained.")
    for each in found if not session.as_json else ():
        click.echo(f"{_name(each)} is in use again.")
    return 0


async def _undrain_all(pool: Pool) -> list[DeviceStatus]:
    devices = (await pool.status()).devices
    drained = [each.device.uuid for each in devices if each.drained_at is not None]
    return [await pool.drain(uuid, drained=False) for uuid in drained]


def _name(status: DeviceStatus) -> str:
    return f"GPU {status.device.index}, {safe(status.device.label)},"


def _drain(session: CommandSession, device: str, *, drained: bool) -> int:
    status = session.ask(lambda pool: pool.drain(device, drained=drained))
    if session.as_json:
        screen.show_json({"device": status.device.uuid, "drained": drained, "leases": status.leases})
        return 0
    name = _name(status)
    if not drained:
        click.echo(f"{name} is in use again.")
    elif status.leases:
        left = "1 lease is" if status.leases == 1 else f"{status.leases} leases are"
        click.echo(f"{name} gets no new leases; {left} still on it. See: gpu-pool list -d")
    else:
        click.echo(f"{name} gets no new leases, and none is on it.")
    return 0


# -- To disk -----------------------------------------------------------------------


def _hibernate(session: CommandSession, device: str | None, timeout: float) -> int:
    """Drain GPUs, wait until their kernels are on disk, or are known to stay awake, and show which are."""
    drained, kernels = session.ask(lambda pool: _all_on_disk(pool, device, timeout))
    if session.as_json:
        uuids = [each.device.uuid for each in drained]
        screen.show_json({"devices": uuids, "drained": True, "kernels": [_plain(each) for each in kernels]})
    else:
        for each in drained:
            click.echo(f"{_name(each)} gets no new leases.")
        if kernels:
            screen.show(screen.table(_COLUMNS, [_row(each) for each in kernels]))
        click.echo(_in_words(kernels))
    return 0 if all(each.is_kept for each in kernels) else 1


async def _all_on_disk(
    pool: Pool, device: str | None, timeout: float
) -> tuple[list[DeviceStatus], list[_DrainedKernel]]:
    """Drain one GPU, or all, and return them, and what has become of their kernels within so many seconds.

    Raises ``PoolUnreachable``, and drains nothing, where the service would put no kernel to disk.
    """
    there = (await pool.status()).devices
    if any(each.hibernates is None for each in there):
        raise PoolUnreachable(
            "The gpu-pool service is of an older release, which puts no kernel to disk: nothing was drained.",
            "Upgrade jupyter-gpu-pool where the service runs, and start it anew.",
        )
    wanted = [each.device.uuid for each in there] if device is None else [device]
    drained = [await pool.drain(each, hibernate=True) for each in wanted]
    give_up_at, told = time.monotonic() + timeout, ""
    while True:
        status = await pool.status()
        kernels = [_kernel(each) for each in (*status.leases, *status.queue) if each.hibernates]
        left = give_up_at - time.monotonic()
        if left <= 0 or not any(each.may_go for each in kernels):
            return drained, kernels
        if (words := _progress(kernels)) != told:
            screen.note(words)
            told = words
        await asyncio.sleep(min(_EVERY, left))


def _progress(kernels: Sequence[_DrainedKernel]) -> str:
    on_disk = sum(each.image_mib is not None for each in kernels)
    waits = [each for each in kernels if each.may_go]
    why = dict.fromkeys(f"{safe(each.lease.id)}: {safe(each.why, 300)}" for each in waits[:3])
    more = f" And {len(waits) - 3} more." if len(waits) > 3 else ""
    return f"{on_disk} of {_kernels(len(kernels))} on disk. Waited for are {' '.join(why)}{more}"


def _kernels(count: int) -> str:
    return "1 kernel is" if count == 1 else f"{count} kernels are"


def _row(kernel: _DrainedKernel) -> list[str]:
    lease, mib = kernel.lease, kernel.image_mib
    who = safe(lease.id), safe(lease.holder.user), safe(lease.holder.kernel or "-")
    return [*who, "awake" if mib is None else f"asleep, {format_memory(mib)}", safe(kernel.why, 600) or "-"]


def _plain(kernel: _DrainedKernel) -> Plain:
    lease = kernel.lease
    return {
        "lease": lease.id,
        "user": lease.holder.user,
        "kernel": lease.holder.kernel,
        "image_mib": kernel.image_mib,
        "why": kernel.why,
        "outlives_server": lease.hibernation is not None and lease.hibernation.outlives_server,
    }


def _in_words(kernels: Sequence[_DrainedKernel]) -> str:
    """Say how many kernels are on disk, and what becomes of them."""
    if not kernels:
        return "No kernel is on them."
    if all(each.is_kept for each in kernels):
        return "All are on disk. Once this is undone, their next cell wakes them: gpu-pool undrain"
    asleep = [each for each in kernels if each.image_mib is not None]
    awake = len(kernels) - len(asleep)
    lost = [safe(each.lease.id) for each in asleep if not each.is_kept]
    said = f"{_kernels(len(asleep))} on disk, and {_kernels(awake)} awake." if awake else "All are on disk."
    ends = " What is awake ends with its server, and with this machine." if awake else ""
    return f"{said}{ends}{_LOST.format(', '.join(lost)) if lost else ''}"
