"""The generators of random numbers that kernels of one template have inherited, and that are seeded anew.

One that was given a seed draws the same in all kernels, as it does in those that start cold.
"""

import _random
import contextlib
import gc
import os
import random
import sys
from typing import Any, Iterator  # noqa: UP035 - for Python 3.8

#: A smaller seed of PyTorch's was chosen by somebody: its own has 53 bits from the system.
_LEAST_OF_TORCH = 1 << 32
#: How many objects are asked at once for what they refer to.
_AT_ONCE = 10_000


class Seeds:
    """What was given a seed while modules were imported, and what the system gave."""

    def __init__(self) -> None:
        #: Python's generators that were given one.
        self.given = []  # type: list[random.Random]
        #: Whether the generator of the functions of ``random`` was.
        self.shared_is_seeded = False
        #: What Python has drawn from the system.
        self.drawn = set()  # type: set[int]

    @contextlib.contextmanager
    def noting(self) -> "Iterator[None]":
        """Note what happens in this block."""
        original, shared, system = random.Random.seed, random.seed, getattr(random, "_urandom", None)

        def seed(generator: random.Random, a: Any = None, *arguments: Any, **named: Any) -> None:
            original(generator, a, *arguments, **named)
            if a is not None:
                self.given.append(generator)

        def seed_shared(a: Any = None, *arguments: Any, **named: Any) -> None:
            shared(a, *arguments, **named)
            self.shared_is_seeded = a is not None

        def draw(count: int) -> bytes:
            drawn = os.urandom(count)
            self.drawn.add(int.from_bytes(drawn, "big"))
            return drawn

        random.Random.seed, random.seed = seed, seed_shared  # type: ignore[assignment,method-assign]
        if system is not None:
            random._urandom = draw  # type: ignore[attr-defined]
        try:
            yield
        finally:
            random.Random.seed, random.seed = original, shared  # type: ignore[method-assign]
            if system is not None:
                random._urandom = system  # type: ignore[attr-defined]

    def without(self) -> "list[Any]":
        """Return the generators that were given no seed, and numpy's sequences of seeds."""
        given = {id(each) for each in self.given}
        found = [each for each in gc.get_objects() if _is_generator(each) and id(each) not in given]
        return [each for each in found if isinstance(each, random.Random) or not self._has_own(each)]

    def doubt(self) -> "str | None":
        """Return what cannot be seeded anew, or must not be; None if there is nothing."""
        numpy, torch = sys.modules.get("numpy.random.mtrand"), sys.modules.get("torch")
        if self.shared_is_seeded:
            return "the preloaded modules have given the random module a seed"
        if numpy is not None and self._has_own(numpy._rand._bit_generator):
            return "the preloaded modules have given numpy.random a seed"
        if torch is not None:
            try:
                seed = torch.default_generator.initial_seed()
            except AttributeError:  # it is another module of that name, or is still being imported
                return "it is not known if the preloaded modules have given PyTorch a seed"
            if seed < _LEAST_OF_TORCH:
                return "the preloaded modules have given PyTorch a seed"
        if _has_bare_generator():
            return (
                "the preloaded modules keep a _random.Random, of which it is not known if it was given a seed"
            )
        return None

    def _has_own(self, candidate: Any) -> bool:
        """Whether what is numpy's was given a seed; else Python has drawn one from the system for it."""
        sequence = getattr(candidate, "seed_seq", getattr(candidate, "_seed_seq", candidate))
        entropy = getattr(sequence, "entropy", None)
        return not isinstance(entropy, int) or entropy not in self.drawn


def draw_anew(generators: "list[Any]") -> None:
    """Seed these generators, and those of Python and PyTorch that every program uses; make secrets anew."""
    random.seed()
    for each in generators:
        if isinstance(each, random.Random):
            each.seed()
        elif hasattr(each, "n_children_spawned"):
            each.__init__(
                spawn_key=each.spawn_key,
                pool_size=each.pool_size,
                n_children_spawned=each.n_children_spawned,
            )
        else:
            each.state = type(each)().state
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)
    uuid = sys.modules.get("uuid")
    # On a machine without network cards, the node is a random number (RFC 9562, 6.10).
    if uuid is not None and (getattr(uuid, "_node", None) or 0) >> 40 & 1:
        uuid._node = None  # type: ignore[attr-defined]


def _is_generator(candidate: object) -> bool:
    """Whether it is a generator of random numbers: Python's, or what numpy's draw from or are seeded by."""
    # Its type, since an object may do anything when it is asked for its class.
    kind = type(candidate)
    if issubclass(kind, random.Random):
        return not issubclass(kind, random.SystemRandom)
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and issubclass(kind, (numpy.BitGenerator, numpy.SeedSequence))


def _has_bare_generator() -> bool:
    """Whether there is one of the type below ``random.Random``, of which the collector is not told."""
    objects = gc.get_objects()
    for start in range(0, len(objects), _AT_ONCE):
        found = gc.get_referents(*objects[start : start + _AT_ONCE])
        while found:
            each = found.pop()
            kind = type(each)
            if issubclass(kind, _random.Random) and not issubclass(kind, random.Random):
                return True
            # The collector is not told either of what holds nothing else.
            if kind in (dict, tuple) and not gc.is_tracked(each):
                found.extend(gc.get_referents(each))
    return False
