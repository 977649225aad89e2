"""``hibernated``, and what ``status`` says of kernels that sleep on this machine's disk."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpu_pool_client import Hibernation, Pool
from gpu_pool_provisioner.hibernation.calling import why_not
from gpu_pool_provisioner.hibernation.program.gpu_pool_hibernation.values import VERSION
from support.terminal import Terminal

MIB = 1 << 20
IPYTHON = ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
_WHY = why_not("criu-of-nobody") if os.geteuid() == 0 else "only root says where images are."
as_root = pytest.mark.skipif("criu-of-nobody" not in _WHY, reason=f"no kernel sleeps here: {_WHY}")


@pytest.fixture
def asleep(terminal: Terminal, tmp_path: Path) -> Path:
    """Return the folder where kernels sleep, by the variables of a terminal."""
    terminal.environment["JUPYTER_DATA_DIR"] = str(tmp_path)
    return tmp_path / "gpu-pool/asleep"


def named(lease: str, uid: int = 0) -> str:
    """Return the ID of the kernel of a lease."""
    return hashlib.md5(f"{lease} {uid}".encode()).hexdigest()


def image(parent: Path, lease: str, mib: int, hours: float = 2, uid: int = 0) -> Path:
    """Write what the program keeps of a kernel, as its ``dump`` does; return the image's folder."""
    folder = parent / named(lease, uid)
    note = {"lease": lease, "user": "ada", "kernel": "thesis.ipynb"}  # of which the user is not believed
    files = {"pages-1.img": [mib * MIB, "digest"]}
    header = {"since": time.time() - hours * 3600, "listens": [], "files": files}
    (folder / "image").mkdir(parents=True)
    for name, said in (
        ("kernel.json", {"uid": uid, "user": pwd.getpwuid(uid).pw_name}),
        ("note.json", {"note": note}),
        ("image/header.json", header),
    ):
        (folder / name).write_text(json.dumps({"version": 1, **said}))
    return folder / "image"


def listed(terminal: Terminal) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(terminal.run("hibernated", "--json").stdout)["images"]
    return found


