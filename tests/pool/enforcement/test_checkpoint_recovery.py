"""What a pool that was killed left suspended is brought back, against a stand-in for the driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_pool.enforcement.checkpoint import NotRestored
from gpu_pool.tuning import Tuning
from gpu_pool_client import LeaseState
from support.checkpoints import MakeCheckpoint, records, states
from support.cuda_stub import Driver
from support.pools import eventually, running

#: As if it were long ago that something was suspended.
LATER = Tuning(parked_within=0.0)


@pytest.mark.parametrize("left", [["locked", "running"], ["checkpointed", "locked"], ["checkpointed"] * 2])
def test_what_was_cut_off_is_brought_back(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint, tmp_path: Path, left: list[str]
) -> None:
    checkpoint().suspend("l1", pids, "GPU-1")
    assert checkpoint().suspended() == ["l1"]
    for pid, state in zip(pids, left, strict=True):
        driver.set_state(pid, state)
    assert checkpoint(LATER).recover({"l1": LeaseState.HELD}) == {}
    assert states(driver, pids) == ["running"] * 2
    assert records(tmp_path) == []


def test_what_is_about_to_be_parked_is_left_alone(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint
) -> None:
    checkpoint().suspend("l1", pids, "GPU-1")
    assert checkpoint().recover({"l1": LeaseState.HELD}) == {}
    assert states(driver, pids) == ["checkpointed"] * 2


@pytest.mark.long
async def test_nobody_interferes_while_the_program_of_a_killed_pool_is_at_work(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    driver.scenario(f"hang checkpoint {pids[1]}")
    code = "\n".join(
        (
            "from pathlib import Path",
            "from gpu_pool.enforcement.checkpoint import Checkpoint",
            "from gpu_pool.settings import PoolSettings",
            "from gpu_pool.tuning import Tuning",
            "impatient = PoolSettings(checkpoint='on', tuning=Tuning(driver_within=4, driver_lock_ms=1))",
            f"pool = Checkpoint(Path({str(tmp_path / 'suspended')!r}), impatient)",
            f"pool.suspend('l1', {pids}, 'GPU-1')",
        )
    )
    with running(code) as server:
        await eventually(lambda: "checkpoint" in driver.calls(pids[1]))
        server.kill()
        server.wait()
    assert checkpoint().recover({"l1": LeaseState.HELD}) == {}
    assert states(driver, pids) == ["checkpointed", "locked"]
    # The program ends itself, and with it its hold on the lease.
    await eventually(lambda: checkpoint().recover({"l1": LeaseState.HELD}) or not records(tmp_path))
    assert states(driver, pids) == ["running"] * 2


def test_what_is_parked_stays_suspended(driver: Driver, pids: list[int], checkpoint: MakeCheckpoint) -> None:
    checkpoint().suspend("l1", pids, "GPU-1")
    assert checkpoint().recover({"l1": LeaseState.PARKED}) == {}
    assert states(driver, pids) == ["checkpointed"] * 2


def test_suspended_processes_without_a_lease_are_reported(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint
) -> None:
    checkpoint().suspend("l1", pids, "GPU-1")
    found = checkpoint().recover({"l1": LeaseState.ENDED})
    assert found["l1"].pids == set(pids)


def test_processes_that_are_broken_are_reported(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint
) -> None:
    checkpoint().suspend("l1", pids, "GPU-1")
    driver.set_state(pids[0], "failed")
    found = checkpoint(LATER).recover({"l1": LeaseState.HELD})
    assert found["l1"].pids == {pids[0]}


def test_what_another_version_has_recorded_is_left_alone_and_stops_nobody(
    driver: Driver,
    pids: list[int],
    checkpoint: MakeCheckpoint,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = checkpoint(LATER)
    for name, pid in zip(("l1", "l2"), pids, strict=True):
        pool.suspend(name, [pid], "GPU-1")
    theirs, newer = tmp_path / "suspended/l1", tmp_path / "suspended/l2"
    newer.write_text(json.dumps({**json.loads(newer.read_text()), "more": 1}) + "\n")
    text = json.dumps({"pids": pids[:1]}) + "\n"
    theirs.write_text(text)
    for _ in range(2):
        with pytest.raises(NotRestored, match="by another version"):
            pool.restore("l1")
    assert pool.host_memory().leases == 1
    assert pool.recover(dict.fromkeys(("l1", "l2"), LeaseState.HELD)) == {}
    assert theirs.read_text() == text
    assert states(driver, pids) == ["checkpointed", "running"]
    assert [str(theirs) in record.getMessage() for record in caplog.records] == [True]


def test_processes_that_ended_leave_nothing(
    driver: Driver, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    with driver.process() as pid:
        checkpoint().suspend("l1", [pid], "GPU-1")
    assert checkpoint().recover({"l1": LeaseState.HELD}) == {}
    assert records(tmp_path) == []
