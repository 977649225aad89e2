"""Images that outlive their server: who has them, and for how long."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool_provisioner.folders import HeldFolder, hold_left
from gpu_pool_provisioner.hibernation import left
from gpu_pool_provisioner.hibernation.images import taken_bytes
from gpu_pool_provisioner.hibernation.left import KEPT_FOR, KernelRecord, LeftImage, Owner

ADA = Owner(0, "ada", "/home/ada/week1.ipynb", "python3-gpu")


@pytest.fixture
def parent(tmp_path: Path) -> str:
    folder = tmp_path / "asleep"
    folder.mkdir(0o700)
    return str(folder)


def leave(parent: str, owner: Owner = ADA, at: float = 1000.0) -> LeftImage:
    """Leave an image, which this process holds for as long as the result is kept."""
    folder = HeldFolder(parent, "asleep-")
    image = Path(folder.path, "image")
    image.mkdir()
    (image / "pages-1.img").write_bytes(b"x" * (3 << 20))
    return left.leave(folder, KernelRecord(owner, "/tmp/kernel", "key", {}, count=14, at=at))


def test_its_owner_has_it_once_nobody_holds_it(parent: str) -> None:
    first = leave(parent)
    assert left.claim(parent, ADA) is None
    del first
    second = left.claim(parent, ADA)
    assert second is not None
    assert second.record.owner == ADA
    assert left.claim(parent, ADA) is None
    second.remove()
    assert not list(Path(parent).iterdir())


@pytest.mark.parametrize(
    "other", [{"uid": 1}, {"hub_user": "bob"}, {"notebook": "/home/ada/week2.ipynb"}, {"kernel": "python3"}]
)
def test_nobody_else_has_it(parent: str, other: dict[str, str]) -> None:
    leave(parent)
    assert left.claim(parent, replace(ADA, **other)) is None
    assert left.claim(parent, ADA) is not None


def test_a_newer_one_replaces_an_older_one_of_its_owner_alone(parent: str) -> None:
    leave(parent, at=1000.0)
    leave(parent, replace(ADA, kernel="other"))
    leave(parent, at=2000.0)
    assert len(list(Path(parent).iterdir())) == 2
    found = left.claim(parent, ADA)
    assert found is not None
    assert found.record.at == 2000.0


def test_one_whose_notebook_is_renamed_is_found_by_its_new_name(parent: str) -> None:
    image, renamed = leave(parent), replace(ADA, notebook="/home/ada/week2.ipynb")
    image.belong_to(renamed)
    del image
    assert left.claim(parent, ADA) is None
    assert left.claim(parent, renamed) is not None


def test_what_nobody_asks_for_in_a_week_is_removed_unless_somebody_holds_it(parent: str) -> None:
    leave(parent, replace(ADA, kernel="other"), at=1000.0)
    held, now = leave(parent, at=1000.0), time.time()
    left.remove_expired(parent, now + KEPT_FOR - 60)
    assert len(list(Path(parent).iterdir())) == 2
    left.remove_expired(parent, now + KEPT_FOR + 60)
    assert [str(each) for each in Path(parent).iterdir()] == [held.path]


def test_a_week_begins_anew_when_somebody_had_it(parent: str) -> None:
    path = leave(parent).path
    os.utime(path, (1000.0, 1000.0))
    left.claim(parent, ADA)
    left.remove_expired(parent, time.time() + KEPT_FOR - 60)
    assert left.claim(parent, ADA) is not None


def test_one_that_is_made_anew_meanwhile_is_not_taken_for_what_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = HeldFolder(tmp_path, "kept-")
    old = folder.path

    def made_anew(held: int, how: int) -> None:
        Path(old).rename(tmp_path / "old")
        Path(old).mkdir()

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", made_anew)
        assert hold_left(old) is None
    assert Path(old).is_dir()


def test_what_a_folder_takes_is_told_while_things_go(parent: str) -> None:
    taken = set[int]()
    writing = True

    def rename() -> None:
        while writing:
            image = leave(parent)
            image.remove()

    thread = threading.Thread(target=rename)
    thread.start()
    try:
        taken = {taken_bytes(parent) for _ in range(2000)}
    finally:
        writing = False
        thread.join()
    assert max(taken) < 4 << 20


def test_none_is_taken_from_a_folder_where_others_write(parent: str) -> None:
    leave(parent)
    Path(parent).chmod(0o770)
    assert left.claim(parent, ADA) is None


@pytest.mark.parametrize("missing", ["kernel.json", "image"])
def test_what_is_half_removed_is_no_image(parent: str, missing: str) -> None:
    path = Path(leave(parent).path, missing)
    path.rename(path.with_name("gone"))
    assert left.claim(parent, ADA) is None
    left.remove_expired(parent, time.time() + KEPT_FOR + 1)
    assert not list(Path(parent).iterdir())


def test_a_record_that_cannot_be_read_is_none(parent: str) -> None:
    Path(leave(parent).path, "kernel.json").write_text('{"version": 1}')
    assert left.claim(parent, ADA) is None


def test_a_notebook_is_known_by_its_real_path(tmp_path: Path) -> None:
    notebook, link = tmp_path / "week1.ipynb", tmp_path / "link.ipynb"
    notebook.touch()
    link.symlink_to(notebook)
    found = Owner.of(str(link), "python3", {"JUPYTERHUB_USER": "ada"})
    assert found is not None
    assert (found.notebook, found.hub_user) == (str(notebook), "ada")
    assert Owner.of("week1.ipynb", "python3", {}) is None
    assert Owner.of(str(tmp_path / "console"), "python3", {}) is None


@pytest.mark.parametrize(
    ("now", "since"),
    [
        ("2026-11-28 23:00", "today 18:02"),
        ("2026-11-29 00:01", "yesterday 18:02"),
        ("2026-12-01 18:02", "28 November 18:02"),
    ],
)
def test_it_says_since_when_it_sleeps_and_what_it_has(parent: str, now: str, since: str) -> None:
    def at(text: str) -> float:
        return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M"))

    assert leave(parent, at=at("2026-11-28 18:02")).in_words(at(now)) == f"from {since} (14 variables, 3 MiB)"
