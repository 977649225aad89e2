"""The generators of random numbers that kernels of one template have inherited, and that are seeded anew."""

import contextlib
import gc
import os
import random
import sys
from typing import Any, Iterator  # noqa: UP035 - for Python 3.8

#: A smaller seed of numpy's was chosen by somebody.
_LEAST_ENTROPY = 1 << 64


@contextlib.contextmanager
def noting_seeds() -> "Iterator[list[random.Random]]":
    """Yield what will be the generators of Python's own that were given a seed in this block."""
    seeded = []  # type: list[random.Random]
    original = random.Random.seed

    def seed(self: random.Random, a: Any = None, *arguments: Any, **named: Any) -> None:
        original(self, a, *arguments, **named)
        if a is not None:
            seeded.append(self)

    random.Random.seed = seed  # type: ignore[method-assign]
    try:
        yield seeded
    finally:
        random.Random.seed = original  # type: ignore[method-assign]


def without_seed(seeded: "list[random.Random]") -> "list[Any]":
    """Return the generators that there are, but for those of ``seeded`` and those of numpy's with a seed.

    One that was given a seed draws the same in all kernels, as it does in those that start cold.
    """
    found = [each for each in gc.get_objects() if _is_generator(each) and each not in seeded]
    return [each for each in found if not _has_own_seed(each)]


def draw_anew(generators: "list[Any]") -> None:
    """Seed these generators, and those of Python and PyTorch that every program uses; make secrets anew."""
    random.seed()
    for each in generators:
        if isinstance(each, random.Random):
            each.seed()
        else:
            each.state = type(each)().state
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)


def _is_generator(candidate: object) -> bool:
    """Whether it is a generator of random numbers: Python's, or what numpy's draw from."""
    # Its type, since an object may do anything when it is asked for its class.
    kind = type(candidate)
    if issubclass(kind, random.Random):
        return not issubclass(kind, random.SystemRandom)
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and issubclass(kind, numpy.BitGenerator)


def _has_own_seed(generator: Any) -> bool:
    """Whether a generator of numpy's was given a seed; one that was not has 128 bits from the system."""
    legacy = sys.modules.get("numpy.random.mtrand")
    if legacy is None or isinstance(generator, random.Random) or generator is legacy._rand._bit_generator:
        return False
    sequence = getattr(generator, "seed_seq", getattr(generator, "_seed_seq", None))
    entropy = getattr(sequence, "entropy", None)
    return not isinstance(entropy, int) or entropy < _LEAST_ENTROPY
