"""Real files: which are read, and which are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_pool.courses import BadCourseFile, course_name, read_bytes
from gpu_pool.courses.reading import MOST_BYTES
from support.open_files import open_below


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "courses").mkdir()
    return tmp_path / "courses"


@pytest.mark.parametrize("name", ["cs101", "a", "0", "deep-learning-2026", "a" * 50])
def test_a_course_is_named_as_its_file(name: str) -> None:
    assert course_name(f"{name}.yaml") == name


@pytest.mark.parametrize(
    ("file", "better"),
    [
        ("CS101.yaml", "cs101.yaml"),
        ("cs101.yml", "cs101.yaml"),
        ("cs 101.yaml", "cs-101.yaml"),
        ("-cs.yaml", "cs.yaml"),
        ("cs-.yaml", "cs.yaml"),
        ("../cs.yaml", "cs.yaml"),
        ("a/b.yaml", "a-b.yaml"),
        ("größe.yaml", "gr-e.yaml"),
        ("cs\n.yaml", "cs.yaml"),
        ("a" * 51 + ".yaml", "a" * 50 + ".yaml"),
        ("cs101", "cs101.yaml"),
        (".yaml", "yaml.yaml"),
        ("%.yaml", "cs101.yaml"),
    ],
)
def test_another_name_is_refused_with_a_better_one(file: str, better: str) -> None:
    with pytest.raises(BadCourseFile, match=f"name it {better}"):
        course_name(file)


def test_a_file_is_read(folder: Path) -> None:
    (folder / "a.yaml").write_bytes(b"title: A")
    assert read_bytes(folder, "a.yaml") == b"title: A"


def test_a_link_within_the_folder_is_followed_as_kubernetes_mounts_files(folder: Path) -> None:
    (folder / "..2026").mkdir()
    (folder / "..2026" / "a.yaml").write_bytes(b"title: A")
    (folder / "..data").symlink_to("..2026")
    (folder / "a.yaml").symlink_to("..data/a.yaml")
    assert read_bytes(folder, "a.yaml") == b"title: A"


def test_a_folder_may_itself_be_a_link(folder: Path) -> None:
    (folder / "a.yaml").write_bytes(b"title: A")
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert read_bytes(link, "a.yaml") == b"title: A"


@pytest.mark.parametrize("target", ["../secret.yaml", "/etc/passwd", "up/secret.yaml"])
def test_a_link_that_leads_out_is_refused(folder: Path, target: str) -> None:
    (folder.parent / "secret.yaml").write_text("secret: yes")
    (folder / "up").symlink_to("..")
    (folder / "a.yaml").symlink_to(target)
    with pytest.raises(BadCourseFile, match="leads out of the folder"):
        read_bytes(folder, "a.yaml")


def test_a_link_that_is_changed_meanwhile_leads_nowhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = folder.parent / "secret.yaml"
    secret.write_text("secret: yes")
    (folder / "a.yaml").write_text("title: A")

    really = os.path.realpath

    def swapped(path: Path, **settings: bool) -> str:
        """Say where it is, and put a link there before anybody goes."""
        found = really(path, **settings)
        if path.name == "a.yaml":
            path.unlink()
            path.symlink_to(secret)
        return found

    monkeypatch.setattr(os.path, "realpath", swapped)
    with pytest.raises(BadCourseFile, match="cannot be read"):
        read_bytes(folder, "a.yaml")


def test_what_is_no_ordinary_file_is_refused_at_once(folder: Path) -> None:
    os.mkfifo(folder / "pipe.yaml")
    (folder / "folder.yaml").mkdir()
    for name in ("pipe.yaml", "folder.yaml"):
        with pytest.raises(BadCourseFile, match="not an ordinary file"):
            read_bytes(folder, name)


def test_a_file_that_is_not_there_is_refused(folder: Path) -> None:
    (folder / "a.yaml").symlink_to("nowhere.yaml")
    (folder / "b.yaml").symlink_to("b.yaml")
    for name in ("a.yaml", "b.yaml", "c.yaml"):
        with pytest.raises(BadCourseFile, match="cannot be read"):
            read_bytes(folder, name)


def test_a_huge_file_is_refused_without_being_read_whole(folder: Path) -> None:
    (folder / "a.yaml").write_bytes(b"#" * MOST_BYTES)
    assert len(read_bytes(folder, "a.yaml")) == MOST_BYTES
    with (folder / "a.yaml").open("r+b") as file:
        file.truncate(10**12)
    with pytest.raises(BadCourseFile, match="larger than 64 KiB"):
        read_bytes(folder, "a.yaml")


def test_no_file_stays_open(folder: Path) -> None:
    (folder / "a.yaml").write_bytes(b"title: A")
    os.mkfifo(folder / "pipe.yaml")
    (folder / "folder.yaml").mkdir()
    read_bytes(folder, "a.yaml")
    for name in ("pipe.yaml", "c.yaml", "folder.yaml"):
        with pytest.raises(BadCourseFile):
            read_bytes(folder, name)
    assert open_below(folder) == []
