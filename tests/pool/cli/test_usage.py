"""GPU memory in use, as the real nvidia-ml-py tells it of a small stand-in for the driver's library."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gpu_pool_client._processes import pid_namespace
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
    if (getenv("STUB_MPS")) found[0].pid = 2147483646; /* of the MPS server's own */
    return 0;
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *number, struct process *found) {
    (void)device;
    if (!getenv("STUB_MPS")) { *number = 0; return 0; }
    if (*number < 1) { *number = 1; return 7; }
    *number = 1;
    found[0] = (struct process){(unsigned)getpid(), 77ULL << 20, 0, 0};
    return 0;
}
"""
ASK = """
import json, sys
from gpu_pool.cli.showing import memory_used
from gpu_pool.devices import sampling
from gpu_pool_client import Device, Holder, Lease, LeaseState, Process, Slice, parse_request
simulated, pid = sys.argv[1] == "simulated", int(sys.argv[2])
part = Slice(Device("GPU-1", 0, "V100", 32768, simulated=simulated), 20, 655)
lease = Lease("id", "key", parse_request("2%"), Holder("ann"), LeaseState.HELD, 0.0, 0.0, slices=(part,),
              process=Process.of(pid))
sampling.FIRST_NAMESPACE = sys.argv[3]
print(json.dumps(memory_used(lease)))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Build the stand-in; return its folder."""
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "stub.c").write_text(STUB)
    return shared_library(folder, "libnvidia-ml.so.1", folder / "stub.c")


def asked(library, kind="real", namespace=None, **environment):
    # The lease's process is this one, the one that uses memory is its child.
    done = subprocess.run(
        [sys.executable, "-c", ASK, kind, str(os.getpid()), namespace or pid_namespace()],
        env={**os.environ, "LD_LIBRARY_PATH": str(library), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("kind", "mib", "used"), [("real", 300, {"GPU-1": 300}), ("real", -1, {}), ("simulated", 300, {})]
)
def test_only_the_memory_of_the_leases_own_processes_counts(library, kind, mib, used):
    assert asked(library, kind, STUB_MIB=str(mib)) == used


def test_memory_that_is_used_through_mps_counts(library):
    assert asked(library, STUB_MIB="30", STUB_MPS="1") == {"GPU-1": 77}


def test_in_a_container_the_use_is_not_known(library):
    assert asked(library, namespace="pid:[1]", STUB_MIB="300") == {}


def test_without_a_driver_the_use_is_not_known(tmp_path):
    assert asked(tmp_path) == {}
