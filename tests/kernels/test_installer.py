"""Kernelspecs on slices: what is written, what is refused, what is removed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from jupyter_client.kernelspec import KernelSpecManager

from gpu_pool_client import BadRequest, SliceRequest, parse_request
from gpu_pool_kernels import installer
from gpu_pool_kernels.naming import display_name, folder_name, logo
from support.users import NOBODY

R = {
    "argv": ["R", "--slave", "-e", "IRkernel::main()", "--args", "{connection_file}"],
    "display_name": "R",
    "language": "R",
    "interrupt_mode": "message",
    "env": {"R_LIBS": "/opt/r"},
    "metadata": {"debugger": False},
}


@pytest.fixture(autouse=True)
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let Jupyter look in a folder of the test's first, and return it."""
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "prefix/share/jupyter"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "user"))
    return tmp_path / "prefix"


@pytest.fixture
def open_prefix(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Do the same in a folder that other users can come through, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-pool-test-"))
    folder.chmod(0o755)
    monkeypatch.setenv("JUPYTER_PATH", str(folder / "prefix/share/jupyter"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(folder / "user"))
    yield folder / "prefix"
    shutil.rmtree(folder)


def kernels(prefix: Path) -> Path:
    return prefix / "share/jupyter/kernels"


def put(prefix: Path, name: str, spec: dict[str, Any], **files: str) -> Path:
    folder = kernels(prefix) / name
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))
    for file, content in files.items():
        (folder / file.replace("__", ".").replace("_", "-")).write_text(content)
    return folder


def sizes(*texts: str) -> list[SliceRequest]:
    return [parse_request(text) for text in texts]


def installed(prefix: Path) -> dict[str, str]:
    """Our kernels of this test, without those the tester may have."""
    return {
        kernel.name: kernel.display_name
        for kernel in installer.installed()
        if kernel.path.is_relative_to(prefix)
    }


def test_jupyter_finds_one_kernel_per_size(prefix: Path) -> None:
    installer.install(sizes("2%", "50%", "1"), prefix=prefix)
    assert installed(prefix) == {
        "python3-gpu-1gpu": "Python 3 (whole GPU)",
        "python3-gpu-2pct": "Python 3 (GPU 2%)",
        "python3-gpu-50pct": "Python 3 (GPU 50%)",
    }
    spec = KernelSpecManager().get_kernel_spec("python3-gpu-2pct")
    assert spec.metadata["kernel_provisioner"] == {"provisioner_name": "gpu-pool", "config": {"slice": "2%"}}
    assert spec.argv[-4:] == ["-m", "ipykernel_launcher", "-f", "{connection_file}"]


def test_a_kernel_of_any_language_is_copied_whole(prefix: Path) -> None:
    folder = put(prefix, "ir", R, kernel__js="// js", logo_64x64__png="png", logo_svg__svg="<svg>R</svg>")
    (folder / "helper.sh").touch(0o755)
    (made,) = installer.install(sizes("1.5GiB"), base="IR", prefix=prefix)
    assert (made.name, made.display_name, made.base) == ("ir-gpu-1.5gib", "R (GPU 1.5 GiB)", "ir")
    spec = json.loads((made.path / "kernel.json").read_text())
    assert {key: spec[key] for key in ("argv", "language", "interrupt_mode")} == {
        key: R[key] for key in ("argv", "language", "interrupt_mode")
    }
    assert spec["env"].items() >= R["env"].items()
    assert spec["metadata"].items() >= R["metadata"].items()
    assert (made.path / "kernel.js").read_text() == "// js"
    assert (made.path / "logo-64x64.png").read_text() == "png"
    assert os.access(made.path / "helper.sh", os.X_OK)
    assert "GPU 1.5 GiB" in (made.path / "logo-svg.svg").read_text()


def test_a_read_only_base_is_no_obstacle(prefix: Path) -> None:
    folder = put(prefix, "ir", R, logo_svg__svg="<svg>R</svg>")
    for path in (folder / "kernel.json", folder / "logo-svg.svg", folder):
        path.chmod(0o555)
    (made,) = installer.install(sizes("2%"), base="ir", prefix=prefix)
    assert made.path.stat().st_mode & 0o777 == 0o755
    assert (made.path / "kernel.json").stat().st_mode & 0o200


