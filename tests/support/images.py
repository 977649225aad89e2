"""The images of ``examples/kubernetes/Containerfile``, built as its page says, by buildah."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = ROOT / "examples/kubernetes/Containerfile"
#: Where a build finds packages as this machine does, if it is told so.
_SHARED = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
#: A notebook image to begin with: what the Jupyter Docker Stacks have, without their frameworks.
_BASE = """FROM python:3.13-slim
RUN pip install --no-cache-dir jupyterlab jupyterhub ipykernel \\
 && useradd --uid 1000 --gid 100 --create-home jovyan
USER 1000
WORKDIR /home/jovyan
CMD ["jupyterhub-singleuser"]
"""
BASE_NAME = "localhost/gpu-pool-test-base:1"


def build_notebook(folder: Path) -> Path:
    """Build the image of notebooks and kernels; return an archive of it."""
    file = folder / "Containerfile.base"
    file.write_text(_BASE)
    _build(file, folder, "--tag", BASE_NAME)
    return _target("notebook", folder, "--build-arg", f"NOTEBOOK_IMAGE={BASE_NAME}")


def build_service(folder: Path) -> Path:
    """Build the service's image; return an archive of it."""
    return _target("service", folder)


def name_of(target: str) -> str:
    """Return the name of a target's image."""
    return f"localhost/gpu-pool-{target}:0.1.0"


def _target(target: str, folder: Path, *arguments: str) -> Path:
    name = name_of(target)
    _build(CONTAINERFILE, ROOT, "--target", target, "--tag", name, *arguments)
    archive = folder / f"{target}.tar"
    push = ["buildah", "push", "--quiet", name, f"docker-archive:{archive}:{name}"]
    subprocess.run(push, check=True, capture_output=True)
    return archive


def _build(file: Path, context: Path, *arguments: str) -> None:
    """Build an image; skip where what it is made of cannot be fetched."""
    command = ["buildah", "build", "--layers", "--network=host", "--file", str(file), *arguments]
    for path in _SHARED:
        command += ["--volume", f"{path}:{path}:ro"] if Path(path).exists() else []
    done = subprocess.run([*command, str(context)], capture_output=True, text=True)
    if "initializing source docker://" in done.stderr:
        pytest.skip(f"an image to begin with cannot be fetched: {done.stderr[-400:]}")
    assert done.returncode == 0, done.stderr[-3_000:]
