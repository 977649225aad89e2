"""``gpu-pool kernels``: installed, listed and removed by name."""

from __future__ import annotations

import json


def test_kernels_are_installed_listed_and_removed(terminal):
    made = terminal.run("kernels", "install", "2%", "1", "--user")
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.count("Installed '") == 2
    kernels = json.loads(terminal.run("kernels", "list", "--json").stdout)["kernels"]
    assert [set(kernel) for kernel in kernels] == [{"name", "display_name", "slice", "base", "path"}] * 2
    assert sorted(kernel["slice"] for kernel in kernels) == ["1", "2%"]
    assert "GPU 2%" in terminal.run("kernels", "list").stdout
    first, second = (kernel["name"] for kernel in kernels)
    assert "Removed" in terminal.run("kernels", "remove", first).stdout
    gone = json.loads(terminal.run("kernels", "remove", "--all", "--json").stdout)["kernels"]
    assert [kernel["name"] for kernel in gone] == [second]
    assert "None is installed" in terminal.run("kernels", "list").stdout


def test_kernels_are_installed_below_a_prefix(terminal):
    done = terminal.run("kernels", "install", "2%", "--prefix", str(terminal.folder / "prefix"))
    assert done.returncode == 0
    assert list((terminal.folder / "prefix/share/jupyter/kernels").glob("*/kernel.json"))


def test_a_size_that_the_pool_refuses_is_installed_and_said_to_be_refused(terminal):
    done = terminal.run("kernels", "install", "1%", "2%", "2x50%", "--user")
    assert (done.returncode, done.stdout.count("Installed ")) == (0, 3)
    assert done.stderr.splitlines() == [
        "gpu-pool: the pool would refuse a kernel of 1%: "
        "1% of V100-SXM2-32GB (simulated) (32GiB) is 327 MiB. "
        "CUDA itself takes about 350 MiB before the first tensor, so nothing would be left. "
        "Ask for at least 1.1% here.",
        "gpu-pool: the pool would refuse a kernel of 2x50%: "
        "You asked for 2x50%, that is 50% of each of 2 GPUs; "
        "this pool has one: 0: V100-SXM2-32GB (simulated), 32GiB. Ask for at most 50%.",
    ]
    assert not (terminal.folder / "pool").exists(), "no pool is made for that"
    printed = json.loads(terminal.run("kernels", "install", "1%", "1.1%", "--user", "--json").stdout)
    assert [set(each) for each in printed["refused"]] == [{"slice", "message", "remedy"}]
    assert printed["refused"][0]["slice"] == "1%"
    assert terminal.run("run", "1.1%", "--", "true").returncode == 0, "what is advised is granted"


def test_the_pools_own_rules_are_asked(terminal):
    config = terminal.folder / "config/gpu_pool_config.py"
    config.parent.mkdir()
    config.write_text("c.PoolSettings.max_share = 0.4; c.PoolSettings.context_mib = 100")
    done = terminal.run("kernels", "install", "1%", "50%", "--user")
    assert "1%" not in done.stderr
    assert "the most this pool gives to one lease is 40% of a GPU" in done.stderr


def test_a_service_is_asked_and_nobody_waits_for_one_that_is_away(terminal):
    away = {"GPU_POOL_URL": f"unix:{terminal.folder}/nobody.sock"}
    done = terminal.run("kernels", "install", "1%", "--user", env=away)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_gpu_nothing_is_said_of_sizes(terminal):
    terminal.environment.pop("GPU_POOL_DEVICES")
    done = terminal.run("kernels", "install", "1%", "--user", env={"LD_LIBRARY_PATH": ""})
    assert done.returncode == 0


def test_the_doctor_names_kernels_that_would_be_refused(terminal):
    terminal.run("kernels", "install", "1%", "2%", "--user")
    checks = json.loads(terminal.run("doctor", "--json").stdout)["checks"]
    ok, *notes = [check for check in checks if check["name"] == "kernels"]
    assert (ok["state"], ok["text"]) == ("ok", "python3-gpu-1pct, python3-gpu-2pct")
    [note] = [check for check in notes if check["state"] == "note"]
    assert note["text"].startswith("the pool would refuse python3-gpu-1pct: 1% of V100")
    assert note["remedy"] == (
        "Ask for at least 1.1% here. "
        "Then: gpu-pool kernels remove python3-gpu-1pct; gpu-pool kernels install SIZE"
    )


def test_a_kernel_that_is_somebodys_own_work_stays_and_is_named(terminal):
    terminal.run("kernels", "install", "2%", "--user")
    theirs = terminal.folder / "data/kernels/handmade"
    theirs.mkdir()
    stanza = {"kernel_provisioner": {"provisioner_name": "gpu-pool", "config": {"slice": "5%"}}}
    spec = {"argv": ["python"], "display_name": "Mine", "language": "python", "metadata": stanza}
    (theirs / "kernel.json").write_text(json.dumps(spec))
    done = terminal.run("kernels", "remove", "--all")
    assert done.returncode == 0
    assert done.stdout.startswith("Removed 'Python 3 (GPU 2%)' from ")
    assert (
        f"'{theirs}' is a GPU kernel, but was not created by gpu-pool kernels install. It stays:"
        in done.stderr
    )
    again = json.loads(terminal.run("kernels", "remove", "--all", "--json").stdout)
    assert again == {"kernels": [], "left": [], "foreign": [str(theirs)]}