def test_a_kernelspec_holds_no_path_of_this_package(prefix: Path) -> None:
    (made,) = installer.install(sizes("2%"), prefix=prefix)
    assert str(Path(installer.__file__).parent) not in (made.path / "kernel.json").read_text()


def test_a_wrapped_kernel_needs_no_provisioner(prefix: Path) -> None:
    put(prefix, "ir", R)
    (kernel,) = installer.install(sizes("2%"), base="ir", prefix=prefix, wrap=True)
    spec = json.loads((kernel.path / "kernel.json").read_text())
    assert "kernel_provisioner" not in spec["metadata"]
    proxy, real = spec["argv"][: spec["argv"].index("--")], spec["argv"][spec["argv"].index("--") + 1 :]
    assert proxy[1:3] == ["-m", "gpu_pool_provisioner.wrap"]
    assert proxy[proxy.index("--slice") + 1] == "2%"
    assert proxy[-2:] == ["-f", "{connection_file}"]
    assert real == [*R["argv"][:-1], "@connection_file@"]
    assert installed(prefix) == {kernel.name: "R (GPU 2%)"}
    installer.install(sizes("2%"), base="ir", prefix=prefix)
    assert json.loads((kernel.path / "kernel.json").read_text())["argv"] == R["argv"], "it replaces the other"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (R["argv"], [*R["argv"][:-1], "@connection_file@"]),
        (
            ["julia", "-i", "--color=yes", "{resource_dir}/kernel.jl", "{connection_file}"],
            ["julia", "-i", "--color=yes", "{folder}/kernel.jl", "@connection_file@"],
        ),
        (
            ["{prefix}/bin/xcpp", "-f", "{connection_file}"],
            [f"{sys.prefix}/bin/xcpp", "-f", "@connection_file@"],
        ),
        (
            ["{resource_dir}/run.sh", "--with={connection_file}", "{connection_file}", "{other}"],
            ["{folder}/run.sh", "--with=@connection_file@", "@connection_file@", "{other}"],
        ),
        (["python3", "-m", "k", "{connection_file}"], [sys.executable, "-m", "k", "@connection_file@"]),
    ],
    ids=["R", "Julia", "xeus", "a script", "python"],
)
def test_a_wrapped_kernel_names_one_placeholder_once_and_no_other_that_is_known(
    prefix: Path, argv: list[str], expected: list[str]
) -> None:
    """Frontends that start kernels by themselves replace the connection file's, and may do so once."""
    put(prefix, "other", {**R, "argv": argv})
    (kernel,) = installer.install(sizes("2%"), base="other", prefix=prefix, wrap=True)
    command = json.loads((kernel.path / "kernel.json").read_text())["argv"]
    proxy, real = command[: command.index("--")], command[command.index("--") + 1 :]
    assert [word for word in command if "{connection_file}" in word] == proxy[-1:] == ["{connection_file}"]
    assert real == [word.replace("{folder}", str(kernel.path)) for word in expected]


def test_user_kernels_go_to_the_users_folder(tmp_path: Path) -> None:
    (made,) = installer.install(sizes("2%"), user=True)
    assert made.path == tmp_path / "user/kernels/python3-gpu-2pct"


def test_installing_again_replaces_ours_and_leaves_nothing_behind(prefix: Path) -> None:
    (made,) = installer.install(sizes("2%"), prefix=prefix)
    (made.path / "stale").touch()
    assert installer.install(sizes("0.02"), prefix=prefix) == [made]
    assert not (made.path / "stale").exists()
    assert [path.name for path in kernels(prefix).parent.iterdir()] == ["kernels"]
    assert [path.name for path in kernels(prefix).iterdir()] == [made.name]


def test_a_replacement_that_fails_leaves_the_old_kernel(tmp_path: Path) -> None:
    target = tmp_path / "kernel"
    target.mkdir()
    with pytest.raises(FileNotFoundError), installer._moved_away(target, tmp_path / "old"):
        (tmp_path / "missing").rename(target)
    assert target.exists()


