"""Builds the images of the Containerfile so that they are the same wherever that is done (``make images``).

The base is that of ``Containerfile.base``, packages are those of the locks, and all times are that of the
last commit (``SOURCE_DATE_EPOCH`` names another). Docker with BuildKit, podman and buildah can build them.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
#: What can be built without another image of yours.
TARGETS = ("service", "notebook-cpu", "notebook-pytorch")
BUILDERS = ("docker", "podman", "buildah")
OF_THE_DAEMON = "The builder in docker's daemon (driver docker) cannot give files the time of the commit"
ANOTHER = '"docker buildx create --use" makes one that can.'


@dataclass(frozen=True)
class Build:
    """What is the same for all targets."""

    builder: str
    #: The image that all begin with.
    base: str
    #: Seconds since 1970.
    time: int
    version: str
    #: What stands before each name, such as a registry and a folder in it.
    prefix: str = ""
    push: bool = False
    #: Whether docker's builder can give all files the same time.
    rewrites: bool = True
    #: What is passed on to the builder as it is.
    more: tuple[str, ...] = ()

    def name(self, target: str) -> str:
        """Return what a target's image is called."""
        return f"{self.prefix}gpu-pool-{target}:{self.version}"

    def command(self, target: str) -> list[str]:
        """Return the command that builds a target's image; docker's also pushes it, if that is wanted."""
        command = [self.builder, *(["buildx"] if self.builder == "docker" else []), "build"]
        command += ["--file", "examples/kubernetes/Containerfile", "--target", target]
        command += ["--tag", self.name(target), "--build-arg", f"PYTHON_IMAGE={self.base}"]
        about = {"title": f"gpu-pool-{target}", "version": self.version, "licenses": "BSD-3-Clause"}
        for key, value in {**about, "base.name": self.base}.items():
            command += ["--label", f"org.opencontainers.image.{key}={value}"]
        if self.builder == "docker":
            command += ["--build-arg", f"SOURCE_DATE_EPOCH={self.time}"]
            where = "registry" if self.push else "docker"
            command += [f"--output=type={where}{',rewrite-timestamp=true' if self.rewrites else ''}"]
            # What is in it and how it was made: kept beside the image, which only a registry can.
            command += ["--sbom=true", "--provenance=mode=max"] if self.push else ["--provenance=false"]
        else:
            # Layers that were kept of another build would keep its time.
            command += ["--layers=false", "--timestamp", str(self.time)]
        return [*command, *self.more, "."]


def main() -> None:
    """Build the targets that are named, or all that can be built without another image."""
    given = arguments().parse_args()
    base = given.base or pinned_base()
    if given.push and "@sha256:" not in base:
        raise SystemExit(f"{base} has no digest, which what is published must have: see RELEASE.md.")
    if given.push and not given.prefix:
        raise SystemExit("Where to? Name the registry, such as --prefix registry.example.org/physics/")
    builder, more = given.builder or found_builder(), tuple(shlex.split(given.options))
    rewrites = builder != "docker" or driver(more) != "docker"
    if given.push and not rewrites:
        raise SystemExit(f"{OF_THE_DAEMON}, nor keep statements beside an image: {ANOTHER}")
    if not rewrites:
        print(f"{OF_THE_DAEMON}, so images will not be the same from every build: {ANOTHER}", flush=True)
    build = Build(
        builder=builder,
        base=base,
        time=int(os.environ.get("SOURCE_DATE_EPOCH") or last_commit()),
        version=given.tag or project_version(),
        prefix=given.prefix,
        push=given.push,
        rewrites=rewrites,
        more=more,
    )
    for target in given.targets or TARGETS:
        run(build.command(target))
        if build.push and build.builder != "docker":
            run([build.builder, "push", build.name(target)])


def arguments() -> argparse.ArgumentParser:
    """Return what can be said on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="by default all")
    parser.add_argument("--builder", choices=BUILDERS, help="by default the first of these that is here")
    parser.add_argument("--base", help="another image to begin with, with Python 3.13")
    parser.add_argument("--prefix", default="", help="before each name: registry.example.org/physics/")
    parser.add_argument("--tag", help="by default the version in pyproject.toml")
    parser.add_argument("--push", action="store_true", help="to the registry in --prefix")
    parser.add_argument("--options", default="", help="more options of the builder, as one word")
    return parser


def pinned_base() -> str:
    """Return the image that ``Containerfile.base`` names."""
    (found,) = re.findall(r"^FROM (\S+)$", (HERE / "Containerfile.base").read_text(), re.MULTILINE)
    return str(found)


def project_version() -> str:
    """Return the version in ``pyproject.toml``."""
    (found,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return str(found)


def last_commit() -> int:
    """Return when the last commit was made, in seconds since 1970; where there is none, 1980 as in wheels."""
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else 315532800


def found_builder() -> str:
    """Return the first builder that is here."""
    for each in BUILDERS:
        # Docker's program may be there without what builds.
        command = [each, "buildx", "version"] if each == "docker" else [each, "--version"]
        if shutil.which(each) and subprocess.run(command, capture_output=True).returncode == 0:
            return each
    raise SystemExit("There is no docker with buildx here, no podman and no buildah.")


def driver(options: Sequence[str]) -> str:
    """Return the driver of docker's builder: the one that the options name, or the one in use."""
    named = [each.partition("=")[2] for each in options if each.startswith("--builder=")]
    done = subprocess.run(["docker", "buildx", "inspect", *named], capture_output=True, text=True)
    found = re.search(r"^Driver:\s+(\S+)$", done.stdout, re.MULTILINE)
    return found[1] if found else ""


def run(command: Sequence[str]) -> None:
    """Run a command in the repository's root, and show it; end with its status if it fails."""
    print(shlex.join(command), flush=True)
    # It is told the time by an option; podman and buildah refuse to be told twice.
    variables = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    if code := subprocess.run(command, cwd=ROOT, env=variables).returncode:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
