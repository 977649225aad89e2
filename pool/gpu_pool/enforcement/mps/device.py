"""One device under classic MPS: its compute mode, who uses it already, its daemon, and who holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gpu_pool.enforcement.mps.daemon import PIPES, SHUT, MpsControl, MpsDaemon, MpsSize, is_old
from gpu_pool.enforcement.mps.programs import (
    TOOL,
    environment_of,
    find,
    is_believed,
    mps_processes,
    run,
    user_name_of,
)
from gpu_pool.enforcement.privileged import Privileged
from gpu_pool.enforcement.tiers import TierFailed
from gpu_pool_client import Device
from gpu_pool_client import _procfs as procfs

EXCLUSIVE: Final = "Exclusive_Process"
DEFAULT: Final = "Default"
#: nvidia-smi takes seconds where the driver has to be initialised first.
_TIMEOUT: Final = 30.0


def compute_mode(device: Device) -> str:
    """Return the device's compute mode as nvidia-smi names it: ``Default``, ``Exclusive_Process``."""
    return _query(device, "--query-gpu=compute_mode")


def refuse_unsuitable(device: Device) -> None:
    """Raise ``TierFailed`` for what MPS cannot divide."""
    if device.simulated:
        raise TierFailed(f"{device.label} is simulated: there is nothing to enforce.")
    if device.mig_profile is not None:
        raise TierFailed(
            f"{device.label} is a MIG instance, which is not divided further.",
            'Leave c.PoolSettings.tier at "auto" for it.',
        )


def refuse_busy(device: Device, mode: str) -> None:
    """Raise ``TierFailed`` where somebody else's processes would keep MPS off the device, or be kept off."""
    if mode == "Prohibited":
        raise TierFailed(
            f"The compute mode of GPU {device.index} is Prohibited: nothing may use it.",
            f"Allow it: sudo nvidia-smi -i {device.uuid} -c DEFAULT",
        )
    # The first is enough, and what follows it need not be another: a name may have newlines in it.
    first = _query(device, "--query-compute-apps=pid,process_name").partition("\n")[0]
    if first:
        pid, _, name = first.partition(",")
        shown = procfs.printable(name.strip().encode())
        exclusive = f", and its compute mode, {EXCLUSIVE}, admits no other" if mode == EXCLUSIVE else ""
        raise TierFailed(
            f"GPU {device.index} is used by process {pid.strip()} ({shown}){exclusive}.",
            f"End it first (kill {pid.strip()}), so that all that use the GPU do so through MPS.",
        )


def refuse_others(device: Device, pipe: Path) -> None:
    """Raise ``TierFailed`` where MPS runs already for this device, and its pipes are not in ``pipe``."""
    for pid in filter(is_believed, mps_processes()):
        environ = environment_of(pid)
        visible = [each for each in environ if each.startswith("CUDA_VISIBLE_DEVICES=GPU-")]
        elsewhere = visible and device.uuid not in visible[0]
        # One that we may not look at may see this device.
        if not elsewhere and f"{PIPES}={pipe}" not in environ:
            user = user_name_of(pid)
            raise TierFailed(
                f"MPS already runs on this machine: process {pid} of {user}.",
                f"Have {user} stop it: echo quit | {TOOL}; or end it: kill {pid}",
            )


def _query(device: Device, question: str) -> str:
    command = [find("nvidia-smi"), "-i", device.uuid, question, "--format=csv,noheader"]
    return run(command, timeout=_TIMEOUT)


#: Holds the compute mode that was found, so that it is put back even after a crash.
_FOUND: Final = "compute-mode"


