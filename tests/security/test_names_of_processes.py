"""A process may call itself anything; what the pool believes of it is what the kernel says."""

from __future__ import annotations

import os

import pytest

from gpu_pool.enforcement.watchdog.processes import describe
from gpu_pool.service.callers import is_contained
from gpu_pool_client._processes import family, lineage, owner_of
from support.disguises import ENDS_OF_LINES, OTHER, STUDENT, disguised, needs_root

pytestmark = needs_root


@pytest.mark.parametrize("end", ENDS_OF_LINES, ids=repr)
def test_a_name_is_no_line_of_the_status(end: bytes) -> None:
    with disguised(b"a" + end + b"Uid:\t0") as process:
        assert owner_of(process.pid) == STUDENT
    with disguised(b"a" + end + b"NSpid:\t1 2") as process:
        assert not is_contained(process.pid)


@pytest.mark.parametrize("name", [b"Uid:\t0\t0\t0\t0", b") R 1 1 1 1", b"\n) Z 1 1 1", b"a) S 1 (b) S 1"])
def test_a_name_is_neither_a_user_nor_a_parent_nor_an_end(name: bytes) -> None:
    with disguised(name, OTHER) as process:
        assert process.is_alive()
        assert [each.pid for each in lineage(process.pid)][:2] == [process.pid, os.getpid()]
        assert process.pid in family(os.getpid())
        user, shown = describe(process.pid)
        assert user == f"{OTHER}"
        assert shown.isprintable()
