"""Which pod is whose notebook server, and which volume its home."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpu_pool.cluster.kept_objects import lean_pod
from gpu_pool.cluster.notebooks import HomeVolume, Identity, read_notebook
from support.kernel_pods import notebook

HOME = "/home/jovyan"


def read(pod: dict[str, Any]) -> Any:
    pod["metadata"]["uid"] = "u1"
    # As the service keeps it: what it leaves out of a pod would not be seen.
    return read_notebook(lean_pod(pod), HOME)


def test_the_names_are_those_of_the_annotations_and_the_home_is_what_is_mounted_there() -> None:
    found = read(notebook("Zoë O'Hara", "hub", server="big data", node="n1"))
    assert (found.user, found.server, found.node) == ("Zoë O'Hara", "big data", "n1")
    assert found.home == HomeVolume("claim-Zoë O'Hara")
    assert found.image == "example.org/notebook:1"
    assert not found.is_ending


def test_other_pods_are_nobodys() -> None:
    pod = notebook("ada", "hub")
    del pod["metadata"]["annotations"]
    # A label is not believed: it holds what fits into a label.
    pod["metadata"]["labels"] = {"hub.jupyter.org/username": "ada"}
    assert read(pod) is None
    assert read_notebook({"metadata": {}}, HOME) is None


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


def test_a_home_that_is_not_understood_is_none_and_says_why() -> None:
    pod = notebook("ada", "hub")
    pod["spec"]["volumes"] = [{"name": "home", "hostPath": {"path": "/srv/homes"}}]
    assert (read(pod).home, read(pod).home_problem) == (None, "its volume is of the kind hostPath")


def test_of_several_containers_none_is_guessed_to_be_the_notebook() -> None:
    pod = notebook("ada", "hub")
    beside = {
        "name": "backup",
        "image": "backup:1",
        "volumeMounts": [{"name": "home", "mountPath": HOME, "readOnly": True}],
    }
    pod["spec"]["containers"].insert(0, beside)
    assert (read(pod).home, read(pod).image) == (HomeVolume("claim-ada"), "example.org/notebook:1")
    pod["spec"]["containers"][1]["name"] = "main"
    assert (read(pod).home, read(pod).image) == (None, "")
    assert read(pod).home_problem == "none of the 2 containers of its pod is called notebook"
    # What ran and ended before it counts for nothing.
    pod["spec"]["initContainers"] = [pod["spec"]["containers"].pop(0)]
    assert read(pod).home == HomeVolume("claim-ada")


def test_a_server_runs_as_its_container_says_or_else_its_pod() -> None:
    pod = notebook("ada", "hub")
    assert read(pod).identity == Identity()
    pod["spec"]["securityContext"] = {
        "runAsUser": 1, "runAsGroup": 2, "fsGroup": 3, "supplementalGroups": [4, 0, 5],
        "supplementalGroupsPolicy": "Strict", "seLinuxOptions": {"level": "s0:c1", "type": "spc_t"},
    }  # fmt: skip
    pod["spec"]["hostUsers"] = False
    expected = Identity(1, 2, 3, (4, 5), "Strict", "s0:c1", host_users=False)
    assert read(pod).identity == expected
    pod["spec"]["containers"][0]["securityContext"] = {"runAsUser": 4711}
    assert read(pod).identity == replace(expected, uid=4711)


def test_what_a_server_has_in_its_variables_is_not_kept() -> None:
    pod = notebook("ada", "hub")
    pod["spec"]["containers"][0]["env"] = [{"name": "JUPYTERHUB_API_TOKEN", "value": "secret"}]
    assert "secret" not in str(lean_pod(pod))