def test_a_foreign_kernel_is_never_overwritten_and_nothing_else_written(prefix: Path) -> None:
    folder = put(prefix, "python3-gpu-2pct", R)
    with pytest.raises(BadRequest, match="already another kernel"):
        installer.install(sizes("1%", "2%"), prefix=prefix)
    assert json.loads((folder / "kernel.json").read_text()) == R
    assert [path.name for path in kernels(prefix).iterdir()] == ["python3-gpu-2pct"]


def test_a_gpu_kernel_is_no_base(prefix: Path) -> None:
    installer.install(sizes("2%"), prefix=prefix)
    with pytest.raises(BadRequest, match=r"made from 'python3'.*--base python3"):
        installer.install(sizes("5%"), base="python3-gpu-2pct", prefix=prefix)


def test_an_unknown_base_is_answered_with_those_there_are(prefix: Path) -> None:
    put(prefix, "ir", R)
    installer.install(sizes("2%"), prefix=prefix)
    with pytest.raises(BadRequest, match=r"no kernel 'julia'.*Installed: .*ir, python3") as refusal:
        installer.install(sizes("2%"), base="julia", prefix=prefix)
    assert "gpu-2pct" not in str(refusal.value)


def test_a_base_of_another_provisioner_is_refused(prefix: Path) -> None:
    other = {"kernel_provisioner": {"provisioner_name": "kubernetes-provisioner"}}
    put(prefix, "remote", {**R, "metadata": other})
    put(prefix, "local", {**R, "metadata": {"kernel_provisioner": {"provisioner_name": "local-provisioner"}}})
    with pytest.raises(BadRequest, match="kubernetes-provisioner"):
        installer.install(sizes("2%"), base="remote", prefix=prefix)
    assert installer.install(sizes("2%"), base="local", prefix=prefix)


def test_a_broken_base_is_refused(prefix: Path) -> None:
    folder = put(prefix, "broken", R)
    (folder / "kernel.json").write_text("{")
    with pytest.raises(BadRequest, match="cannot be read"):
        installer.install(sizes("2%"), base="broken", prefix=prefix)


def test_a_folder_that_cannot_be_written_to_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadRequest, match=r"cannot be changed.*--user"):
        installer.install(sizes("2%"), prefix=tmp_path / "file")


def test_only_ours_are_removed(prefix: Path) -> None:
    put(prefix, "ir", R)
    installer.install(sizes("2%", "10%"), prefix=prefix)
    for name in ("ir", "nothing"):
        with pytest.raises(BadRequest, match=r"no GPU kernel.*python3-gpu-10pct"):
            installer.remove(["python3-gpu-2pct", name])
    assert set(installed(prefix)) == {"python3-gpu-2pct", "python3-gpu-10pct"}
    (gone,) = installer.remove(["Python3-GPU-2pct"]).gone
    assert gone.slice == "2%"
    assert sorted(path.name for path in kernels(prefix).iterdir()) == ["ir", "python3-gpu-10pct"]


def copy_of(kernel: installer.InstalledKernel, folder: Path) -> Path:
    return shutil.copytree(kernel.path, folder / kernel.name)