@as_root
def test_they_are_listed_oldest_first(terminal: Terminal, asleep: Path) -> None:
    image(asleep, "1-new", 320)
    image(asleep, "2-old", 2048, hours=30)
    broken = image(asleep, "3-broken", 1)
    (broken / "header.json").write_text("{}")
    rows = terminal.run("hibernated").stdout.splitlines()
    assert rows[0].split() == ["ID", "Lease", "User", "For", "Asleep", "for", "Size"]
    assert [row.split() for row in rows[1:]] == [
        [named("2-old"), "2-old", "root", "thesis.ipynb", "1d6h", "2GiB"],
        [named("1-new"), "1-new", "root", "thesis.ipynb", "2h", "320MiB"],
    ]
    assert [each["image_bytes"] // MIB for each in listed(terminal)] == [2048, 320]


@as_root
def test_where_none_sleeps_the_folder_is_named(terminal: Terminal, asleep: Path, tmp_path: Path) -> None:
    assert terminal.run("hibernated").stdout.startswith(f"No kernel sleeps in {asleep} or /")
    elsewhere = tmp_path / "elsewhere"
    image(elsewhere, "1-new", 320)
    assert "1-new" in terminal.run("hibernated", "--folder", str(elsewhere)).stdout


@as_root
def test_one_is_removed_by_its_lease_and_of_unknown_ones_none(terminal: Terminal, asleep: Path) -> None:
    removed, stays = image(asleep, "1-a", 320), image(asleep, "2-b", 10)
    refused = terminal.run("hibernated", "--remove", "1-a", "--remove", "3-c")
    assert refused.returncode == 2
    assert "No kernel with the ID or lease 3-c sleeps in" in refused.stderr
    assert removed.exists()
    done = terminal.run("hibernated", "--remove", "1-a")
    assert done.stdout == "Removed 320MiB of the kernel thesis.ipynb of root (lease 1-a).\n"
    assert (removed.exists(), stays.exists()) == (False, True)


@as_root
def test_whose_one_is_says_the_system_and_a_lease_that_two_have_noted_removes_none(
    terminal: Terminal, asleep: Path
) -> None:
    """A user may note anybody's lease and name."""
    mine, theirs = image(asleep, "1-a", 320), image(asleep, "1-a", 10, uid=1)
    assert sorted((each["user"], each["id"]) for each in listed(terminal)) == [
        (pwd.getpwuid(1).pw_name, named("1-a", 1)),
        ("root", named("1-a")),
    ]
    refused = terminal.run("hibernated", "--remove", "1-a")
    assert refused.returncode == 2
    assert "2 kernels on disk have noted the lease 1-a: say which by its ID" in refused.stderr
    assert terminal.run("hibernated", "--remove", named("1-a", 1)).returncode == 0
    assert (mine.exists(), theirs.exists()) == (True, False)


@as_root
def test_root_sees_other_users_kernels_where_the_programs_settings_have_them(
    terminal: Terminal, asleep: Path, tmp_path: Path
) -> None:
    elsewhere, etc = tmp_path / "elsewhere", tmp_path / "etc"
    image(asleep, "1-root", 10)
    image(elsewhere, "2-theirs", 320, uid=1)
    (etc / "gpu-pool").mkdir(parents=True)
    (etc / "gpu-pool/hibernation.json").write_text(json.dumps({"folder": str(elsewhere)}))
    (etc / "passwd").write_bytes(Path("/etc/passwd").read_bytes())
    there = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc && exec "$@"', str(etc)]
    done = subprocess.run(
        [*there, sys.executable, "-m", "gpu_pool.cli", "hibernated", "--json"],
        env=terminal.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    said = json.loads(done.stdout)
    assert said["folders"] == [str(asleep), str(elsewhere)]
    assert sorted(each["lease"] for each in said["images"]) == ["1-root", "2-theirs"]


@pytest.mark.parametrize("who", ["kernelspec", "server"])
def test_a_users_are_listed_by_the_program_that_their_settings_name(
    terminal: Terminal, asleep: Path, tmp_path: Path, who: str
) -> None:
    program = tmp_path / "their program"
    program.touch()
    config = {"hibernate_after": 60, "hibernation_program": str(program)}
    if who == "kernelspec":
        spec = {"metadata": {"kernel_provisioner": {"provisioner_name": "gpu-pool", "config": config}}}
        file, said = asleep.parents[1] / "kernels/sleeper/kernel.json", {"argv": ["x"], "display_name": "S"}
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({**said, **spec}))
    else:
        file = Path(terminal.environment["JUPYTER_CONFIG_DIR"], "jupyter_server_config.json")
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"GPUPoolProvisioner": config}))
    sudo = tmp_path / "sudo"
    sudo.write_text(f"""#!/bin/sh
[ "$*" = "-n {program} list" ] && echo '{{"ok": true, "folder": "/theirs", "kernels": []}}'
""")
    sudo.chmod(0o755)
    assert "/theirs" in json.loads(by_a_user(terminal, tmp_path, "hibernated", "--json"))["folders"]


@pytest.mark.parametrize("words", [(), ("--hibernation",)])
def test_the_doctor_asks_the_program_that_the_servers_settings_name(
    terminal: Terminal, tmp_path: Path, words: tuple[str, ...]
) -> None:
    config = {"hibernate_after": 60, "hibernation_program": "/no/such/program"}
    file = Path(terminal.environment["JUPYTER_CONFIG_DIR"], "jupyter_server_config.json")
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"GPUPoolProvisioner": config}))
    (tmp_path / "sudo").touch(0o755)
    assert "there is no /no/such/program, which" in by_a_user(terminal, tmp_path, "doctor", *words, "--json")


def test_the_doctor_asks_a_users_program_each_thing_once(terminal: Terminal, tmp_path: Path) -> None:
    """Each question is a line in the system's log."""
    program, sudo, asked = tmp_path / "program", tmp_path / "sudo", tmp_path / "asked"
    program.touch()
    can = json.dumps({"ok": True, "version": VERSION, "why": "", "criu": "4.2"})
    sudo.write_text(f"""#!/bin/sh
echo "$3" >> {asked}
[ "$3" = check ] && echo '{can}' || echo '{{"ok": true, "folder": "{tmp_path}", "kernels": []}}'
""")
    sudo.chmod(0o755)
    config = {"hibernate_after": 60, "hibernation_program": str(program)}
    file = Path(terminal.environment["JUPYTER_CONFIG_DIR"], "jupyter_server_config.json")
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"GPUPoolProvisioner": config}))
    said = by_a_user(terminal, tmp_path, "doctor", "--hibernation", "--json")
    assert f"kernels can sleep on disk, by {program} (CRIU 4.2)" in said
    assert asked.read_text().split() == ["check", "list"]


