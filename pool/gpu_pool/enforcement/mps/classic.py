"""Slices by classic MPS (version 2): one control daemon and one server for each device, and who holds it."""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from gpu_pool.enforcement.mps.daemon import (
    PIPES,
    SHUT,
    MpsControl,
    MpsDaemon,
    MpsSize,
    contexts,
    is_old,
    size_of,
)
from gpu_pool.enforcement.mps.probe import MEMORY, ProbeOutcome, attempts, is_roots
from gpu_pool.enforcement.mps.programs import (
    TOOL,
    NotRun,
    environment_of,
    find,
    is_believed,
    mps_processes,
    run,
    user_name_of,
)
from gpu_pool.enforcement.privileged import Privileged
from gpu_pool.enforcement.tiers import SEEN_ON_H100, Tier, TierContext, TierFailed, TierStatement
from gpu_pool_client import WHOLE, Device, Enforcement, Lease, Limit, Slice, Strength
from gpu_pool_client import _procfs as procfs
from gpu_pool_client._log import get_logger

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
        while self.ask.works():
            if not self.ask.unanswered:
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
        self._limited_to, self.ask.unanswered = None, 0
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
        try:
            works = self.ask.works()
        except NotRun as error:
            get_logger().warning("MPS of %s is not looked after now: %s", self.device.label, error)
            return ""
        if not works:
            self.restart()
            return RESTARTED
        if self.ask.unanswered or not self.ask.faulty():
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


THREADS: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
#: A process that tries to evade a limit gets this much, and asks for twice as much.
_TRIED: Final = MpsSize(1024, 10)


class ByMps(Tier):
    """What limits by both versions of MPS have in common. One object serves all devices.

    ``runtime`` is a folder of its own on a local disk; it is made if missing.
    All clients run as the user ``uid`` (the pool's own by default), unless
    ``multiuser``, for which the pool must be root; then ``uid`` is the user
    that :meth:`probe` tries. ``hard`` names the devices that a probe found closed, to all but
    root. ``privileged`` does what needs root. No question to a daemon waits longer than
    ``timeout`` seconds.
    """

    needs_owner: ClassVar[bool] = True
    needs_uuids: ClassVar[bool] = True
    #: The folder in that for what lives no longer than this boot.
    folder: ClassVar[str]
    #: What each device has of its own: ``daemon`` or ``server``.
    has_own: ClassVar[str]

    @classmethod
    def make(cls, context: TierContext) -> ByMps:
        """Return the tier, for several users if the pool is."""
        return cls(context.runtime / cls.folder, uid=context.probe_uid, multiuser=context.several_users)

    def __init__(
        self,
        runtime: Path,
        *,
        uid: int | None = None,
        multiuser: bool = False,
        hard: Collection[str] = (),
        privileged: Privileged | None = None,
        timeout: float = 10.0,
    ) -> None:
        self._runtime, self._multiuser, self._hard, self._timeout = runtime, multiuser, set(hard), timeout
        self._uid = os.geteuid() if uid is None else uid
        self._privileged = Privileged() if privileged is None else privileged
        self._is_public = multiuser or self._uid != os.geteuid()

    def _strength(self, lease: Lease) -> Strength:
        """Return how firmly a lease of one slice is held."""
        is_hard = lease.slices[0].device.uuid in self._hard and not is_roots(lease)
        return Strength.HARD if is_hard else Strength.COOPERATIVE

    def _only_slice(self, lease: Lease) -> Slice:
        """Return the slice of a lease that has one; raise ``TierFailed`` for others."""
        if len(lease.slices) != 1:
            raise TierFailed(
                f"{len(lease.slices)} GPUs were asked for at once; each has an MPS {self.has_own} of its own "
                "here, and a process can use one of them.",
                "Ask for one GPU, or have the administrator set another c.PoolSettings.tier.",
            )
        return lease.slices[0]

    def _take_note(self, device: Device, outcome: ProbeOutcome) -> ProbeOutcome:
        """Keep whether a probe found the device closed."""
        self._hard -= {device.uuid}
        if outcome is ProbeOutcome.REFUSED:
            self._hard.add(device.uuid)
        return outcome


