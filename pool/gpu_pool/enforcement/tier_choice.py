"""Which tier is used for a device, by the settings and by who owns the devices.

Tiers are found through the entry points of installed packages, ours as any other's.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpu_pool import plugins
from gpu_pool.enforcement.machine import Isolation
from gpu_pool.enforcement.tiers import Accounting, Tier, TierContext, WholeInstance
from gpu_pool.plugins import PluginBroken
from gpu_pool.settings import PoolSettings
from gpu_pool_client import BadRequest, Device

#: The group of entry points that names tiers: those of this package, and of any other that is installed.
TIERS: Final = "gpu_pool.tiers"
#: What a setting says to have the firmest that needs no preparation by the administrator.
AUTO: Final = "auto"


def find_tier(name: str) -> type[Tier]:
    """Return the tier that the settings name. Raises ``BadRequest`` for one that cannot be used."""
    if name == AUTO:
        return Accounting
    try:
        found: type[Tier] = plugins.load(TIERS, name, Tier)
    except PluginBroken as broken:
        raise BadRequest(
            f"c.PoolSettings.tier is {name[:40]!a}, and that cannot be used: {broken}.",
            f"Accepted: {AUTO}, {', '.join(sorted(plugins.offers(TIERS)))}.",
        ) from broken
    return found


def unowned(settings: PoolSettings) -> Isolation:
    """Return the isolation of a pool that any of its user's processes may open: nobody owns the devices.

    Raises ``BadRequest`` where the settings ask for a tier that needs an owner.
    """
    kind = find_tier(settings.tier)
    if kind.needs_owner:
        raise BadRequest(
            f"c.PoolSettings.tier is {settings.tier!r}, which one process must do for all.",
            'Run "gpu-pool serve", and set GPU_POOL_URL=unix: for everybody who uses this machine\'s GPUs.',
        )
    return _isolation(kind.make(TierContext(settings, _runtime(settings))))


def owned(settings: PoolSettings) -> Isolation:
    """Return the isolation of a pool whose devices this process owns, for several users if it is root."""
    several = os.geteuid() == 0
    prober = _uid_of(settings.probe_user) if several else None
    context = TierContext(settings, _runtime(settings), several_users=several, probe_uid=prober)
    return _isolation(find_tier(settings.tier).make(context))


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
