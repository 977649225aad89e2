"""Which tiers are tried for a device, by the settings and by who owns the devices."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpu_pool.enforcement.hami_core import HamiTier
from gpu_pool.enforcement.machine import Isolation
from gpu_pool.enforcement.mps import MpsTier
from gpu_pool.enforcement.mps_namespaces import CgroupTier
from gpu_pool.enforcement.tiers import Accounting, Tier, WholeInstance
from gpu_pool.settings import PoolSettings
from gpu_pool_client import BadRequest, Device

#: The tiers that one process must own for all, by the name in the settings.
_OWNED: Final = ("mps", "cgroups")


def unowned(settings: PoolSettings) -> Isolation:
    """Return the isolation of a pool that any of its user's processes may open: nobody owns the devices.

    Raises ``BadRequest`` where the settings ask for a tier that needs an owner.
    """
    if settings.tier in _OWNED:
        raise BadRequest(
            f"c.PoolSettings.tier is {settings.tier!r}, which one process must do for all.",
            'Run "gpu-pool serve", and set GPU_POOL_URL=unix: for everybody who uses this machine\'s GPUs.',
        )
    if settings.tier == "hami":
        return _isolation(HamiTier(Path(settings.hami_library), _runtime(settings) / "hami"))
    return _isolation(Accounting())


def owned(settings: PoolSettings) -> Isolation:
    """Return the isolation of a pool whose devices this process owns, for several users if it is root."""
    several = os.geteuid() == 0
    prober = _uid_of(settings.probe_user) if several else None
    if settings.tier == "mps":
        return _isolation(MpsTier(_runtime(settings) / "mps", uid=prober, multiuser=several))
    if settings.tier == "cgroups":
        return _isolation(CgroupTier(_runtime(settings) / "mps3", uid=prober, multiuser=several))
    return unowned(settings)


def _isolation(chosen: Tier) -> Isolation:
    counted, instances = Accounting(), WholeInstance()

    def candidates(device: Device) -> Sequence[Tier]:
        if device.mig_profile is not None:
            return (instances,)
        # Nothing stands behind a simulated device that could be enforced.
        return (counted if device.simulated else chosen,)

    return Isolation(candidates)


def _uid_of(user: str) -> int:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise BadRequest(
            f"c.PoolSettings.probe_user is {user[:64]!a}, and there is no such user.",
            "Name a user of this machine who may do no more than a student.",
        ) from None


def _runtime(settings: PoolSettings) -> Path:
    """Return the folder for what lives no longer than this boot of the machine."""
    if settings.runtime_dir:
        return Path(settings.runtime_dir)
    if os.geteuid() == 0:
        return Path("/run/gpu-pool")
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "gpu-pool" if base else Path.home() / ".local/state/gpu-pool"