class MpsTier(ByMps):
    """Limits by classic MPS, for each process of a lease apart.

    ``one_size`` makes the limits the daemon's own, which a process cannot lift by changing its environment.
    """

    name: ClassVar[str] = "mps"
    seen: ClassVar[str] = SEEN_ON_H100
    folder: ClassVar[str] = "mps"
    has_own: ClassVar[str] = "daemon"

    def __init__(self, runtime: Path, *, one_size: bool = True, **settings: Any) -> None:
        super().__init__(runtime, **settings)
        self._one_size = one_size
        self._device_states: dict[str, MpsDevice] = {}

    def adapt(self, device: Device) -> Device:
        """Return the device with its context slots, and of one size where the limits are the daemon's."""
        return replace(device, contexts=contexts(device), one_size=self._of_one_size(device))

    def describe(self, lease: Lease) -> TierStatement:
        """Say how a lease of one slice is enforced; one of several is not, and :meth:`open` refuses it."""
        if len(lease.slices) != 1:
            return TierStatement()
        part = lease.slices[0]
        pipe = {PIPES: f"{self._control(part.device).pipe}"}
        if is_old(part.device):
            nothing = Limit(by="MPS, without limits before Volta")
            return TierStatement(pipe, Enforcement(nothing, nothing))
        size = size_of(part)
        limits = {MEMORY: f"0={size.memory_mib}M", THREADS: f"{size.percent}"} if _is_part(part) else {}
        strength = self._strength(lease) if self._one_size else Strength.COOPERATIVE
        memory, compute = "MPS, each process", f"MPS, a ceiling of {size.percent}%"
        return TierStatement(
            {**pipe, **limits}, Enforcement(Limit(strength, memory), Limit(strength, compute))
        )

    def prepare(self, device: Device) -> None:
        """Start the device's daemon, or take over the one that an earlier run of the pool has left."""
        refuse_unsuitable(device)
        find(TOOL)
        if os.geteuid() != 0 and (self._multiuser or self._uid != os.geteuid()):
            raise TierFailed(
                "MPS for other users than the pool's own needs a pool that runs as root.",
                "Run gpu-pool serve as root, or leave MPS to the pool's own user.",
            )
        if device.uuid not in self._device_states:
            device_state = self._device_state(device)
            device_state.prepare()
            self._device_states[device.uuid] = device_state

    def open(self, lease: Lease) -> None:
        """Let the lease's processes in, with its size; it is the size of all who are in."""
        part = self._only_slice(lease)
        self._check_user(lease)
        self.prepare(part.device)
        device_state = self._device_states[part.device.uuid]
        size = size_of(part)
        others = {held for lease_id, held in device_state.held.items() if lease_id != lease.id}
        if self._of_one_size(part.device) and others - {size}:
            raise TierFailed(
                f"GPU {part.device.index} is divided into slices of {others.pop().memory_mib} MiB now, and "
                f"MPS gives all of them one size: {size.memory_mib} MiB must wait until the GPU is empty."
            )
        device_state.held[lease.id] = size
        try:
            device_state.fit()
        except TierFailed:
            del device_state.held[lease.id]
            raise

    def evict(self, lease: Lease, pids: Sequence[int]) -> None:
        """Have MPS end the work of these processes, so that killing them disturbs no others."""
        for part in lease.slices:
            if part.device.uuid in self._device_states:
                self._device_states[part.device.uuid].ask.terminate(set(pids))

    def close(self, lease: Lease) -> None:
        """Forget the lease; a device that nobody holds admits nobody."""
        for part in lease.slices:
            device_state = self._device_states.get(part.device.uuid)
            if device_state is not None:
                device_state.held.pop(lease.id, None)
                if not device_state.held:
                    device_state.fit()

    def recover(self, leases: Sequence[Lease]) -> None:
        """Enforce exactly these leases: on daemons that live still, or on new ones; end all others."""
        parts = [(lease.id, lease.slices[0]) for lease in leases if len(lease.slices) == 1]
        devices = {part.device.uuid: part.device for _, part in parts}
        for folder in self._runtime.iterdir() if self._runtime.exists() else ():
            if folder.name not in {*devices, *self._device_states}:
                self._device_state(Device(folder.name, 0, "", 0)).leave()
        for device in devices.values():
            self.prepare(device)
        for uuid, device_state in self._device_states.items():
            device_state.held = {
                lease_id: size_of(part) for lease_id, part in parts if part.device.uuid == uuid
            }
            device_state.fit()

    def stop(self) -> None:
        """Stop the daemons, and put the compute modes back that were found."""
        for uuid in list(self._device_states):
            self._device_states.pop(uuid).leave()

    def tend(self) -> dict[str, str]:
        """Look after the daemons, and mend what is broken; return what holders are to read, by lease id.

        A daemon that is gone or hangs is started again. A server that a fault
        blocks has its clients ended, and is started again if that does not help.
        """
        told: dict[str, str] = {}
        for device_state in self._device_states.values():
            try:
                trouble = device_state.mend()
            except TierFailed as failure:  # the other devices need care, too
                trouble = f"The GPU's MPS has stopped and could not be started again. {failure}"
            told |= dict.fromkeys(device_state.held, trouble) if trouble else {}
        return told

    def probe(self, device: Device) -> ProbeOutcome:
        """Try to use a prepared device that nobody holds past any limit; once refused, its limits are hard.

        Call it before the first lease. Nothing is hard where the daemon runs as
        the user of its clients.
        """
        device_state = self._device_states[device.uuid]
        if device_state.held or not self._of_one_size(device):
            return ProbeOutcome.UNKNOWN
        pipe = {PIPES: f"{device_state.control.pipe}"}
        device_state.limit(_TRIED)
        try:
            outcome = attempts(device.uuid, self._uid, pipe, 2 * _TRIED.memory_mib)
        finally:
            device_state.fit()
        return self._take_note(device, outcome)

    def _of_one_size(self, device: Device) -> bool:
        return self._one_size and not is_old(device)

    def _check_user(self, lease: Lease) -> None:
        try:
            uid = pwd.getpwnam(lease.holder.user).pw_uid
        except KeyError:  # a name of JupyterHub's, say, that is no user of this machine
            return
        if uid != self._uid and not self._multiuser:
            raise TierFailed(
                f"MPS serves one Unix user here (uid {self._uid}), and {lease.holder.user} is another.",
                "Have the administrator run gpu-pool serve as root, with MPS for several users.",
            )

    def _device_state(self, device: Device) -> MpsDevice:
        return MpsDevice(
            device,
            self._control(device),
            uid=0 if self._multiuser else self._uid,
            own_limits=self._of_one_size(device),
            privileged=self._privileged,
            timeout=self._timeout,
        )

    def _control(self, device: Device) -> MpsDaemon:
        return MpsDaemon(
            self._runtime / device.uuid,
            options=("-multiuser-server",) if self._multiuser else (),
            visible=device.uuid,
            public=self._is_public,
            timeout=self._timeout,
        )


def _is_part(part: Slice) -> bool:
    return part.milli < WHOLE or part.memory_mib < part.device.memory_mib
