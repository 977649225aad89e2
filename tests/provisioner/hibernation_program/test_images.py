"""A kernel goes to disk and on: its image, what is noted of it, and that there is one of it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from support.hibernating import (
    COUNTS,
    PYTHON,
    Installation,
    User,
    asleep,
    goes_on,
    said,
    started,
    status,
    until,
    why_no_users,
)

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


def test_a_users_kernel_sleeps_and_goes_on(ada: User, installation: Installation) -> None:
    kernel = ada.launch([PYTHON, "-c", COUNTS])
    assert kernel.answer["ok"], kernel.answer
    before = said(ada)
    asleep = ada.call("dump", kernel.id, note={"of": "ada"})
    assert asleep["ok"], asleep
    assert kernel.process.wait(60) == 0
    assert not Path(f"/proc/{kernel.pid}").exists()
    assert asleep["image"]["listens"] == [["127.0.0.1", int(before[5])]]
    assert ada.call("list")["kernels"] == [{key: asleep[key] for key in asleep if key != "ok"}]
    before = said(ada)
    again = ada.restore(kernel.id)
    assert again.answer["ok"], again.answer
    until(lambda: int(said(ada)[0]) > int(before[0]))
    # It is process 3, and knows it; what it has open is there.
    assert said(ada)[1:] == ["3", "3", "1000", "None", before[5]]
    found = status(again.pid)
    assert found["Uid"].split() == [str(ada.entry.pw_uid)] * 4
    assert (found["NoNewPrivs"], int(found["CapPrm"], 16)) == ("1", 0)
    assert ada.call("remove", kernel.id)["ok"]
    again.close()
    assert not list(installation.asleep.glob("?" * 32))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"argv": []}, "argv must be"),
        ({"argv": "sh"}, "argv must be"),
        ({"argv": ["sh", "a\0b"]}, "argv must be"),
        ({"argv": ["sh", 1]}, "argv must be"),
        ({"env": {"A": 1}}, "argv must be"),
        ({"env": {"A=B": "x\0"}}, "argv must be"),
        ({"cwd": "/\0"}, "cwd must be"),
        ({"umask": "022"}, "umask a number"),
        ({"umask": -1}, "umask a number"),
        ({"cwd": "/root"}, "Permission denied"),
        ({"argv": ["/nowhere/python"]}, "No such file"),
    ],
)
def test_what_cannot_be_run_is_refused_and_leaves_nothing(
    ada: User, installation: Installation, changed: dict[str, object], why: str
) -> None:
    request = {"argv": ["sh"], "env": {"PATH": "/bin"}, "cwd": "/", "umask": 0o022, **changed}
    answer = ada.call("launch", **request)
    assert why in answer["error"]
    assert not list(installation.asleep.glob("?" * 32))


def test_a_user_neither_reads_nor_writes_an_image(ada: User, installation: Installation) -> None:
    kernel = asleep(ada)
    folder = installation.asleep / kernel
    for path in (installation.asleep, folder):
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (0, 0o700)
    for path in (folder / "image").iterdir():
        assert (path.stat().st_uid, path.stat().st_mode & 0o222 if path.suffix == ".img" else 0) == (0, 0)
    for words in (["ls", folder], ["cat", folder / "image/header.json"], ["touch", folder / "image/x"]):
        assert subprocess.run(words, capture_output=True, check=False, **ada.identity).returncode != 0


def test_a_damaged_image_is_not_restored(ada: User, installation: Installation) -> None:
    kernel = asleep(ada)
    pages = next((installation.asleep / kernel / "image").glob("pages-*.img"))
    whole = pages.read_bytes()
    pages.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "what is on disk is damaged" in ada.restore(kernel).answer["error"]
    pages.write_bytes(whole)
    assert ada.restore(kernel).answer["ok"]


#: Has something mapped that it has not open, as libraries are, and is in a folder of its own.
_MAPS = """
import mmap, os, time
os.mkdir("work"); os.chdir("work")
with open("../library", "wb") as file:
    file.write(b"x" * 100_000)
with open("../library", "rb") as file:
    kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
