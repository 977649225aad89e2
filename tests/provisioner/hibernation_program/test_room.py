"""How much room images may take."""

from __future__ import annotations

import fcntl
import os
import subprocess

import pytest

from support.hibernating import PYTHON, Installation, User, asleep, goes_on, status, until, why_no_users

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
