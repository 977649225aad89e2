"""The pod of a kernel: restricted, pinned to its node, and by nothing that its user says less so."""

from __future__ import annotations

import base64
import json
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cluster import manifests
from gpu_pool.cluster.dialects import Cluster, PodBans, PodParts, choose
from gpu_pool.cluster.manifests import KernelPodRequest
from gpu_pool.cluster.notebooks import HomeMount, HomeVolume, Identity, Notebook
from gpu_pool.cluster.pod_choices import ContainerSettings
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
from support.kernel_pods import command

NOTEBOOK = Notebook(
    "hub",
    "jupyter-ada",
    "u-ada",
    "ada",
    "",
    "n1",
    "img:1",
    HomeVolume("claim-ada"),
    pull_secrets=("regcred",),
)
PORTS = {"shell_port": 9751, "iopub_port": 9752, "stdin_port": 9753, "control_port": 9754, "hb_port": 9755}
CONNECTION: dict[str, Any] = {
    **PORTS, "key": "k", "signature_scheme": "hmac-sha256", "transport": "tcp",
    "curve_publickey": "p" * 40, "curve_secretkey": "s" * 40,
}  # fmt: skip
RUN_AS = Identity(1000, 100, fs_group=100)
BODY = ContainerSettings("course:2", 2.0, 4096, "/home/jovyan", HomeVolume("claim-ada"), RUN_AS)
dialect = choose(Cluster.read([hami()])).dialect
assert dialect is not None
BANS = dialect.table.bans


def order(
    *argv: str, body: ContainerSettings = BODY, parts: PodParts | None = None, **more: Any
) -> KernelPodRequest:
    connection = more.pop("connection", CONNECTION)
    terms = Terms(ends_at=more.pop("ends_at", None), parks_in_pod=more.pop("parks_in_pod", False))
    asked = KernelCommand(argv or ("python3", "-f", "{connection_file}"), connection, **more)
    part = Slice(Device("GPU-1", 0, "V100", 32768, node="n1"), 20, 655)
    lease = Lease(
        "7-0123abcd", "k", parse_request("2%"), Holder("ada@ä", "cs101"), LeaseState.HELD, 1.0,
        held_at=2.0, slices=(part,), terms=terms,
    )  # fmt: skip
    return KernelPodRequest("gpu-pool", lease, NOTEBOOK, asked, "n1", parts or PodParts(), BANS, body)


def pod(made: KernelPodRequest) -> dict[str, Any]:
    return manifests.pod(made, "gpu-pool-7-0123abcd-1", now=1_000.0)


def container(made: KernelPodRequest) -> dict[str, Any]:
    (only,) = pod(made)["spec"]["containers"]
    found: dict[str, Any] = only
    return found


def environment(made: KernelPodRequest) -> dict[str, str]:
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
    ephemeral = pod(order(body=ContainerSettings("i", 0, 0, "/home/jovyan", None, RUN_AS)))["spec"]
    assert ephemeral["volumes"][0] == {"name": "home", "emptyDir": {}}


@pytest.mark.parametrize(("ends_at", "seconds"), [(None, None), (4_600.0, 3_660), (900.0, 1)])
def test_a_pod_ends_by_itself_soon_after_its_longest_lease(
    ends_at: float | None, seconds: int | None
) -> None:
    assert pod(order(ends_at=ends_at))["spec"].get("activeDeadlineSeconds") == seconds


def test_a_pod_that_can_be_parked_has_no_deadline_since_nobody_knows_how_long_it_will_be() -> None:
    assert "activeDeadlineSeconds" not in pod(order(ends_at=4_600.0, parks_in_pod=True))["spec"]


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


def test_a_home_is_mounted_as_the_notebook_server_has_it() -> None:
    mounts = (
        HomeMount("users/ada", read_only=True, recursive_read_only="IfPossible", propagation="None"),
        HomeMount("shared", below="shared/data"),
    )
    body = replace(BODY, home=HomeVolume("homes", mounts, is_read_only=True))
    made = pod(order(body=body))["spec"]
    assert made["volumes"][0] == {
        "name": "home",
        "persistentVolumeClaim": {"claimName": "homes", "readOnly": True},
    }
    assert made["containers"][0]["volumeMounts"][:2] == [
        {
            "name": "home", "mountPath": "/home/jovyan", "subPath": "users/ada", "readOnly": True,
            "recursiveReadOnly": "IfPossible", "mountPropagation": "None",
        },
        {"name": "home", "mountPath": "/home/jovyan/shared/data", "subPath": "shared"},
    ]  # fmt: skip


