"""What a process does with its device: seen in its open files, and told by a stand-in for the driver."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from gpu_pool.devices import activity
from gpu_pool.devices.activity import activity_of
from gpu_pool.tuning import Tuning
from gpu_pool_client import Activity, NeverFits, NotAllowed, OverQuota, Process, Slice, parse_request
from gpu_pool_client import _procfs as procfs
from support.compiled import shared_library
from support.pools import ENDS_ITS_FIRST_THREAD, V100, embedded, identity, running, take

REAL = Slice(replace(V100, uuid="GPU-1", simulated=False), 20, 655)
SIMULATED = Slice(V100, 20, 655)

#: One GPU on which process $1 computes by $2 per cent (-6: the driver has no samples; -3: it never has).
STUB = """
#include <stdlib.h>
struct process { unsigned pid; unsigned long long used; unsigned instance, compute; };
struct sample { unsigned pid; unsigned long long at; unsigned sm, memory, encoder, decoder; };
int nvmlInitWithFlags(unsigned flags) { return (int)(flags & 0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code ? "failed" : "fine"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = (void *)uuid; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *number, struct process *found) {
    (void)device;
    if (*number < 1) { *number = 1; return 7; }
    found[0] = (struct process){(unsigned)atoi(getenv("STUB_PID")), 1 << 20, 0, 0};
    return 0;
}
int nvmlDeviceGetProcessUtilization(void *device, struct sample *found, unsigned *number,
                                   unsigned long long since) {
    int per_cent = atoi(getenv("STUB_PER_CENT"));
    (void)device;
    if (per_cent < 0) return -per_cent;
    if (*number < 1) { *number = 1; return 7; }
    found[0] = (struct sample){(unsigned)atoi(getenv("STUB_PID")), since, (unsigned)per_cent, 0, 0, 0};
    return 0;
}
"""
ASK = """
import sys
from gpu_pool.devices.activity import _is_working
print(_is_working({int(sys.argv[1])}, ["GPU-1"]))
"""


#: Opens a file, and says so; and what runs such code as a child.
OPENS = "file = open({!r}); print('open', flush=True); import sys; sys.stdin.read()"
NESTED = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"


@pytest.fixture
def uvm(tmp_path: Path) -> str:
    """Return the path of a file in the place of the device that CUDA opens."""
    path = tmp_path / "nvidia-uvm"
    path.touch()
    return str(path)


def initialised(uvm: str) -> IO[str]:
    """Open the device in this process, as CUDA does."""
    return Path(uvm).open()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "stub.c").write_text(STUB)
    return shared_library(folder, "libnvidia-ml.so.1", folder / "stub.c")


@pytest.mark.parametrize(
    ("known", "per_cent", "working"),
    [
        (42, 3, "(True, False)"),
        (42, 0, "(False, False)"),
        (42, -6, "(False, False)"),
        (42, -3, "(None, True)"),
        (7, 99, "(None, False)"),
    ],
)
def test_whether_the_device_works_for_a_process(
    library: Path, known: int, per_cent: int, working: str
) -> None:
    environment = {"LD_LIBRARY_PATH": str(library), "STUB_PID": f"{known}", "STUB_PER_CENT": f"{per_cent}"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, "42"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == working


def test_cuda_is_seen_in_the_open_files_of_a_process_and_its_descendants(uvm: str) -> None:
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"
    opens = f"file = open({uvm!r}); print('open', flush=True); import sys; sys.stdin.read()"
    with running() as idle, running(nested.format(opens)) as busy:
        assert busy.stdout is not None
        assert busy.stdout.readline() == "open\n"
        assert activity_of(identity(idle), [REAL], "1-a", cuda=uvm) == Activity(
            initialised=False, working=False
        )
        assert activity_of(identity(busy), [REAL], "1-a", cuda=uvm).initialised
        assert activity_of(identity(busy), [SIMULATED], "1-a", cuda=uvm) == Activity(
            initialised=False, working=False
        )
    gone = replace(Process.current(), start=1)
    assert activity_of(gone, [REAL], "1-a", cuda=uvm) == Activity(initialised=False, working=False)
    elsewhere = replace(Process.current(), namespace="pid:[1]")
    assert activity_of(elsewhere, [REAL], "1-a", cuda=uvm) == Activity()


def test_what_a_process_does_on_a_mig_instance_is_never_known(uvm: str) -> None:
    instance = replace(REAL, device=replace(REAL.device, uuid="MIG-1", mig_profile="1g.5gb"))
    with running() as idle, running(OPENS.format(uvm)) as busy:
        assert busy.stdout is not None
        assert busy.stdout.readline() == "open\n"
        assert activity_of(identity(idle), [instance], "1-a", cuda=uvm) == Activity(
            initialised=False, working=False
        )
        found = activity_of(identity(busy), [instance], "1-a", cuda=uvm)
        assert (found.initialised, found.working, found.unmeasured) == (True, None, True)
        assert not activity_of(identity(busy), [REAL], "1-a", cuda=uvm).unmeasured
    elsewhere = replace(Process.current(), namespace="pid:[1]")
    assert activity_of(elsewhere, [instance], "1-a", cuda=uvm) == Activity(unmeasured=True)


def test_what_nothing_is_attached_to_is_known_by_its_keeper(uvm: str) -> None:
    with running(OPENS.format(uvm)) as keeper, running(NESTED.format(OPENS.format(uvm))) as server:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "open\n"
        assert server.stdout is not None
        assert server.stdout.readline() == "open\n"
        assert activity_of(None, [REAL], "1-a", identity(keeper), cuda=uvm).initialised
        assert activity_of(None, [REAL], "1-a", identity(server), cuda=uvm).initialised is False, (
            "another kernel of it"
        )
    elsewhere = replace(Process.current(), namespace="pid:[1]")
    assert activity_of(None, [REAL], "1-a", elsewhere, cuda=uvm).initialised is False


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start a process of another user, and make devices"
)
def test_a_mark_of_another_user_counts_for_nothing() -> None:
    command = ["/bin/sh", "-c", "exec 3</dev/full; echo open; read x"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    forged = {"GPU_POOL_LEASE": "7-cafe"}
    for user, initialised in ((0, True), (65534, False)):
        with running() as kernel, subprocess.Popen(command, env=forged, user=user, **pipes) as forger:
            assert forger.stdout is not None
            assert forger.stdout.readline() == b"open\n"
            assert (
                activity_of(identity(kernel), [REAL], "7-cafe", cuda="/dev/full").initialised is initialised
            )
            forger.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make devices")
def test_the_device_is_known_by_its_number_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        os.mknod(tmp_path / "renamed", 0o020600, Path("/dev/full").stat().st_rdev)
        (tmp_path / "renamed").open().close()
    except PermissionError:
        pytest.skip("devices cannot be made here")
    with running(OPENS.format(str(tmp_path / "renamed"))) as kernel:
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == "open\n"
        for name, initialised in (("/dev/full", True), ("/dev/zero", False)):
            assert activity_of(identity(kernel), [REAL], "1-a", cuda=name).initialised is initialised


def test_the_number_of_a_device_is_its_drivers_where_there_is_no_file_of_it(tmp_path: Path) -> None:
    # Linux has registered the major number 1 as that of "mem" since ever, and no device is called so.
    assert activity.device_number(str(tmp_path / "mem")) == os.makedev(1, 0)
    (tmp_path / "mem").touch()
    assert activity.device_number(str(tmp_path / "mem")) is None, "a file of that name is no device"


def test_the_files_of_a_thread_count_when_the_first_one_has_ended(
    uvm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_LEASE", "7-cafe")
    with running() as kernel, running(f"file = open({uvm!r})\n{ENDS_ITS_FIRST_THREAD}") as training:
        assert training.stdout is not None
        assert training.stdout.readline() == "alone\n"
        assert activity_of(identity(training), [REAL], "8-cafe", cuda=uvm).initialised
        assert activity_of(identity(kernel), [REAL], "7-cafe", cuda=uvm).initialised, "by its mark"


def test_what_was_started_on_the_lease_and_detached_counts(uvm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_POOL_LEASE", "7-cafe")
    opens = f"file = open({uvm!r}); print('open', flush=True); import sys; sys.stdin.read()"
    with running() as kernel, running(opens) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == "open\n"
        assert activity_of(identity(kernel), [REAL], "7-cafe", cuda=uvm).initialised
        assert activity_of(identity(kernel), [REAL], "8-cafe", cuda=uvm).initialised is False


async def test_what_keeps_state_on_the_device_is_not_parked(tmp_path: Path, uvm: str) -> None:
    tuning = Tuning(cuda_device=uvm)
    async with embedded(tmp_path / "store.db", replace(V100, simulated=False), tuning=tuning) as pool:
        lease = await take(pool, "1", "key")
        await pool.attach(lease, Process.current())
        with initialised(uvm), pytest.raises(NotAllowed, match="has initialised CUDA"):
            await pool.park(lease)
        assert (await pool.park(lease)).state.value == "parked"


async def test_what_could_never_be_is_refused_as_that_and_not_for_what_is_on_the_device(
    tmp_path: Path, uvm: str
) -> None:
    terms, tuning = {"per_user": {"share": "60%"}}, Tuning(cuda_device=uvm)
    real = replace(V100, simulated=False)
    async with embedded(tmp_path / "store.db", real, default_course=terms, tuning=tuning) as pool:
        lease = await take(pool, "2%", "key")
        await pool.attach(lease, Process.current())
        with initialised(uvm):
            for size, error in (
                ("8", NeverFits),
                ("0.1%", NeverFits),
                ("40GiB", NeverFits),
                ("61%", OverQuota),
            ):
                with pytest.raises(error):
                    await pool.resize(lease, parse_request(size))
            with pytest.raises(NotAllowed, match="has initialised CUDA"):
                await pool.resize(lease, parse_request("60%"))
        assert (await pool.get_lease(lease)).request == parse_request("2%")


async def test_a_limit_changes_whatever_is_on_the_device(tmp_path: Path, uvm: str) -> None:
    tuning = Tuning(cuda_device=uvm)
    async with embedded(tmp_path / "store.db", replace(V100, simulated=False), tuning=tuning) as pool:
        lease = await take(pool, "2% for 1h", "key")
        await pool.attach(lease, Process.current())
        await take(pool, "1", "waits")
        with initialised(uvm):
            found = await pool.resize(lease, parse_request("2%..10%"))
            assert (str(found.request), found.slices[0].limit_mib) == ("2%..10% for 1h", 3276)
            with pytest.raises(NotAllowed, match="has initialised CUDA"):
                await pool.resize(lease, parse_request("3%..10%"))
            found = await pool.resize(lease, parse_request("2%"))
            assert (str(found.request), found.slices[0].limit_mib) == ("2% for 1h", 0)


def test_others_environments_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[int] = set()
    owners = {pid: pid % 2 for pid in procfs.pids()} | {os.getpid(): 0}
    monkeypatch.setattr(activity, "owner_of", owners.get)
    monkeypatch.setattr(activity, "environment_of", lambda pid: read.add(pid) or [])
    assert activity.marked("1-a", 0) == set()
    assert read
    assert {owners.get(pid) for pid in read} == {0}
    read.clear()
    assert activity.marked("1-a", None) == set()
    assert read == set()


async def test_looks_that_take_long_keep_no_other_work_waiting() -> None:
    may_end = threading.Event()
    looks = [asyncio.create_task(activity.in_own_thread(may_end.wait)) for _ in range(100)]
    try:
        assert await asyncio.wait_for(asyncio.to_thread(os.getpid), 120) == os.getpid()
    finally:
        may_end.set()
        await asyncio.gather(*looks)
