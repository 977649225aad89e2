"""The tests of jupyter_client, nbclient and ipykernel come out with warm kernels as they do anyway.

Every IPython kernel that they start through jupyter_client is warm: see ``support.warm_suite``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import warm_suite
from support.suites import differing, outcomes, required, unpacked

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Suite:
    """Files of a project's tests; those that start kernels through jupyter_client."""

    project: str
    files: Sequence[str]
    options: Sequence[str]
    #: What they import that is not installed with us.
    requirements: Sequence[str]
    #: How many tests pass as they are, and how many kernels are warm, at least.
    tests: int
    kernels: int
    #: Those that read the private route of a message, on which the proxy is one station more.
    of_routes: Sequence[str] = ()


#: Their settings are older than today's pytest-asyncio, which otherwise only warns.
_LOOP = ("-o", "asyncio_default_fixture_loop_scope=function")
SUITES = [
    Suite(
        "jupyter_client",
        ["tests/test_kernelmanager.py", "tests/test_manager.py"],
        ["-p", "no:asyncio"],
        [],
        30,
        10,
    ),
    Suite(
        "nbclient",
        ["tests/test_client.py"],
        _LOOP,
        ["flaky", "ipywidgets", "jupyterlab_widgets", "testpath", "widgetsnbextension", "xmltodict"],
        50,
        40,
    ),
    Suite(
        "ipykernel",
        [f"tests/test_{name}.py" for name in ("async", "debugger", "kernel", "message_spec", "subshells")],
        _LOOP,
        ["coverage", "flaky", "pytest-cov"],
        90,
        30,
        ["tests.test_kernel::test_parent_header_and_ident"],
    ),
]


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.project)
def test_whatever_passes_with_stock_kernels_passes_with_warm_ones(
    suite: Suite, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    cache = request.config.cache
    assert cache is not None
    folder = unpacked(suite.project, cache, tmp_path)
    here = Path(warm_suite.__file__).parents[1]
    paths = [here, *([required(suite.requirements, cache)] if suite.requirements else [])]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, paths))}

    report = tmp_path / "kernels.json"

    def run(name: str, *options: str, **more: str) -> dict[str, str]:
        own = tmp_path / name
        own.mkdir(exist_ok=True)
        return outcomes(folder, suite.files, own, [*suite.options, *options], **variables, **more)

    def stock() -> dict[str, str]:
        return run("stock", JUPYTER_DEFAULT_PROVISIONER_NAME="local-provisioner")

    def warm() -> dict[str, str]:
        return run(
            "warm",
            *("-p", warm_suite.__name__),
            **{warm_suite.REPORT: str(report)},
            JUPYTER_DEFAULT_PROVISIONER_NAME="gpu-pool",
            GPU_POOL_DEFAULT_SLICE="1%",
            GPU_POOL_DEVICES="A100-SXM4-80GB:1",
            GPU_POOL_URL=f"embedded:{tmp_path}/pool/store.db",
        )

    found = differing(stock, warm, at_least=suite.tests)
    assert [each for each in found if each.split(": ")[0] not in suite.of_routes] == []
    started: dict[str, Any] = json.loads(report.read_text())
    print(f"{suite.project}: {len(started['warm'])} warm kernels, {len(started['cold'])} cold ones")
    assert len(started["warm"]) >= suite.kernels
    # The others are programs of the suite's own.
    assert not [argv for argv in started["cold"] if "ipykernel_launcher" in argv], started["said"]
