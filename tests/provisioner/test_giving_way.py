"""Which kernels on disk give way to one that would end with its server."""

from __future__ import annotations

import pytest

from gpu_pool_provisioner.hibernation.calling import MissingRoom
from gpu_pool_provisioner.hibernation.giving_way import Removable, gives_way

_OLD, _OF_PHYSICS, _NEW = (
    Removable("old", 1.0, 10, ""),
    Removable("of physics", 2.0, 10, "physics"),
    Removable("new", 3.0, 10, ""),
)
_IMAGES = (_NEW, _OLD, _OF_PHYSICS)


@pytest.mark.parametrize(
    ("missing", "of_course", "chosen"),
    [
        (1, 0, ["old"]),
        (11, 0, ["old", "of physics"]),
        (30, 0, ["old", "of physics", "new"]),
        (31, 0, []),
        (0, 1, ["of physics"]),
        (0, 11, []),
        (10, 10, ["of physics"]),
        (11, 10, ["of physics", "old"]),
        (1, 11, []),
    ],
)
def test_the_oldest_give_way_where_that_makes_room_enough(
    missing: int, of_course: int, chosen: list[str]
) -> None:
    assert gives_way(_IMAGES, MissingRoom(missing, of_course, "physics")) == chosen


def test_a_refusal_for_want_of_the_disks_room_has_nobody_give_way() -> None:
    assert MissingRoom.of({"missing": 0, "of_course": 0, "course": "physics"}) is None
