"""Writes the lock files of the images: every Python package with its version and hashes (``make lock``).

A lock has no address of an index in it: pip asks the one that it is set up with, and takes only files that
have these hashes. Of each package it has the wheels for Linux on x86-64 and ARM alone: so it stays short, and
nothing is compiled in an image. It needs Python 3.11 or newer, and uv.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import tomllib  # type: ignore[import-not-found]
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[2] / "pyproject.toml"
#: The Python of the images, see the Containerfile.
PYTHON = "3.13"
MACHINES = ("x86_64", "aarch64")
#: The oldest C library that an image may have, 2.36: Debian 12's.
GLIBC = 36
#: What a user's server and a kernel in a pod need. The Hub's major version, which servers must have as well,
#: is that of the releases of Zero to JupyterHub.
_NOTEBOOK = ("ipykernel>=7.4", "jupyterlab>=4.2", "jupyterhub>=5.4,<6")
#: By lock: extras of this project (``None`` where it is not in there), and what else is in it.
LOCKS: dict[str, tuple[tuple[str, ...] | None, tuple[str, ...]]] = {
    # What builds the wheel, and what lists an image's packages.
    "tools": (None, ("cyclonedx-bom>=7", "hatch-jupyter-builder>=0.9", "hatchling>=1.27")),
    "service": (("checkpoint", "hub", "kubernetes"), ()),
    "notebook-cpu": ((), _NOTEBOOK),
    "notebook-pytorch": ((), (*_NOTEBOOK, "torch>=2.8", "numpy")),
}
_HEADER = "# Made by `make lock`: change examples/kubernetes/images/lock.py or pyproject.toml instead.\n"


def main() -> None:
    """Write the locks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*LOCKS, []], help="locks to write; by default all")
    parser.add_argument("--upgrade", action="store_true", help="take the newest version of every package")
    given = parser.parse_args()
    for name in given.names or LOCKS:
        path = path_of(name)
        kept = "" if given.upgrade or not path.exists() else path.read_text()
        text = locked(requirements_of(name), kept)
        path.write_text(_HEADER + text)
        print(f"{path.relative_to(PROJECT.parent)}: {text.count('==')} packages")


def path_of(name: str) -> Path:
    """Return where a lock is."""
    return HERE / f"{name}.txt"


def requirements_of(name: str) -> list[str]:
    """Return what a lock must have, as ``pyproject.toml`` and this file say today."""
    extras, more = LOCKS[name]
    if extras is None:
        return [*more]
    project = tomllib.loads(PROJECT.read_text())["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(each for extra in extras for each in optional[extra]), *more]


def locked(requirements: list[str], kept: str = "") -> str:
    """Return the lines of a lock, with the versions of ``kept`` where they still fit."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, made = Path(folder, "wanted.in"), Path(folder, "pylock.toml")
        wanted.write_text("\n".join(requirements))
        constraints = Path(folder, "kept.txt")
        constraints.write_text("".join(f"{line.split()[0].rstrip(';')}\n" for line in pinned(kept)))
        command = ["uv", "pip", "compile", "--quiet", "--universal", "--no-header", "--format=pylock.toml"]
        command += [f"--python-version={PYTHON}", f"--output-file={made}", str(wanted)]
        done = subprocess.run([*command, f"--constraints={constraints}"], capture_output=True, text=True)
        # Versions that no longer fit together are chosen anew.
        if done.returncode:
            subprocess.run(command, check=True)
        packages = tomllib.loads(made.read_text())["packages"]
    return "".join(filter(None, map(_lines, packages)))


def pinned(text: str) -> Iterator[str]:
    """Return the lines of a lock that name a package and its version."""
    return (line for line in text.splitlines() if "==" in line and not line.startswith((" ", "#")))


def _lines(package: dict[str, Any]) -> str:
    """Return a package as pip reads it; nothing if it is not for Linux."""
    marker = package.get("marker", "")
    on_linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    requirement = Requirement(f"{package['name']}=={package['version']}" + (f" ; {marker}" if marker else ""))
    machines = [
        {**on_linux, "platform_machine": each, "python_full_version": f"{PYTHON}.0"} for each in MACHINES
    ]
    if requirement.marker and not any(map(requirement.marker.evaluate, machines)):
        return ""
    hashes = sorted(each["hashes"]["sha256"] for each in package.get("wheels", []) if _fits(_file_name(each)))
    if not hashes:
        raise SystemExit(f"{requirement}: there is no wheel of it for Linux and Python {PYTHON}")
    return f"{requirement}" + "".join(f" \\\n    --hash=sha256:{each}" for each in hashes) + "\n"


def _file_name(wheel: dict[str, Any]) -> str:
    return str(wheel.get("name") or wheel["url"].rpartition("/")[2])


def _fits(name: str) -> bool:
    """Tell whether an image's Python can use a wheel."""
    *_, tags = parse_wheel_filename(name)
    return not tags.isdisjoint(_supported())


@cache
def _supported() -> frozenset[Tag]:
    """Return the tags of wheels that an image's Python can use."""
    version = tuple(map(int, PYTHON.split(".")))
    kinds = [f"manylinux_2_{minor}" for minor in range(GLIBC + 1)] + [
        "manylinux2014",
        "manylinux2010",
        "manylinux1",
    ]
    platforms = [f"{kind}_{machine}" for kind in kinds for machine in MACHINES]
    named = f"cp{PYTHON.replace('.', '')}"
    return frozenset(
        (*cpython_tags(version, platforms=platforms), *compatible_tags(version, named, platforms))
    )


def versions(name: str) -> dict[str, str]:
    """Return what a lock has: versions by package."""
    found = (Requirement(line.partition(" \\")[0]) for line in pinned(path_of(name).read_text()))
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in found}


def unmet(name: str) -> list[str]:
    """Return what a lock should have and has not, or in a version that is not allowed: it is out of date."""
    has = versions(name)

    def is_met(wanted: Requirement) -> bool:
        version = has.get(canonicalize_name(wanted.name))
        return version is not None and wanted.specifier.contains(version, prereleases=True)

    return [str(each) for each in map(Requirement, requirements_of(name)) if not is_met(each)]


if __name__ == "__main__":
    main()
