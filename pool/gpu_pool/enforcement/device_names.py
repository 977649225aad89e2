"""How programs find the devices of a slice: by uuid, or by CUDA's numbers where the pool is set to that.

A number is right only for who sees the same GPUs as the pool, in the same order. So it is given to
processes of the pool's own pid namespace alone: what runs in a container, or asks over HTTP, may have
been given some of the machine's GPUs, which are numbered from 0 there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from gpu_pool.devices.visible import ORDER, PCI_ORDER, VARIABLE
from gpu_pool.enforcement.machine import Isolation
from gpu_pool.enforcement.tiers import Tier
from gpu_pool_client import Device, Lease, Process
from gpu_pool_client import _procfs as procfs

#: What a setting says to have numbers.
INDEX: Final = "index"


def with_indices(lease: Lease, isolation: Isolation) -> Lease:
    """Return a lease whose processes find its devices by number, if all have one; otherwise as it is."""
    if not lease.slices or not _sees_the_same(lease.process or lease.holder.process):
        return lease
    if any(why_uuid(part.device, isolation.tier(part.device)) for part in lease.slices):
        return lease
    numbers = ",".join(str(part.device.cuda_index) for part in lease.slices)
    named: Mapping[str, str] = {VARIABLE: numbers, ORDER: PCI_ORDER}
    return replace(lease, variables={**lease.variables, **named})


def why_uuid(device: Device, tier: Tier | type[Tier]) -> str:
    """Say why programs must find a device by its uuid; empty where its number will do."""
    if device.mig_profile is not None:
        return "CUDA has no numbers for MIG instances"
    if tier.needs_uuids:
        return "MPS numbers anew what its daemon sees"
    if device.cuda_index is None:
        return "its number is not certain, since a GPU of this machine is in MIG mode, or cannot be read"
    return ""


def _sees_the_same(process: Process | None) -> bool:
    return (
        process is not None
        and process.namespace == Process.current().namespace
        and len(procfs.status(process.pid, b"NSpid")) == 1
    )
