"""``%gpu use 10%`` where nobody answers, late, or for somebody else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_pool_kernels.inkernel import burst, extension, slice_requests

from .conftest import SLICE


class Place:
    """What a kernel's launcher keeps for its requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.mkfifo(folder / slice_requests.PIPE)
        self._pipe = os.open(folder / slice_requests.PIPE, os.O_RDWR | os.O_NONBLOCK)

    def request(self) -> dict[str, str]:
        return dict(json.loads(os.read(self._pipe, 4096)))

    def answer(self, request: str, message: str, **variables: Any) -> None:
        content = {"id": request, "granted": True, "message": message, "variables": variables}
        (self.folder / slice_requests.ANSWER).write_text(json.dumps(content))

    def close(self) -> None:
        os.close(self._pipe)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name, value in SLICE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(slice_requests.VARIABLE, str(tmp_path))
    monkeypatch.setattr(slice_requests, "TIMEOUT", 0.1)
    extension.size_changes.cache_clear()
    made = Place(tmp_path)
    yield made
    made.close()


def test_an_answer_that_comes_late_is_taken_by_the_next_look(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    extension.gpu("use 2x10% model=V100")
    assert "There is no answer yet" in capsys.readouterr().err
    request = place.request()
    assert request["size"] == "2x10% model=V100"
    place.answer("0" * 32, "Of another request.")
    extension.gpu("")
    assert capsys.readouterr().out == ""
    place.answer(request["id"], "This kernel now has 10%.", GPU_POOL_SLICE=["2%", "10%"])
    assert "10%" in repr(extension.gpu(""))
    assert capsys.readouterr().out == "This kernel now has 10%.\n"
    extension.gpu("")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("way", ["cell", "pipe"])
def test_an_answer_that_comes_late_undoes_nothing_that_is_heard_after_it(
    place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path, way: str
) -> None:
    extension.gpu("use 10%")
    place.answer(place.request()["id"], "This kernel now has 10%.", GPU_POOL_SLICE=["2%", "10%"])
    later = {"GPU_POOL_SLICE": ["10%", "20%"]}
    if way == "cell":
        extension.take_changes({**later})
    else:
        (tmp_path / burst.PIPE).write_text(json.dumps(later) + "\n")
        burst.listen(tmp_path / burst.PIPE, extension.catch_up)
    assert capsys.readouterr().out == "This kernel now has 10%.\n"
    assert "20%" in repr(extension.gpu(""))


def test_answers_to_several_requests_count_however_late_they_come(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_GPU_MEMORY_LIMIT", "1")
    requests = []
    for size in ("10%", "20%", "30%"):
        extension.gpu(f"use {size}")
        requests.append(place.request()["id"])
    place.answer(requests[0], "This kernel now has 10%.", CUPY_GPU_MEMORY_LIMIT=["1", "2"])
    extension.gpu("")
    # As the answers before it, this has what has changed since the kernel's start.
    place.answer(requests[2], "This kernel now has 30%.", CUPY_GPU_MEMORY_LIMIT=["1", "3"])
    extension.gpu("")
    assert os.environ["CUPY_GPU_MEMORY_LIMIT"] == "3"
    place.answer(requests[1], "This kernel now has 20%.", CUPY_GPU_MEMORY_LIMIT=["1", "0"])
    extension.gpu("")
    assert capsys.readouterr().out == "This kernel now has 10%.\nThis kernel now has 30%.\n"
    assert os.environ["CUPY_GPU_MEMORY_LIMIT"] == "3"


@pytest.mark.parametrize("where", [None, "nowhere"])
def test_where_nobody_is_to_be_asked_that_is_said(
    place: Place, where: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(slice_requests.VARIABLE)
    if where:
        monkeypatch.setenv(slice_requests.VARIABLE, str(place.folder / where))
    extension.gpu("use 10%")
    assert "does not answer" in capsys.readouterr().err


def test_a_launcher_that_has_gone_is_not_waited_for(
    place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / slice_requests.PIPE).rename(tmp_path / "of-the-living")
    os.mkfifo(tmp_path / slice_requests.PIPE)
    extension.gpu("use 10%")
    assert "does not answer" in capsys.readouterr().err


def test_outside_a_slice_there_is_nothing_to_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GPU_POOL_SLICE", raising=False)
    extension.gpu("use 10%")
    assert "This kernel has no GPU slice" in capsys.readouterr().out
    extension.gpu("use")
    assert "%gpu use 10%" in capsys.readouterr().err
