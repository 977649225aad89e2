"""Slices of any size by MPS version 3 and control groups, for driver R615 and newer.

Each lease has a namespace of MPS and a control group. The namespace limits threads,
and the memory of each process apart. The control group limits the memory of the
processes in it together: those that are attached, and what they start. What else
uses the namespace, from a terminal, say, is in no group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from gpu_pool.enforcement.mps.classic import RESTARTED, ByMps, DeviceClaim, refuse_unsuitable
from gpu_pool.enforcement.mps.daemon import PIPES, SHUT, MpsDaemon, MpsSize, contexts, size_of, wait_until
from gpu_pool.enforcement.mps.probe import ProbeOutcome, attempts
from gpu_pool.enforcement.mps.programs import is_memory, is_percentage
from gpu_pool.enforcement.tiers import TierFailed, TierStatement
from gpu_pool_client import Device, Enforcement, Lease, Limit, Process
from gpu_pool_client._processes import family

_CSV: Final = "--format=csv,noheader"
_VERSION: Final = ("-p", "3")
_MEMORY: Final = "pinned-memory-limit"
_THREADS: Final = "active-thread-percentage"


class NamespaceDaemon:
    """The one daemon for all devices, with a server for each. Every method may raise ``TierFailed``."""

    def __init__(self, control: MpsDaemon, timeout: float) -> None:
        self.control, self._timeout = control, timeout

    def works(self) -> bool:
        """Whether the daemon runs and answers."""
        if not self.control.running():
            return False
        try:
            self.servers()
        except TierFailed:
            return False
        return True

    def servers(self) -> set[str]:
        """Return the names of its servers."""
        return self._names("server", "list")

    def start_server(self, server: str, uid: int, device: str) -> None:
        """Start a server for one device; who comes to it without a namespace gets nothing."""
        self._ask("server", "create", server, f"--uid={uid}", f"--allowed-devices={device}")
        # One whose device is not found is accepted, and ends: its clients would run without MPS.
        if not wait_until(lambda: server in self.servers(), self._timeout):
            raise TierFailed(f"The MPS server for {device} ended at once. {self.control.log_tail()}".strip())
        self._ask("server", "set", server, *_limits(SHUT))

    def namespaces(self, server: str) -> set[str]:
        """Return the names of a server's namespaces, ``default`` among them."""
        return self._names("namespace", "list", f"--server={server}")

    def make_namespace(self, server: str, name: str, size: MpsSize) -> None:
        """Make a namespace, if there is none, and limit it; raise if it is not limited then."""
        if name not in self.namespaces(server):
            self._ask("namespace", "create", name, f"--server={server}")
        # One without limits of its own has none: it takes none from its server.
        self._ask("namespace", "set", name, f"--server={server}", *_limits(size))
        memory, threads = (self._ask("namespace", "get", name, server, what) for what in (_MEMORY, _THREADS))
        if not (is_memory(memory, size.memory_mib) and is_percentage(threads, size.percent)):
            raise TierFailed(
                f"MPS was told to limit namespace {name} to {size.memory_mib} MiB and {size.percent}%, "
                f"and says that its limits are {memory[:60]!r} and {threads[:60]!r}."
            )

    def delete_namespace(self, server: str, name: str) -> None:
        """Delete a namespace, if there is one, with the clients that are in it."""
        if name in self.namespaces(server):
            self._ask("namespace", "delete", name, f"--server={server}", "--force")

    def terminate(self, server: str, pids: set[int]) -> None:
        """End these clients' work on the device, and return when they are off it and may be killed."""
        for pid in sorted(pids & self._clients(server)):
            self._ask("client", "terminate", f"{pid}")
            if not wait_until(lambda: pid not in self._clients(server), self._timeout):  # noqa: B023 - called at once
                raise TierFailed(
                    f"MPS did not take process {pid} off the GPU within {self._timeout:g} s.",
                    "Killing it now may stop other processes on this GPU.",
                )

    def quit(self) -> None:
        """Stop the daemon and all its servers, and remove its files."""
        self.control.quit(*_VERSION, "-q")
        if self.control.folder.exists():
            self.control.folder.rmdir()

    def _clients(self, server: str) -> set[int]:
        return {int(pid) for pid in self._names("client", "list", f"--server={server}") if pid.isdigit()}

    def _names(self, *question: str) -> set[str]:
        """Return the first column of a list."""
        return {line.partition(",")[0].strip() for line in self._ask(*question, _CSV).split("\n") if line}

    def _ask(self, *question: str) -> str:
        return self.control.ask("", *_VERSION, *question)


