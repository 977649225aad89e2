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