def test_a_kernel_touches_files_as_the_notebook_server_does() -> None:
    run_as = Identity(4711, 5000, 6000, (7000,), "Strict", "s0:c1,c2", host_users=False)
    spec = pod(order(body=replace(BODY, run_as=run_as)))["spec"]
    security = spec["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (4711, 5000, 6000)
    assert (security["supplementalGroups"], security["supplementalGroupsPolicy"]) == ([7000], "Strict")
    assert (security["seLinuxOptions"], spec["hostUsers"]) == ({"level": "s0:c1,c2"}, False)


def test_without_a_group_for_its_files_a_volume_keeps_its_own_and_the_key_can_be_read() -> None:
    spec = pod(order(body=replace(BODY, run_as=replace(RUN_AS, fs_group=None))))["spec"]
    assert "fsGroup" not in spec["securityContext"]
    assert spec["volumes"][1]["secret"]["defaultMode"] == 0o444
    assert pod(order())["spec"]["volumes"][1]["secret"]["defaultMode"] == 0o440


def test_the_connection_file_can_be_written_by_its_kernel_alone() -> None:
    made = container(order())
    assert made["args"] == ["python3", "-f", "/run/gpu-pool/connection.json"]
    mounts = {each["name"]: each for each in made["volumeMounts"]}
    assert mounts["connection-secret"] == {
        "name": "connection-secret", "mountPath": "/run/gpu-pool-secret", "readOnly": True
    }  # fmt: skip
    assert mounts["connection"] == {"name": "connection", "mountPath": "/run/gpu-pool"}
    volumes = {each["name"]: each for each in pod(order())["spec"]["volumes"]}
    assert volumes["connection"]["emptyDir"]["medium"] == "Memory"
    assert volumes["connection-secret"]["secret"]["secretName"] == "gpu-pool-7-0123abcd-1"


def test_a_kernel_is_started_with_a_copy_that_only_it_can_read(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "secret/connection.json").write_text("keys")
    (tmp_path / "secret/connection.json").chmod(0o440)
    made = container(
        order(
            "sh", "-c", 'cat "$1"; echo more >> "$1"; touch made; echo "$2"', "k", "{connection_file}", "a  b"
        )
    )
    folders = {"/run/gpu-pool-secret": str(tmp_path / "secret"), "/run/gpu-pool/": f"{tmp_path}/run/"}
    words = [*made["command"], *made["args"]]
    for there, here in folders.items():
        words = [word.replace(there, here) for word in words]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, umask=0o022)
    assert (done.stdout, done.stderr) == ("keysa  b\n", "")
    assert (tmp_path / "run/connection.json").read_text() == "keysmore\n"
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("run/connection.json", "made")]
    # What the user's own cells write is as it always is.
    assert modes == [0o600, 0o644]


@pytest.mark.parametrize("name", ["", "a b", "a;b", "a,b", "$(a)", "-a", "a.", "1a", "a\n"])
def test_what_is_preloaded_has_the_name_of_a_module(name: str) -> None:
    asked = KernelCommand(("python3",), CONNECTION, preload=("numpy.linalg", name))
    with pytest.raises(BadRequest, match="modules, named as in import"):
        manifests.check_command(asked, BANS, require_curve=True)
    usual = replace(asked, preload=("numpy.linalg", "größe"))
    manifests.check_command(usual, BANS, require_curve=True)
    assert order().launch != replace(order(), command=usual).launch


TEXTS = {"launch.py": "import sys\nprint('supervised', *sys.argv[1:])\n"}
FILES = {**TEXTS, "__pycache__/launch.cpython-313.pyc": b"code"}


