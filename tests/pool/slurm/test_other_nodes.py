"""What a job's processes write down of its other nodes, and how kernels' steps there are ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.slurm import launching, steps
from gpu_pool.slurm.steps import JobNode, OtherNodes, StepHost
from gpu_pool.store.device_table import write_device
from gpu_pool.store.errors import StoreUnusable
from gpu_pool_client import WHOLE, KernelCommand, Lease, LeaseState, PodPhase, PoolUnreachable, Slice
from support.jupyter_env import eventually
from support.pools import V100
from support.session_world import lease

_NODE, _SILENT = JobNode("n2", "gpu:1", 2, "127.0.0.1"), JobNode("n3", "gpu:1", 2, "127.0.0.1")
_GPU = replace(V100, node="n2")
_KNOWN = OtherNodes({"n2": _NODE}, (_GPU,), {_GPU.uuid: WHOLE})
_HALF = replace(_KNOWN, nodes={"n2": _NODE, "n3": _SILENT}, problems={"n3": "It is silent."})

Answer = Callable[[OtherNodes], OtherNodes]


def pipes() -> set[str]:
    """Return the pipes that this process has."""
    found: set[str] = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that with which they were listed
            found.add(str(each.readlink()))
    return {each for each in found if each.startswith("pipe:")}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "pool").mkdir(mode=0o700)
    return tmp_path / "pool" / "store.db"


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> list[OtherNodes | Answer]:
    """Return what is found of other nodes, one look after the other."""
    found: list[OtherNodes | Answer] = []

    def find(job: str, here: str, before: OtherNodes) -> OtherNodes:
        answer = found.pop(0)
        return answer if isinstance(answer, OtherNodes) else answer(before)

    monkeypatch.setattr(steps, "find_other_nodes", find)
    return found


def test_processes_of_a_job_know_what_one_of_them_has_found(
    store: Path, finds: list[OtherNodes | Answer]
) -> None:
    finds.append(_KNOWN)
    assert [StepHost("7", "n1", store).look() for _ in range(2)] == [_KNOWN] * 2
    [written] = store.parent.iterdir()
    assert written.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("is_known", [True, False])
def test_in_a_folder_of_others_nothing_is_believed_and_nothing_overwritten(
    store: Path, finds: list[OtherNodes | Answer], is_known: bool
) -> None:
    finds += [_KNOWN, _KNOWN]
    StepHost("7", "n1", store).look()
    [written] = store.parent.iterdir()
    if not is_known:
        written.unlink()
    own = store.parent.parent / "own"
    own.write_text("mine")
    written.with_suffix(f".{os.getpid()}").symlink_to(own)
    store.parent.chmod(0o777)
    host = StepHost("7", "n1", store)
    with pytest.raises(StoreUnusable, match="can be written to by other users"):
        host.look()
    assert (host.others, own.read_text(), written.exists()) == (None, "mine", is_known)


def test_what_is_written_follows_no_link(store: Path, finds: list[OtherNodes | Answer]) -> None:
    finds += [_KNOWN, _KNOWN]
    StepHost("7", "n1", store).look()
    [written] = store.parent.iterdir()
    own = store.parent.parent / "own"
    own.write_text("mine")
    written.unlink()
    written.with_suffix(f".{os.getpid()}").symlink_to(own)
    assert StepHost("7", "n1", store).look() == _KNOWN
    assert own.read_text() == "mine"


async def test_a_node_that_was_silent_is_asked_again_while_what_is_known_stays_in_use(
    store: Path, finds: list[OtherNodes | Answer]
) -> None:
    may_answer, asked = threading.Event(), []

    def answers(before: OtherNodes) -> OtherNodes:
        asked.append(before)
        assert may_answer.wait(120)
        return replace(_HALF, problems={}, asked_at=time.time())

    finds += [replace(_HALF, asked_at=time.time()), answers]
    host = StepHost("7", "n1", store)
    first = host.look()
    host.look_again()  # it is not time
    assert asked == []
    long_ago = host.others = replace(first, asked_at=time.time() - 61)
    long_ago.write(next(store.parent.iterdir()))
    host.look_again()
    host.look_again()  # while it is asked
    assert host.look() == long_ago
    may_answer.set()
    await eventually(lambda: host.others is not None and not host.others.problems)
    assert asked == [long_ago]
    finds.append(_KNOWN)
    assert StepHost("7", "n1", store).look().problems == {}


def test_other_processes_do_not_ask_a_silent_node_again_at_once(
    store: Path, finds: list[OtherNodes | Answer]
) -> None:
    finds.append(replace(_HALF, asked_at=time.time()))
    StepHost("7", "n1", store).look()
    known = StepHost("7", "n1", store).look()
    assert (known.problems, known.is_due()) == (_HALF.problems, False)
    assert replace(known, asked_at=known.asked_at - 61).is_due()


@pytest.mark.parametrize("before", [OtherNodes(), _HALF])
async def test_what_is_known_stays_in_use_where_slurm_does_not_answer_and_it_is_asked_later(
    store: Path, finds: list[OtherNodes | Answer], before: OtherNodes
) -> None:
    def fails(before: OtherNodes) -> OtherNodes:
        raise PoolUnreachable("Slurm does not answer.")

    finds += [before, fails] if before.nodes else [fails]
    host = StepHost("7", "n1", store)
    host.look()
    host.look_again()
    await eventually(lambda: not finds and host.others is not None and not host.others.is_due())
    expected = replace(before, problems=before.problems or {"": "Slurm does not answer."})
    for each in (host, StepHost("7", "n1", store)):
        assert replace(each.look(), asked_at=0.0) == expected


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"nodes": []}', '{"nodes": {"n2": {}}, "devices": []}'])
def test_what_another_version_has_written_is_not_read(
    store: Path, finds: list[OtherNodes | Answer], text: str
) -> None:
    finds += [_KNOWN, _HALF]
    StepHost("7", "n1", store).look()
    [written] = store.parent.iterdir()
    written.write_text(text)
    assert StepHost("7", "n1", store).look() == _HALF


def _held() -> Lease:
    return replace(lease(LeaseState.HELD), slices=(Slice(_GPU, 20, 600),))


_KERNEL = KernelCommand(("python",), {"key": "secret"}, argv_here=("python",))


async def test_no_key_is_left_of_a_step_that_cannot_be_started(
    store: Path, finds: list[OtherNodes | Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(store.parent.parent / "data"))
    monkeypatch.setattr(launching, "find_spec", lambda _: None)
    finds.append(_KNOWN)
    host = StepHost("7", "n1", store)
    host.look()
    with pytest.raises(PoolUnreachable, match="part of jupyter-gpu-pool is not installed"):
        await host.launch(_held(), _KERNEL, None)
    assert not list(store.parent.parent.rglob("kernel.json"))


class _Pool:
    """The pool of a host of steps, which counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def living(self, lease_id: str) -> Lease:
        self.asked += 1
        return _held()


