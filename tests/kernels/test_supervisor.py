"""The main process of a kernel's pod, with real kernels and sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from jupyter_client.asynchronous.client import AsyncKernelClient

from gpu_pool_client._pods import last_output
from gpu_pool_kernels.inkernel.job import hold_ports
from gpu_pool_provisioner.launchers.supervised import KernelNotStarted, SupervisorAway
from support.cgroups import limited_memory
from support.frameworks import write_torch
from support.many_files import left_open
from support.pools import eventually
from support.ports import keepalive_of
from support.supervisors import (
    IS_FORKED,
    children_of,
    command_of,
    parent_of,
    supervised,
    until_gone,
    write_supervisor,
)

TINY = (sys.executable, str(Path(__file__).parents[1] / "support/tiny_kernel.py"), "{connection_file}")
WITHIN = 60.0


@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_a_kernel_is_restarted_in_place(tmp_path: Path, isolated: bool) -> None:
    async with supervised(tmp_path, isolated=isolated) as pod:
        control = await pod.connect()
        await pod.asked("x = 1")
        pids = [await pod.pid()]
        for _ in range(3):
            await control.restart(within=WITHIN)
            assert await pod.value("'x' in globals()") == "False"
            pids.append(await pod.pid())
        assert len(set(pids)) == 4
        assert parent_of(pids[-1]) == pod.process.pid
        assert [parent_of(pid) for pid in pids[:-1]] == [0, 0, 0]


@pytest.mark.parametrize("isolated", [False, True])
async def test_one_that_is_started_as_its_kernel_needs_no_other_python(
    tmp_path: Path, isolated: bool
) -> None:
    async with supervised(tmp_path, isolated=isolated) as pod:
        kernel = await pod.pid()
        (template,) = set(children_of(pod.process.pid)) - {kernel}
        assert (command_of(template) == command_of(pod.process.pid)) is not isolated


def test_one_of_the_same_python_compiles_nothing(tmp_path: Path) -> None:
    write_supervisor(tmp_path)
    for text in tmp_path.glob("*.py"):
        if text.name != "launch.py":
            text.write_text("raise AssertionError('compiled anew')")
    command = [sys.executable, "-I", "-S", str(tmp_path / "launch.py"), "supervisor", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--linger" in done.stdout


def test_one_of_any_other_python_has_the_texts(tmp_path: Path) -> None:
    write_supervisor(tmp_path)
    for code in (tmp_path / "__pycache__").iterdir():
        code.rename(code.with_name(code.name.replace("cpython-", "cpython-1")))
    command = [sys.executable, "-I", "-S", str(tmp_path / "launch.py"), "supervisor", "--help"]
    assert subprocess.run(command, capture_output=True).returncode == 0


async def test_one_that_was_shut_down_in_good_order_is_found_where_it_was(tmp_path: Path) -> None:
    """Where ipykernel removes its connection file, it would make one with other ports and another key."""
    async with supervised(tmp_path) as pod:
        control = await pod.connect()
        client = AsyncKernelClient()
        client.load_connection_info(pod.connection)
        client.start_channels(stdin=False, hb=False, iopub=False)
        await client.kernel_info(reply=True, timeout=120)
        client.shutdown(restart=True)
        assert await control.exited() == 0
        client.stop_channels()
        await control.restart(within=WITHIN)
        assert await pod.value("1 + 1") == "2"
    assert (tmp_path / "connection.json").stat().st_mode & 0o777 == 0o600


async def test_no_two_kernels_draw_the_same(tmp_path: Path) -> None:
    drawn = []
    async with supervised(tmp_path) as pod:
        control = await pod.connect()
        for _ in range(3):
            drawn.append(await pod.value("__import__('random').random()"))
            await control.restart(within=WITHIN)
    assert len(set(drawn)) == 3


async def test_a_log_that_takes_nothing_holds_nobody_up(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        async with supervised(tmp_path, stderr=writing) as pod:
            control = await pod.connect()
            # More than its pipe and the one before it take.
            await pod.asked("import sys; print('much' * 100_000, file=sys.__stderr__)")
            await control.restart(within=WITHIN)
            assert await pod.value("1 + 1") == "2"
    finally:
        os.close(reading)
        os.close(writing)


async def test_it_works_also_where_whoever_starts_it_has_left_many_files_open_to_it(tmp_path: Path) -> None:
    async with supervised(tmp_path, started_by=left_open) as pod:
        control = await pod.connect()
        await pod.asked("import sys; print('to the log', file=sys.__stderr__)")
        await control.restart(within=WITHIN)
        assert await pod.value("1 + 1") == "2"
    assert "to the log" in pod.log.read_text()


async def test_a_kernel_is_forked_where_no_language_is_set(tmp_path: Path) -> None:
    """Python sets a variable of its own then (PEP 538), as in images that say nothing of it."""
    async with supervised(tmp_path, LANG="", LC_ALL="", LC_CTYPE="") as pod:
        control = await pod.connect()
        for _ in range(2):
            assert await pod.value(IS_FORKED) == "True"
            assert await pod.value("__import__('os').environ['LC_CTYPE']") == "'C.UTF-8'"
            await control.restart(within=WITHIN)


async def test_a_kernel_is_as_one_that_the_pod_would_have_started_itself(tmp_path: Path) -> None:
    """One that was forked is as one that was not."""
    seen = (
        "[__import__('sys').argv[1:-1], __import__('sys').path[0], __import__('os').getcwd(),"
        " __import__('os').getsid(0) == __import__('os').getpid(), sorted(set(__import__('os').environ)"
        " - {'JPY_PARENT_PID'}), __import__('signal').pthread_sigmask(0, []),"
        " [str(__import__('signal').getsignal(n)).split(' at ')[0] for n in (2, 10, 15, 17)],"
        " str(__import__('sys').flags)]"
    )
    async with supervised(tmp_path) as pod:
        forked = await pod.value(seen)
        control = await pod.connect()
        (template,) = set(children_of(pod.process.pid)) - {await pod.pid()}
        os.kill(template, signal.SIGKILL)
        await until_gone(template)
        await control.restart(within=WITHIN)
        assert await pod.value(seen) == forked


async def test_the_end_of_a_kernel_is_told_and_it_starts_again(tmp_path: Path) -> None:
    async with supervised(tmp_path) as pod:
        control = await pod.connect()
        os.kill(await pod.pid(), signal.SIGKILL)
        assert await control.exited() == -signal.SIGKILL
        assert not control.out_of_memory
        await control.restart(within=WITHIN)
        await pod.asked("import os; os._exit(3)", reply=False)
        assert await control.exited() == 3
        late = await pod.connect()
        assert await late.exited() == 3
        await late.restart(within=WITHIN)
        assert await pod.value("1 + 1") == "2"


async def test_memory_that_was_used_up_is_told_of_a_kernel_that_was_killed_and_of_no_other(
    tmp_path: Path,
) -> None:
    fill = "bytearray(2 << 30)"
    async with supervised(tmp_path) as pod:
        with limited_memory(512) as processes:
            control = await pod.connect()
            await pod.pid()
            for pid in (pod.process.pid, *children_of(pod.process.pid)):
                processes.write_text(str(pid))
            await control.restart(within=WITHIN)
            await pod.asked(f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{fill}'])")
            await pod.asked("import os; os._exit(3)", reply=False)
            assert (await control.exited(), control.out_of_memory) == (3, False)
            await control.restart(within=WITHIN)
            await pod.asked(fill, reply=False)
            assert (await control.exited(), control.out_of_memory) == (-signal.SIGKILL, True)
            pod.process.terminate()
            await pod.ended()


async def test_what_was_written_last_is_told_with_a_kernel_s_end_and_stays_in_the_log(
    tmp_path: Path,
) -> None:
    async with supervised(tmp_path, GPU_POOL_POD="1") as pod:
        control = await pod.connect()
        await pod.asked("import os; os.abort()", reply=False)
        assert await control.exited() == -signal.SIGABRT
        assert last_output(control.last_words).startswith("Fatal Python error: Aborted: File ")
        late = await pod.connect()
        assert (await late.exited(), late.last_words) == (-signal.SIGABRT, control.last_words)
        # It is that kernel's alone.
        await control.restart(within=WITHIN)
        await pod.asked("import os; os._exit(3)", reply=False)
        assert (await control.exited(), control.last_words) == (3, "")
    assert "Fatal Python error: Aborted" in pod.log.read_text()


def is_asleep(pid: int) -> bool:
    """Whether a process waits for something to come, and does not run."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


