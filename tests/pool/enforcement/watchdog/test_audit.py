"""What a watchdog does to leases and to unmanaged processes, in the audit log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpu_pool_client import Device
from support.pools import eventually, identity, running
from support.watchdog import watched_pool

V100 = Device("GPU-0", 0, "Tesla V100-SXM2-32GB", 32768)
CARD = "gpu GPU-0 Tesla V100-SXM2-32GB"


STUBBORN = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


async def test_warnings_and_ends_are_told_in_nobodys_name(tmp_path: Path, nvml: Path) -> None:
    log = tmp_path / "audit.jsonl"
    async with watched_pool(tmp_path, nvml, V100, audit_log=str(log)) as there:
        with running(STUBBORN) as kernel:
            assert kernel.stdout
            assert kernel.stdout.readline() == "ready\n"
            lease = await there.hold("2%", identity(kernel))
            there.scene(CARD, f"process {kernel.pid} 9000")
            there.look(5, times=60)
    told = lines(log)
    assert [each["event"] for each in told] == ["warned", "warned", "ending", "ended"]
    assert {each["lease"] for each in told} == {lease.id}
    assert {each["user"] for each in told} == {"ada"}
    assert "What ran was interrupted." in told[1]["message"]
    assert [each.get("reason") for each in told[2:]] == ["over-memory", "over-memory"]
    assert not any("by" in each for each in told)


def sleeper(user: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["/bin/sleep", "600"], user=user)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
async def test_unmanaged_processes_that_are_ended_are_told(tmp_path: Path, nvml: Path) -> None:
    log = tmp_path / "audit.jsonl"
    settings = {"end_unmanaged": True, "audit_log": str(log)}
    async with watched_pool(tmp_path, nvml, V100, **settings) as there:
        await there.pool.status()
        with sleeper("nobody") as unmanaged:
            there.scene(CARD, f"process {unmanaged.pid} 500")
            there.look(30, times=4)
            await eventually(lambda: unmanaged.poll() == -signal.SIGTERM)
    (told,) = lines(log)
    assert (told["event"], told["process"], told["user"]) == (
        "unmanaged-process-ended",
        unmanaged.pid,
        "nobody",
    )
    assert told["device"] == "GPU-0"
