"""The program of a node agent: looks at the devices and reports, and suspends what it is asked to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn

from gpu_pool.cluster.node_agent.sampling import NodeSample, sample_node
from gpu_pool.cluster.node_agent.suspending import MoveLoop, PodSuspender
from gpu_pool.devices import discover
from gpu_pool.devices.sampling import ProcessSampler
from gpu_pool_client import BadRequest, Device, GpuPoolError
from gpu_pool_client._log import EscapingFormatter, EscapingLogger
from gpu_pool_client._remote.client import RemotePool
from gpu_pool_client._remote.endpoints import Endpoint, http_endpoint

_log = EscapingLogger(logging.getLogger("gpu_pool.node_agent"))
#: Seconds between two searches for the devices: MIG instances come and go, and cards fall off the bus.
_FIND_EVERY: Final = 60.0
#: More than any token of the cluster's has.
_LONGEST_TOKEN: Final = 8192


class NodeAgentProgram:
    """Reports what pods use of this machine's devices to the pool at a URL.

    The token is read anew for each report: the kubelet replaces it.
    """

    def __init__(
        self,
        url: str,
        token: Path,
        every: float,
        find: Callable[[], Sequence[Device]] = lambda: discover().devices,
        ready_file: Path | None = None,
        suspender: PodSuspender | None = None,
    ) -> None:
        """``every`` is the seconds between two reports; ``find`` finds the devices.

        ``ready_file`` is there, and written anew by each report, as long as the pool takes them. Without a
        ``suspender`` nothing is suspended here.

        Raises ``BadRequest`` where a report cannot be sent to that URL.
        """
        if not url.startswith(("http://", "https://")):
            raise BadRequest(
                f"{url[:200]!a} is not the URL of a pool's service for node agents.",
                "Name it: --pool http://gpu-pool.jupyterhub:8888/services/gpu-pool",
            )
        self._endpoint: Endpoint = http_endpoint(url)
        self._token, self._every, self._find, self._ready_file = token, every, find, ready_file
        self._suspender = suspender
        self._sampler = ProcessSampler()
        self._devices: Sequence[Device] = ()
        self._find_at = 0.0
        self._complaint = ""

    async def run(self) -> NoReturn:
        """Report again and again, and suspend what is asked for, until cancelled."""
        self._complain(await self.report())
        if self._suspender is None:
            await self._report_again()
        moves = MoveLoop(self._suspender, self._pool, lambda: self._devices)
        try:
            await asyncio.gather(self._report_again(), moves.run())
        finally:
            self._suspender.close()
        raise AssertionError("neither ends by itself")

    async def _report_again(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._every)
            self._complain(await self.report())

    async def report(self) -> tuple[str, ...]:
        """Look and report once; return what is wrong, in sentences."""
        found = await asyncio.to_thread(self._sample)
        try:
            await self._pool().report_use(found.devices, found.uses, complete=found.complete)
        except GpuPoolError as error:
            return (*found.problems, str(error), *self._show(ready=False))
        return (*found.problems, *self._show(ready=True))

    def _show(self, *, ready: bool) -> tuple[str, ...]:
        """Let the kubelet see whether reports are taken; return why it cannot, in sentences."""
        if self._ready_file is None:
            return ()
        try:
            if ready:
                self._ready_file.write_bytes(b"")
            else:
                self._ready_file.unlink(missing_ok=True)
        except OSError as error:
            return (f"Whether its reports are taken cannot be shown: {error}.",)
        return ()

    def _sample(self) -> NodeSample:
        now = time.monotonic()
        if now >= self._find_at:
            self._devices, self._find_at = self._find(), now + _FIND_EVERY
        found = sample_node(self._sampler, self._devices)
        if not self._devices:
            return replace(
                found, problems=(*found.problems, "This node has no GPU that can be seen from here.")
            )
        return found

    def _pool(self) -> RemotePool:
        """Return the service's pool, asked with the token that is good now."""
        return RemotePool(replace(self._endpoint, token=self._read_token()))

    def _read_token(self) -> str:
        try:
            text = self._token.read_text(encoding="ascii").strip()
        except (OSError, UnicodeError) as error:
            raise BadRequest(
                f"The token in {self._token} cannot be read: {error}.", "See the volume of the agent's pod."
            ) from error
        if not 0 < len(text) <= _LONGEST_TOKEN or not text.isprintable() or " " in text:
            raise BadRequest(f"There is no token in {self._token}.", "See the volume of the agent's pod.")
        return text

    def _complain(self, problems: tuple[str, ...]) -> None:
        """Log what is wrong, once until it changes, and that nothing is any more."""
        complaint = " ".join(problems)
        if complaint != self._complaint:
            if complaint:
                _log.warning("%s", complaint)
            else:
                _log.info(
                    "What pods use of %d GPUs is reported to %s", len(self._devices), self._endpoint.url
                )
        self._complaint = complaint


def log_to_stderr() -> None:
    """Write what an agent logs to standard error, which is where a pod's log comes from."""
    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