open("../ready", "w").close()
time.sleep(600)
"""


def test_a_library_that_was_updated_is_named_and_the_image_kept(ada: User) -> None:
    kernel, library = asleep(ada, _MAPS), ada.home / "library"
    library.rename(ada.home / "before")
    library.write_bytes(b"y" * 100_000)
    library.chmod(0o644)
    why = ada.restore(kernel).answer["error"]
    assert why == f"the file {library} changed, or went, while it slept."
    (ada.home / "before").rename(library)
    assert ada.restore(kernel).answer["ok"]


def test_a_folder_that_is_gone_is_named_and_the_image_kept(ada: User) -> None:
    kernel = asleep(ada, _MAPS)
    (ada.home / "work").rename(ada.home / "moved")
    why = ada.restore(kernel).answer["error"]
    assert why == f"the folder {ada.home}/work, in which it was, is gone."
    (ada.home / "moved").rename(ada.home / "work")
    assert ada.restore(kernel).answer["ok"]


def test_another_processor_is_told_and_the_image_kept(ada: User, installation: Installation) -> None:
    """As where the folder lies on a disk that is another machine's now."""
    kernel = asleep(ada)
    header = installation.asleep / kernel / "image" / "header.json"
    said = header.read_text()
    header.write_text(json.dumps({**json.loads(said), "cpu": "another"}))
    assert "another processor than the one on which it fell asleep" in ada.restore(kernel).answer["error"]
    header.write_text(said)
    assert ada.restore(kernel).answer["ok"]


def test_of_two_restores_one_goes_on(ada: User) -> None:
    kernel = asleep(ada, OPENS.format(more=""))  # none of whose files changes meanwhile
    first = ada.restore(kernel)
    assert first.answer["ok"], first.answer
    assert ada.restore(kernel).answer["error"] == "it goes on already."
    first.close()
    again = ada.restore(kernel)
    assert again.answer["ok"], again.answer


def test_two_restores_at_once_let_one_go_on(ada: User) -> None:
    kernel = asleep(ada)
    calls = [ada.start("restore", kernel) for _ in range(3)]
    answers = []
    for each in calls:
        assert each.stdout is not None
        answers.append(json.loads(each.stdout.readline()))
    assert [each["ok"] for each in answers].count(True) == 1
    for each in calls:
        each.communicate()


def test_what_nobody_has_asked_for_in_days_is_removed_unless_a_server_has_it(
    ada: User, installation: Installation
) -> None:
    old, had, server = asleep(ada), asleep(ada), ada.launch(["sleep", "600"])
    assert ada.call("note", had, note={}, server=server.pid)["ok"]
    for each in (old, had):
        os.utime(installation.asleep / each, (1000, 1000))
    assert "a process of yours" in ada.call("note", old, note={}, server=os.getpid())["error"]
    ada.launch(["sleep", "60"])
    found = {each["id"] for each in ada.call("list")["kernels"]}
    assert (old in found, had in found) == (False, True)


def test_an_image_survives_a_reboot(ada: User, installation: Installation) -> None:
    """All processes are gone, and the system has another id: no process has what it had."""
    kernel = asleep(ada)
    state = installation.asleep / kernel / "kernel.json"
    said = json.loads(state.read_text())
    said["run"].update(boot="another", first=1, started=1)
    state.write_text(json.dumps(said))
    assert not goes_on(ada, kernel)
    assert ada.call("dump", kernel)["error"] == "it has ended"
    (before,) = ada.call("list")["kernels"]
    assert ada.restore(kernel).answer["ok"]
    # It is written anew, although the image from which it goes on is still there.
    assert ada.call("dump", kernel)["image"]["since"] > before["image"]["since"]


def test_a_deep_note_is_refused_and_stops_nobody(ada: User) -> None:
    kernel = asleep(ada)
    note = '{"a":' * 980 + "1" + "}" * 980
    answer = ada.said(f'{{"note": {note}}}\n'.encode(), "note", kernel)
    assert "20 levels" in answer["error"]
    assert ada.call("note", kernel, note={"a": [{"b": 1}]})["ok"]
    assert ada.call("list")["kernels"][0]["note"] == {"a": [{"b": 1}]}


def test_an_answer_says_when_the_first_process_has_started(ada: User) -> None:
    kernel = ada.launch(["sleep", "600"])
    assert kernel.answer["started"] == started(int(kernel.answer["first"]))
