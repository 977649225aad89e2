"""Slices by HAMi-core, a library that the administrator has installed: it asks processes to keep to theirs.

It is loaded into every process (``LD_PRELOAD``) and refuses what is past a
limit. A process that unsets the variable is free of it, so it is cooperative.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from gpu_pool.enforcement.tiers import Tier, TierContext, TierFailed, TierStatement
from gpu_pool_client import WHOLE, Device, Enforcement, Lease, Limit, Slice, Strength
from gpu_pool_client import _procfs as procfs
from gpu_pool_client._log import get_logger
from gpu_pool_client._processes import account_of

#: HAMi-core keeps a lock here, whoever uses it.
LOCKS: Final = Path("/tmp/vgpulock")  # noqa: S108 - its own choice
_FILE: Final = "shared.cache"
#: Thousandths of compute below which its regulator, which is 5 points off at any time, regulates nothing.
_LEAST_MILLI: Final = 100
#: How often it is tried to make a folder that somebody else is in the way of.
_TRIES: Final = 20


class HamiTier(Tier):
    """Limits by ``library``, the path of HAMi-core's ``libvgpu.so``. One object serves all devices.

    Each lease has a folder of its user's own in ``folder``, which is on a local
    disk. The file in it is how its processes share their limits: the first of
    them fixes these.
    """

    name: ClassVar[str] = "hami"

    @classmethod
    def make(cls, context: TierContext) -> HamiTier:
        """Return the tier with the library that the settings name."""
        return cls(Path(context.settings.hami_library), context.runtime / "hami")

    def __init__(self, library: Path, folder: Path, *, locks: Path = LOCKS) -> None:
        self._library, self._folder, self._locks = library, folder, locks

    def adapt(self, device: Device) -> Device:
        """Return the device as it is: slices may have any sizes, and contexts are not limited."""
        return device

    def prepare(self, device: Device) -> None:
        """Look whether the library can be used on this device."""
        if device.simulated or device.mig_profile is not None:
            raise TierFailed(f"HAMi-core divides whole GPUs, and {device.label} is not one.")
        if not self._library.is_file():
            raise TierFailed(
                f"HAMi-core's library {self._library} does not exist.",
                "Install it there, or correct its path in the settings.",
            )
        try:
            # Have the folder of HAMi-core's lock, whatever somebody else has put in its place. Anybody can
            # make something of its name first, since it is in ``/tmp``.
            if not any(self._is_made() or self._is_folder() for _ in range(_TRIES)):
                raise TierFailed(f"Somebody replaces {self._locks} whenever the pool takes it over.")
            self._folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        except OSError as error:
            raise TierFailed(f"HAMi-core cannot be used: {error}.") from None
        if not (self._locks.is_dir() and os.access(self._locks, os.R_OK | os.W_OK | os.X_OK)):
            raise TierFailed(
                f"HAMi-core needs {self._locks}, which this user may not write to.",
                f"Make it writable for everybody: sudo chmod 1777 {self._locks}",
            )

    def describe(self, lease: Lease) -> TierStatement:
        """Say what the library holds processes to: memory, and compute where the share is large enough."""
        variables = {
            "LD_PRELOAD": f"{self._library}",
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": f"{self._lease_folder(lease) / _FILE}",
        }
        for place, part in enumerate(lease.slices):
            variables |= _limits(place, part)
        least = min((part.milli for part in lease.slices), default=0)
        compute = Limit(Strength.COOPERATIVE, "HAMi-core") if least >= _LEAST_MILLI else Limit()
        return TierStatement(variables, Enforcement(Limit(Strength.COOPERATIVE, "HAMi-core"), compute))

    def open(self, lease: Lease) -> None:
        """Make the lease's folder anew: the limits of an earlier slice of it would hold on."""
        self.close(lease)
        folder = self._lease_folder(lease)
        try:
            folder.mkdir(mode=0o700, parents=True)
            if os.geteuid() == 0:
                shutil.chown(folder, lease.holder.user)
        except LookupError:
            pass  # a name of JupyterHub's, say, that is no user of this machine
        except OSError as error:
            raise TierFailed(f"HAMi-core's folder for lease {lease.id} cannot be made: {error}.") from None

    def close(self, lease: Lease) -> None:
        """Remove the lease's folder."""
        shutil.rmtree(self._lease_folder(lease), ignore_errors=True)

    def recover(self, leases: Sequence[Lease]) -> None:
        """Remove the folders of all other leases."""
        held = {self._lease_folder(lease) for lease in leases}
        for folder in self._folder.iterdir() if self._folder.exists() else ():
            if folder not in held:
                shutil.rmtree(folder, ignore_errors=True)

    def _is_made(self) -> bool:
        try:
            self._locks.mkdir(mode=0o700)
        except FileExistsError:
            return False
        self._locks.chmod(0o1777)
        return True

    def _is_folder(self) -> bool:
        """Whether the folder is there; what another user has put in its place is moved aside, by root.

        Raises ``TierFailed`` for what is not ours to move.
        """
        found = self._locks.lstat()
        theirs = found.st_uid not in (0, os.geteuid())
        if stat.S_ISDIR(found.st_mode):
            if theirs and os.geteuid() == 0:
                self._take_over(found)
                return False  # its owner may have moved it meanwhile, so it is looked at again
            return True
        if not theirs and self._locks.is_dir():  # a link that the administrator has made
            return True
        user, what = account_of(found.st_uid), _in_words(self._locks)
        if not theirs or os.geteuid() != 0:
            raise TierFailed(
                f"HAMi-core needs the folder {self._locks}, and {what} of {user} is in its place.",
                f"Remove it, and the pool makes the folder: sudo rm {self._locks}",
            )
        aside = self._locks.with_name(f"{self._locks.name}.{secrets.token_hex(4)}")
        self._locks.rename(aside)
        get_logger().warning(
            "%s of %s was in the place of %s, and is %s now", what, user, self._locks, aside.name
        )
        return False

    def _take_over(self, found: os.stat_result) -> None:
        """Make another user's folder root's, so that its owner cannot take it away from everybody.

        What its owner has put in its place since it was ``found`` is left as it is.
        """
        try:
            handle = os.open(self._locks, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):  # a link is no folder either, by these flags
            return
        try:
            opened = os.fstat(handle)
            if os.path.samestat(opened, found) and opened.st_uid == found.st_uid:
                os.fchown(handle, 0, 0)
                os.fchmod(handle, 0o1777)
        finally:
            os.close(handle)

    def _lease_folder(self, lease: Lease) -> Path:
        return self._folder / lease.id


def _in_words(path: Path) -> str:
    """Say what is there that is no folder."""
    if not path.is_symlink():
        return "a file"
    target = procfs.printable(os.fsencode(os.readlink(path)), most=200)
    return f"a symbolic link to {target}" + ("" if path.exists() else ", which does not exist,")


def _limits(place: int, part: Slice) -> dict[str, str]:
    """Return the limits of the device that a process sees at this place."""
    memory = {f"CUDA_DEVICE_MEMORY_LIMIT_{place}": f"{part.memory_mib}m"}
    regulated = _LEAST_MILLI <= part.milli < WHOLE
    return (
        {**memory, f"CUDA_DEVICE_SM_LIMIT_{place}": f"{part.milli * 100 // WHOLE}"} if regulated else memory
    )
