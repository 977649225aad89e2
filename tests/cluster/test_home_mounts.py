"""A home is mounted by a kernel as by its notebook server, or the kernel is refused in words."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_pool.cluster.kept_objects import lean_pod
from gpu_pool.cluster.notebooks import HomeMount, HomeVolume, UnclearMount, read_home
from support.kernel_pods import notebook

HOME = "/home/jovyan"
#: The volume of everybody's homes.
ALL = "homes"


def read(
    *mounts: dict[str, Any],
    env: list[dict[str, Any]] | None = None,
    source: dict[str, Any] | None = None,
    volumes: list[dict[str, Any]] | None = None,
    **more: Any,
) -> HomeVolume | None:
    """Return the home of a server of ada's whose container mounts the volume of everybody's so."""
    pod = notebook("ada", "hub", node="n1")
    pod["metadata"]["uid"] = "u-1"
    pod["spec"]["serviceAccountName"] = "students"
    volume = source or {"persistentVolumeClaim": {"claimName": ALL}}
    pod["spec"]["volumes"] = [{"name": "v", **volume}, {"name": "w", "emptyDir": {}}, *(volumes or [])]
    container = pod["spec"]["containers"][0]
    container["volumeMounts"] = [{"name": "v", "mountPath": HOME} | each for each in mounts]
    container |= {"env": env or []} | more
    kept = lean_pod(pod)
    return read_home(kept, kept["spec"]["containers"][0], HOME)


def value(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "value": text}


def field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


USER = value("JUPYTERHUB_USER", "ada")


@pytest.mark.parametrize(
    "path", ["/home/jovyan/", "/home/jovyan", "/home//jovyan", "/home/./jovyan", "home/jovyan"]
)
def test_a_home_is_found_however_its_path_is_written(path: str) -> None:
    assert read({"mountPath": path, "subPath": "users/ada"}) == HomeVolume(ALL, (HomeMount("users/ada"),))


@pytest.mark.parametrize(
    ("expression", "env", "folder"),
    [
        ("$(JUPYTERHUB_USER)", [USER], "ada"),
        ("homes/$(JUPYTERHUB_USER)/x", [USER], "homes/ada/x"),
        ("$(POD)", [field("POD", "metadata.name")], "jupyter-ada"),
        ("$(A)/$(B)", [field("A", "metadata.namespace"), field("B", "metadata.uid")], "hub/u-1"),
        ("$(A)/$(B)", [field("A", "spec.nodeName"), field("B", "spec.serviceAccountName")], "n1/students"),
        # A variable may be made of those before it.
        ("$(B)", [USER, value("B", "of-$(JUPYTERHUB_USER)")], "of-ada"),
        # The last one of a name counts.
        ("$(A)", [value("A", "one"), value("A", "two")], "two"),
        # What is no reference stays as it is; two dollars are one.
        ("$$(A)", [value("A", "x")], "$(A)"),
        ("$A-$(A)", [value("A", "x")], "$A-x"),
        ("a$(A", [value("A", "x")], "a$(A"),
        # What is put in is not read again.
        ("$(A)", [value("A", "$$(B)"), value("B", "secret")], "$(B)"),
    ],
)
def test_an_expression_names_the_folder_that_the_kubelet_found(
    expression: str, env: list[dict[str, Any]], folder: str
) -> None:
    assert read({"subPathExpr": expression}, env=env) == HomeVolume(ALL, (HomeMount(folder),))


@pytest.mark.parametrize(
    ("expression", "env"),
    [
        ("$(USER)", []),
        ("$(USER)", [value("USER", "")]),
        ("$(USER)", [{"name": "USER"}]),
        # Labels and annotations can change while the server runs.
        ("$(USER)", [field("USER", "metadata.labels['user']")]),
        ("$(USER)", [field("USER", "metadata.annotations['hub.jupyter.org/username']")]),
        ("$(USER)", [field("USER", "status.podIP")]),
        ("$(USER)", [{"name": "USER", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]),
        ("$(USER)", [{"name": "USER", "valueFrom": {"configMapKeyRef": {"name": "s", "key": "k"}}}]),
        ("$(USER)", [{"name": "USER", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}]),
        ("$(USER)", [{"name": "USER", "valueFrom": {"fileKeyRef": {"key": "k"}}}]),
        # One that is not known hides an earlier one of its name.
        ("$(USER)", [value("USER", "ada"), field("USER", "metadata.labels['user']")]),
        # Made of one that is not known here, such as one of envFrom, or comes later.
        ("$(USER)", [value("USER", "of-$(ELSEWHERE)")]),
        ("$(USER)", [value("USER", "$(LATER)"), value("LATER", "bob")]),
    ],
)
def test_an_expression_that_is_not_known_is_refused_and_never_left_out(
    expression: str, env: list[dict[str, Any]]
) -> None:
    with pytest.raises(UnclearMount, match=r"uses 'USER', which is not known"):
        read({"subPathExpr": expression}, env=env)


@pytest.mark.parametrize("folder", ["..", "../bob", "ada/../bob", "/bob", "ada/.."])
def test_no_name_leads_to_the_folder_of_another(folder: str) -> None:
    with pytest.raises(UnclearMount, match="leads out of it"):
        read({"subPathExpr": "$(U)"}, env=[value("U", folder)])
    with pytest.raises(UnclearMount, match="leads out of it"):
        read({"subPath": folder})


def test_a_kernel_may_read_only_where_its_server_may() -> None:
    assert read({"readOnly": True}) == HomeVolume(ALL, (HomeMount(read_only=True),))
    source = {"persistentVolumeClaim": {"claimName": ALL, "readOnly": True}}
    assert read({}, source=source) == HomeVolume(ALL, is_read_only=True)
    deep = read({"readOnly": True, "recursiveReadOnly": "Enabled", "mountPropagation": "None"})
    assert deep == HomeVolume(ALL, (HomeMount("", True, "Enabled", "None"),))


def test_a_folder_of_the_home_that_is_read_only_stays_so() -> None:
    found = read(
        {},
        {"mountPath": f"{HOME}/shared", "subPath": "shared", "readOnly": True},
        {"mountPath": f"{HOME}-2", "subPath": "other"},
        {"name": "w", "mountPath": f"{HOME}/cache"},
    )
    assert found == HomeVolume(ALL, (HomeMount(), HomeMount("shared", read_only=True, below="shared")))


def claimed(name: str, **source: Any) -> dict[str, Any]:
    return {"name": name, "persistentVolumeClaim": {"claimName": ALL, **source}}


@pytest.mark.parametrize(
    ("source", "read_only", "expected"),
    [({}, True, True), ({"readOnly": True}, False, True), ({"readOnly": False}, False, False)],
)
def test_a_folder_of_the_home_that_is_another_volume_of_its_claim_stays_as_it_is(
    source: dict[str, Any], read_only: bool, expected: bool
) -> None:
    found = read(
        {},
        {"name": "x", "mountPath": f"{HOME}/graded", "subPath": "graded", "readOnly": read_only},
        volumes=[claimed("x", **source)],
    )
    assert found == HomeVolume(ALL, (HomeMount(), HomeMount("graded", read_only=expected, below="graded")))


def test_another_volume_of_the_volume_claims_claim_is_refused_if_it_is_not_understood() -> None:
    mount = {"name": "x", "mountPath": f"{HOME}/graded"}
    with pytest.raises(UnclearMount, match="its volume claim says 'next'"):
        read({}, mount, volumes=[claimed("x", next=1)])
    other = {"name": "x", "persistentVolumeClaim": {"claimName": "other", "next": 1}}
    assert read({}, mount, volumes=[other]) == HomeVolume(ALL)


@pytest.mark.parametrize(
    ("mount", "words"),
    [
        ({"mountPropagation": "Bidirectional"}, "its mountPropagation is 'Bidirectional'; accepted: None,"),
        ({"recursiveReadOnly": "Maybe"}, "its recursiveReadOnly is 'Maybe'"),
        ({"readOnly": "yes"}, "its readOnly is 'yes', and neither"),
        ({"subPath": 7}, "its subPath is 7, which is not text"),
        ({"subPath": "a", "subPathExpr": "b"}, "both subPath and subPathExpr"),
        ({"newInNextVersion": "x"}, "its mount says 'newInNextVersion', which this version does not know"),
    ],
)
def test_a_mount_that_is_not_understood_is_refused(mount: dict[str, Any], words: str) -> None:
    with pytest.raises(UnclearMount, match=words):
        read(mount)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"hostPath": {"path": "/srv"}}, "of the kind hostPath"),
        ({"nfs": {"server": "s", "path": "/"}}, "of the kind nfs"),
        ({"emptyDir": {}}, "of the kind emptyDir"),
        ({"csi": {"driver": "d"}}, "of the kind csi"),
        ({"persistentVolumeClaim": {"claimName": "c"}, "next": {}}, "kind next and persistentVolumeClaim"),
        ({"persistentVolumeClaim": {"claimName": "c", "next": 1}}, "its volume claim says 'next'"),
        ({"persistentVolumeClaim": {}}, "names no claim"),
        ({"persistentVolumeClaim": {"claimName": "c", "readOnly": "no"}}, "its readOnly is 'no'"),
    ],
)
def test_a_volume_that_is_not_understood_is_refused(source: dict[str, Any], words: str) -> None:
    with pytest.raises(UnclearMount, match=words):
        read({}, source=source)


def test_what_is_no_folder_or_two_is_refused() -> None:
    with pytest.raises(UnclearMount, match="2 volumes are mounted there"):
        read({"subPath": "ada"}, {"name": "w", "mountPath": f"{HOME}/"})
    with pytest.raises(UnclearMount, match="no volume 'nothing'"):
        read({"name": "nothing"})
    with pytest.raises(UnclearMount, match="block device"):
        read(volumeDevices=[{"name": "v", "devicePath": HOME}])
    assert read() is None
