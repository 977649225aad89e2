"""What the doctor says of a cluster's prepared pods."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_pool.cli.checks import check_prepared
from gpu_pool.cli.prepared_pods import prepared_of

PREFIX = "jupyter-gpu-pool"


def pod(uid: str, labels: dict[str, str], *, owner: str = "", **more: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"uid": uid, "labels": {f"{PREFIX}/course": "ml", **labels}}
    metadata["annotations"] = {f"{PREFIX}/node": "n1"}
    metadata["ownerReferences"] = [{"uid": owner}] if owner else []
    return {"metadata": metadata, **more}


def server(uid: str) -> dict[str, Any]:
    made = pod(uid, {"app.kubernetes.io/component": "singleuser-server"})
    made["metadata"]["annotations"] = {"hub.jupyter.org/username": uid}
    return made


def kernel(owner: str, **labels: str) -> dict[str, Any]:
    about = {"app.kubernetes.io/component": "gpu-kernel", f"{PREFIX}/lease": "1-a", **labels}
    return pod(f"kernel-of-{owner}", about, owner=owner)


def prepared(owner: str, *, runs: bool) -> dict[str, Any]:
    made = kernel(owner, **{f"{PREFIX}/prepared": "digits"})
    del made["metadata"]["labels"][f"{PREFIX}/lease"]
    if runs:
        made["status"] = {"podIP": "10.0.0.9", "containerStatuses": [{"state": {"running": {}}}]}
    return made


HOLDER = {"metadata": {"uid": "holder", "labels": {f"{PREFIX}/device-holder": "gpu-pool"}}}


def said(*pods: dict[str, Any], is_shared: bool = True) -> tuple[str, str]:
    (found,) = check_prepared(prepared_of({"ml": 5}, pods, "hub", "gpu-pool", is_shared=is_shared))
    assert found.name == "prepared pods"
    return found.state, found.text


def test_how_many_there_are_and_where() -> None:
    pods = [server(each) for each in ("ada", "bob", "eve")]
    pods += [prepared("ada", runs=True), prepared("bob", runs=False), kernel("eve"), HOLDER]
    assert said(*pods) == ("ok", "ml: 1 of at most 5 ready (n1: 1), 1 starting")


def test_who_begins_in_one_has_it_no_more() -> None:
    taken = kernel("ada", **{f"{PREFIX}/prepared": "digits"})
    assert said(server("ada"), taken, HOLDER) == ("ok", "ml: 0 of at most 5 ready")


@pytest.mark.parametrize(
    ("pods", "is_shared", "why"),
    [
        ([], True, "No notebook server of the course runs."),
        ([server("ada")], False, "a GPU comes with its pod"),
        ([server("ada")], True, "The pool has no GPU now"),
        ([server("ada"), HOLDER], True, "kubectl -n hub exec deploy/gpu-pool -- gpu-pool health"),
    ],
)
def test_why_there_is_none(pods: list[dict[str, Any]], is_shared: bool, why: str) -> None:
    state, text = said(*pods, is_shared=is_shared)
    assert state == "note"
    assert text.startswith("ml: 0 of at most 5 ready. ")
    assert why in text
