"""The pod of a kernel: restricted, pinned to its node, and by nothing that its user says less so."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from gpu_pool.dialects import Bans, Cluster, PodParts, choose
from gpu_pool.kubernetes import manifests
from gpu_pool.kubernetes.manifests import Body, Order
from gpu_pool.kubernetes.notebooks import Home, Notebook
from gpu_pool_client import (
    BadRequest,
    Device,
    Holder,
    KernelCommand,
    Lease,
    LeaseState,
    NotAllowed,
    Slice,
    Terms,
    parse_request,
)
from support.clusters import hami

NOTEBOOK = Notebook("hub", "jupyter-ada", "u-ada", "ada", "", "n1", "img:1", Home("claim-ada"), ("regcred",))
PORTS = {"shell_port": 9751, "iopub_port": 9752, "stdin_port": 9753, "control_port": 9754, "hb_port": 9755}
CONNECTION: dict[str, Any] = {
    **PORTS, "key": "k", "signature_scheme": "hmac-sha256", "transport": "tcp",
    "curve_publickey": "p", "curve_secretkey": "s",
}  # fmt: skip
BODY = Body("course:2", 2.0, 4096, "/home/jovyan", Home("claim-ada"), 1000, 100)
dialect = choose(Cluster.read([hami()])).dialect
assert dialect is not None
BANS = dialect.table.bans


def order(*argv: str, body: Body = BODY, parts: PodParts | None = None, **more: Any) -> Order:
    connection = more.pop("connection", CONNECTION)
    ends_at = more.pop("ends_at", None)
    command = KernelCommand(argv or ("python3", "-f", "{connection_file}"), connection, **more)
    part = Slice(Device("GPU-1", 0, "V100", 32768, node="n1"), 20, 655)
    lease = Lease(
        "7-0123abcd", "k", parse_request("2%"), Holder("ada@ä", "cs101"), LeaseState.HELD, 1.0,
        held_at=2.0, slices=(part,), terms=Terms(ends_at=ends_at),
    )  # fmt: skip
    return Order("gpu-pool", lease, NOTEBOOK, command, "n1", parts or PodParts(), BANS, body)


def pod(made: Order) -> dict[str, Any]:
    return manifests.pod(made, "gpu-pool-7-0123abcd-1", now=1_000.0)


def container(made: Order) -> dict[str, Any]:
    (only,) = pod(made)["spec"]["containers"]
    found: dict[str, Any] = only
    return found


def environment(made: Order) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(made)["env"]}


def test_a_pod_may_nothing_that_a_kernel_does_not_need() -> None:
    spec = pod(order())["spec"]
    assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
    assert spec["restartPolicy"] == "Never"
    security = spec["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 1000)
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    own = container(order())["securityContext"]
    assert own["allowPrivilegeEscalation"] is own["privileged"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}


def test_a_pod_goes_where_its_slice_is_and_with_its_notebook_server() -> None:
    made = pod(order(parts=PodParts(node_affinity=({"key": "zone", "operator": "Exists"},))))
    (term,) = made["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]
    assert term["matchExpressions"] == [{"key": "zone", "operator": "Exists"}]
    assert made["metadata"]["ownerReferences"][0]["uid"] == "u-ada"
    assert made["metadata"]["namespace"] == "hub"
    assert made["metadata"]["labels"]["jupyter-gpu-pool/lease"] == "7-0123abcd"
    assert "ä" not in made["metadata"]["labels"]["jupyter-gpu-pool/user"]
    assert made["spec"]["imagePullSecrets"] == [{"name": "regcred"}]


def test_image_memory_and_home_are_the_courses() -> None:
    made = container(order())
    assert made["image"] == "course:2"
    assert made["resources"]["limits"] == {"cpu": "2000m", "memory": "4096Mi"}
    volumes = {each["name"]: each for each in pod(order())["spec"]["volumes"]}
    assert volumes["home"]["persistentVolumeClaim"] == {"claimName": "claim-ada"}
    ephemeral = pod(order(body=Body("i", 0, 0, "/home/jovyan", None, 1000, 100)))["spec"]
    assert ephemeral["volumes"][0] == {"name": "home", "emptyDir": {}}


@pytest.mark.parametrize(("ends_at", "seconds"), [(None, None), (4_600.0, 3_660), (900.0, 1)])
def test_a_pod_ends_by_itself_soon_after_its_longest_lease(
    ends_at: float | None, seconds: int | None
) -> None:
    assert pod(order(ends_at=ends_at))["spec"].get("activeDeadlineSeconds") == seconds


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        (None, "/home/jovyan"),
        ("work/a b", "/home/jovyan/work/a b"),
        ("/home/jovyan/work", "/home/jovyan/work"),
        ("/home/jovyan-2", "/home/jovyan"),
        ("/etc", "/home/jovyan"),
        ("../../etc", "/home/jovyan"),
        ("a/../../b", "/home/jovyan"),
    ],
)
def test_a_kernel_starts_below_its_home(folder: str | None, expected: str) -> None:
    assert container(order(folder=folder))["workingDir"] == expected


def test_the_connection_file_is_read_only_and_its_place_is_told() -> None:
    made = container(order())
    assert made["command"] == ["python3", "-f", "/run/gpu-pool/connection.json"]
    assert {"name": "connection", "mountPath": "/run/gpu-pool", "readOnly": True} in made["volumeMounts"]


def test_the_secret_goes_with_its_pod_and_holds_the_keys_alone() -> None:
    made = {
        "metadata": {
            "name": "p",
            "namespace": "hub",
            "uid": "u-p",
            "labels": pod(order())["metadata"]["labels"],
        }
    }
    secret = manifests.secret(made, KernelCommand(("x",), {**CONNECTION, "ip": "1.2.3.4", "evil": "x"}))
    assert secret["metadata"]["ownerReferences"][0] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "p",
        "uid": "u-p",
    }
    assert secret["immutable"] is True
    said = json.loads(base64.b64decode(secret["data"]["connection.json"]))
    assert said == {**CONNECTION, "ip": "0.0.0.0"}


def test_a_users_variables_do_not_replace_ours() -> None:
    theirs = {"GPU_POOL_MEMORY_MIB": "99999", "CUDA_VISIBLE_DEVICES": "all", "HOME": "/root", "MY": "own"}
    found = environment(order(environment={**theirs, "JUPYTERHUB_API_TOKEN": "t"}))
    assert (found["GPU_POOL_MEMORY_MIB"], found["HOME"], found["MY"]) == ("655", "/home/jovyan", "own")
    # Which GPU it sees is the cluster's affair.
    assert "CUDA_VISIBLE_DEVICES" not in found
    assert "JUPYTERHUB_API_TOKEN" not in found


def test_nothing_that_a_user_wrote_is_expanded() -> None:
    made = order("sh", "-c", "echo $(HOSTNAME) $X $$", environment={"A": "$(GPU_POOL_LEASE)"})
    assert container(made)["command"][2] == "echo $$(HOSTNAME) $$X $$$$"
    assert environment(made)["A"] == "$$(GPU_POOL_LEASE)"


@pytest.mark.parametrize("name", ["CUDA_DISABLE_CONTROL", "NVIDIA_VISIBLE_DEVICES"])
def test_variables_that_lift_limits_are_refused(name: str) -> None:
    command = KernelCommand(("x",), CONNECTION, {name: "true"})
    with pytest.raises(NotAllowed, match=f"sets the variable {name}"):
        manifests.check_command(command, BANS, require_curve=True)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (KernelCommand((), CONNECTION), "1 to 200 words"),
        (KernelCommand(("x\0",), CONNECTION), "no NUL"),
        (KernelCommand(("x",), CONNECTION, {"A B": "1"}), "not the name of a variable"),
        (KernelCommand(("x",), {**CONNECTION, "hb_port": 0}), "lacks hb_port"),
        (KernelCommand(("x",), {**CONNECTION, "hb_port": "22"}), "lacks hb_port"),
        (KernelCommand(("x",), {k: v for k, v in CONNECTION.items() if k != "key"}), "lacks key"),
        (KernelCommand(("x",), {**CONNECTION, "transport": "ipc"}), "the transport tcp"),
    ],
)
def test_what_no_pod_can_be_made_of_is_refused(command: KernelCommand, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        manifests.check_command(command, Bans(), require_curve=True)


def test_a_connection_in_the_clear_is_refused_unless_it_is_allowed() -> None:
    plain = {name: value for name, value in CONNECTION.items() if not name.startswith("curve")}
    command = KernelCommand(("x",), plain)
    with pytest.raises(NotAllowed, match="unencrypted"):
        manifests.check_command(command, Bans(), require_curve=True)
    manifests.check_command(command, Bans(), require_curve=False)


def test_the_same_kernel_is_the_same_launch_and_its_key_is_not_told_by_it() -> None:
    assert order().launch == order().launch
    others = [order("other"), order(folder="a"), order(connection={**CONNECTION, "key": "k2"})]
    assert len({order().launch, *(each.launch for each in others)}) == 4


def test_pods_of_a_lease_are_numbered() -> None:
    assert manifests.next_name("7-0123abcd", []) == "gpu-pool-7-0123abcd-1"
    names = ["gpu-pool-7-0123abcd-9", "gpu-pool-7-0123abcd-10", "something"]
    assert manifests.next_name("7-0123abcd", names) == "gpu-pool-7-0123abcd-11"


def test_what_the_dialect_asks_for_is_in_the_container() -> None:
    assert dialect is not None
    made = pod(order(parts=dialect.translate(parse_request("2%")).pod))
    limits = made["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpumem"] == "655"
    assert limits["memory"] == "4096Mi"
    assert made["spec"]["schedulerName"] == "hami-scheduler"