async def test_where_a_kernel_has_ended_before_it_listened_nothing_computes_until_the_next(
    tmp_path: Path,
) -> None:
    profile, ends = tmp_path / "ipython/profile_default", tmp_path / "ends"
    profile.mkdir(parents=True)
    wanted = f"import os\nif os.path.exists({str(ends)!r}): os._exit(3)"
    (profile / "ipython_kernel_config.py").write_text(wanted)
    async with supervised(tmp_path, "--linger", "600") as pod:
        control = await pod.connect()
        assert await pod.value(IS_FORKED) == "True"
        ends.touch()
        with pytest.raises(KernelNotStarted, match="ended with status 3 before it listened"):
            await control.restart(within=WITHIN)
        await eventually(lambda: is_asleep(pod.process.pid))
        ends.unlink()
        await control.restart(within=WITHIN)
        assert await pod.value(IS_FORKED) == "True"


@pytest.mark.parametrize(
    ("cell", "status"),
    [
        ("import os; os._exit(0)", 0),
        pytest.param("import os; os._exit(3)", 3, marks=pytest.mark.long),
        ("import os; os.kill(os.getpid(), 9)", 137),
    ],
)
async def test_without_anybody_connected_it_ends_with_its_kernel(
    tmp_path: Path, cell: str, status: int
) -> None:
    async with supervised(tmp_path) as pod:
        await pod.asked(cell, reply=False)
        assert await pod.ended() == status
        assert pod.log.read_text() == ""