@pytest.fixture
def host(store: Path, finds: list[OtherNodes | Answer], monkeypatch: pytest.MonkeyPatch) -> StepHost:
    """Return what runs steps that last, on a node that is known."""
    programs = store.parent.parent / "programs"
    programs.mkdir()
    (programs / "srun").write_text("#!/bin/sh\nexec sleep 600\n")
    (programs / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(store.parent.parent / "data"))
    finds.append(_KNOWN)
    host = StepHost("7", "n1", store)
    host.pool = _Pool()  # type: ignore[assignment]
    host.look()
    return host


async def test_a_child_of_its_server_keeps_no_step_alive(host: StepHost) -> None:
    """Only the server's own end of a pipe tells a step that it lives."""
    held, before = _held(), pipes()
    await host.launch(held, _KERNEL, None)
    ours = pipes() - before
    assert ours
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, b"yes" if pipes() & ours else b"no")
        finally:
            os._exit(0)
    await asyncio.to_thread(os.waitpid, child, 0)
    assert os.read(reader, 3) == b"no"
    os.close(reader)
    os.close(writer)
    await host.end(held.id)


_SCONTROL = """#!/bin/sh
case "$*" in
    *hostnames*) printf 'n1\\nn2\\nn3\\n';;
    *) echo "JobId=7 NodeList=n[1-3] Nodes=n[1-3] CPU_IDs=0-1 Mem=0 GRES=gpu:1(IDX:0)";;
esac
"""
_SRUN = """#!/bin/sh
case "$*" in
    *=n2*) echo '{odd}';;
    *) echo '{{"devices": [{device}], "shares": {{"GPU-3": 1000}}, "problem": ""}}';;
esac
"""


@pytest.mark.parametrize(
    "odd",
    [
        "0",
        "[]",
        '{"version": 2}',
        '{"devices": [{"odd": 1}], "shares": {}, "problem": ""}',
        '{"devices": [], "shares": [], "problem": ""}',
        '{"devices": [], "shares": {"GPU-2": null}, "problem": ""}',
        "[" * 20_000,
    ],
)
def test_a_node_that_says_something_odd_is_left_out_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    device = json.dumps(write_device(replace(V100, uuid="GPU-3")))
    for name, text in (
        ("scontrol", _SCONTROL),
        ("sinfo", "#!/bin/sh\n"),
        ("srun", _SRUN.format(odd=odd, device=device)),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = steps.find_other_nodes("7", "n1")
    assert found.problems == {"n2": "It does not say what it has."}
    assert [each.node for each in found.devices] == ["n3"]
    assert found.shares == {"GPU-3": WHOLE}


async def test_whoever_follows_a_step_asks_the_pool_only_where_there_is_news(host: StepHost) -> None:
    held, pool = _held(), host.pool
    assert isinstance(pool, _Pool)
    began = await host.launch(held, _KERNEL, None)
    assert (await host.follow(held.id, began.version, 1.0)).version == began.version
    assert pool.asked == 2  # at first, and at the end
    following = asyncio.create_task(host.follow(held.id, began.version, 600.0))
    await host.end(held.id)
    assert (await following).phase is PodPhase.ENDED


@pytest.mark.parametrize("who", ["slurmstepd-n2:", "[2026-11-28T23:19:32.282]"])
def test_what_slurm_adds_to_an_output_is_not_its_last_words(tmp_path: Path, who: str) -> None:
    said = f"{who} error: *** STEP 13.2 ON n2 CANCELLED AT 2026-11-28T23:19:32 DUE to SIGNAL Killed ***"
    (tmp_path / launching.OUTPUT).write_text(f"the end\n{said}\n")
    assert launching.last_words(tmp_path) == " Its last words: the end"


def test_of_gigabytes_that_a_job_has_written_its_end_is_read(tmp_path: Path) -> None:
    with (tmp_path / launching.OUTPUT).open("wb") as file:
        file.seek(1 << 33)
        file.write(b"\nthe end\nslurmstepd: error: it was killed\n")
    assert launching.last_words(tmp_path) == " Its last words: the end"
    assert len(launching.output_end(tmp_path)) <= 1 << 16
    assert launching.last_words(tmp_path / "gone") == ""
