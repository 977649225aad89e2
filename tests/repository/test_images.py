"""What the images are made of: locks that are up to date, one base, and all of the package."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.images import ROOT, script

pytest.importorskip("tomllib", reason="locks are written by Python 3.11 or newer")
build, lock = script("build"), script("lock")
IMAGES = ROOT / "examples/kubernetes/images"
CONTAINERFILE = (ROOT / "examples/kubernetes/Containerfile").read_text()


@pytest.mark.parametrize("name", lock.LOCKS)
def test_a_lock_has_what_the_project_needs_today(name: str) -> None:
    assert lock.unmet(name) == [], "make lock"


@pytest.mark.parametrize("name", lock.LOCKS)
def test_a_lock_has_a_hash_for_everything_and_no_address(name: str) -> None:
    text = lock.path_of(name).read_text()
    packages = re.split(r"\n(?=[a-z0-9])", text.partition("\n")[2].strip())
    assert len(packages) == len(lock.versions(name)) > 10
    assert [each.partition("\n")[0] for each in packages if "--hash=sha256:" not in each] == []
    assert "://" not in text
    assert "--" not in text.replace("--hash=sha256:", "")


def test_a_lock_that_lacks_something_is_out_of_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lock.LOCKS, "tools", (None, ("hatchling>=99", "no-such-package", "cyclonedx-bom>=7")))
    assert lock.unmet("tools") == ["hatchling>=99", "no-such-package"]


def test_what_is_kept_of_a_lock_are_its_versions() -> None:
    hashed = " \\\n    --hash=sha256:0\n"
    lines = f'torch==2.15.0{hashed}triton==3.9.0; sys_platform == "linux"{hashed}'
    assert [line.split()[0].rstrip(";") for line in lock.pinned(lines)] == ["torch==2.15.0", "triton==3.9.0"]


def test_every_image_begins_with_one_base_of_the_locks_python_by_its_digest() -> None:
    base, _, digest = build.pinned_base().partition("@")
    assert f"ARG PYTHON_IMAGE={base}\n" in CONTAINERFILE
    assert base == f"docker.io/library/python:{lock.PYTHON}-slim"
    assert re.fullmatch("sha256:[0-9a-f]{64}", digest)


def test_every_target_has_a_lock_and_a_user_who_is_not_root() -> None:
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", CONTAINERFILE, re.M | re.S))
    assert set(build.TARGETS) < stages.keys()
    assert {f"{each}.txt" for each in (*build.TARGETS, "tools")} == {
        each.name for each in IMAGES.glob("*.txt")
    }
    for target in build.TARGETS:
        assert f"install.sh {target}\n" in stages[f"{target}-packages"]
        assert f"COPY --from={target}-packages " in stages[target]
    for target in (*build.TARGETS, "hub", "notebook"):
        assert re.findall(r"^USER (\S+)$", stages[target], re.MULTILINE)[-1] == "1000"


def test_what_a_build_copies_is_let_in() -> None:
    let_in = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    wanted = [
        word
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINERFILE, re.MULTILINE)
        for word in shlex.split(line)
    ]
    assert len(wanted) > 10
    closed = [each for each in wanted if not any(f"{each}/".startswith(f"{path}/") for path in let_in)]
    # Of this folder only what npm has built.
    assert closed == ["labextension"]
    assert {"labextension/dist", "labextension/install.json"} < set(let_in)


def test_docker_and_the_others_are_told_the_same() -> None:
    of = {
        each: build.Build(each, "base@sha256:0", 7, "1.0", "registry.example.org/", push=True).command(
            "service"
        )
        for each in build.BUILDERS
    }
    assert of["podman"][1:] == of["buildah"][1:]
    for command in of.values():
        assert "registry.example.org/gpu-pool-service:1.0" in command
        assert "PYTHON_IMAGE=base@sha256:0" in command
        assert command[-1] == "."
    # Times, and what is said of the image beside it, each in the builder's own way.
    assert {"SOURCE_DATE_EPOCH=7", "--output=type=registry,rewrite-timestamp=true"} < set(of["docker"])
    assert {"--sbom=true", "--provenance=mode=max"} < set(of["docker"])
    assert of["podman"][of["podman"].index("--timestamp") + 1] == "7"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--push", "--base=python:3.13", "--prefix=x/"], "has no digest"),
        (["--push", "--base=python@sha256:0"], "Where to?"),
        (["no-such-target"], "no-such-target"),
    ],
)
def test_what_must_not_be_published_is_not(words: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, IMAGES / "build.py", *words], capture_output=True, text=True)
    assert done.returncode != 0
    assert said in done.stderr


@pytest.fixture
def docker(tmp_path: Path) -> dict[str, str]:
    """Return the variables of a docker that says what it does; it has the daemon's builder and ``other``."""
    program = tmp_path / "docker"
    program.write_text(
        "#!/bin/sh\n"
        'case "$2 $3" in\n'
        '"inspect other") echo "Driver:  docker-container" ;;\n'
        'inspect*) echo "Driver:  docker" ;;\n'
        '*) echo "did $*" ;;\n'
        "esac\n"
    )
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ([], 0, "--output=type=docker --"),
        (["--options=--builder=other"], 0, "--output=type=docker,rewrite-timestamp=true "),
        (["--push"], 1, "nor keep statements"),
        (["--push", "--options=--builder=other"], 0, "--output=type=registry,rewrite-timestamp=true "),
    ],
)
def test_the_builder_in_dockers_daemon_builds_without_times_and_does_not_push(
    docker: dict[str, str], more: list[str], code: int, said: str
) -> None:
    words = ["service", "--builder=docker", "--base=base@sha256:0", "--prefix=registry.example.org/", *more]
    command = [sys.executable, IMAGES / "build.py", *words]
    done = subprocess.run(command, env=docker, capture_output=True, text=True)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    own = "--options=--builder=other" not in more
    assert ("docker buildx create --use" in done.stdout + done.stderr) == own
    assert ("did buildx build" in done.stdout) == (code == 0)


def test_a_time_that_is_given_is_told_once(tmp_path: Path) -> None:
    """Podman 5.8 fails where it has both the option and the variable."""
    program = tmp_path / "podman"
    program.write_text('#!/bin/sh\necho "did $*; time ${SOURCE_DATE_EPOCH-unset}"\n')
    program.chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SOURCE_DATE_EPOCH": "7"}
    command = [sys.executable, IMAGES / "build.py", "service", "--builder=podman", "--base=base@sha256:0"]
    said = subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout
    assert "--timestamp 7 " in said
    assert said.endswith("; time unset\n")