async def test_it_waits_for_a_restart_and_ends_where_none_is_asked_for(tmp_path: Path) -> None:
    async with supervised(tmp_path, "--linger", "1") as pod:
        control = await pod.connect()
        os.kill(await pod.pid(), signal.SIGKILL)
        await control.exited()
        await control.restart(within=WITHIN)
        os.kill(await pod.pid(), signal.SIGKILL)
        assert await pod.ended() == 128 + signal.SIGKILL


async def test_a_kernel_ends_once_its_server_has_been_away_for_as_long_as_it_may(tmp_path: Path) -> None:
    async with supervised(tmp_path, "--alone", "1") as pod:
        control = await pod.connect()
        began = time.monotonic()
        while time.monotonic() < began + 2:  # of longer than it may be away, it is not
            assert await pod.value("1 + 1") == "2"
        control.close()
        assert await pod.ended() == 128 + signal.SIGTERM
        assert "its server has not been heard of" in pod.log.read_text()


async def test_a_server_whose_machine_is_gone_without_a_word_counts_as_away_within_half_a_minute(
    tmp_path: Path,
) -> None:
    async with supervised(tmp_path, "--alone", "600") as pod:
        await pod.connect()

        def both_look() -> bool:
            ends = keepalive_of(pod.port)
            return len(ends) == 2 and all(after is not None and after <= 15 for after in ends)

        await eventually(both_look)


async def test_where_no_server_could_reach_it_no_kernel_runs(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        async with supervised(tmp_path, "--alone", "600", "--port", port) as pod:
            assert await pod.ended() == 1
            assert f"the port {port} for the kernel's server is taken" in pod.log.read_text()


def test_the_ports_of_a_job_are_its_own_before_its_kernel_listens() -> None:
    ports, held = hold_ports()
    with ExitStack() as kept, zmq.Context() as context, context.socket(zmq.ROUTER) as kernel:
        for each in held:
            kept.enter_context(each)
        for port in ports.values():
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("", port))
            kernel.bind(f"tcp://0.0.0.0:{port}")  # as a kernel does


