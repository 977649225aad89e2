"""What a folder imports is declared for those who have it; ``make lint`` finds what nobody imports."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
#: Of which extras, beside what everybody installs, a folder may import.
EXTRAS = {
    "kernels": (),
    "pool": ("hub", "kubernetes", "checkpoint"),
    "pool_client": (),
    # Its server extension is loaded by jupyter_server alone.
    "provisioner": ("lab",),
    "spawner": ("hub", "kubernetes"),
    "examples": ("lab",),
    "tests": ("test",),
    "benchmarks": ("bench",),
}
#: What the environment of a kernel has, which is not ours.
OF_KERNELS = {"IPython", "torch"}
#: What a Hub has whose spawner is another than those of our extras, as its example says.
OF_HUBS = {"batchspawner", "docker", "dockerspawner", "systemdspawner"}
PACKAGES = ("kernels", "pool", "pool_client", "provisioner", "spawner")
#: What of the privileged program is installed apart from us.
PROGRAM = "provisioner/gpu_pool_provisioner/hibernation/program"


@functools.cache
def declared() -> dict[str, set[str]]:
    """Return what pyproject.toml declares, by extra; "" is for everybody."""
    tomllib = pytest.importorskip("tomllib", reason="this Python cannot read pyproject.toml")
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: set(_names(extra, extras)) for extra in extras}


def _names(extra: str, extras: dict[str, list[str]]) -> Iterator[str]:
    for requirement in map(Requirement, extras[extra]):
        if requirement.name == "jupyter-gpu-pool":
            for other in requirement.extras:
                yield from _names(other, extras)
        else:
            yield canonicalize_name(requirement.name)


def imported(folder: str) -> dict[str, str]:
    """Return the packages of others that the modules in a folder import, each with one of the modules."""
    ours = {path.stem for root in (*PACKAGES, PROGRAM, "tests", ".") for path in (ROOT / root).iterdir()}
    found = {}
    for path in (ROOT / folder).rglob("*.py"):
        for name in _imports(ast.parse(path.read_text())):
            if name not in sys.stdlib_module_names | ours | OF_KERNELS | OF_HUBS:
                found[name] = str(path.relative_to(ROOT))
    return found


def _imports(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@functools.cache
def installed() -> Mapping[str, list[str]]:
    return packages_distributions()


def distributions(module: str) -> set[str]:
    return {canonicalize_name(name) for name in installed().get(module, [module])}


@pytest.mark.parametrize("folder", EXTRAS)
def test_everything_that_is_imported_is_declared(folder: str) -> None:
    allowed = set().union(*(declared()[extra] for extra in ("", *EXTRAS[folder])))
    missing = {name: path for name, path in imported(folder).items() if not distributions(name) & allowed}
    assert missing == {}


def test_every_dependency_has_a_lower_bound() -> None:
    declared()
    text = (ROOT / "pyproject.toml").read_text().partition("[project.entry-points")[0]
    lists = re.findall(
        r"^(?:dependencies|hub|lab|metrics|kubernetes|checkpoint) = \[(.*?)\]$",
        text,
        re.DOTALL | re.MULTILINE,
    )
    assert [word for words in lists for word in re.findall(r'"([^"]+)"', words) if ">=" not in word] == []
