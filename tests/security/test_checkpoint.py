"""What is moved to host memory is the user's own, whatever others' processes are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_pool.enforcement.checkpoint import Checkpoint, NotSuspended
from gpu_pool.settings import PoolSettings
from support.disguises import OTHER, STUDENT, disguised, needs_root

pytestmark = needs_root


@pytest.mark.parametrize("name", [b"Uid:\t%d\t1\t1" % OTHER, b"a\rUid:\t%d" % OTHER])
def test_a_process_that_calls_itself_ours_is_not_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: OTHER)
    with disguised(name, STUDENT) as process, pytest.raises(NotSuspended, match="belongs to another user"):
        Checkpoint(tmp_path, PoolSettings(checkpoint=True)).suspend("l1", [process.pid], "GPU-1")
