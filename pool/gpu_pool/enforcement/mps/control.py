"""What a classic (version 2) control daemon is asked, and what its answers mean."""

from __future__ import annotations

from typing import Final

from gpu_pool.enforcement.mps.commands import is_memory, is_percentage
from gpu_pool.enforcement.mps.daemon import MpsDaemon, wait_until
from gpu_pool.enforcement.mps.sizes import MpsSize
from gpu_pool.enforcement.tiers import TierFailed

#: The daemon sees one device, which is number 0 for it and its clients. A limit set for a
#: uuid and one set for a number are two, of which the later counts: so it is always the number.
_DEVICE: Final = 0
_ACTIVE: Final = "ACTIVE"
_FAULT: Final = "FAULT"
#: What terminate_client prints once the client's contexts are destroyed.
_TERMINATED: Final = "0"


class MpsControl:
    """A control daemon that divides one device, and its server.

    Every method may raise ``TierFailed``: the daemon is gone, hangs, refuses,
    or says one thing and does another.
    """

    def __init__(self, control: MpsDaemon, timeout: float) -> None:
        self._control, self._timeout = control, timeout

    def works(self) -> bool:
        """Whether the daemon runs and answers."""
        if not self._control.running():
            return False
        try:
            self._control.ask("get_default_active_thread_percentage")
        except TierFailed:
            return False
        return True

    def servers(self) -> list[int]:
        """Return the pids of its servers: one, or none."""
        return _numbers(self._control.ask("get_server_list"))

    def clients(self, server: int) -> list[int]:
        """Return the pids of a server's clients, as this daemon's pid namespace has them."""
        return _numbers(self._control.ask(f"get_client_list {server}"))

    def faulty(self) -> list[int]:
        """Return the servers that a client's fatal fault blocks."""
        return [server for server in self.servers() if _FAULT in self._status(server)]

    def start_server(self, uid: int) -> None:
        """Start a server for a user; in exclusive mode it holds the device from then on."""
        if not self.servers():
            self._control.ask(f"start_server -uid {uid}")
        if not wait_until(self._serves, self._timeout):
            raise TierFailed(f"The MPS server did not start. {self._control.last_words()}".strip())

    def limit(self, size: MpsSize) -> None:
        """Limit every process that becomes a client from now on; raise if that is not what it then is.

        A default is read by the next server only, and a server outlives its
        clients: so both are set.
        """
        self._set("default_device_pinned_mem_limit", f"{_DEVICE}", size.memory_mib)
        self._set("default_active_thread_percentage", "", size.percent)
        for server in self.servers():
            self._set("device_pinned_mem_limit", f"{server} {_DEVICE}", size.memory_mib)
            self._set("active_thread_percentage", f"{server}", size.percent)

    def terminate(self, pids: set[int]) -> None:
        """End these clients' work on the device, and return when they are off it and may be killed."""
        for server in self.servers():
            for pid in sorted(pids.intersection(self.clients(server))):
                if not wait_until(lambda: self._is_off(server, pid), self._timeout):  # noqa: B023 - called at once
                    raise TierFailed(
                        f"MPS did not take process {pid} off the GPU within {self._timeout:g} s.",
                        "Killing it now may stop all other processes on this GPU.",
                    )

    def _is_off(self, server: int, pid: int) -> bool:
        said = self._control.ask(f"terminate_client {server} {pid}")
        return said.split()[-1:] == [_TERMINATED] or pid not in self.clients(server)

    def _serves(self) -> bool:
        return any(_ACTIVE in self._status(server) for server in self.servers())

    def _status(self, server: int) -> str:
        return self._control.ask(f"get_server_status {server}").upper()

    def _set(self, what: str, whom: str, value: int) -> None:
        memory = what.endswith("mem_limit")
        self._control.ask(" ".join(f"set_{what} {whom} {value}{'M' if memory else ''}".split()))
        answer = self._control.ask(f"get_{what} {whom}".strip())
        if not (is_memory(answer, value) if memory else is_percentage(answer, value)):
            raise TierFailed(
                f"MPS was told to limit processes to {value}{' MiB' if memory else '%'}, "
                f"and says that the limit is {answer[:60]!r}."
            )


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdigit()]
