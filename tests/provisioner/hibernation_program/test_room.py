"""How much room images may take."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Callable

import pytest

from support.hibernating import (
    COUNTS,
    PYTHON,
    Installation,
    User,
    asleep,
    goes_on,
    said,
    status,
    until,
    until_it_counts,
    why_no_users,
)
from support.readable import is_readable

_WHY = why_no_users()
pytestmark = [pytest.mark.hibernation, pytest.mark.skipif(bool(_WHY), reason=f"no user can: {_WHY}")]


@pytest.mark.parametrize(("setting", "whose"), [("user_mib", "your kernels"), ("all_mib", "kernels")])
def test_what_images_may_take_keeps_the_next_one_awake(
    ada: User, installation: Installation, setting: str, whose: str
) -> None:
    asleep(ada)
    installation.configure(**{setting: 20})
    kernel = ada.launch([PYTHON, "-c", "import time; kept = bytes(range(256)) * 80_000; time.sleep(600)"])
    until(lambda: int(status(kernel.pid)["VmRSS"].split()[0]) > 20_000)
    why = ada.call("dump", kernel.id)["error"]
    installation.configure()
    assert f"of the 20 MiB that {whose} may take on disk" in why
    assert goes_on(ada, kernel.id)
    assert ada.call("dump", kernel.id)["ok"]


def test_what_a_courses_images_may_take_counts_those_of_all_users(
    ada: User, bob: User, installation: Installation
) -> None:
    of_course, of_another = ({"note": {"course": name}, "server": 0} for name in ("physics", "another"))
    large = bob.launch([PYTHON, "-c", "import time; kept = bytes(range(256)) * 300_000; time.sleep(600)"])
    until(lambda: int(status(large.pid)["VmRSS"].split()[0]) > 75_000)
    assert bob.call("dump", large.id, **of_course)["ok"]
    installation.configure(course_mib={"physics": 100})
    kernel = ada.launch(["sleep", "600"])
    refused = ada.call("dump", kernel.id, **of_course)
    assert "of the 100 MiB that kernels of the course 'physics' may take on disk" in refused["error"]
    assert (refused["course"], refused["missing"], refused["of_course"] > 0) == ("physics", 0, True)
    installation.configure(course_mib={"physics": 100}, user_mib=20)
    refused = ada.call("dump", kernel.id, **of_course)
    assert (refused["missing"] > 0, refused["of_course"] > 0) == (True, True)
    assert "that your kernels may take" in refused["error"]
    installation.configure(course_mib={"physics": 100})
    assert ada.call("dump", kernel.id, **of_another)["ok"]
    again = ada.launch(["sleep", "600"])
    bob.call("remove", large.id)
    assert ada.call("dump", again.id, **of_course)["ok"]
    installation.configure()


def test_who_has_a_removed_users_number_has_room_for_their_own(ada: User, installation: Installation) -> None:
    large = ada.launch([PYTHON, "-c", "import time; kept = bytes(range(256)) * 300_000; time.sleep(600)"])
    until(lambda: int(status(large.pid)["VmRSS"].split()[0]) > 75_000)
    assert ada.call("dump", large.id)["ok"]
    state = installation.asleep / large.id / "kernel.json"
    said = json.loads(state.read_text())
    state.write_text(json.dumps({**said, "user": "one-who-was-removed"}))
    installation.configure(user_mib=100)
    kernel = ada.launch(["sleep", "600"])
    found = ada.call("dump", kernel.id)
    installation.configure()
    state.write_text(json.dumps(said))  # so that it is removed with the test
    assert found["ok"], found


def test_nobody_waits_for_who_holds_the_folder(bob: User, installation: Installation) -> None:
    asleep(bob)
    held = os.open(installation.asleep, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        asleep(bob)
    finally:
        os.close(held)


def test_an_image_takes_no_more_than_was_reserved(ada: User, installation: Installation) -> None:
    """Files that have no name count for nothing in its memory, and go into its image."""
    code = """
import os, tempfile, time
kept = [tempfile.TemporaryFile(dir=".") for _ in range(4)]
for each in kept:
    each.write(b"x" * 60_000_000), each.flush()
open("ready", "w").close()
time.sleep(600)
"""
    kernel = ada.launch([PYTHON, "-c", code])
    until((ada.home / "ready").exists)
    assert "its image takes more than the " in ada.call("dump", kernel.id).get("error", "")
    assert goes_on(ada, kernel.id)
    assert not list((installation.asleep / kernel.id).glob("image*"))


def test_a_part_of_the_disk_stays_free(ada: User, installation: Installation) -> None:
    small = installation.folder / "small"
    small.mkdir(0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m,mode=700", "none", small], check=True)
    try:
        subprocess.run(["fallocate", "-l", "330M", small / "other"], check=True)  # 70 are left
        installation.configure(folder=str(small))
        kernel = ada.launch(["sleep", "600"])
        why = ada.call("dump", kernel.id).get("error", "")
        kernel.close()
    finally:
        installation.configure()
        subprocess.run(["umount", small], check=True)
        small.rmdir()
    assert "and the disk has " in why


def test_a_disk_that_gets_full_while_an_image_is_written_keeps_its_part(
    ada: User, installation: Installation, criu: Callable[[str], None]
) -> None:
    small = installation.folder / "small"
    small.mkdir(0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m,mode=700", "none", small], check=True)
    try:
        may = ada.home / "may"
        criu(f'[ "$1" = dump ] && {{ touch {ada.home}/begun; while [ ! -e {may} ]; do sleep 0.01; done; }}')
        installation.configure(folder=str(small), criu=str(installation.folder / "criu"))
        kernel = ada.launch([PYTHON, "-c", COUNTS])
        said(ada)
        with ada.start("dump", kernel.id) as dump:
            assert dump.stdout is not None
            until((ada.home / "begun").exists)
            subprocess.run(["fallocate", "-l", "381M", small / "other"], check=True)  # 19 are left
            is_told = is_readable(dump.stdout, 60)
            may.touch()
            why = json.loads(dump.stdout.readline()).get("error", "")
        until_it_counts(ada)
        left = list((small / kernel.id).glob("image*"))
        (small / "other").unlink()
        assert ada.call("dump", kernel.id)["ok"]
        ada.end()
    finally:
        installation.configure()
        subprocess.run(["umount", small], check=True)
        small.rmdir()
    assert is_told
    assert why == "the disk has got full meanwhile: a twentieth of it stays free."
    assert left == []


def test_what_a_user_reserves_keeps_nobody_else_awake(
    ada: User, bob: User, installation: Installation, criu: Callable[[str], None]
) -> None:
    waits = f"touch {ada.home}/begun; while [ ! -e {ada.home}/may ]; do sleep 0.01; done"
    criu(f'[ "$1" = dump ] && [ $(id -u) = {ada.entry.pw_uid} ] && {{ {waits}; }}')
    installation.configure(user_mib=150, criu=str(installation.folder / "criu"))
    large = ada.launch(
        [PYTHON, "-c", "import time; kept = b'x' * 200_000_000; open('large', 'w'); time.sleep(600)"]
    )
    until((ada.home / "large").exists)
    first, second, theirs = (each.launch(["sleep", "600"]) for each in (ada, ada, bob))
    with ada.start("dump", first.id) as dump:
        assert dump.stdout is not None
        until((ada.home / "begun").exists)
        for each in (large, second):
            assert "of the 150 MiB that your kernels may take" in ada.call("dump", each.id)["error"]
        assert bob.call("dump", theirs.id)["ok"]
        (ada.home / "may").touch()
        assert json.loads(dump.stdout.readline())["ok"]