class DeviceClaim:
    """The pool's claim to one device: a file in ``folder``. The pool's own MPS has its pipes in ``pipe``."""

    def __init__(self, device: Device, folder: Path, pipe: Path, privileged: Privileged) -> None:
        self._device, self._pipe, self._privileged = device, pipe, privileged
        self._found = folder / _FOUND

    def take(self) -> None:
        """Take the device, or raise ``TierFailed`` because somebody else uses it."""
        refuse_others(self._device, self._pipe)
        mode = compute_mode(self._device)
        if not self._found.exists():  # otherwise it was ours, and processes of our leases may be on it
            refuse_busy(self._device, mode)
            self._found.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._found.write_text(mode)
        if mode != EXCLUSIVE and self._privileged.available():
            self._close_to_others()

    def give_back(self) -> None:
        """Put the compute mode back that was found, and remove the folder."""
        if self._found.exists():
            changed = self._found.read_text() == DEFAULT and compute_mode(self._device) == EXCLUSIVE
            if changed and self._privileged.available():
                self._privileged.call("compute-mode", self._device.uuid, "default")
            self._found.unlink()
        if self._found.parent.exists():
            self._found.parent.rmdir()

    def _close_to_others(self) -> None:
        try:
            self._privileged.call("compute-mode", self._device.uuid, "exclusive")
        except TierFailed:
            return  # in a container even root may not: a probe finds the device open, and nothing is hard


#: What holders read whose MPS was gone.
RESTARTED: Final = "The GPU's MPS had stopped and was started again. Restart the kernel to use the GPU."
_FAULTED: Final = (
    "A CUDA error in one process stopped all processes on this GPU, maybe not by your doing. "
    "Restart the kernel to use the GPU."
)


class MpsDevice:
    """A device that MPS divides. Every method may raise ``TierFailed``.

    The server runs as the user ``uid``. With ``own_limits`` the limits of the
    leases held are the daemon's own, otherwise it has none. ``held`` has the
    size of every lease that is let in, by its id.
    """

    def __init__(
        self,
        device: Device,
        control: MpsDaemon,
        *,
        uid: int,
        own_limits: bool,
        privileged: Privileged,
        timeout: float,
    ) -> None:
        self.device, self.control, self.ask = device, control, MpsControl(control, timeout)
        self.held: dict[str, MpsSize] = {}
        self._uid, self._own_limits = uid, own_limits
        #: What the daemon was last told and has confirmed, since telling it takes nine questions.
        self._limited_to: MpsSize | None = None
        self._claim = DeviceClaim(device, control.folder, control.pipe, privileged)

    @property
    def size(self) -> MpsSize:
        """What a process that comes now may use: what all who are in may, or nothing if nobody is."""
        if not self._own_limits:
            return MpsSize(self.device.memory_mib, 100)
        return next(iter(self.held.values()), SHUT)

    def prepare(self) -> None:
        """Take over the daemon that an earlier run of the pool has left, or start one."""
        if self.ask.works():
            return
        self.control.kill()
        try:
            self._claim.take()
            self.restart()
        except TierFailed:
            self.leave()
            raise

    def restart(self) -> None:
        """Start the daemon and its server anew, whatever they are doing now."""
        self._limited_to = None
        self.control.start()
        self.ask.start_server(self._uid)
        self.fit()

    def fit(self) -> None:
        """Limit the processes that come from now on to the size that there is now."""
        self.limit(self.size)

    def limit(self, size: MpsSize) -> None:
        """Limit the processes that come from now on; before Volta, MPS cannot."""
        if size != self._limited_to and not is_old(self.device):
            self._limited_to = None
            self.ask.limit(size)
            self._limited_to = size

    def mend(self) -> str:
        """Start again what is gone or hangs, and end a fault; return what the holders are to read."""
        if not self.ask.works():
            self.restart()
            return RESTARTED
        if not self.ask.faulty():
            return ""
        # The server recovers once all that had the fault are gone from it, which they may not be.
        if not self._clears():
            self.restart()
        return _FAULTED

    def leave(self) -> None:
        """Stop the daemon, and leave the device as it was found."""
        self.control.quit()
        self._claim.give_back()

    def _clears(self) -> bool:
        try:
            self.ask.terminate({pid for server in self.ask.faulty() for pid in self.ask.clients(server)})
            return not self.ask.faulty()
        except TierFailed:
            return False
