"""One device under classic MPS: its daemon, its compute mode, and who holds how much of it."""

from __future__ import annotations

from typing import Final

from gpu_pool.enforcement.mps.compute_mode import DeviceClaim
from gpu_pool.enforcement.mps.control import MpsControl
from gpu_pool.enforcement.mps.daemon import MpsDaemon
from gpu_pool.enforcement.mps.sizes import SHUT, MpsSize, is_old
from gpu_pool.enforcement.privileged import Privileged
from gpu_pool.enforcement.tiers import TierFailed
from gpu_pool_client import Device

_RESTARTED: Final = "The GPU's MPS had stopped and was started again. Restart the kernel to use the GPU."
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
            return _RESTARTED
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
