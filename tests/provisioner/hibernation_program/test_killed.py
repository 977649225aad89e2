"""What is killed, stopped, or ends on the way to disk and back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.hibernating import (
    COUNTS,
    PYTHON,
    Installation,
    Kernel,
    User,
    asleep,
    child_of,
    goes_on,
    pids_in,
    said,
    status,
    until,
    until_it_counts,
    why_no_users,
)

_WHY = why_no_users()
pytestmark = [pytest.mark.hibernation, pytest.mark.skipif(bool(_WHY), reason=f"no user can: {_WHY}")]


def test_a_kernel_ends_with_its_server_and_leaves_nothing(ada: User, installation: Installation) -> None:
    kernel = ada.launch([PYTHON, "-c", COUNTS])
    said(ada)
    kernel.close()
    assert not Path(f"/proc/{kernel.pid}").exists()
    assert not list(installation.asleep.glob("?" * 32))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_criu_that_its_user_ends_or_stops_leaves_the_kernel_awake(
    ada: User, criu: Callable[[str], None], signum: signal.Signals
) -> None:
    criu(
        f'[ "$1" = dump ] && {{ echo $$ > {ada.home}/criu.new; mv {ada.home}/criu.new {ada.home}/criu; '
        f"while [ ! -e {ada.home}/may ]; do sleep 0.01; done; }}"
    )
    kernel = ada.launch([PYTHON, "-c", COUNTS])
    said(ada)
    with ada.start("dump", kernel.id) as dump:
        until((ada.home / "criu").exists)
        namespace = os.readlink(f"/proc/{kernel.pid}/ns/pid")
        number = (ada.home / "criu").read_text().strip()
        pid = next(pid for pid in pids_in(namespace) if status(pid)["NSpid"].split()[-1] == number)
        done = subprocess.run(["kill", f"-{int(signum)}", str(pid)], check=False, **ada.identity)
        assert done.returncode == 0
        assert dump.stdin is not None
        assert dump.stdout is not None
        if signum is signal.SIGSTOP:
            dump.stdin.close()  # its server has had enough
        assert not json.loads(dump.stdout.readline())["ok"]
    until_it_counts(ada)
    (ada.home / "may").touch()
    assert ada.call("dump", kernel.id)["ok"]


def test_a_dump_that_is_given_up_at_any_moment_ends_none_of_its_processes(
    ada: User, installation: Installation
) -> None:
    """CRIU runs code of its own in each of them, and one ends with a CRIU that is killed meanwhile."""
    code = "import subprocess; children = [subprocess.Popen(['sleep', '600']) for _ in range(40)]\n" + COUNTS
    kernel = ada.launch([PYTHON, "-c", code])
    said(ada)
    namespace = os.readlink(f"/proc/{kernel.pid}/ns/pid")
    log = installation.asleep / kernel.id / "work" / "log"

    def lives() -> list[int]:
        return sorted(pid for pid in pids_in(namespace) if not status(pid)["State"].startswith("Z"))

    whole = lives()
    for fiftieths in range(20):
        with ada.start("dump", kernel.id) as dump:
            until(lambda dump=dump: log.exists() or dump.poll() is not None)
            time.sleep(fiftieths / 50)  # there is no event for how far it has come
            assert dump.stdin is not None
            assert dump.stdout is not None
            dump.stdin.close()  # its server has had enough
            if json.loads(dump.stdout.readline())["ok"]:  # done by then
                break
        assert lives() == whole
    else:
        until_it_counts(ada)
        assert ada.call("dump", kernel.id)["ok"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_dump_that_is_killed_leaves_the_kernel_or_its_image_and_the_next_one_ends_it(
    ada: User, installation: Installation, criu: Callable[[str], None], when: str
) -> None:
    """Root kills the program while CRIU is about to run, or while it makes the image known."""
    hold = f"touch {ada.home}/begun; while [ ! -e {ada.home}/may ]; do sleep 0.01; done"
    criu(f'[ "$1" = dump ] && {{ {hold}; }}')
    kernel = ada.launch([PYTHON, "-c", COUNTS])
    said(ada)
    dump = ada.start("dump", kernel.id)
    until((ada.home / "begun").exists)
    caller = child_of(dump.pid)
    image = installation.asleep / kernel.id / "image"
    if when == "after":
        (ada.home / "may").touch()
        until(image.exists)
    os.kill(caller, signal.SIGKILL)
    dump.communicate()
    (ada.home / "may").touch()
    assert image.exists() == (when == "after")
    told = ada.call("dump", kernel.id)
    assert told["ok"] or (when == "after" and told["error"] == "it has ended"), told
    assert ada.call("list")["kernels"][0]["image"]
    assert kernel.process.wait(60) == 0
    again = ada.restore(kernel.id)
    assert again.answer["ok"], again.answer
    assert said(ada)


def stopped(ada: User, installation: Installation) -> tuple[Kernel, subprocess.Popen[bytes], Path]:
    """Return a kernel that CRIU has just written, its dump, and where it makes a large image whole."""
    kernel = ada.launch([PYTHON, "-c", "import os; kept = os.urandom(300_000_000)\n" + COUNTS])
    said(ada)
    dump = ada.start("dump", kernel.id)
    folder = installation.asleep / kernel.id
    new = folder / "image.new"
    until(lambda: new.exists() and new.stat().st_mode & 0o777 == 0o755)  # root's again
    return kernel, dump, folder


def test_a_dump_that_is_killed_once_criu_has_ended_leaves_nothing_stopped_in_the_next_image(
    ada: User, installation: Installation
) -> None:
    kernel, dump, folder = stopped(ada, installation)
    os.kill(child_of(dump.pid), signal.SIGKILL)
    dump.communicate()
    assert (folder / "image.new").exists()
    assert not (folder / "image").exists()
    assert ada.call("dump", kernel.id)["ok"]
    beats = int(said(ada)[0])
    assert ada.restore(kernel.id).answer["ok"]
    until(lambda: int(said(ada)[0]) > beats)


@pytest.mark.parametrize("verb", ["note", "remove", "launch"])
def test_a_kernel_that_a_killed_dump_has_left_stopped_goes_on_once_anybody_comes(
    ada: User, bob: User, installation: Installation, verb: str
) -> None:
    kernel, dump, folder = stopped(ada, installation)
    os.kill(child_of(dump.pid), signal.SIGKILL)
    dump.communicate()
    assert status(kernel.pid)["State"].startswith("T")
    if verb == "launch":  # by somebody else
        bob.launch(["sleep", "600"])
    else:
        assert ada.call(verb, kernel.id, note={})["ok"]
    assert not status(kernel.pid)["State"].startswith("T")
    until_it_counts(ada)
    assert not list(folder.glob("image*"))
    assert ada.call("dump", kernel.id)["ok"]


def test_who_notes_something_of_a_kernel_that_was_to_end_ends_it_and_is_told_that_it_sleeps(
    ada: User, installation: Installation
) -> None:
    kernel, dump, folder = stopped(ada, installation)
    until((folder / "image").exists)
    os.kill(child_of(dump.pid), signal.SIGKILL)
    dump.communicate()
    told = ada.call("note", kernel.id, note={"a": 1})
    assert (told["asleep"], told["goes_on"], told["note"]) == (True, False, {"a": 1})
    assert told["image"]["bytes"] > 300_000_000
    again = ada.restore(kernel.id)
    assert again.answer["ok"], again.answer
    # From here on the image is not what the kernel is.
    assert ada.call("note", kernel.id, note={})["asleep"] is False


@pytest.mark.parametrize("what", ["kernel", "server"])
def test_a_kernel_that_ends_while_its_image_is_made_whole_does_not_come_back(
    ada: User, installation: Installation, what: str
) -> None:
    kernel, dump, folder = stopped(ada, installation)
    with dump:
        assert dump.stdin is not None
        assert dump.stdout is not None
        if what == "kernel":
            os.kill(int(kernel.answer["first"]), signal.SIGKILL)
        else:
            dump.stdin.close()
        assert json.loads(dump.stdout.readline()).get("error") == "it was ended meanwhile."
    assert not list(folder.glob("image*"))


def test_a_launch_that_is_killed_leaves_a_kernel_that_sleeps_and_ends_all_the_same(ada: User) -> None:
    kernel = ada.launch([PYTHON, "-c", COUNTS])
    said(ada)
    os.kill(child_of(kernel.process.pid), signal.SIGKILL)
    kernel.process.wait(60)
    until_it_counts(ada)
    assert ada.call("dump", kernel.id)["ok"]
    again = ada.restore(kernel.id)
    assert again.answer["ok"]
    os.kill(child_of(again.process.pid), signal.SIGKILL)
    again.close()
    until(lambda: not Path(f"/proc/{again.pid}").exists())


def test_a_restore_that_is_killed_leaves_the_image(ada: User, criu: Callable[[str], None]) -> None:
    hold = f"touch {ada.home}/begun; while [ ! -e {ada.home}/may ]; do sleep 0.01; done"
    criu(f'[ "$1" = restore ] && {{ {hold}; }}')
    kernel = asleep(ada)
    restore = ada.start("restore", kernel)
    until((ada.home / "begun").exists)
    os.kill(child_of(restore.pid), signal.SIGKILL)
    restore.communicate()  # its server lets go
    until(lambda: not goes_on(ada, kernel))
    (ada.home / "may").touch()
    again = ada.restore(kernel)
    assert again.answer["ok"], again.answer


def _age(path: Path) -> None:
    """Let a folder look as it was an hour ago: nothing begins there any more, and nothing has expired."""
    os.utime(path, (time.time() - 3600,) * 2)


@pytest.mark.parametrize("lost", ["image/header.json", "kernel.json"])
def test_a_removal_that_was_killed_is_finished_by_the_next_launch(
    ada: User, installation: Installation, lost: str
) -> None:
    path = installation.asleep / asleep(ada)
    (path / lost).unlink()
    _age(path)
    ada.launch(["sleep", "600"])
    assert not path.exists()


def test_a_whole_image_that_has_not_got_its_name_gets_it(ada: User, installation: Installation) -> None:
    """Where power was lost between the two names."""
    path = installation.asleep / (kernel := asleep(ada))
    (path / "image").rename(path / "image.new")
    _age(path)
    ada.launch(["sleep", "600"])
    [found] = [each for each in ada.call("list")["kernels"] if each["id"] == kernel]
    assert found["image"]["bytes"]
    assert ada.restore(kernel).answer["ok"]


def test_a_removal_that_was_killed_leaves_no_kernel_stopped(ada: User, installation: Installation) -> None:
    kernel = ada.launch(["sleep", "600"])
    (installation.asleep / kernel.id / "image.old").mkdir()
    os.kill(kernel.pid, signal.SIGSTOP)
    until(lambda: status(kernel.pid)["State"].startswith("T"))
    assert ada.call("note", kernel.id, note={}, server=0)["ok"]
    until(lambda: not status(kernel.pid)["State"].startswith("T"))
