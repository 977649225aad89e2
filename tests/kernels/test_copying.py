"""A kernelspec that brings the script that starts its kernel: its copies work as it does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_pool_kernels.naming import copy_folder, write_anew
from support.users import NOBODY


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "bin").mkdir(parents=True)
    return folder


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def put(file: Path, mode: int, text: str = "#!/bin/sh\necho ran\n") -> Path:
    file.write_text(text)
    file.chmod(mode)
    return file


def mode_of(file: Path) -> int:
    return file.stat().st_mode & 0o7777


@pytest.mark.parametrize(
    ("original", "copied"),
    [(0o755, 0o755), (0o644, 0o644), (0o555, 0o755), (0o444, 0o644), (0o600, 0o600), (0o775, 0o755)],
)
def test_a_copy_has_the_rights_of_its_original_and_can_be_changed(
    source: Path, tmp_path: Path, original: int, copied: int
) -> None:
    for place in (source, source / "bin"):
        put(place / "helper.sh", original)
    copy_folder(source, tmp_path / "copy")
    for place in (tmp_path / "copy", tmp_path / "copy/bin"):
        assert mode_of(place / "helper.sh") == copied
        assert (place / "helper.sh").read_text() == (source / "helper.sh").read_text()


def test_a_read_only_folder_can_be_removed_once_copied(source: Path, tmp_path: Path) -> None:
    put(source / "bin/helper.sh", 0o555)
    (source / "bin").chmod(0o555)
    source.chmod(0o555)
    copy_folder(source, tmp_path / "copy")
    assert mode_of(tmp_path / "copy/bin") == 0o755
    assert subprocess.check_output([tmp_path / "copy/bin/helper.sh"], text=True) == "ran\n"


def test_links_lead_where_they_led(source: Path, tmp_path: Path) -> None:
    put(source / "bin/helper.sh", 0o755)
    outside = put(tmp_path / "site.sh", 0o755)
    (source / "start").symlink_to("bin/helper.sh")
    (source / "bin/up").symlink_to("../start")
    (source / "site").symlink_to("../site.sh")
    (source / "absolute").symlink_to(outside)
    (source / "folder").symlink_to("bin")
    (source / "nothing").symlink_to("not-there")
    (source / "itself").symlink_to("itself")
    copy = tmp_path / "elsewhere/copy"
    copy.parent.mkdir()
    copy_folder(source, copy)
    within, original = copy.resolve(), outside.resolve()
    assert (copy / "start").resolve() == (copy / "bin/up").resolve() == within / "bin/helper.sh"
    assert (copy / "folder").resolve() == within / "bin"
    assert (copy / "site").resolve() == (copy / "absolute").resolve() == original
    assert (copy / "nothing").is_symlink()
    assert (copy / "itself").is_symlink()


def test_what_is_no_file_or_runs_as_its_owner_is_linked(source: Path, tmp_path: Path) -> None:
    os.mkfifo(source / "pipe")
    put(source / "own", 0o4755)
    copy_folder(source, tmp_path / "copy")
    for name in ("pipe", "own"):
        assert (tmp_path / "copy" / name).readlink() == (source / name).resolve()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_what_may_not_be_read_is_linked() -> None:
    folder = Path(tempfile.mkdtemp(prefix="gpu-pool-test-"))
    try:
        folder.chmod(0o777)
        (folder / "source/secret").mkdir(parents=True)
        (folder / "source/secret").chmod(0o700)
        put(folder / "source/token", 0o600)
        code = (
            "import os, pathlib; from gpu_pool_kernels.naming import copy_folder\n"
            f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
            f"here = pathlib.Path({str(folder)!r})\n"
            "copy_folder(here / 'source', here / 'copy')\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
        for name in ("secret", "token"):
            assert (folder / "copy" / name).readlink() == folder / "source" / name
    finally:
        shutil.rmtree(folder)


def test_a_file_that_is_written_anew_is_not_the_one_that_it_was_a_link_to(
    source: Path, tmp_path: Path
) -> None:
    outside = put(tmp_path / "site.json", 0o600, "theirs")
    (source / "kernel.json").symlink_to(outside)
    (source / "logo").symlink_to("not-there")
    copy_folder(source, tmp_path / "copy")
    for name, mode in (("kernel.json", 0o600), ("logo", 0o644), ("new", 0o644)):
        write_anew(tmp_path / "copy" / name, "ours")
        assert (tmp_path / "copy" / name).read_text() == "ours"
        assert mode_of(tmp_path / "copy" / name) == mode
    assert outside.read_text() == "theirs"
