"""Which pod is whose notebook server, and which volume its home."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_pool.kubernetes.notebooks import Home, read_notebook
from support.kernel_pods import notebook

HOME = "/home/jovyan"


def read(pod: dict[str, Any]) -> Any:
    pod["metadata"]["uid"] = "u1"
    return read_notebook(pod, HOME)


def test_the_names_are_those_of_the_annotations_and_the_home_is_what_is_mounted_there() -> None:
    found = read(notebook("Zoë O'Hara", "hub", server="big data", node="n1"))
    assert (found.user, found.server, found.node) == ("Zoë O'Hara", "big data", "n1")
    assert found.home == Home("claim-Zoë O'Hara")
    assert found.image == "example.org/notebook:1"
    assert not found.is_ending


def test_other_pods_are_nobodys() -> None:
    pod = notebook("ada", "hub")
    del pod["metadata"]["annotations"]
    # A label is not believed: it holds what fits into a label.
    pod["metadata"]["labels"] = {"hub.jupyter.org/username": "ada"}
    assert read(pod) is None
    assert read_notebook({"metadata": {}}, HOME) is None


@pytest.mark.parametrize("path", ["/home/jovyan/", "/home/jovyan"])
def test_a_part_of_a_volume_stays_a_part(path: str) -> None:
    pod = notebook("ada", "hub")
    pod["spec"]["containers"][0]["volumeMounts"] = [
        {"name": "home", "mountPath": path, "subPath": "users/ada"}
    ]
    assert read(pod).home == Home("claim-ada", "users/ada")


def test_a_volume_elsewhere_is_not_the_home() -> None:
    pod = notebook("ada", "hub")
    pod["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] = "/data"
    assert read(pod).home is None
    assert read(notebook("ada", "hub", claim="")).home is None


def test_a_server_that_is_being_stopped_is_ending() -> None:
    pod = notebook("ada", "hub")
    pod["metadata"]["deletionTimestamp"] = "now"
    assert read(pod).is_ending
    failed = notebook("ada", "hub") | {"status": {"phase": "Failed"}}
    assert read(failed).is_ending