@pytest.mark.long
async def test_a_kernel_that_listens_late_is_not_taken_for_one_without_a_server(tmp_path: Path) -> None:
    """Its server connects once it listens."""
    late = ("sh", "-c", 'sleep 6; exec "$@"', "sh", *TINY)
    async with supervised(tmp_path, "--alone", "5", argv=late, encrypts=False) as pod:
        await pod.asked("hello")
        await pod.connect()
        await pod.asked("and again")


async def test_who_has_connected_before_takes_over_a_kernel_again(tmp_path: Path) -> None:
    async with supervised(tmp_path) as pod:
        first = await pod.connect()
        first.close()
        os.kill(await pod.pid(), signal.SIGKILL)
        second = await pod.connect()
        assert await second.exited() == -signal.SIGKILL
        await second.restart(within=WITHIN)
        assert await pod.value("1 + 1") == "2"


async def test_signals_reach_the_kernel_and_what_it_has_started(tmp_path: Path) -> None:
    async with supervised(tmp_path) as pod:
        control = await pod.connect()
        await pod.asked("import subprocess; child = subprocess.Popen(['sleep', '600'])")
        child = int(await pod.value("child.pid"))
        await pod.asked("import time\ntry: time.sleep(0)\nfinally: pass")
        cell = asyncio.create_task(
            pod.asked(
                "try:\n    open('sleeps', 'w').close(); time.sleep(600)\nexcept KeyboardInterrupt: pass"
            )
        )
        await eventually(lambda: (tmp_path / "sleeps").exists())
        await control.send_signal(signal.SIGINT)
        await cell
        await until_gone(child)
        with pytest.raises(ValueError, match="is no signal"):
            await control.send_signal(12345)


async def test_an_order_to_end_is_passed_on(tmp_path: Path) -> None:
    async with supervised(tmp_path) as pod:
        pid = await pod.pid()
        pod.process.terminate()
        assert await pod.ended() == 128 + signal.SIGTERM
        assert parent_of(pid) == 0


async def test_a_kernel_that_ignores_the_order_to_end_is_killed(tmp_path: Path) -> None:
    async with supervised(tmp_path, "--grace", "0.3") as pod:
        await pod.asked("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
        pid = await pod.pid()
        pod.process.terminate()
        assert await pod.ended() == 128 + signal.SIGKILL
        assert parent_of(pid) == 0


async def test_of_a_job_whose_processes_are_all_told_to_end_nobody_hears_that_its_kernel_died(
    tmp_path: Path,
) -> None:
    """Slurm does that where a job's time is over, in any order, and says why itself."""
    async with supervised(tmp_path, "--settle", "600") as pod:
        control = await pod.connect()
        pid = await pod.pid()
        os.kill(pid, signal.SIGTERM)
        await eventually(lambda: not Path(f"/proc/{pid}").exists())  # it was waited for
        pod.process.terminate()
        with pytest.raises(SupervisorAway):
            await control.exited()
        assert await pod.ended() == 128 + signal.SIGTERM


async def test_of_a_kernel_that_was_told_to_end_alone_it_is_heard(tmp_path: Path) -> None:
    async with supervised(tmp_path) as pod:
        control = await pod.connect()
        os.kill(await pod.pid(), signal.SIGTERM)
        assert await control.exited() == -signal.SIGTERM


async def test_an_order_to_end_comes_before_the_first_kernel(tmp_path: Path) -> None:
    async with supervised(tmp_path) as pod:
        await pod.connect()
        pod.process.terminate()
        assert await pod.ended() == 128 + signal.SIGTERM


async def test_orphans_are_waited_for(tmp_path: Path) -> None:
    async with supervised(tmp_path) as pod:
        await pod.asked("import os; [os.system('sh -c \"sleep 0.05 & sleep 0.05 &\"') for _ in range(5)]")

        async def are_gone() -> bool:
            return len(children_of(pod.process.pid)) == 2  # the kernel and its template

        await eventually(are_gone)


async def test_what_a_kernel_has_forked_ends_with_it_and_frees_its_ports(tmp_path: Path) -> None:
    """A kernel whose children fork without end, of which each keeps the kernel's sockets."""
    async with supervised(tmp_path) as pod:
        control = await pod.connect()
        await pod.asked(
            "import os, time\n"
            "for _ in range(20):\n"
            "    if os.fork() == 0:\n"
            "        while True:\n"
            "            child = os.fork()\n"
            "            time.sleep(0.02) if child == 0 else os.waitpid(child, 0)\n"
            "            child or os._exit(0)\n"
        )
        group = await pod.pid()
        await control.restart(within=WITHIN)
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)
        assert await pod.value("1 + 1") == "2"