def _limits(size: MpsSize) -> tuple[str, str]:
    return f"--{_MEMORY}={size.memory_mib}M", f"--{_THREADS}={size.percent}"


#: The first driver branch with MPS version 3 and memory limits of control groups.
_BRANCH: Final = 615
_HARD_LIMIT: Final = re.compile(r"hard limit: *([0-9]+) MiB")
#: The driver may round a limit up to its pages of 2 MiB.
_PAGE_MIB: Final = 2
#: What a process asks for that tries to evade the limits, in MiB.
_TRIED_MIB: Final = 256
_DEFAULT: Final = "default"
#: What the memory's limit rests on. It is the namespace's for whoever comes by it; the
#: control group counts together only what the pool has put into it.
_HELD_BY: Final = "MPS, each process, and a control group for what is attached"


@dataclass(slots=True)
class _NamespaceDevice:
    """One device, with the sizes of the leases held on it by their ids."""

    device: Device
    claim: DeviceClaim
    held: dict[str, MpsSize] = field(default_factory=dict)

    @property
    def server(self) -> str:
        """The name of its server: short, since it is a part of the path of a socket."""
        return _server(self.device)


class CgroupTier(ByMps):
    """Limits by namespaces of MPS and by control groups."""

    name: ClassVar[str] = "cgroups"
    folder: ClassVar[str] = "mps3"
    has_own: ClassVar[str] = "server"

    def __init__(self, runtime: Path, **settings: Any) -> None:
        super().__init__(runtime, **settings)
        control = MpsDaemon(
            runtime / "daemon",
            options=("-p", "3", *(("--multiuser",) if self._multiuser else ())),
            visible="",
            public=self._is_public,
            timeout=self._timeout,
        )
        self._daemon = NamespaceDaemon(control, self._timeout)
        self._device_states: dict[str, _NamespaceDevice] = {}

    def adapt(self, device: Device) -> Device:
        """Return the device with its context slots; its slices may have any sizes."""
        return replace(device, contexts=contexts(device), one_size=False)

    def describe(self, lease: Lease) -> TierStatement:
        """Say how a lease of one slice is enforced; one of several is not, and :meth:`open` refuses it."""
        if len(lease.slices) != 1:
            return TierStatement()
        part = lease.slices[0]
        pipe = self._daemon.control.pipe / _server(part.device) / _namespace(lease.id)
        strength = self._strength(lease)
        ceiling = f"MPS, a ceiling of {size_of(part).percent}%"
        limits = Enforcement(Limit(strength, _HELD_BY), Limit(strength, ceiling))
        return TierStatement({PIPES: f"{pipe}"}, limits)

    def prepare(self, device: Device) -> None:
        """Start the daemon and the device's server, or take over those of an earlier run of the pool."""
        refuse_unsuitable(device)
        _refuse_old(device)
        if not self._privileged.available():
            raise TierFailed(
                "Memory limits of control groups need root.",
                "Install gpu-pool-privileged, as the documentation for administrators says.",
            )
        if device.uuid in self._device_states:
            return
        claim = DeviceClaim(device, self._runtime / device.uuid, self._daemon.control.pipe, self._privileged)
        device_state = _NamespaceDevice(device, claim)
        if not self._daemon.works() or device_state.server not in self._daemon.servers():
            try:
                self._start(device_state)
            except TierFailed:
                self._leave(device_state)
                raise
        self._device_states[device.uuid] = device_state

    def open(self, lease: Lease) -> None:
        """Make the lease's control group and namespace, with their limits, before any process is in them."""
        part = self._only_slice(lease)
        self.prepare(part.device)
        device_state, size = self._device_states[part.device.uuid], size_of(part)
        self._privileged.call("cgroup-make", lease.id)
        self._limit_group(lease.id, part.device, size.memory_mib)
        self._daemon.make_namespace(device_state.server, _namespace(lease.id), size)
        device_state.held[lease.id] = size

    def attach(self, lease: Lease, process: Process) -> None:
        """Put a process and what it has started into the control group, where what it starts later is too."""
        if not process.is_alive():
            return
        # Its own first: what it starts from then on is in the group too.
        for pid in sorted(family(process.pid), key=lambda pid: pid != process.pid):
            self._privileged.call("cgroup-join", lease.id, f"{pid}")

    def evict(self, lease: Lease, pids: Sequence[int]) -> None:
        """Have MPS end the work of these processes, so that killing them disturbs no others."""
        for part in lease.slices:
            if part.device.uuid in self._device_states:
                self._daemon.terminate(_server(part.device), set(pids))

    def close(self, lease: Lease) -> None:
        """Remove the namespace and the control group of a lease."""
        for device_state in self._device_states.values():
            if lease.id in device_state.held:
                self._daemon.delete_namespace(device_state.server, _namespace(lease.id))
                self._remove_group(lease.id)
                del device_state.held[lease.id]  # not before: it is tried again

    def recover(self, leases: Sequence[Lease]) -> None:
        """Enforce exactly these leases, and remove the namespaces and control groups of all others."""
        held = {lease.id for lease in leases}
        for device_state in self._device_states.values():
            for name in self._daemon.namespaces(device_state.server) - {_DEFAULT, *map(_namespace, held)}:
                self._daemon.delete_namespace(device_state.server, name)
        groups = self._privileged.system.folder
        for group in sorted(groups.iterdir()) if groups.exists() else ():
            if group.is_dir() and group.name not in held:
                self._remove_group(group.name)
        for lease in leases:
            if len(lease.slices) == 1:
                self.open(lease)

    def stop(self) -> None:
        """Stop the daemon with all its servers, and leave the devices as they were found."""
        self._daemon.quit()
        for uuid in list(self._device_states):
            self._device_states.pop(uuid).claim.give_back()

    def tend(self) -> dict[str, str]:
        """Start a daemon again that is gone or hangs; return what holders are to read, by lease id."""
        if not self._device_states or self._daemon.works():
            return {}
        self._daemon.control.kill()
        for device_state in self._device_states.values():
            self._start(device_state)
            for lease_id, size in device_state.held.items():
                self._daemon.make_namespace(device_state.server, _namespace(lease_id), size)
        return {
            lease_id: RESTARTED
            for device_state in self._device_states.values()
            for lease_id in device_state.held
        }

    def probe(self, device: Device) -> ProbeOutcome:
        """Try to use a prepared device without a lease; once that is refused, its limits are hard.

        Nothing is hard where the daemon runs as the user of its clients.
        """
        client = {PIPES: f"{self._daemon.control.pipe / _server(device)}"}
        return self._take_note(device, attempts(device.uuid, self._uid, client, _TRIED_MIB))

    def _start(self, device_state: _NamespaceDevice) -> None:
        device_state.claim.take()
        if not self._daemon.works():
            self._daemon.control.start()
        uid = 0 if self._multiuser else self._uid
        self._daemon.start_server(device_state.server, uid, device_state.device.uuid)

    def _leave(self, device_state: _NamespaceDevice) -> None:
        if not self._device_states:
            self._daemon.quit()
        device_state.claim.give_back()

    def _limit_group(self, lease_id: str, device: Device, mib: int) -> None:
        said = str(self._privileged.call("cgroup-limit", lease_id, device.uuid, f"{mib}").get("said"))
        limit = _HARD_LIMIT.search(said)
        if limit is None or not mib <= int(limit[1]) <= mib + _PAGE_MIB:
            shown = " ".join(said.split())[:300]
            raise TierFailed(f"Lease {lease_id}'s control group was limited to {mib} MiB, and says: {shown}.")

    def _remove_group(self, lease_id: str) -> None:
        try:
            self._privileged.call("cgroup-remove", lease_id)
        except TierFailed:
            # The process of a parked lease lives on in it, and may not use any device meanwhile.
            for device_state in self._device_states.values():
                self._limit_group(lease_id, device_state.device, 0)


def _server(device: Device) -> str:
    return f"gpu_{device.index}"


def _namespace(lease_id: str) -> str:
    # As other names of MPS: letters, digits and underscores.
    return f"lease_{lease_id.replace('-', '_')}"


def _refuse_old(device: Device) -> None:
    branch = re.match(r"[0-9]+", device.driver)
    if branch is None or int(branch[0]) < _BRANCH:
        raise TierFailed(
            f"The driver of {device.label}, {device.driver or 'unknown'}, has no limits for control groups.",
            f"They need driver R{_BRANCH} or newer, which is made for Turing cards and newer.",
        )
