"""What the GPU benchmarks run on, with what, and until when."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.gpu import SharedDevice, opened

from gpu_pool_client import Device

#: How processes on one GPU share it, in turns or at once, and the tier by which they do.
TURNS, MPS = "time-slicing", "MPS"
TIER_OF = {TURNS: "framework caps", MPS: "mps"}
_TASK = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. Times are in seconds."""

    device: Device
    #: The ways of sharing that work here.
    sharings: tuple[str, ...]
    #: A folder for everything that nobody needs afterwards.
    scratch: Path
    #: On the clock of ``time.monotonic``.
    ends_at: float
    where: str = "cuda"
    training_images: int = 60_000
    testing_images: int = 10_000
    epochs: int = 5
    rounds: int = 2
    #: The most processes at once.
    most: int = 48
    #: For how long they compute together.
    together: float = 5.0

    @property
    def is_over(self) -> bool:
        """Whether nothing more should be begun."""
        return time.monotonic() >= self.ends_at

    def within(self, share: float) -> Plan:
        """Return the plan for a part that may use this share of the time that is left."""
        now = time.monotonic()
        return replace(self, ends_at=now + share * max(0.0, self.ends_at - now))

    @property
    def images(self) -> Path:
        """The file with the images."""
        return self.scratch / "clothes.pt"

    @property
    def load(self) -> str:
        """Code that makes the benchmark's own module known to a process."""
        return f"import sys; sys.path.insert(0, {str(_TASK)!r}); import gpu_task\n"

    @property
    def prepare(self) -> str:
        """Code that makes a process ready to learn."""
        return f"{self.load}lesson = gpu_task.Lesson({str(self.images)!r}, {self.where!r})"

    def draw(self) -> None:
        """Draw the images that all processes learn from."""
        with self.shared(TURNS) as shared:
            sizes = f"{self.training_images}, {self.testing_images}"
            shared.take("10%").child.ask(f"{self.load}gpu_task.save({str(self.images)!r}, {sizes})")

    @contextlib.contextmanager
    def shared(self, sharing: str) -> Iterator[SharedDevice]:
        """Divide the device in one way of sharing, for as long as this lasts."""
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        with opened(TIER_OF[sharing]) as tier:
            shared = SharedDevice(folder, self.device, tier)
            try:
                yield shared
            finally:
                shared.close()
