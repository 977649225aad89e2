"""What a job's processes write down of its other nodes, and how kernels' steps there are ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_pool.slurm import steps
from gpu_pool.slurm.steps import JobNode, OtherNodes, StepHost
from gpu_pool.store.errors import StoreUnusable

_NODE = JobNode("n2", "gres/gpu:1", 2, "127.0.0.1")
_KNOWN = OtherNodes({"n2": _NODE})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "pool").mkdir(mode=0o700)
    return tmp_path / "pool" / "store.db"


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> list[OtherNodes]:
    """Return what is found of other nodes, one look after the other."""
    found: list[OtherNodes] = []
    monkeypatch.setattr(steps, "find_other_nodes", lambda *_: found.pop(0))
    return found


def test_processes_of_a_job_know_what_one_of_them_has_found(store: Path, finds: list[OtherNodes]) -> None:
    finds.append(_KNOWN)
    assert [StepHost("7", "n1", store).look() for _ in range(2)] == [_KNOWN] * 2
    [written] = store.parent.iterdir()
    assert written.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("is_known", [True, False])
def test_in_a_folder_of_others_nothing_is_believed_and_nothing_overwritten(
    store: Path, finds: list[OtherNodes], is_known: bool
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


def test_what_is_written_follows_no_link(store: Path, finds: list[OtherNodes]) -> None:
    finds += [_KNOWN, _KNOWN]
    StepHost("7", "n1", store).look()
    [written] = store.parent.iterdir()
    own = store.parent.parent / "own"
    own.write_text("mine")
    written.unlink()
    written.with_suffix(f".{os.getpid()}").symlink_to(own)
    assert StepHost("7", "n1", store).look() == _KNOWN
    assert own.read_text() == "mine"