async def test_one_that_is_killed_takes_its_kernel_along(tmp_path: Path) -> None:
    """As on one machine: a kernel ends with its parent, also where no container does it."""
    async with supervised(tmp_path) as pod:
        pid = await pod.pid()
        pod.process.kill()
        await until_gone(pid)


#: What a kernel on a slice of 2% that may have 10% is told.
LIMITED = {
    "GPU_POOL_SLICE": "2%..10%",
    "GPU_POOL_MEMORY_MIB": "655",
    "GPU_POOL_TORCH_FRACTION": "0.007",
    "GPU_POOL_ALLOWED_MIB": "655",
    "GPU_POOL_LIMIT_MIB": "3276",
    "GPU_POOL_POD": "1",
}
#: Ends once the kernel has heard of another amount.
HEARS = "import os, time, torch\nwhile os.environ['GPU_POOL_ALLOWED_MIB'] == '{}': time.sleep(0.01)"
SEEN = "(__import__('os').environ['GPU_POOL_ALLOWED_MIB'], dict(__import__('torch').cuda.fractions))"


def allowed(before: str, now: str, fraction: str) -> dict[str, tuple[str | None, str | None]]:
    return {"GPU_POOL_ALLOWED_MIB": (before, now), "GPU_POOL_TORCH_FRACTION": ("0.007", fraction)}


@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_a_kernel_hears_what_it_may_use_in_the_middle_of_a_cell_and_the_next_one_begins_with_it(
    tmp_path: Path, isolated: bool
) -> None:
    write_torch(tmp_path)
    environment = {**LIMITED, "PYTHONPATH": str(tmp_path)}
    async with supervised(tmp_path, isolated=isolated, **environment) as pod:
        control = await pod.connect()
        await pod.asked("import torch; torch.cuda.init()")
        assert await pod.value(SEEN) == "('655', {0: 0.007, 1: 0.007})"
        cell = asyncio.create_task(pod.asked(HEARS.format("655")))
        await control.change(allowed("655", "2048", "0.05"))
        await cell
        assert await pod.value(SEEN) == "('2048', {0: 0.05, 1: 0.05})"
        await control.restart(within=WITHIN)
        await pod.asked("import torch; torch.cuda.init()")
        assert await pod.value(SEEN) == "('2048', {0: 0.05, 1: 0.05})"
        await control.change(allowed("2048", "655", "0.007"))
        await pod.asked(HEARS.format("2048"))
        assert await pod.value(SEEN) == "('655', {0: 0.007, 1: 0.007})"


async def test_what_the_kernelspec_has_set_stays_as_it_is(tmp_path: Path) -> None:
    async with supervised(tmp_path, **LIMITED, CUPY_GPU_MEMORY_LIMIT="1000") as pod:
        control = await pod.connect()
        await pod.value("1")
        await control.change({"CUPY_GPU_MEMORY_LIMIT": ("500", "700"), "GPU_POOL_LIMIT_MIB": ("3276", None)})
        await control.restart(within=WITHIN)
        names = "'CUPY_GPU_MEMORY_LIMIT', 'GPU_POOL_LIMIT_MIB'"
        found = await pod.value(f"[__import__('os').environ.get(name) for name in ({names})]")
        assert found == "['1000', None]"
