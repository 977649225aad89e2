"""The folders of a process that is killed are removed by the next one; those of one that lives are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from gpu_pool_client._folders import HeldFolder, remove_abandoned

#: Makes a folder, says where, and waits to be killed.
MAKER = """
import signal, sys
from gpu_pool_client._folders import HeldFolder
held = HeldFolder(sys.argv[1], "made-")
print(held.path, flush=True)
signal.pause()
"""


def test_who_is_killed_leaves_a_folder_for_the_next_to_remove(tmp_path: Path) -> None:
    maker = subprocess.Popen([sys.executable, "-c", MAKER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    theirs = Path(maker.stdout.readline().strip())
    (theirs / "kernel-1").write_text("a socket's stand-in")
    ours = HeldFolder(tmp_path, "made-")
    remove_abandoned(str(tmp_path), "made-")
    assert theirs.is_dir()
    assert Path(ours.path).stat().st_mode & 0o777 == 0o700
    maker.kill()
    maker.communicate()
    assert maker.returncode == -signal.SIGKILL
    remove_abandoned(str(tmp_path), "made-")
    assert sorted(tmp_path.iterdir()) == [Path(ours.path)]
    ours.close()
    ours.close()
    assert not list(tmp_path.iterdir())


def test_what_is_not_surely_ones_own_stays(tmp_path: Path) -> None:
    folder = HeldFolder(tmp_path, "made-")
    name = Path(folder.path).name
    folder.close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"{name}-link").symlink_to(elsewhere)
    (tmp_path / f"{name}-file").write_text("")
    (tmp_path / "made-0-other-machine").mkdir()
    (tmp_path / f"{name}-abandoned").mkdir()
    stays = {elsewhere.name, f"{name}-link", f"{name}-file", "made-0-other-machine"}
    if os.getuid() == 0:
        (tmp_path / f"{name}-theirs").mkdir()
        os.chown(tmp_path / f"{name}-theirs", 65534, 65534)
        stays.add(f"{name}-theirs")
    remove_abandoned(str(tmp_path), "made-")
    assert {each.name for each in tmp_path.iterdir()} == stays
