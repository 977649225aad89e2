"""How servers of ordinary users call the privileged program: what is slow, given up, or never answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_pool_client import Holder, Lease, LeaseState, parse_request
from gpu_pool_provisioner.hibernation.calling import Program, ProgramRefused, why_not
from gpu_pool_provisioner.hibernation.kept import KeptKernel
from gpu_pool_provisioner.hibernation.left import hold
from gpu_pool_provisioner.hibernation.program.gpu_pool_hibernation.values import VERSION
from gpu_pool_provisioner.launchers.base import StaysAwakeError
from support.jupyter_env import eventually
from support.many_files import many_files

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the program must be root's own file.")

#: In place of sudo: it keeps a kernel alive, and is told by files how to go on.
SUDO = """#!/bin/sh
there={folder}
echo "$3" >> $there/called
[ $3 = restore ] || read -r line
case $3 in
check) echo '{{"ok": true, "why": "", "version": {version}}}' ;;
launch) echo $$ > $there/pid
    echo '{{"ok": true, "id": "'$(printf %032d 7)'", "pid": '$$', "first": '$$'}}'; cat > /dev/null ;;
note) [ -e $there/noted ] && exec cat $there/noted; until [ -e $there/may ]; do sleep 0.01; done ;;
dump) [ ! -e $there/noted ] || exit 1
    [ ! -e $there/answer ] || {{ kill -9 $(cat $there/pid); cat $there/answer; exit; }}
    touch $there/begun; cat > /dev/null; touch $there/image; until [ -e $there/may ]; do sleep 0.01; done ;;
list) echo '{{"ok": true, "kernels": []}}' ;;
remove) [ ! -e $there/refuse ] || {{ echo '{{"ok": false, "error": "the disk is away."}}'; exit; }}
    until [ -e $there/may_remove ]; do sleep 0.01; done; rm -f $there/image; echo '{{"ok": true}}' ;;
*) until [ -e $there/may ]; do sleep 0.01; done ;;
esac
"""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder by which a program is told how to go on that stands in for sudo."""
    sudo = tmp_path / "sudo"
    sudo.write_text(SUDO.format(folder=tmp_path, version=VERSION))
    sudo.chmod(0o755)
    (tmp_path / "program").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    yield tmp_path
    let_go_on(tmp_path)


def let_go_on(there: Path) -> None:
    for name in ("may", "may_remove"):
        (there / name).touch()


def calls(there: Path) -> list[str]:
    return (there / "called").read_text().split()


def test_that_kernels_can_sleep_is_asked_once_and_that_they_cannot_each_time(there: Path) -> None:
    installed = str(there / "program")
    assert [why_not(installed=installed) for _ in range(3)] == ["", "", ""]
    assert calls(there) == ["check"]
    missing = str(there / "missing")
    assert f"there is no {missing}" in why_not(installed=missing)
    (there / "missing").touch()
    assert why_not(installed=missing) == ""