def test_every_copy_is_removed_wherever_jupyter_looks(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own,) = installer.install(sizes("2%"), user=True)
    (of_prefix,) = installer.install(sizes("2%"), prefix=prefix)
    other = tmp_path / "other/kernels"
    linked = kernels(prefix) / "Python3-GPU-10PCT"
    linked.symlink_to(copy_of(own, tmp_path / "elsewhere"))
    foreign = put(
        prefix, "handmade", {**R, "metadata": {"kernel_provisioner": {"provisioner_name": "gpu-pool"}}}
    )
    copied = copy_of(own, other)
    assert {kernel.path for kernel in installer.copies()} == {own.path, of_prefix.path, linked}
    monkeypatch.setenv("JUPYTER_PATH", os.pathsep.join([os.environ["JUPYTER_PATH"], str(other.parent)]))
    assert installed(tmp_path).keys() == {"python3-gpu-2pct", "python3-gpu-10pct"}
    removal = installer.remove(["python3-gpu-2pct"])
    assert {kernel.path for kernel in removal.gone} == {own.path, of_prefix.path, copied}
    assert removal.left == []
    assert not own.path.exists()
    assert [kernel.path for kernel in installer.remove_all().gone] == [linked]
    assert (tmp_path / "elsewhere" / own.name / "kernel.json").exists(), "what a link leads to is not ours"
    assert installer.copies() == []
    assert installer.foreign() == [foreign]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_what_may_not_be_removed_is_said_and_the_rest_is_removed(open_prefix: Path) -> None:
    installer.install(sizes("2%"), prefix=open_prefix)
    installer.install(sizes("2%", "10%"), user=True)
    theirs = open_prefix.parent / "user"
    for path in (theirs, *theirs.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    code = f"""
import os, sys
import gpu_pool.cli.kernels, gpu_pool_kernels.installer, ipykernel.kernelspec
from gpu_pool.cli import main
os.setgid({NOBODY}); os.setuid({NOBODY})
sys.exit(main(["kernels", "remove", "--all"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.count("Removed ") == 2
    kept = kernels(open_prefix) / "python3-gpu-2pct"
    assert f"'{kept}' was not removed: Permission denied. Repeat this as root, who owns it." in done.stderr
    assert [kernel.path for kernel in installer.copies()] == [kept]


def test_ours_are_listed_by_base_and_size(prefix: Path) -> None:
    put(prefix, "ir", R)
    installer.install(
        sizes("4", "1.5GiB", "50%", "2%..20%", "2x75%", "1", "10%", "2%..5%", "2%"), prefix=prefix
    )
    installer.install(sizes("10%", "2%"), base="ir", prefix=prefix)
    assert [kernel.slice for kernel in installer.installed()] == [
        *("2%", "10%"),
        *("2%", "2%..5%", "2%..20%", "10%", "50%", "1", "2x75%", "4", "1.5GiB"),
    ]


@pytest.mark.parametrize(
    ("size", "name"),
    [
        ("2%", "Python 3 (GPU 2%)"),
        ("0.5%", "Python 3 (GPU 0.5%)"),
        ("1", "Python 3 (whole GPU)"),
        ("4", "Python 3 (whole GPU×4)"),  # noqa: RUF001
        ("2x50%", "Python 3 (GPU 50%×2)"),  # noqa: RUF001
        ("1.5GiB", "Python 3 (GPU 1.5 GiB)"),
        ("2%..10%", "Python 3 (GPU 2%, up to 10%)"),
        ("2x2%..10%", "Python 3 (GPU 2%×2, up to 10%)"),  # noqa: RUF001
        ("1GiB..4.5GiB model=V100", "Python 3 (GPU 1 GiB, up to 4.5 GiB, V100)"),
        ("2% model=V100", "Python 3 (GPU 2%, V100)"),
        ("2% model=V100 for 20min", "Python 3 (GPU 2%, V100, for 20min)"),
        ("1 memory>=16GiB driver>=550 index=0,1", "Python 3 (whole GPU, ≥ 16 GiB, driver ≥ 550, index 0, 1)"),
    ],
)
def test_the_names_people_read(size: str, name: str) -> None:
    assert display_name("Python 3 (ipykernel)", parse_request(size)) == name
    assert "  " not in name


DISTINCT = [
    "2%",
    "2.5%",
    "25%",
    "1",
    "11",
    "2x50%",
    "2GiB",
    "2x1GiB",
    "2%..5%",
    "2%..50%",
    "1GiB..2GiB",
    "2% model=to-5pct",
    "2% model=V100",
    "2% memory>=16GiB",
    "2% model=memory16gib",
    "2% for 20min",
    "2% model=for20min",
    "2% for 20s",
    "2% driver>=16",
    "2% index=1",
    "2% index=0,1",
    "2% memory>=16GiB model=V100",
    "2% model=V100-memory16gib",
]


def test_different_sizes_have_different_folders_that_jupyter_accepts() -> None:
    names = [folder_name("python3", parse_request(size)) for size in DISTINCT]
    assert len(set(names)) == len(DISTINCT)
    assert all(
        name == name.lower() and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-") for name in names
    )
    assert names[:4] == ["python3-gpu-2pct", "python3-gpu-2.5pct", "python3-gpu-25pct", "python3-gpu-1gpu"]


@pytest.mark.parametrize(
    ("size", "filled", "words"),
    [
        ("2%", "20 980", ["2%"]),
        ("4", "1000 0", ["4", "GPUs"]),
        ("2x50%", "500 500", ["2×", "50%"]),  # noqa: RUF001
        ("655MiB", None, ["655", "MiB"]),
        ("2%..10%", "100 900, 20 980", ["2%", "to 10%"]),
        ("2x1GiB..4GiB", None, ["2×1GiB", "to 4GiB"]),  # noqa: RUF001
    ],
)
def test_the_logo_shows_the_size(size: str, filled: str | None, words: list[str]) -> None:
    drawing = ElementTree.fromstring(logo(parse_request(size)))
    svg = "{http://www.w3.org/2000/svg}"
    assert [text.text for text in drawing.iter(f"{svg}text")] == words
    rings = [circle.get("stroke-dasharray") for circle in drawing.iter(f"{svg}circle")]
    assert ", ".join(ring for ring in rings if ring) == (filled or "")


def test_a_pool_that_is_named_is_the_kernels_own(prefix: Path) -> None:
    url = "slurm:/var/tmp/pool.db"
    (kernel,) = installer.install(sizes("2%"), prefix=prefix, pool_url=url)
    spec = KernelSpecManager().get_kernel_spec(kernel.name)
    assert spec.metadata["kernel_provisioner"]["config"]["pool_url"] == url
    (wrapped,) = installer.install(sizes("2%"), prefix=prefix, pool_url=url, wrap=True)
    assert KernelSpecManager().get_kernel_spec(wrapped.name).env["GPU_POOL_URL"] == url


def test_a_batch_kernel_is_beside_the_others(prefix: Path) -> None:
    installer.install(sizes("2%"), prefix=prefix)
    (batch,) = installer.install(sizes("2%"), prefix=prefix, batch=True)
    assert (batch.name, batch.display_name) == ("python3-gpu-2pct-batch", "Python 3 (GPU 2%, batch)")
    stanza = KernelSpecManager().get_kernel_spec(batch.name).metadata["kernel_provisioner"]
    assert stanza["config"] == {"slice": "2%", "batch": True}
    assert len([each for each in installer.installed() if each.path.is_relative_to(prefix)]) == 2
    installer.install(sizes("2%"), prefix=prefix, batch=True, wrap=True)
    assert KernelSpecManager().get_kernel_spec(batch.name).env["GPU_POOL_BATCH"] == "1"


def test_what_is_preloaded_stands_in_the_kernelspec(prefix: Path) -> None:
    (made,) = installer.install(sizes("2%"), prefix=prefix, preload=["numpy", "matplotlib.pyplot"])
    spec = KernelSpecManager().get_kernel_spec(made.name)
    config = {"slice": "2%", "preload": ["numpy", "matplotlib.pyplot"]}
    assert spec.metadata["kernel_provisioner"]["config"] == config
    (found,) = [each for each in installer.installed() if each.path.is_relative_to(prefix)]
    assert found.preload == ("numpy", "matplotlib.pyplot")
    installer.install(sizes("2%"), prefix=prefix, preload=[], with_server=True)
    spec = KernelSpecManager().get_kernel_spec(made.name)
    config = {"slice": "2%", "preload": [], "preload_with_server": True}
    assert spec.metadata["kernel_provisioner"]["config"] == config


@pytest.mark.parametrize(
    ("preload", "how", "message"),
    [
        (["numpy", "my-module"], {}, "'my-module' is not the name of a Python module"),
        (["numpy"], {"wrap": True}, "Wrapped kernels cannot preload modules"),
        (["numpy"], {"base": "ir"}, "The kernel 'ir' cannot preload modules"),
        (None, {"with_server": True}, "Nothing is to be preloaded with the server"),
    ],
)
def test_what_cannot_be_preloaded_is_refused_before_anything_is_written(
    prefix: Path, preload: list[str] | None, how: dict[str, Any], message: str
) -> None:
    put(prefix, "ir", R)
    with pytest.raises(BadRequest, match=message):
        installer.install(sizes("2%"), prefix=prefix, preload=preload, **how)
    assert installed(prefix) == {}
