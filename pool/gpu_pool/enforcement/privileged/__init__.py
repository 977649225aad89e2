"""How the pool has something done that needs root: directly where it is root, by sudo otherwise.

``program`` is what then runs as root. It imports nothing of ours, so that it can be read and installed alone.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Final

from gpu_pool.enforcement.privileged.program import PrivilegedRefused, SystemPaths, perform
from gpu_pool.enforcement.tiers import TierFailed

__all__ = ["PROGRAM", "Privileged"]

#: Where the administrator installs the program, owned by root and writable by nobody else.
PROGRAM: Final = Path("/usr/local/libexec/gpu-pool-privileged")
_TIMEOUT: Final = 120.0


class Privileged:
    """The privileged program, as the pool calls it. ``root`` tells whether the pool is root itself."""

    def __init__(
        self, *, program: Path = PROGRAM, system: SystemPaths | None = None, root: bool | None = None
    ) -> None:
        self._program, self.system = program, system or SystemPaths()
        self._root = os.geteuid() == 0 if root is None else root

    def available(self) -> bool:
        """Whether there is a way to it at all."""
        return self._root or self._program.exists()

    def call(self, *arguments: str) -> dict[str, object]:
        """Have one thing done and return what was answered; raise ``TierFailed`` if it was not done."""
        try:
            answer = perform(arguments, self.system, 0) if self._root else self._sudo(arguments)
        except (PrivilegedRefused, OSError, ValueError, subprocess.SubprocessError) as error:
            raise TierFailed(f"{' '.join(arguments[:1])} was not done: {error}.") from None
        if not answer.get("ok", True):
            raise TierFailed(f"{' '.join(arguments[:1])} was not done: {answer.get('error')}.")
        return answer

    def _sudo(self, arguments: tuple[str, ...]) -> dict[str, object]:
        command = ["sudo", "-n", f"{self._program}", *arguments]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, check=False
        )
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            raise PrivilegedRefused(
                f"sudo said: {done.stderr.decode(errors='replace').strip()[:200]}"
            ) from None
        if not isinstance(answer, dict):
            raise PrivilegedRefused(f"{self._program} answered with what it never answers")
        return answer
