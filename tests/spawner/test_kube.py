"""Servers on Kubernetes: what is chosen, and what a pod gets. No cluster, no Hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubespawner import KubeSpawner
from traitlets import TraitError

from gpu_pool.cluster.dialects import choose
from gpu_pool.cluster.export import documents
from gpu_pool.courses import CourseFile, Courses, parse_course
from gpu_pool_client import BadRequest, GpuPoolError, NotAllowed, parse_request
from gpu_pool_spawner.choices import OwnCourses
from gpu_pool_spawner.kube import GPUPoolKubeSpawner
from gpu_pool_spawner.kube_choices import chosen, options_of_form, options_of_link, request_of, server_choices
from gpu_pool_spawner.kube_cluster import ClusterSupply, capacity
from gpu_pool_spawner.kube_profiles import Profile, configured_pod, faults, pod_of, profile_of, settings_of
from gpu_pool_spawner.page import SpawnPage, spawn_page
from support.clusters import everything, hami
from support.kube_profiles import HAMI, NOW, PODS, SERVER, TEXT, course, dialect, profile


def base(**container: Any) -> dict[str, Any]:
    made = {"name": "notebook", "image": "any", "env": [{"name": "A", "value": "1"}], **container}
    metadata = {"name": "jupyter-ada", "labels": {"app.kubernetes.io/managed-by": "kubespawner"}}
    return {"metadata": metadata, "spec": {"containers": [made]}}


def test_a_form_means_a_course_and_its_slice() -> None:
    assert options_of_form({"course": ["ml/Small one"]}) == {"course": "ml", "slice": "Small one"}
    assert options_of_form({"course": ["ml"]}) == {"course": "ml"}
    assert options_of_form({"course": [""]}) == {}
    assert options_of_link({"course": ["ml"], "slice": ["2%"]}) == {"course": "ml", "slice": "2%"}
    assert chosen({"course": "ml", "slice": "2%"}) == ("ml", "2%")


@pytest.mark.parametrize(
    "options",
    [{"slice": ["Small"]}, {"course": "ml", "slice": 1}, {"course": "ml", "labels": {}}, {"profile": "x"}],
)
def test_anything_else_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        chosen(options)


@pytest.mark.parametrize(
    ("slice_name", "request_"),
    [(None, "2%"), ("Two", "2"), ("2", "2"), ("Small", "2%"), ("5%", "5%"), ("2%", "2%")],
)
def test_a_slice_is_chosen_by_name_or_by_size(slice_name: str | None, request_: str) -> None:
    assert request_of(SERVER, slice_name) == parse_request(request_)


@pytest.mark.parametrize("slice_name", ["Huge", "20%", "3", "1 model=A100"])
def test_a_slice_that_is_not_offered_is_refused(slice_name: str) -> None:
    with pytest.raises(GpuPoolError):
        request_of(SERVER, slice_name)


def test_a_server_whose_kernels_have_slices_has_none() -> None:
    assert request_of(PODS, None) is None
    with pytest.raises(BadRequest, match="each of its kernels gets one"):
        request_of(PODS, "Small")


def test_a_course_sets_what_its_file_says() -> None:
    assert settings_of(PODS, {}) == {}
    assert settings_of(SERVER, {"mem_guarantee": 2**30, "cpu_guarantee": 4}) == {
        "image": "example.org/ml:1",
        "cpu_limit": 2.0,
        "cpu_guarantee": 2.0,
        "mem_limit": 4 * 2**30,
        "mem_guarantee": 2**30,
        "storage_capacity": "10240Mi",
        "start_timeout": 600,
    }


@pytest.mark.parametrize("name", list(everything()))
def test_every_dialect_puts_a_slice_or_a_gpu_into_a_server(name: str) -> None:
    speaks = choose(*everything()[name]).dialect
    assert speaks is not None
    granted = 0
    for text in ("2%", "4GiB", "14%", "1"):
        try:
            made = profile(text, speaks)
        except GpuPoolError:
            continue
        granted += 1
        before = base(command=["jupyterhub-singleuser"])
        after = pod_of(before, made, "ada", speaks)
        labels = after["metadata"]["labels"]
        assert (labels["jupyter-gpu-pool/user"], labels["jupyter-gpu-pool/course"]) == ("ada", "ml")
        assert labels["app.kubernetes.io/managed-by"] == "kubespawner"
        assert after["spec"]["activeDeadlineSeconds"] == 7200
        assert before == base(command=["jupyterhub-singleuser"])
        many = name.startswith("kai") and text != "1"  # KAI shares a GPU among any number of pods
        assert capacity(made, ClusterSupply(speaks)) >= (14 if many else 1)
    assert granted


def test_a_server_has_no_variables_that_the_cluster_makes_of_services_unless_that_is_configured() -> None:
    for made in (None, profile("2%"), Profile("ml", PODS)):
        assert pod_of(base(), made, "ada", HAMI)["spec"]["enableServiceLinks"] is False
    configured = base()
    configured["spec"]["enableServiceLinks"] = True
    assert pod_of(configured, None, "ada", HAMI)["spec"]["enableServiceLinks"] is True


def test_a_server_is_in_the_queue_of_its_course_where_kueue_runs() -> None:
    label = "kueue.x-k8s.io/queue-name"
    for made in (profile("2%"), Profile("ml", PODS)):
        assert pod_of(base(), made, "ada", HAMI, kueue=True)["metadata"]["labels"][label] == "gpu-pool-ml"
        assert label not in pod_of(base(), made, "ada", HAMI)["metadata"]["labels"]
    queues, _ = documents({"ml": SERVER}, HAMI, "ns", kueue=True)
    assert queues[-1]["metadata"]["name"] == "gpu-pool-ml"


def test_what_a_course_has_set_is_undone_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ml.yaml").write_text(TEXT.format("kernels: server, cpu: 2, start_within: 10min"))
    (tmp_path / "plain.yaml").write_text(TEXT.format(""))
    # As the Hub has it, but with no cluster to connect to and no user to name a pod for.
    monkeypatch.setattr(KubeSpawner, "clear_state", lambda _: None)
    spawner = GPUPoolKubeSpawner.__new__(GPUPoolKubeSpawner)
    spawner.courses_dir, spawner.course_namespace = str(tmp_path), "course-{course}"
    spawner.start_timeout, spawner.namespace, spawner.storage_pvc_ensure = 60, "all", True

    def settings_at_start(**options: str) -> tuple[object, ...]:
        spawner.user_options = options
        spawner.clear_state()
        spawner.start().close()
        return spawner.cpu_limit, spawner.cpu_guarantee, spawner.start_timeout, spawner.namespace

    (tmp_path / "brief.yaml").write_text(TEXT.format("home: none"))
    assert settings_at_start(course="brief") == (None, None, 60, "course-brief")
    assert spawner.storage_pvc_ensure is False

    assert settings_at_start(course="ml") == (2.0, 2.0, 600, "course-ml")
    assert settings_at_start(course="plain") == (None, None, 60, "course-plain")
    assert settings_at_start(course="ml", slice="Two") == (2.0, 2.0, 600, "course-ml")
    assert settings_at_start(course="gone") == (None, None, 60, "all")
    assert spawner.storage_pvc_ensure is True


@pytest.mark.parametrize(
    "wrong",
    [
        {"dialect": "hummy"},
        {"dialect": "shared"},
        {"dialect_options": {"que": "x"}},
        {"dialect_options": {"context_mib": "350"}},
        {"course_namespace": "Course {course}"},
    ],
)
def test_a_setting_that_cannot_be_is_refused_when_the_hub_starts(wrong: dict[str, Any]) -> None:
    spawner = GPUPoolKubeSpawner.__new__(GPUPoolKubeSpawner)
    ((name, value),) = wrong.items()
    with pytest.raises(TraitError, match=name):
        setattr(spawner, name, value)


def test_a_server_without_a_slice_sees_no_gpu() -> None:
    before = base()
    before["spec"]["initContainers"] = [{"name": "prepare", "image": "any"}]
    made = pod_of(before, Profile("ml", PODS), "ada", None)
    void = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
    assert made["spec"]["containers"][0]["env"] == [{"name": "A", "value": "1"}, void]
    assert made["spec"]["initContainers"][0]["env"] == [void]
    assert pod_of(before, None, "ada", HAMI)["spec"]["containers"][0]["env"][-1] == void


LASTING: list[dict[str, Any]] = [
    {"name": "home", "persistentVolumeClaim": {"claimName": "claim-ada"}},
    {"name": "shared", "nfs": {"server": "files", "path": "/"}},
    {"name": "node", "hostPath": {"path": "/srv"}},
    {"name": "driver", "csi": {"driver": "files.example.org"}},
]
PASSING: list[dict[str, Any]] = [
    {"name": "certificates", "secret": {"secretName": "hub"}},
    {"name": "files", "configMap": {"name": "hub"}},
    {"name": "shm", "emptyDir": {"medium": "Memory"}},
]


@pytest.mark.parametrize("kernels", ["pods", "server"])
def test_a_course_without_homes_has_nothing_that_lasts(kernels: str) -> None:
    mounts = [{"name": each["name"], "mountPath": f"/{each['name']}"} for each in LASTING]
    before = base(volumeMounts=mounts)
    before["spec"]["volumes"] = [*LASTING, *PASSING]
    request = parse_request("2%") if kernels == "server" else None

    def volumes(**said: object) -> list[dict[str, Any]]:
        made = profile_of("ml", course(kernels=kernels, **said), request, HAMI)
        spec = pod_of(before, made, "ada", HAMI)["spec"]
        assert spec["containers"][0]["volumeMounts"] == mounts
        return list(spec["volumes"])

    empty = [{"name": each["name"], "emptyDir": {}} for each in LASTING]
    assert volumes(home="none") == [*empty, *PASSING]
    assert volumes() == volumes(home="10GiB") == [*LASTING, *PASSING]


@pytest.mark.parametrize("kernels", ["pods", "server"])
def test_the_page_says_beforehand_that_work_is_lost(kernels: str) -> None:
    spawner = GPUPoolKubeSpawner.__new__(GPUPoolKubeSpawner)
    brief, kept = course(kernels=kernels, home="none"), course(kernels=kernels)

    def shown(open_: CourseFile) -> str:
        courses = {"ml": open_}
        choices = server_choices(courses, ClusterSupply(HAMI), NOW, may_wait=False)
        notes = spawner.server_notes(courses)
        return spawn_page(SpawnPage(OwnCourses(courses), None, NOW, servers=choices, notes=notes))

    words = "This course has no home folder: your work is lost when the server ends."
    assert words in shown(brief)
    assert words not in shown(kept)


@pytest.mark.parametrize(
    "lifting",
    [
        {"env": [{"name": "CUDA_DISABLE_CONTROL", "value": "true"}]},
        {"envFrom": [{"secretRef": {"name": "any"}}]},
        {"securityContext": {"privileged": True}},
        {"resources": {"limits": {"nvidia.com/gpu": "8"}}},
    ],
)
@pytest.mark.parametrize("made", [profile("2%"), Profile("ml", PODS), None])
def test_what_would_lift_a_limit_is_refused(lifting: dict[str, Any], made: Profile | None) -> None:
    with pytest.raises(NotAllowed):
        pod_of(base(**lifting), made, "ada", HAMI)


def test_a_server_has_a_limit_where_the_cluster_has_limits_and_else_it_is_told() -> None:
    speaks = choose(*everything()["kai-nvfractions"]).dialect
    assert speaks is not None
    made = profile("2%..10%", speaks)
    annotations = pod_of(base(), made, "ada", speaks)["metadata"]["annotations"]
    key = "nvidia.com/container.notebook.gpu-memory"
    assert (annotations[f"{key}.request"], annotations[f"{key}.limit"]) == ("655Mi", "3276Mi")
    # As many servers as of the guarantee alone.
    alone = profile("2%", speaks)
    assert capacity(made, ClusterSupply(speaks)) == capacity(alone, ClusterSupply(speaks))
    text = TEXT.replace("request: 2%", "request: 2%..10%").format("kernels: server")
    courses = Courses({"ml": parse_course("ml.yaml", text.encode())})
    told = [words for words in faults(courses, base(), HAMI) if "2%..10%" in words]
    assert len(told) == 1
    assert told[0].endswith("Ask for 2%: the guarantee alone can be had here.")


def test_what_would_fail_at_a_start_is_told_when_it_is_loaded() -> None:
    courses = Courses({"ml": SERVER, "pods": PODS})
    assert list(faults(courses, base(), HAMI)) == [
        "The slice Two of the course ml cannot be given on this cluster: You asked for 2 GPUs on one node; "
        "no node has more than 1 that match. Ask for at most 1."
    ]
    lifting = base(env=[{"name": "CUDA_DISABLE_CONTROL"}])
    assert "CUDA_DISABLE_CONTROL" in next(faults(courses, lifting, HAMI))
    # As Zero to JupyterHub's chart configures one, unless it is told otherwise.
    first = {"name": "block-cloud-metadata", "securityContext": {"privileged": True}}
    names = "extra_container_config environment extra_resource_limits extra_resource_guarantees"
    nothing = {name: {} for name in f"{names} extra_labels extra_annotations extra_pod_config".split()}
    spawner = SimpleNamespace(privileged=False, init_containers=[first], **nothing)
    assert "privileged" in next(faults(courses, configured_pod(spawner), HAMI))


@pytest.mark.parametrize(
    ("wanted", "liked"), [("nvlink", ["n1"]), ("t4", ["n2"]), ("H100", None), ("", None), ("tesla", None)]
)
def test_gpus_are_preferred_where_there_are_several_kinds(wanted: str, liked: list[str] | None) -> None:
    both = dialect(hami("n1"), hami("n2", model="Tesla-T4", memory=32768))
    file = course(kernels="server", **({"prefer": wanted} if wanted else {}))
    spec = pod_of(base(), profile("2%", both, file), "ada", both)["spec"]
    if liked is None:
        assert "affinity" not in spec
        return
    (term,) = spec["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["preference"]["matchExpressions"][0]["values"] == liked
