"""Where a process can be struck: named points of a lease's life, and of a warm kernel's start.

``arm`` is called in a process before it imports anything else of the project, and ``arm_template``
in one that has imported it. They wrap the functions below; nothing of the project knows of it. A point
is struck by writing a file of its name: the first process that comes by takes the file away, and does
what it says.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gpu_pool_kernels.inkernel.launch import PACKAGE

#: Names the folder of a world in the environment of all its processes. Nothing of the project's own, which
#: a template would not have.
MARK: Final = "CHAOS_WORLD"
#: The folder in it where points are struck.
STRIKES: Final = "strikes"
#: In the service as it comes up in a later release: before the store is changed, within, and after.
UPGRADE: Final = (
    "gpu_pool.store.schema:upgrade:before",
    "gpu_pool.store.schema:_bring_up:after",
    "gpu_pool.store.schema:upgrade:after",
)
#: In the service: the store within a transaction and after it, the tier, the question and its answer.
SERVICE: Final = (
    *UPGRADE,
    "gpu_pool.store.requests:_insert_held:before",
    "gpu_pool.store.requests:_insert_held:after",
    "gpu_pool.store.requests:_insert_waiting:after",
    "gpu_pool.store.requests:decide:after",
    "gpu_pool.store.reclaim:end:before",
    "gpu_pool.store.reclaim:end:after",
    "gpu_pool.store.leases:bind_process:after",
    "gpu_pool.store.leases:lend:after",
    "gpu_pool.store.leases:queue_again:after",
    "gpu_pool.store.yielding:note:before",
    "gpu_pool.store.yielding:note:after",
    "gpu_pool.policy.yielding:ask_back:before",
    "gpu_pool.policy.yielding:ask_back:after",
    "gpu_pool.store.yielding:place:after",
    "gpu_pool.store.burst:update:before",
    "gpu_pool.policy.burst:divide:before",
    "gpu_pool.policy.burst:divide:after",
    "gpu_pool.store.burst:_write:before",
    "gpu_pool.store.burst:_write:after",
    "gpu_pool.store.burst:update:after",
    "gpu_pool.store.reclaim:end_gone:before",
    "gpu_pool.store.reclaim:end_gone:after",
    "gpu_pool.store.reclaim:serve_queue:after",
    "gpu_pool.enforcement.enforcer:Enforcer.enforce:before",
    "gpu_pool.enforcement.enforcer:Enforcer.enforce:after",
    "gpu_pool.service.handler:Handler.prepare:before",
    "gpu_pool.service.handler:Handler.prepare:after",
    "gpu_pool.service.handler:Handler.on_finish:before",
)
#: In Jupyter's server: from the request for a slice to the end of its kernel.
SERVER: Final = (
    "gpu_pool_provisioner.provisioner:GPUPoolProvisioner._take_slice:before",
    "gpu_pool_provisioner.provisioner:GPUPoolProvisioner._take_slice:after",
    "gpu_pool_provisioner.provisioner:GPUPoolProvisioner._launch_on:before",
    "gpu_pool_provisioner.provisioner:GPUPoolProvisioner._launch_on:after",
    "gpu_pool_provisioner.provisioner:GPUPoolProvisioner.post_launch:before",
    "gpu_pool_provisioner.provisioner:GPUPoolProvisioner.cleanup:before",
    "gpu_pool_provisioner.provisioner:GPUPoolProvisioner.cleanup:after",
    "gpu_pool_provisioner.pool_work:PoolWork._await_grant:after",
    "gpu_pool_provisioner.launchers.base:HeldLease.attach:before",
    "gpu_pool_provisioner.launchers.base:HeldLease.attach:after",
    "gpu_pool_provisioner.launchers.process:ProcessRun._first_answer:before",
    "gpu_pool_provisioner.launchers.process:ProcessRun._first_answer:after",
    "gpu_pool_provisioner.proxy.relay:Relay.begin:after",
    "gpu_pool_provisioner.pool_work:PoolWork.give_way:before",
    "gpu_pool_provisioner.pool_work:PoolWork._until_asked:after",
    "gpu_pool_provisioner.pool_work:PoolWork._park:before",
    "gpu_pool_provisioner.pool_work:PoolWork._park:after",
    "gpu_pool_provisioner.pool_work:PoolWork._resume:before",
    "gpu_pool_provisioner.pool_work:PoolWork._resume:after",
    "gpu_pool_provisioner.driver:SessionDriver._show_burst:before",
    "gpu_pool_provisioner.resize_pipe:ResizeRequests.open_changes:after",
    "gpu_pool_provisioner.resize_pipe:ResizeRequests.tell:before",
    "gpu_pool_provisioner.resize_pipe:ResizeRequests.tell:after",
    "gpu_pool_client._remote.client:RemotePool.request:after",
    "gpu_pool_client._remote.client:RemotePool.release:before",
    "gpu_pool_provisioner.templates:TemplateProcess._import:before",
    "gpu_pool_provisioner.templates:Templates.find:after",
    "gpu_pool_provisioner.templates:TemplateProcess._ask:before",
    "gpu_pool_provisioner.templates:TemplateProcess._hears:after",
    "gpu_pool_provisioner.templates:TemplateProcess._ask:after",
    "gpu_pool_provisioner.templates:TemplateProcess.fork:after",
)
#: In a template, from the end of its imports to the pid that it tells.
TEMPLATE: Final = (
    "gpu_pool_kernels.inkernel.template:Template.doubt:before",
    "gpu_pool_kernels.inkernel.template:Template.fork:before",
    "os:waitpid:before",
    "gpu_pool_kernels.inkernel.template:send:before",
    "gpu_pool_kernels.inkernel.template:send:after",
)
#: In a template or in what it has just forked, whichever comes first, and in the new kernel.
FORKED: Final = (
    "os:fork:after",
    "gpu_pool_kernels.inkernel.template:Template.become_kernel:before",
    "gpu_pool_kernels.inkernel.template:Template.become_kernel:after",
)
#: In a kernel that was forked: as it hears of what it may use on top of its slice, or no more.
KERNEL: Final = (
    "gpu_pool_kernels.inkernel.slice_requests:apply:before",
    "gpu_pool_kernels.inkernel.slice_requests:apply:after",
)
#: In the service of a cluster: from the request for a slice to the end of its kernel's pod.
CLUSTER: Final = (
    "gpu_pool.service.handler:Handler.prepare:before",
    "gpu_pool.store.requests:_insert_held:before",
    "gpu_pool.store.requests:decide:after",
    "gpu_pool.store.leases:bind_process:after",
    "gpu_pool.pool.pool:GpuPool.launch:before",
    "gpu_pool.cluster.pod_builder:PodBuilder.of:after",
    "gpu_pool.cluster.kernel_pods:KernelPods._create:before",
    "gpu_pool.cluster.kernel_pods:KernelPods._create:after",
    "gpu_pool.cluster.kernel_pods:KernelPods.launch:after",
    "gpu_pool.pool.pool:GpuPool.launch:after",
    "gpu_pool.pool.pool:GpuPool.pod:before",
    "gpu_pool.pool.pool:GpuPool.pod:after",
)
#: The same where it gets its slice as another kernel ends,
GRANT: Final = (
    "gpu_pool.store.queue:StoredQueue._grant:before",
    "gpu_pool.store.queue:StoredQueue._grant:after",
)
#: and before that waits in the queue.
CLUSTER_WAITS: Final = (
    "gpu_pool.store.requests:_insert_waiting:before",
    "gpu_pool.store.requests:_insert_waiting:after",
    *GRANT,
)
#: The same at a restart of the kernel, and at its end.
CLUSTER_ENDS: Final = (
    "gpu_pool.cluster.kernel_pods:KernelPods._delete_until_done:before",
    "gpu_pool.cluster.kernel_pods:KernelPods._delete_until_done:after",
    "gpu_pool.store.reclaim:end:before",
    "gpu_pool.store.reclaim:end:after",
)
#: What can happen there: the process is killed, its client's connection is closed, it stands still, or it
#: does so until the file of the point's name with ``.go`` is there; it is stopped, or has no memory left.
KILL, CUT, STALL, HOLD, STOP, NO_MEMORY = "kill", "cut", "stall", "hold", "stop", "no memory"
#: The point at which a connection can be closed.
CUTTABLE: Final = "gpu_pool.service.handler:Handler.prepare:after"
_STALL_SECONDS: Final = 2.0
#: What a release to come might change: in what is held, and in all that ever was.
_LATER: Final = """
ALTER TABLE lease ADD COLUMN later_{0} TEXT NOT NULL DEFAULT 'grey';
UPDATE history SET note = note || '.';
CREATE TABLE later_{0} (said TEXT NOT NULL);
INSERT INTO later_{0} VALUES ('once');
"""


def arm(points: tuple[str, ...], folder: Path) -> None:
    """Wrap the points of this process.

    Its clock is set by the file ``clock`` (seconds ahead), and how long its questions to the
    service and the answers are under way by the file ``slow`` (seconds).
    """
    folder.mkdir(parents=True, exist_ok=True)
    _let_the_clock_be_set(folder / "clock")
    _let_the_network_be_slow(folder / "slow")
    for point in points:
        _wrap(importlib.import_module(point.partition(":")[0]), point, folder)


def arm_template(folder: Path) -> None:
    """Wrap the points of this process, a template that imports what its kernels need."""
    for point in (*TEMPLATE, *FORKED, *KERNEL):
        # It runs in an environment of its own, under a private name.
        module = point.partition(":")[0].replace("gpu_pool_kernels.inkernel", PACKAGE)
        _wrap(importlib.import_module(module), point, folder)


def be_of_release(folder: Path) -> None:
    """Let this process be of a later release: with as many migrations more as the file ``release`` says."""
    from gpu_pool.store import schema

    file, real = folder / "release", schema.migrations()
    later = int(file.read_text()) if file.exists() else 0
    schema.migrations = lambda: (*real, *map(_LATER.format, range(later)))


def strike(folder: Path, point: str, how: str) -> None:
    """Let the next process that comes by a point be struck."""
    # Whole or not at all.
    (folder / ".new").write_text(how)
    (folder / ".new").rename(folder / point)


def _wrap(owner: Any, point: str, folder: Path) -> None:
    _, path, moment = point.split(":")
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, _wrapped(getattr(owner, name), folder / point, before=moment == "before"))


def _wrapped(function: Callable[..., Any], file: Path, *, before: bool) -> Callable[..., Any]:
    path = str(file)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def struck(*args: Any, **kwargs: Any) -> Any:
            if before:
                _come_by(path, args)
            found = await function(*args, **kwargs)
            if not before:
                _come_by(path, args)
            return found
    else:

        @functools.wraps(function)
        def struck(*args: Any, **kwargs: Any) -> Any:
            if before:
                _come_by(path, args)
            found = function(*args, **kwargs)
            if not before:
                _come_by(path, args)
            return found

    return struck


def _come_by(path: str, args: tuple[Any, ...]) -> None:
    if not os.path.exists(path):  # noqa: PTH110 - it is asked often
        return
    try:
        how = Path(path).read_text()
        os.unlink(path)  # noqa: PTH108
    except FileNotFoundError:  # another process was struck
        return
    # Kept for the report: which points were hit.
    with open(Path(path).parent / "hit", "a") as file:
        file.write(f"{Path(path).name} {how} {os.getpid()} {Path(sys.argv[0]).name}\n")
    if how == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == CUT:
        args[0].request.connection.stream.close()
    elif how == STOP:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == NO_MEMORY:
        raise MemoryError
    elif how == HOLD:
        while not os.path.exists(f"{path}.go"):  # noqa: PTH110
            time.sleep(0.05)
    else:
        time.sleep(_STALL_SECONDS)


def _let_the_clock_be_set(file: Path) -> None:
    true = time.time
    time.time = lambda: true() + _seconds(file)


def _let_the_network_be_slow(file: Path) -> None:
    from gpu_pool_client._remote import endpoints

    ask = endpoints.ask

    async def slow(*args: Any) -> Any:
        await asyncio.sleep(_seconds(file))
        answer = await ask(*args)
        await asyncio.sleep(_seconds(file))  # who gives up now has been answered, and never knows
        return answer

    endpoints.ask = slow


def _seconds(file: Path) -> float:
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return 0.0
