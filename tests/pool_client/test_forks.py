"""What belongs to one process is closed in the children that are forked from it, and in them alone."""

from __future__ import annotations

import os
import weakref

import pytest

from gpu_pool_client._forks import close_in_children


class Held:
    """A descriptor that is held, as those of locks and folders are."""

    def __init__(self) -> None:
        self.descriptor = os.open(os.devnull, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self.descriptor)
        close_in_children(self)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("gone", range(3))
def test_one_that_somebody_has_closed_keeps_no_other_one_open(gone: int) -> None:
    held = [Held() for _ in range(3)]
    os.close(held[gone].descriptor)
    others = [each for number, each in enumerate(held) if number != gone]
    child = os.fork()
    if child == 0:
        os._exit(any(is_open(each.descriptor) for each in others))
    assert os.waitpid(child, 0)[1] == 0
    assert all(is_open(each.descriptor) for each in others)
    held[gone].close.detach()
