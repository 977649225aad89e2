"""Files and folders that are other ones when a kernel wakes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.hibernating import Installation, User, asleep, why_no_users

_WHY = why_no_users()
pytestmark = [pytest.mark.hibernation, pytest.mark.skipif(bool(_WHY), reason=f"no user can: {_WHY}")]

OPENS = """
import os, time
folder = os.path.expanduser("~/folder")
os.mkdir(folder)
kept = open(folder + "/kept", "w+"); kept.write("x" * 32); kept.flush()
{more}
open(os.path.expanduser("~/ready"), "w").close()
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def secret(installation: Installation) -> Iterator[Path]:
    """Return a folder of root's with a file of as many bytes as the kernel's."""
    folder = installation.folder / "secret"
    folder.mkdir(0o700)
    (folder / "kept").write_text("s" * 32)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_an_open_file_that_is_a_link_to_roots_is_not_opened(ada: User, secret: Path, what: str) -> None:
    kernel = asleep(ada, OPENS.format(more=""))
    folder = ada.home / "folder"
    replaced, by = (folder / "kept", secret / "kept") if what == "file" else (folder, secret)
    replaced.rename(ada.home / "before")
    replaced.symlink_to(by)
    answer = ada.restore(kernel).answer
    assert not answer["ok"]
    assert "changed, or went, while it slept" in answer["error"]
    assert (secret / "kept").read_text() == "s" * 32
    # What it was is there again, and it goes on.
    replaced.unlink()
    (ada.home / "before").rename(replaced)
    assert ada.restore(kernel).answer["ok"]


def test_a_file_that_is_a_link_to_roots_by_the_time_that_criu_runs_is_not_opened(
    ada: User, installation: Installation, secret: Path, criu: Callable[[str], None]
) -> None:
    """The user is faster than CRIU, after the program has looked: CRIU's own rights do not suffice."""
    kernel = asleep(ada, OPENS.format(more=""))
    kept = ada.home / "folder" / "kept"
    criu(f'[ "$1" = restore ] && {{ mv {kept} {kept}.old; ln -s {secret}/kept {kept}; }}')
    answer = ada.restore(kernel).answer
    assert not answer["ok"]
    assert "Permission denied" in answer["error"]


def test_a_deleted_files_folder_that_is_a_link_to_roots_is_not_written_to(ada: User, secret: Path) -> None:
    kernel = asleep(ada, OPENS.format(more='gone = open(folder + "/gone", "w+"); os.unlink(gone.name)'))
    folder = ada.home / "folder"
    (folder / "kept").rename(ada.home / "kept")
    folder.rename(ada.home / "before")
    folder.symlink_to(secret)
    before = sorted(each.name for each in secret.iterdir())
    assert not ada.restore(kernel).answer["ok"]
    assert sorted(each.name for each in secret.iterdir()) == before


def test_a_working_folder_that_is_a_link_to_roots_is_not_entered(ada: User, secret: Path) -> None:
    kernel = asleep(ada, OPENS.format(more="os.chdir(folder); kept.close()"))
    folder = ada.home / "folder"
    folder.rename(ada.home / "before")
    folder.symlink_to(secret)
    answer = ada.restore(kernel).answer
    assert not answer["ok"], os.readlink(f"/proc/{answer['pid']}/cwd")


def test_a_file_system_that_never_answers_is_not_waited_for(ada: User) -> None:
    """A user's own (FUSE): they mount it where a file was open, and it answers nothing."""
    if not Path("/dev/fuse").exists():
        pytest.skip("there is no /dev/fuse.")
    kernel = asleep(ada, OPENS.format(more=""))
    folder = ada.home / "folder"
    device = os.open("/dev/fuse", os.O_RDWR)
    try:
        options = f"fd={device},rootmode=40000,user_id={ada.entry.pw_uid},group_id={ada.entry.pw_gid}"
        mount = ["mount", "-i", "-t", "fuse", "-o", options, "none", folder]
        subprocess.run(mount, check=True, pass_fds=[device])
        why = ada.restore(kernel).answer["error"]
        assert "has not answered within 10 seconds" in why
    finally:
        subprocess.run(["umount", "-l", folder], check=False)
        os.close(device)
    assert ada.restore(kernel).answer["ok"]
