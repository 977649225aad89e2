"""Images that outlive their server: which server has one, and what it says of it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gpu_pool_provisioner.hibernation import giving_way, left
from gpu_pool_provisioner.hibernation.calling import MissingRoom, Program, ProgramRefused
from gpu_pool_provisioner.hibernation.left import KernelRecord, LeftImage, Owner

ADA = Owner(os.getuid(), "ada", "/home/ada/week1.ipynb", "python3-gpu")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root says where the program keeps images.")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Return the program with a folder of a test's own."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    folder = tmp_path / "asleep"
    folder.mkdir(0o700)
    return Program(folder=str(folder))


def leave(program: Program, owner: Owner = ADA, at: float = 1000.0, **more: Any) -> Path:
    """Write what the program keeps of a kernel that was left; return its folder."""
    folder = Path(program.folder, os.urandom(16).hex())
    (folder / "image").mkdir(parents=True)
    record = asdict(KernelRecord(owner, "/tmp/kernel", "key", {}, count=14, at=at))
    note = {"version": 1, "lease": "1-a", "user": "ada", "kernel": "week1", "record": record, **more}
    header = {"since": at, "listens": [], "files": {"pages-1.img": [3 << 20, "digest"]}}
    for name, said in (
        ("kernel.json", {"uid": 0, "user": "root"}),
        ("note.json", {"note": note}),
        ("image/header.json", header),
    ):
        (folder / name).write_text(json.dumps({"version": 1, **said}))
    return folder


def claimed(program: Program, owner: Owner = ADA) -> LeftImage:
    found = left.claim(program, owner)
    assert found is not None
    return found


def test_its_owner_has_it_once_nobody_holds_it(program: Program) -> None:
    leave(program)
    first = claimed(program)
    assert left.claim(program, ADA) is None
    del first
    assert claimed(program).record.owner == ADA


@pytest.mark.parametrize(
    "other", [{"uid": 1}, {"hub_user": "bob"}, {"notebook": "/home/ada/week2.ipynb"}, {"kernel": "python3"}]
)
def test_nobody_else_has_it(program: Program, other: dict[str, Any]) -> None:
    leave(program)
    assert left.claim(program, replace(ADA, **other)) is None
    assert left.claim(program, ADA) is not None


def test_of_several_the_newest_is_taken_and_older_ones_go_that_no_server_has(program: Program) -> None:
    kept = [leave(program, replace(ADA, kernel="other")), leave(program, at=2000.0), leave(program, at=900.0)]
    older, held = leave(program, at=1000.0), left.hold(kept[-1].name)
    found = claimed(program)
    assert (held is not None, found.record.at) == (True, 2000.0)
    assert (older.exists(), [each.exists() for each in kept]) == (False, [True, True, True])


def test_one_whose_notebook_is_renamed_is_found_by_its_new_name(program: Program) -> None:
    renamed = replace(ADA, notebook="/home/ada/week2.ipynb")
    leave(program)
    image = claimed(program)
    image.belong_to(renamed)
    del image
    assert left.claim(program, ADA) is None
    assert claimed(program, renamed).record.count == 14


def test_what_a_killed_server_cannot_leave_is_removed_unless_another_one_has_it(program: Program) -> None:
    abandoned, held, kept = leave(program, record=None), leave(program, record=None), leave(program)
    holds = left.hold(held.name)
    assert holds is not None
    left.remove_abandoned_once(program)
    assert [each.exists() for each in (abandoned, held, kept)] == [False, True, True]


@contextmanager
def running() -> Iterator[subprocess.Popen[bytes]]:
    """Run another process of this user's."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_what_a_living_server_has_is_neither_removed_nor_offered_wherever_it_holds_it(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    images = [leave(program, record=None), leave(program)]
    with running() as server:
        for each in images:
            note = json.loads((each / "note.json").read_text())["note"]
            program.call("note", each.name, note=note, server=server.pid)
        monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "another"))
        left.remove_abandoned_once(program)
        assert left.claim(program, ADA) is None
        left.remove_others(program, "", ADA)
        room = MissingRoom(1, 0, "")
        assert not giving_way.make_room(
            program, room, replace(ADA, notebook="/home/ada/week2.ipynb"), lambda: True
        )
        assert all(each.exists() for each in images)
        server.kill()
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its parent has not asked
        assert left.claim(program, ADA) is not None


def test_what_a_server_that_lives_on_has_left_is_the_next_ones(program: Program) -> None:
    folder = leave(program)
    image = claimed(program)
    assert json.loads((folder / "note.json").read_text())["server"][0] == os.getpid()
    image.note_left()
    assert json.loads((folder / "note.json").read_text())["server"][:2] == [0, 0]


def test_another_process_that_has_a_servers_number_by_now_has_nothing(program: Program) -> None:
    folder = leave(program)
    note = json.loads((folder / "note.json").read_text())["note"]
    with running() as other:
        program.call("note", folder.name, note=note, server=other.pid)
        said = json.loads((folder / "note.json").read_text())
        said["server"][1] -= 1  # it began before
        (folder / "note.json").write_text(json.dumps(said))
        assert left.claim(program, ADA) is not None


def test_of_two_that_remove_one_and_hold_it_none_holds_what_is_gone(program: Program) -> None:
    kernel = leave(program).name
    first = left.hold(kernel)
    assert first is not None
    assert left.hold(kernel) is None
    first.remove()
    again = left.hold(kernel)
    assert again is not None
    first.remove()
    assert left.hold(kernel) is None


def test_none_is_taken_from_a_folder_where_others_write(program: Program) -> None:
    leave(program)
    Path(program.folder).chmod(0o770)
    with pytest.raises(ProgramRefused, match="is not root's alone"):
        left.claim(program, ADA)


@pytest.mark.parametrize("name", ["kernel.json", "note.json", "image/header.json"])
def test_what_cannot_be_read_is_no_image(program: Program, name: str) -> None:
    (leave(program) / name).write_text('{"version": 0}')
    assert left.claim(program, ADA) is None


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
    ("told", "has"),
    [
        ({"count": 1, "libraries": ["torch", "numpy"]}, "torch, numpy, 1 variable, 3 MiB"),
        ({"count": 2, "libraries": ["a", "b", "c", "d"]}, "a, b, c, 2 variables, 3 MiB"),
        ({"count": "many", "libraries": ["<b>x</b>", "x" * 31, 7, None, "torch"]}, "torch, 3 MiB"),
        ({"libraries": "torch"}, "3 MiB"),
        ({}, "3 MiB"),
    ],
)
def test_what_a_kernel_says_of_itself_may_be_anything(told: dict[str, Any], has: str) -> None:
    assert KernelRecord(ADA, "/tmp/kernel", "key", {}).saying(told).has_in_words(3) == has


@pytest.mark.parametrize(
    ("now", "since"),
    [
        ("2026-11-28 23:00", "today 18:02"),
        ("2026-11-29 00:01", "yesterday 18:02"),
        ("2026-12-01 18:02", "28 November 18:02"),
    ],
)
def test_it_says_since_when_it_sleeps_and_what_it_has(program: Program, now: str, since: str) -> None:
    def at(text: str) -> float:
        return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M"))

    leave(program, at=at("2026-11-28 18:02"))
    assert claimed(program).in_words(at(now)) == f"from {since} (14 variables, 3 MiB)"