def by_a_user(terminal: Terminal, path: Path, *words: str) -> str:
    """Return what a program says that takes itself for another user's, with this folder on the ``PATH``."""
    code = (
        "import os, runpy; os.geteuid = lambda: 1000; runpy.run_module('gpu_pool.cli', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**terminal.environment, "PATH": f"{path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def a_criu(folder: Path, version: str) -> str:
    program = folder / "criu"
    program.write_text(f"#!/bin/sh\necho Version: {version}\n")
    program.chmod(0o755)
    return str(program)


def checks(terminal: Terminal, *words: str) -> tuple[int, list[tuple[str, str]]]:
    """Return the doctor's exit status, and what it says of sleeping."""
    done = terminal.run("doctor", *words, "--json")
    found = [each for each in json.loads(done.stdout)["checks"] if each["name"] == "hibernation"]
    return done.returncode, [(each["state"], each["text"]) for each in found]


@as_root
@pytest.mark.usefixtures("asleep")
def test_the_doctor_says_what_a_machine_lacks(terminal: Terminal, tmp_path: Path) -> None:
    assert checks(terminal) == (0, [])
    status, [(state, text)] = checks(terminal, "--hibernation", "criu-of-nobody")
    assert (status, state) == (1, "broken")
    assert "there is no criu-of-nobody: install CRIU 4.1 or newer" in text
    status, [(state, text)] = checks(terminal, "--hibernation", a_criu(tmp_path, "3.17"))
    assert (status, state) == (1, "broken")
    assert "is 3.17, and 4.1 or newer is needed" in text


@as_root
def test_the_doctor_says_how_much_sleeps_and_how_much_room_there_is(
    terminal: Terminal, asleep: Path, tmp_path: Path
) -> None:
    image(asleep, "1-a", 300)
    image(asleep, "2-b", 20)
    criu = a_criu(tmp_path, "4.2")
    status, [can, (_, disk)] = checks(terminal, "--hibernation", criu)
    assert (status, can) == (0, ("ok", f"kernels can sleep on disk, by {criu} (CRIU 4.2)"))
    assert f"{asleep}: 2 kernels sleep there (320MiB), " in disk


@as_root
def test_the_doctor_looks_at_it_where_a_kernel_is_to_sleep(terminal: Terminal, asleep: Path) -> None:
    config = {"slice": "2%", "hibernate_after": 60, "criu": "criu-of-nobody"}
    spec = {"metadata": {"kernel_provisioner": {"provisioner_name": "gpu-pool", "config": config}}}
    folder = asleep.parents[1] / "kernels/sleeper"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps({"argv": IPYTHON, "display_name": "Sleeper", **spec}))
    status, [(state, text)] = checks(terminal)
    assert (status, state) == (0, "note")
    assert "there is no criu-of-nobody" in text


def sleeper(asleep: Path, argv: list[str], **config: object) -> None:
    """Install a kernelspec."""
    stanza = {"provisioner_name": "gpu-pool", "config": {"slice": "2%", **config}}
    folder = asleep.parents[1] / "kernels/sleeper"
    folder.mkdir(parents=True)
    spec = {"argv": argv, "display_name": "Sleeper", "metadata": {"kernel_provisioner": stanza}}
    (folder / "kernel.json").write_text(json.dumps(spec))


@as_root
def test_the_doctor_does_not_say_that_kernels_of_other_languages_can(
    terminal: Terminal, asleep: Path, tmp_path: Path
) -> None:
    argv = ["R", "--slave", "-e", "IRkernel::main()", "--args", "{connection_file}"]
    sleeper(asleep, argv, hibernate_after=60, criu=a_criu(tmp_path, "4.2"))
    status, [(state, text)] = checks(terminal)
    assert (status, state) == (0, "note")
    assert text == "kernels of Sleeper do not sleep on disk (hibernate_after): only IPython kernels can"


@as_root
def test_what_the_server_says_for_all_is_no_fault_of_a_kernelspec_of_another_language(
    terminal: Terminal, asleep: Path
) -> None:
    file = Path(terminal.environment["JUPYTER_CONFIG_DIR"], "jupyter_server_config.json")
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"GPUPoolProvisioner": {"hibernate_after": 60, "criu": "criu-of-nobody"}}))
    sleeper(asleep, ["R", "--slave", "-e", "IRkernel::main()", "--args", "{connection_file}"])
    status, [(state, text)] = checks(terminal)
    assert (status, state) == (0, "note")
    assert "there is no criu-of-nobody" in text


