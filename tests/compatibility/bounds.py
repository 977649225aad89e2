"""Whether what is installed is the oldest that pyproject.toml declares: a bound not run is a guess."""

from __future__ import annotations

import sys
from importlib.metadata import requires, version

from packaging.requirements import Requirement
from packaging.version import Version

#: What is needed by who tests alone may be of any version.
EXTRAS = ("", "lab", "hub", "metrics", "kubernetes", "checkpoint")


def is_oldest(requirement: Requirement) -> bool:
    """Print a line on one requirement; return whether the oldest release of its bound is installed."""
    (bound,) = [each.version for each in requirement.specifier if each.operator == ">="]
    declared, installed = Version(bound).release, version(requirement.name)
    same = Version(installed).release[: len(declared)] == declared
    print(f"{requirement.name:24} >={bound:10} {installed:12} {'' if same else 'not the oldest declared'}")
    return same


def is_ours(requirement: Requirement) -> bool:
    """Whether a requirement is one of those who use this project."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in EXTRAS)


def main() -> bool:
    """Print a table; return whether every bound is run."""
    declared = [Requirement(line) for line in requires("jupyter-gpu-pool") or ()]
    found = [is_oldest(requirement) for requirement in declared if is_ours(requirement)]
    return all(found)


if __name__ == "__main__":
    sys.exit(not main())