def test_what_does_not_answer_is_left_where_sudo_cannot_be_killed(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: subprocess.Popen[bytes]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(subprocess.Popen, "kill", refuse)
    calling = Program(installed=str(there / "program"), answers_within=0.2)
    with pytest.raises(ProgramRefused, match="note was not done within 0.2 seconds"):
        calling.call("note")


@pytest.mark.parametrize("bytes_of_request", [1, 300_000])
def test_a_kernel_whose_launch_is_not_answered_is_given_up(there: Path, bytes_of_request: int) -> None:
    calling = Program(installed=str(there / "program"), answers_within=0.2, finishes_within=0.2)
    with pytest.raises(ProgramRefused, match="restore was not done within 0.2 seconds"):
        calling.start("restore", given="x" * bytes_of_request)


async def launched(there: Path, finishes_within: float = 60.0) -> KeptKernel:
    kept = KeptKernel(Program(installed=str(there / "program"), finishes_within=finishes_within))
    await kept.launch(["kernel"], {}, None)
    return kept


def lease() -> Lease:
    return Lease("1-a", "", parse_request("2%"), Holder("ada"), LeaseState.HELD, 0.0)


async def test_whoever_is_to_know_hears_of_each_process_that_it_gets(there: Path) -> None:
    kept, heard = KeptKernel(Program(installed=str(there / "program"))), list[int]()
    kept.note_process = heard.append
    await kept.launch(["kernel"], {}, None)
    assert heard == [kept.pid]
    kept.end()


async def test_a_kernel_that_is_ended_before_it_has_begun_is_not_left_behind(there: Path) -> None:
    kept = KeptKernel(Program(installed=str(there / "program")))
    kept.note_process = lambda _: kept.end()  # by then it has its process
    with pytest.raises(OSError, match="it was ended"):
        await kept.launch(["kernel"], {}, None)
    kept.wait(timeout=60)  # what is killed may run for a moment


async def test_its_end_is_waited_for_also_where_many_files_are_open(there: Path) -> None:
    kept = await launched(there)
    with many_files():
        with pytest.raises(subprocess.TimeoutExpired):
            kept.wait(timeout=0)
        kept.end()
        assert kept.wait(timeout=60) == 0


async def test_a_dump_that_never_ends_is_given_up(there: Path) -> None:
    kept = await launched(there, finishes_within=0.2)
    with pytest.raises(StaysAwakeError, match="dump was not done within 0.2 seconds"):
        await kept.sleep(lease())
    assert kept.poll() is None
    kept.end()
    let_go_on(there)
    await kept.remove_image()


async def test_a_kernel_that_is_shut_down_while_its_image_is_finished_leaves_none(there: Path) -> None:
    kept = await launched(there)
    sleeping = asyncio.create_task(kept.sleep(lease()))
    await eventually(lambda: (there / "begun").exists())
    sleeping.cancel()
    kept.end()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    let_go_on(there)
    await kept.remove_image()
    assert not (there / "image").exists()
    assert calls(there)[-1] == "remove"
    await kept.remove_image()
    assert calls(there).count("remove") == 1


async def test_what_is_noted_of_a_kernel_may_be_as_long_as_the_program_takes(there: Path) -> None:
    image = {"bytes": 7, "since": 0.0, "listens": []}
    answer = {"ok": True, "note": {"kernel": "x" * 65_536}, "image": image}
    (there / "answer").write_text(json.dumps(answer) + "\n")
    kept = await launched(there)
    assert await kept.sleep(lease()) == 7
    assert calls(there).count("list") <= 1  # of what killed servers have left, once


@pytest.mark.parametrize("asleep", [True, False])
async def test_what_killed_dumps_have_left_of_a_kernel_is_settled_at_once(there: Path, asleep: bool) -> None:
    """It is asleep where its image was whole, and else not left stopped."""
    image = {"bytes": 7, "since": 0.0, "listens": []}
    (there / "noted").write_text(json.dumps({"ok": True, "asleep": asleep, "image": image}) + "\n")
    kept = await launched(there)
    if asleep:
        os.kill(kept.pid, signal.SIGKILL)
        assert await kept.sleep(lease()) == 7
    else:
        with pytest.raises(StaysAwakeError, match="the program was ended"):
            await kept.sleep(lease())
        kept.end()
    assert calls(there)[-3:] == ["dump", "dump", "note"]
    let_go_on(there)
    await kept.remove_image()


async def test_nothing_else_waits_while_an_image_is_removed(there: Path) -> None:
    kept = await launched(there)
    sleeping = asyncio.create_task(kept.sleep(lease()))
    await eventually(lambda: (there / "begun").exists())
    sleeping.cancel()
    kept.end()
    (there / "may").touch()
    removing = asyncio.create_task(kept.remove_image())
    await asyncio.wait({sleeping})
    await eventually(lambda: "remove" in calls(there))
    (there / "may_remove").touch()
    await removing


async def test_what_could_not_be_removed_is_tried_again_and_held_until_then(there: Path) -> None:
    (there / "answer").write_text(
        json.dumps({"ok": True, "image": {"bytes": 7, "since": 0.0, "listens": []}}) + "\n"
    )
    (there / "may_remove").touch()
    kept = await launched(there)
    assert await kept.sleep(lease()) == 7
    for name in ("image", "refuse"):
        (there / name).touch()
    kept.end()
    await kept.remove_image()
    assert (there / "image").exists()
    assert hold("0" * 31 + "7") is None
    (there / "refuse").unlink()
    another = await launched(there)
    await eventually(lambda: not (there / "image").exists())
    another.end()


async def test_of_a_kernel_that_never_went_to_disk_nothing_is_asked_to_be_removed(there: Path) -> None:
    kept = await launched(there)
    kept.end()
    await kept.remove_image()
    assert "remove" not in calls(there)
