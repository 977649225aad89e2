"""What a student's kernel does in the GPU benchmarks: learn to tell ten kinds of clothes apart.

Runs in a process on a slice, and imports PyTorch alone. The images are drawn
here, 28 x 28 grey values from 0 to 255, the same for a seed on every machine
with the same PyTorch: clothes of ten kinds at varying places, sizes and angles,
some more alike than others, in noise.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn

SIDE = 28
BATCH = 256
#: Standard deviation of the noise, where black is 0 and white is 1.
NOISE = 0.3


def _box(u: Tensor, v: Tensor, left: float, right: float, top: float, bottom: float) -> Tensor:
    return (u > left) & (u < right) & (v > top) & (v < bottom)


def _disc(u: Tensor, v: Tensor, x: float, y: float, radius: float) -> Tensor:
    return (u - x) ** 2 + (v - y) ** 2 < radius**2


def _top(u: Tensor, v: Tensor, sleeve: float, hem: float, width: float = 0.42) -> Tensor:
    """Return a body with two sleeves; ``v`` grows downwards from -1 to 1."""
    sleeves = _box(u.abs(), v, width, 0.85, -0.75, sleeve) & (u.abs() + 0.35 * v < 0.75)
    return _box(u, v, -width, width, -0.75, hem) | sleeves


def _silhouettes(u: Tensor, v: Tensor) -> Tensor:
    """Return the ten kinds at these coordinates, each (count, 28, 28): (count, 28, 28) becomes (10, ...)."""
    sole = _box(u, v, -0.85, 0.85, 0.3, 0.5)
    shoe = sole | (_box(u, v, -0.85, 0.85, -0.1, 0.4) & (v > -0.1 + 0.45 * u))
    return torch.stack(
        [
            _top(u, v, -0.35, 0.75),  # T-shirt
            _box(u, v, -0.4, 0.4, -0.85, 0.85) & ((u.abs() > 0.1) | (v < -0.4)),  # trousers
            _top(u, v, 0.65, 0.75),  # pullover
            (v.abs() < 0.85) & (u.abs() < 0.25 + 0.18 * (v + 0.85)),  # dress
            _top(u, v, 0.7, 0.9) & (u.abs() > 0.05),  # coat
            sole | (_box(u, v, -0.85, 0.85, -0.1, 0.4) & (torch.sin(9 * u) > 0.2)),  # sandal
            _top(u, v, 0.15, 0.75) & ~_disc(u, v, 0.0, -0.75, 0.2),  # shirt
            shoe,  # sneaker
            _box(u, v, -0.7, 0.7, -0.3, 0.6)
            | (_disc(u, v, 0, -0.3, 0.45) & ~_disc(u, v, 0, -0.3, 0.3)),  # bag
            shoe | _box(u, v, -0.85, -0.25, -0.8, 0.4),  # boot
        ]
    )


def clothes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw images, uint8 of shape (count, 1, 28, 28), and return them with their kinds, int64 of (count,)."""
    random = torch.Generator().manual_seed(seed)
    images, kinds = [], []
    for first in range(0, count, 2000):
        image, kind = _some(min(2000, count - first), random)
        images.append(image)
        kinds.append(kind)
    return torch.cat(images), torch.cat(kinds)


def _some(count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    def between(low: float, high: float) -> Tensor:
        return (low + (high - low) * torch.rand(count, generator=random)).view(-1, 1, 1)

    line = torch.linspace(-1, 1, SIDE)
    y, x = torch.meshgrid(line, line, indexing="ij")
    angle, scale = between(-0.2, 0.2), between(1.0, 1.35)
    x, y = x - between(-0.15, 0.15), y - between(-0.15, 0.15)
    u = scale * (x * torch.cos(angle) - y * torch.sin(angle)) * between(0.9, 1.1)
    v = scale * (x * torch.sin(angle) + y * torch.cos(angle))
    kind = torch.randint(10, (count,), generator=random)
    shape = _silhouettes(u, v)[kind, torch.arange(count)].float()
    stripes = 1 - between(0.0, 0.5) * (torch.sin(math.pi * between(2.0, 8.0) * v) > 0)
    noise = NOISE * torch.randn(count, SIDE, SIDE, generator=random)
    grey = shape * stripes * between(0.4, 1.0) + noise
    return (grey.clamp(0, 1) * 255).to(torch.uint8).unsqueeze(1), kind


def save(path: str, training: int, testing: int) -> None:
    """Draw the images of one run of the benchmark, and write them to a file."""
    torch.save([*clothes(training, 1), *clothes(testing, 2)], path)


class Net(nn.Sequential):
    """A small network of two convolutions, as in a first course."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)),
        )


class Lesson:
    """A network and its images on the device ``where``: ``cuda``, or ``cpu`` in a dry run."""

    def __init__(self, path: str | Path, where: str) -> None:
        torch.set_num_threads(1)  # many kernels share the cores
        torch.manual_seed(0)
        self.where = where
        parts = torch.load(path, weights_only=True)
        self.images, self.kinds, self.test_images, self.test_kinds = (part.to(where) for part in parts)
        self.net = Net().to(where)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-3)
        self._train(self.images[:BATCH], self.kinds[:BATCH])
        self.wait()

    def wait(self) -> None:
        """Wait until the device has done all it was told."""
        if self.where == "cuda":
            torch.cuda.synchronize()

    def _train(self, images: Tensor, kinds: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(self.net(images.float() / 255), kinds).backward()
        self.optimizer.step()

    def learn(self, epochs: int) -> dict[str, float]:
        """See every image so many times; return images per second, accuracy and MiB reserved."""
        began = time.perf_counter()
        for _ in range(epochs):
            order = torch.randperm(len(self.images), device=self.where)
            for part in order.split(BATCH):
                self._train(self.images[part], self.kinds[part])
        self.wait()
        seconds = time.perf_counter() - began
        reserved = torch.cuda.max_memory_reserved() >> 20 if self.where == "cuda" else 0
        speed = epochs * len(self.images) / seconds
        return {"images_per_second": speed, "accuracy": self.accuracy(), "reserved_mib": reserved}

    def accuracy(self) -> float:
        """Return the share of the images for testing whose kind is told."""
        with torch.no_grad():
            told = [self.net(part.float() / 255).argmax(1) for part in self.test_images.split(BATCH)]
        return float((torch.cat(told) == self.test_kinds).float().mean())

    def learn_between(self, begin: float, end: float) -> float:
        """Learn from one time to another (``time.time()``); return images per second."""
        time.sleep(max(0.0, begin - time.time()))
        began, seen = time.time(), 0
        while time.time() < end:
            # Not every step is waited for, as no student would.
            for _ in range(20):
                part = slice(seen % (len(self.images) - BATCH + 1), None)
                self._train(self.images[part][:BATCH], self.kinds[part][:BATCH])
                seen += BATCH
            self.wait()
        return seen / (time.time() - began)