@as_root
def test_a_folder_that_is_not_roots_alone_hides_no_other(
    terminal: Terminal, asleep: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    sleeper(asleep, IPYTHON, hibernate_after=60, hibernation_folder=str(elsewhere))
    image(asleep, "1-there", 320)
    done = terminal.run("hibernated", "--json")
    assert [each["lease"] for each in json.loads(done.stdout)["images"]] == ["1-there"]
    assert "Not all kernels on disk are known." in done.stderr
    assert f"chmod go-w {elsewhere}" in done.stderr


@as_root
def test_root_sees_kernels_in_the_folders_that_kernelspecs_name(
    terminal: Terminal, asleep: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    sleeper(asleep, IPYTHON, hibernate_after=60, hibernation_folder=str(elsewhere))
    image(elsewhere, "1-there", 320)
    assert [each["lease"] for each in listed(terminal)] == ["1-there"]


def test_a_users_are_listed_by_the_program_of_their_servers_configuration(
    terminal: Terminal, asleep: Path, tmp_path: Path
) -> None:
    program, sudo = tmp_path / "their program", tmp_path / "sudo"
    program.touch()
    sudo.write_text(f"""#!/bin/sh
[ "$*" = "-n {program} list" ] && echo '{{"ok": true, "folder": "/theirs", "kernels": []}}'
""")
    sudo.chmod(0o755)
    config = Path(terminal.environment["JUPYTER_CONFIG_DIR"], "jupyter_server_config.py")
    config.parent.mkdir(exist_ok=True)
    config.write_text(f"c.GPUPoolProvisioner.hibernation_program = {str(program)!r}\n")
    code = (
        "import os, runpy; os.geteuid = lambda: 1000; runpy.run_module('gpu_pool.cli', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "hibernated", "--json"],
        env={**terminal.environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(done.stdout)["folders"] == ["/theirs"]


@as_root
@pytest.mark.usefixtures("asleep")
@pytest.mark.parametrize("name", ["jupyter_config", "jupyter_server_config"])
def test_the_doctor_looks_at_it_where_the_servers_kernels_are_to_sleep(terminal: Terminal, name: str) -> None:
    settings = Path(terminal.environment["JUPYTER_CONFIG_DIR"], f"{name}.py")
    settings.parent.mkdir(exist_ok=True)
    said = "c.GPUPoolProvisioner.criu = 'criu-of-nobody'\n"
    settings.write_text(said)
    assert checks(terminal) == (0, [])
    settings.write_text(f"{said}c.GPUPoolProvisioner.hibernate_with_server = True\n")
    status, [(state, text)] = checks(terminal)
    assert (status, state) == (0, "note")
    assert "there is no criu-of-nobody" in text


@as_root
@pytest.mark.usefixtures("asleep")
def test_the_doctor_looks_at_it_where_a_course_says_so(terminal: Terminal, tmp_path: Path) -> None:
    least = "title: Any\nslices: [{name: One, request: 1}]\n"
    (tmp_path / "courses").mkdir()
    course = tmp_path / "courses/cs101.yaml"
    course.write_text(f"{least}hibernate_after: 2h\n")
    settings = Path(terminal.environment["JUPYTER_CONFIG_DIR"], "gpu_pool_config.json")
    settings.parent.mkdir(exist_ok=True)
    settings.write_text(json.dumps({"PoolSettings": {"courses_dir": str(course.parent)}}))
    empty = {"PATH": str(tmp_path)}
    done = terminal.run("doctor", "--json", env=empty)
    assert "there is no criu: install" in done.stdout
    course.write_text(least)
    assert "criu" not in terminal.run("doctor", "--json", env=empty).stdout


def test_the_status_says_which_parked_lease_is_asleep_and_asks_no_program(
    terminal: Terminal, tmp_path: Path
) -> None:
    parked, held = terminal.hold("50%"), terminal.hold("10%")

    async def park(pool: Pool) -> None:
        await pool.park(parked)
        for lease in (parked, held):
            await pool.report_hibernation(lease, Hibernation(image_mib=320))

    terminal.ask(park)
    for name in ("sudo", "criu"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
        (tmp_path / name).chmod(0o755)
    empty = {"PATH": str(tmp_path)}
    shown = terminal.run("status", env=empty).stdout
    assert sorted(line.split()[0] for line in shown.splitlines()[1:]) == ["asleep,", "held"]
    assert "asleep, 320MiB" in shown
    told = json.loads(terminal.run("status", "--json", env=empty).stdout)["asleep"]
    assert told == [{"lease": parked, "image_mib": 320}]
    assert not (tmp_path / "called").exists()
