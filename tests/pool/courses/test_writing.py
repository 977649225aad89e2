"""A course file is replaced whole or not at all, and where it cannot be, that is said in words."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_pool.courses.folder import put_in_place, take_back, why_fixed, write_beside
from gpu_pool_client import NotAllowed

FILE = "ml.yaml"
OLD, NEW = b"title: Old\n", b"title: New\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "courses"
    made.mkdir()
    (made / FILE).write_bytes(OLD)
    return made


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_nothing_is_changed_until_it_is_put_in_place(folder: Path) -> None:
    write_beside(folder, FILE, NEW)
    assert (folder / FILE).read_bytes() == OLD
    put_in_place(folder, FILE)
    assert (folder / FILE).read_bytes() == NEW
    assert names(folder) == [FILE]


def test_what_was_written_can_be_taken_back(folder: Path) -> None:
    write_beside(folder, FILE, NEW)
    take_back(folder, FILE)
    take_back(folder, FILE)
    assert names(folder) == [FILE]
    with pytest.raises(NotAllowed, match="cannot be written: No such file"):
        put_in_place(folder, FILE)


def test_mode_and_owner_stay(folder: Path) -> None:
    owner = (1234, 4321) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(folder / FILE, *owner)
    (folder / FILE).chmod(0o604)
    write_beside(folder, FILE, NEW)
    put_in_place(folder, FILE)
    facts = (folder / FILE).stat()
    assert (facts.st_uid, facts.st_gid, facts.st_mode & 0o7777) == (*owner, 0o604)


def test_a_link_that_lies_in_the_way_is_not_followed(folder: Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.write_text("kept")
    (folder / f".{FILE}.new").symlink_to(elsewhere)
    write_beside(folder, FILE, NEW)
    put_in_place(folder, FILE)
    assert elsewhere.read_text() == "kept"
    assert (folder / FILE).read_bytes() == NEW


def test_a_disk_that_is_full_changes_nothing(folder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_192, limits[1]))
    try:
        with pytest.raises(NotAllowed, match=r"ml\.yaml cannot be written: File too large"):
            write_beside(folder, FILE, NEW * 1_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert names(folder) == [FILE]
    assert (folder / FILE).read_bytes() == OLD


def test_an_ordinary_file_can_be_changed(folder: Path) -> None:
    assert why_fixed(folder, FILE) == ""


def test_what_is_no_ordinary_file_of_the_folder_is_not(folder: Path) -> None:
    (folder / "link.yaml").symlink_to(FILE)
    os.mkfifo(folder / "pipe.yaml")
    said = [why_fixed(folder, f"{name}.yaml") for name in ("link", "pipe", "absent")]
    for words, each in zip(("is a link", "is not an ordinary file", "no longer be found"), said, strict=True):
        assert words in each


def in_mounts_of_its_own(script: str, code: str) -> str:
    """Run code after a script, where mounting is allowed and nobody else sees it; return what it prints."""
    command = f'{script} && exec "$0" -c "$1"'
    whole = f"from pathlib import Path\nfrom gpu_pool.courses.folder import *\n{code}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, sys.executable, whole],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    return done.stdout


def test_a_folder_that_is_mounted_read_only_is_fixed(folder: Path) -> None:
    said = in_mounts_of_its_own(
        f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}",
        f"print(why_fixed(Path({str(folder)!r}), {FILE!r}))",
    )
    assert "read-only for the pool's service" in said


def test_a_file_that_is_mounted_by_itself_stays(folder: Path) -> None:
    """As containers mount a single file: it cannot be renamed over."""
    said = in_mounts_of_its_own(
        f"mount --bind {folder / FILE} {folder / FILE}",
        f"folder = Path({str(folder)!r})\nwrite_beside(folder, {FILE!r}, {NEW!r})\n"
        f"try:\n    put_in_place(folder, {FILE!r})\nexcept Exception as error:\n    print(error)",
    )
    assert "the file itself is a mount. Change it where it comes from." in said