def test_a_supervisor_is_mounted_for_all_to_read_where_there_is_one() -> None:
    made = manifests.supervisor(FILES, "gpu-pool")
    assert (made["data"], made["immutable"]) == (TEXTS, True)
    assert made["binaryData"] == {"launch.cpython-313.pyc": "Y29kZQ=="}
    alike = {**TEXTS, "__pycache__/launch.cpython-313.pyc": b"edoc"}
    assert manifests.supervisor(alike, "gpu-pool")["metadata"]["name"] == made["metadata"]["name"]
    other = manifests.supervisor({"launch.py": ""}, "gpu-pool")
    assert made["metadata"]["name"] != other["metadata"]["name"]
    assert "gpu-pool-supervisor-" in made["metadata"]["name"]
    found = pod(replace(order(), supervisor=made))["spec"]
    # A pod whose ConfigMap somebody has deleted starts its kernel all the same.
    items = [
        {"key": "launch.py", "path": "launch.py"},
        {"key": "launch.cpython-313.pyc", "path": "__pycache__/launch.cpython-313.pyc"},
    ]
    assert {"name": made["metadata"]["name"], "items": items, "optional": True} in [
        each.get("configMap") for each in found["volumes"]
    ]
    mount = {"name": "supervisor", "mountPath": "/run/gpu-pool-supervisor", "readOnly": True}
    assert mount in found["containers"][0]["volumeMounts"]
    assert mount["name"] not in [each["name"] for each in pod(order())["spec"]["volumes"]]


@pytest.mark.parametrize(
    ("is_there", "path", "said"),
    [
        (True, "", "supervised supervisor --connection {} --preload=numpy,os.path -- echo a  b {}"),
        (False, "", "a  b {}"),
        (True, "/nowhere", "a  b {}"),
    ],
)
def test_a_kernel_runs_below_the_supervisor_where_that_and_a_python_are_there(
    tmp_path: Path, is_there: bool, path: str, said: str
) -> None:
    (tmp_path / "gpu-pool-secret").mkdir()
    (tmp_path / "gpu-pool-secret/connection.json").write_text("keys")
    (tmp_path / "gpu-pool").mkdir()
    if is_there:
        (tmp_path / "gpu-pool-supervisor").mkdir()
        (tmp_path / "gpu-pool-supervisor/launch.py").write_text(TEXTS["launch.py"])
    order_ = replace(
        order("echo", "a  b", "{connection_file}", preload=("numpy", "os.path")),
        supervisor=manifests.supervisor(FILES, "gpu-pool"),
    )
    made = container(order_)
    words = [word.replace("/run/", f"{tmp_path}/") for word in (*made["command"], *made["args"])]
    if path:  # an image with a shell and no Python
        words[2] = f"PATH={tmp_path / 'bin'}; {words[2]}"
        (tmp_path / "bin").mkdir()
        for name in ("cat", "echo"):
            (tmp_path / "bin" / name).symlink_to(f"/bin/{name}")
    done = subprocess.run(words, capture_output=True, text=True)
    file = tmp_path / "gpu-pool/connection.json"
    assert (done.stdout, done.stderr) == (f"{said.format(file, file)}\n", "")


def test_a_supervisor_has_room_for_the_variables_that_its_kernels_show(tmp_path: Path) -> None:
    made = container(replace(order("echo"), supervisor=manifests.supervisor(FILES, "gpu-pool")))
    (tmp_path / "gpu-pool-secret").mkdir()
    (tmp_path / "gpu-pool-secret/connection.json").write_text("keys")
    for name in ("gpu-pool", "gpu-pool-supervisor"):
        (tmp_path / name).mkdir()
    (tmp_path / "gpu-pool-supervisor/launch.py").write_text(
        "import os; print(len(os.environ['GPU_POOL_TEMPLATE']))"
    )
    words = [word.replace("/run/", f"{tmp_path}/") for word in (*made["command"], *made["args"])]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "16384\n"


@pytest.mark.parametrize(
    ("argv", "started"),
    [
        (("python3", "-Xfrozen_modules=off", "-m", "ipykernel_launcher"), "python3 -Xfrozen_modules=off"),
        (("python3", "-Xfrozen_modules=off", "-S", "-m", "ipykernel_launcher"), "python3 -I -S"),
        (("R", "-Xfrozen_modules=off", "-m"), "python3 -I -S"),
    ],
)
def test_a_supervisor_is_started_as_its_kernel_where_that_is_forked_of_it(
    argv: Sequence[str], started: str
) -> None:
    made = container(replace(order(*argv), supervisor=manifests.supervisor(FILES, "gpu-pool")))
    assert f"exec {started} /run/gpu-pool-supervisor/launch.py supervisor" in made["command"][2]


