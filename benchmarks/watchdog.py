"""What one look a second at eight GPUs and four hundred leases costs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Line
from benchmarks.sizes import sized

STUB = Path(__file__).parents[1] / "tests" / "support" / "nvml_stub" / "stub.c"
DEVICES, LEASES, LOOKS = sized((8, 400, 60), (2, 20, 3))
#: Runs in a process whose NVML is the stub: each lease has one process on its device, in four-deep trees.
MEASURE = """
import json, os, signal, sys, time
from pathlib import Path
from gpu_pool.devices import sampling
from gpu_pool.devices.nvml import find_devices
from gpu_pool.enforcement.watchdog import OwnStore, WatchdogRules, WatchdogThread
from gpu_pool.store import leases, registration, requests
from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Database
from gpu_pool.settings import PoolSettings
from gpu_pool_client import Holder, Process, parse_request
from gpu_pool_client._processes import pid_namespace

devices, count, looks = map(int, sys.argv[1:])
sampling.FIRST_NAMESPACE = pid_namespace()  # it may be measured in a container
scenario = Path(os.environ["NVML_STUB_SCENARIO"])
path, settings = scenario.with_name("store.db"), PoolSettings(context_mib=1)

def sleep_below(depth):
    # The last of a line of processes is the one on the device.
    child = os.fork()
    if child:
        return child
    if depth:
        sleep_below(depth - 1)
    else:
        os.write(tell, b".")
    signal.pause()

def last_of(pid):
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[0])
    return pid

os.setpgrp()
database = Database(path)
store = StoreContext(database, settings)
registration.register(store, find_devices().devices)
there, tell = os.pipe()
roots = [sleep_below(2) for _ in range(count)]
awaited = count
while awaited:
    awaited -= len(os.read(there, awaited))
on_device = {}
for number, root in enumerate(roots):
    size = parse_request(f"{1000 * devices // count / 10}%")
    lease = requests.decide(store, size, Holder("ada"), f"key-{number}")
    leases.bind_process(store, lease.id, Process.of(root), None, 0)
    on_device.setdefault(lease.slices[0].device.uuid, []).append(last_of(root))
text = []
for line in scenario.read_text().splitlines():
    text.append(line)
    text += [f"process {pid} 300" for pid in on_device.get(line.split()[1], [])]
draft = scenario.with_name("draft")
draft.write_text("\\n".join(text))
draft.replace(scenario)
clock = [0.0]
watchdog = WatchdogThread(OwnStore(path, settings), WatchdogRules.of(settings, "end"), clock=lambda: clock[0])
times = []
for _ in range(looks + 1):
    clock[0] += 1
    began = time.process_time()
    watchdog.measure()
    times.append(time.process_time() - began)
seen = sum(len(each) for each in on_device.values())
assert (seen, watchdog.unmanaged, watchdog.problems) == (count, (), ())
print(json.dumps(times), flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.killpg(0, signal.SIGTERM)
watchdog.start()
watchdog.stop()
database.close()
"""


def run() -> Iterator[Line]:
    """Measure and yield the report's line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = folder / "libnvidia-ml.so.1"
        command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", library, STUB]
        subprocess.run(command, check=True)
        cards = (f"gpu GPU-{number} NVIDIA H100 80GB HBM3\nmemory 81559 551\n" for number in range(DEVICES))
        (folder / "scenario.txt").write_text("driver 550.54.14\n" + "".join(cards))
        stub = {"LD_LIBRARY_PATH": name, "NVML_STUB_SCENARIO": str(folder / "scenario.txt")}
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(DEVICES), str(LEASES), str(LOOKS)],
            env={**os.environ, **stub},
            stdout=subprocess.PIPE,
            check=True,
        )
    first, *times = json.loads(done.stdout)
    yield Line(
        f"a look a second at {DEVICES} GPUs and {LEASES} leases",
        statistics.mean(times),
        f"CPU time of {LOOKS} looks: mean {statistics.mean(times) * 1e3:.1f} ms, "
        f"most {max(times) * 1e3:.1f} ms, the first {first * 1e3:.0f} ms; the driver is a stand-in",
        0.01,
        ours=statistics.mean(times),
        unit="cores",
    )
