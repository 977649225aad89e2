"""The chart of the service, ``charts/gpu-pool``, through Helm."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.control_plane import ASSETS

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "gpu-pool"
#: A course, as a file that an administrator names.
COURSE = f"--set-file=courses.intro-ml={ROOT / 'examples/kubernetes/courses/intro-ml.yaml'}"


def find_helm() -> str | None:
    """Return where Helm is, None if it is nowhere."""
    return shutil.which("helm", path=os.pathsep.join([str(ASSETS), os.environ["PATH"]]))


def helm_program() -> str:
    """Return where Helm is; skip if it is nowhere."""
    found = find_helm()
    if found is None:
        pytest.skip(f"no helm in {ASSETS} or on the PATH")
    return found


def try_helm(*words: str | Path, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Helm and return what came of it."""
    environment = {**os.environ, **({"KUBECONFIG": str(kubeconfig)} if kubeconfig else {})}
    return subprocess.run([helm_program(), *words], capture_output=True, text=True, env=environment)


def helm(*words: str | Path, kubeconfig: Path | None = None) -> str:
    """Run Helm and return what it printed; fail with what it said."""
    done = try_helm(*words, kubeconfig=kubeconfig)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rendered_chart(namespace: str, *options: str) -> list[dict[str, Any]]:
    """Return the objects that the chart makes for a release in a namespace."""
    text = helm("template", "pool", CHART, "--namespace", namespace, *options)
    return [each for each in yaml.safe_load_all(text) if each]


def kinds(objects: Sequence[dict[str, Any]]) -> set[str]:
    """Return which kinds of objects there are."""
    return {each["kind"] for each in objects}