def test_a_kernel_does_not_wait_long_for_a_machine_that_is_lost() -> None:
    body = replace(BODY, tolerations=("lab",), lost_after=30)
    *_, lab, not_ready, unreachable = pod(order(body=body))["spec"]["tolerations"]
    assert lab == {"key": "lab", "operator": "Exists"}
    assert [not_ready, unreachable] == [
        {
            "key": f"node.kubernetes.io/{why}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": 30,
        }
        for why in ("not-ready", "unreachable")
    ]


def test_a_kernel_is_not_the_first_process_of_its_pod() -> None:
    assert pod(order())["spec"]["shareProcessNamespace"] is True


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
    assert container(made)["args"][2] == "echo $$(HOSTNAME) $$X $$$$"
    assert environment(made)["A"] == "$$(GPU_POOL_LEASE)"


@pytest.mark.parametrize("name", ["CUDA_DISABLE_CONTROL", "NVIDIA_VISIBLE_DEVICES"])
def test_variables_that_lift_limits_are_refused(name: str) -> None:
    lifting = KernelCommand(("x",), CONNECTION, {name: "true"})
    with pytest.raises(NotAllowed, match=f"sets the variable {name}"):
        manifests.check_command(lifting, BANS, require_curve=True)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (KernelCommand((), CONNECTION), "1 to 200 words"),
        (KernelCommand(("x\0",), CONNECTION), "no NUL"),
        (KernelCommand(("x",), CONNECTION, {"A B": "1"}), "not the name of a variable"),
        (KernelCommand(("x",), {**CONNECTION, "hb_port": 0}), "lacks hb_port"),
        (KernelCommand(("x",), {**CONNECTION, "hb_port": "22"}), "lacks hb_port"),
        (KernelCommand(("x",), {k: v for k, v in CONNECTION.items() if k != "key"}), "lacks key"),
        (KernelCommand(("x",), {**CONNECTION, "transport": "ipc"}), "the transport tcp"),
        # With an empty key, or without a scheme, messages are not signed.
        (KernelCommand(("x",), {**CONNECTION, "key": ""}), "lacks key"),
        (KernelCommand(("x",), {**CONNECTION, "key": "k" * 20_000}), "lacks key"),
        (KernelCommand(("x",), {**CONNECTION, "signature_scheme": ""}), "lacks signature_scheme"),
        (KernelCommand(("x",), {**CONNECTION, "kernel_name": {"a": 1}}), "lacks kernel_name"),
    ],
)
def test_what_no_pod_can_be_made_of_is_refused(wrong: KernelCommand, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        manifests.check_command(wrong, PodBans(), require_curve=True)


def test_a_connection_in_the_clear_is_refused_unless_it_is_allowed() -> None:
    plain = {name: value for name, value in CONNECTION.items() if not name.startswith("curve")}
    in_the_clear = KernelCommand(("x",), plain)
    with pytest.raises(NotAllowed, match="unencrypted"):
        manifests.check_command(in_the_clear, PodBans(), require_curve=True)
    manifests.check_command(in_the_clear, PodBans(), require_curve=False)


@pytest.mark.parametrize("require", [True, False])
@pytest.mark.parametrize("name", ["curve_publickey", "curve_secretkey"])
@pytest.mark.parametrize("value", ["", " " * 40, "k" * 39, "k" * 41, "k" * 39 + "\n", "ä" * 40, None, 40])
def test_a_key_that_encrypts_nothing_is_no_key(name: str, value: object, require: bool) -> None:
    useless = KernelCommand(("x",), {**CONNECTION, name: value})
    with pytest.raises(BadRequest, match=f"no {name} that could encrypt"):
        manifests.check_command(useless, PodBans(), require_curve=require)


def test_half_a_pair_of_keys_is_refused_even_where_none_is_required() -> None:
    half = {name: value for name, value in CONNECTION.items() if name != "curve_secretkey"}
    with pytest.raises(BadRequest, match="no curve_secretkey"):
        manifests.check_command(KernelCommand(("x",), half), PodBans(), require_curve=False)


def test_the_keys_of_zeromq_are_accepted() -> None:
    for _ in range(50):
        manifests.check_command(command(), PodBans(), require_curve=True)


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
