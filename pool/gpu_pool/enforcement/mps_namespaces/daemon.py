"""What a control daemon of MPS version 3 is told: servers, namespaces, clients."""

from __future__ import annotations

from typing import Final

from gpu_pool.enforcement.mps.commands import is_memory, is_percentage
from gpu_pool.enforcement.mps.daemon import MpsDaemon, wait_until
from gpu_pool.enforcement.mps.sizes import SHUT, MpsSize
from gpu_pool.enforcement.tiers import TierFailed

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
            raise TierFailed(
                f"The MPS server for {device} ended at once. {self.control.last_words()}".strip()
            )
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
