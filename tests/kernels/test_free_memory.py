"""When memory is short for a template: the machine's, or that of a cgroup that its server is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_pool_kernels.inkernel import free_memory

GIB = 2**30


class Machine:
    """The files of a machine with cgroups of one version, and a process in ``/user/ada`` of it."""

    def __init__(self, folder: Path, version: int) -> None:
        self.version = version
        self.groups, self.process = folder / "groups", folder / "process"
        self.process.mkdir()
        self.meminfo = folder / "meminfo"
        self.has_available(50)
        others = "22 1 0:21 / / rw - ext4 /dev/vda rw\n"
        kind, line = ("cgroup2 none rw", "0::") if version == 2 else ("cgroup none rw,memory", "4:memory:")
        self.mount = f"30 22 0:26 %s {self.groups} rw,nosuid - {kind}\n"
        (self.process / "mountinfo").write_text(others + self.mount % "/")
        (self.process / "cgroup").write_text(f"9:cpu,cpuacct:/elsewhere\n{line}/user/ada\n")

    def has_available(self, percent: int) -> None:
        self.meminfo.write_text(f"MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: {percent}0 kB\n")

    def limit(self, group: str, most: str, used: float, droppable: float = 0, high: str = "max") -> None:
        """Set a limit of a group in bytes; the others in GiB."""
        folder = self.groups / group
        folder.mkdir(parents=True, exist_ok=True)
        total = "" if self.version == 2 else "total_"
        each = round(droppable * GIB / 2)
        statistics = f"anon 17\n{total}inactive_file {each}\n{total}active_file {each}\n"
        (folder / "memory.stat").write_text(statistics)
        if self.version == 2:
            files = {"memory.current": f"{used * GIB:.0f}", "memory.max": most, "memory.high": high}
        else:
            files = {"memory.usage_in_bytes": f"{used * GIB:.0f}", "memory.limit_in_bytes": most}
        for name, content in files.items():
            (folder / name).write_text(f"{content}\n")

    @property
    def is_short(self) -> bool:
        return free_memory.is_short(str(self.meminfo), str(self.process))


@pytest.fixture(params=[1, 2])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    return Machine(tmp_path, request.param)


def unlimited(machine: Machine) -> str:
    return "max" if machine.version == 2 else "9223372036854771712"


@pytest.mark.parametrize(("percent", "is_short"), [(6, False), (4, True)])
def test_the_machines(machine: Machine, percent: int, is_short: bool) -> None:
    machine.has_available(percent)
    assert machine.is_short is is_short


@pytest.mark.parametrize("group", ["user/ada", "user", "."])
@pytest.mark.parametrize(
    ("used", "droppable", "is_short"), [(1.8, 0, False), (1.95, 0, True), (1.99, 0.5, False)]
)
def test_that_of_a_group_or_of_one_above(
    machine: Machine, group: str, used: float, droppable: float, is_short: bool
) -> None:
    for each in ("user/ada", "user", "."):
        machine.limit(each, unlimited(machine), 8)
    machine.limit(group, f"{2 * GIB}", used, droppable)
    assert machine.is_short is is_short


def test_a_limit_above_which_a_group_is_slowed_down(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2)
    machine.limit("user/ada", f"{8 * GIB}", 1.95, high=f"{2 * GIB}")
    assert machine.is_short


def test_another_group_is_not_looked_at(machine: Machine) -> None:
    machine.limit("user/grace", f"{2 * GIB}", 2)
    machine.limit("elsewhere", f"{2 * GIB}", 2)
    assert not machine.is_short


def test_a_container_sees_its_own_part_of_the_groups(machine: Machine) -> None:
    (machine.process / "mountinfo").write_text(machine.mount % "/user/ada")
    machine.limit(".", f"{2 * GIB}", 1.95)
    assert machine.is_short
    (machine.process / "mountinfo").write_text(machine.mount % "/system")
    assert not machine.is_short


def test_what_cannot_be_read_limits_nothing(machine: Machine) -> None:
    assert not machine.is_short
    machine.limit("user/ada", "nonsense", 1.95)
    assert not machine.is_short


def test_this_machine_is_read() -> None:
    assert isinstance(free_memory.is_short(), bool)
