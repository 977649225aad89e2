"""GPU memory in use, as the real nvidia-ml-py tells it of a small stand-in for the driver's library."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support.compiled import shared_library

#: One GPU with two processes: the one that asks uses $STUB_MIB (-1: not known), another uses 999 MiB.
STUB = """
#include <stdlib.h>
#include <unistd.h>
struct process { unsigned pid; unsigned long long used; unsigned instance, compute; };
int nvmlInitWithFlags(unsigned flags) { return (int)(flags & 0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code ? "failed" : "fine"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = (void *)uuid; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *number, struct process *found) {
    long long mib = atoll(getenv("STUB_MIB"));
    (void)device;
    if (*number < 2) { *number = 2; return 7; }
    *number = 2;
    found[0] = (struct process){(unsigned)getpid(), mib < 0 ? ~0ULL : (unsigned long long)mib << 20, 0, 0};
    found[1] = (struct process){2147483647, 999ULL << 20, 0, 0};
    return 0;
}
"""
ASK = """
import json, sys
from gpu_pool.cli.showing import memory_used
from gpu_pool_client import Device, Holder, Lease, LeaseState, Process, Slice, parse_request
simulated, pid = sys.argv[1] == "simulated", int(sys.argv[2])
part = Slice(Device("GPU-1", 0, "V100", 32768, simulated=simulated), 20, 655)
lease = Lease("id", "key", parse_request("2%"), Holder("ann"), LeaseState.HELD, 0.0, 0.0, slices=(part,),
              process=Process.of(pid))
print(json.dumps(memory_used(lease)))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Build the stand-in; return its folder."""
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "stub.c").write_text(STUB)
    return shared_library(folder, "libnvidia-ml.so.1", folder / "stub.c")


@pytest.mark.parametrize(
    ("kind", "mib", "used"), [("real", 300, {"GPU-1": 300}), ("real", -1, {}), ("simulated", 300, {})]
)
def test_only_the_memory_of_the_leases_own_processes_counts(library, kind, mib, used):
    # The lease's process is this one, the one that uses memory is its child.
    environment = {"LD_LIBRARY_PATH": str(library), "STUB_MIB": str(mib)}
    done = subprocess.run(
        [sys.executable, "-c", ASK, kind, str(os.getpid())],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.stderr, json.loads(done.stdout)) == ("", used)


def test_without_a_driver_the_use_is_not_known(tmp_path):
    environment = {"LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", ASK, "real", str(os.getpid())]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {}
