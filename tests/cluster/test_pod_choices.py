"""What a kernel's pod gets besides its slice: the course's, or else the administrator's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_pool.cluster.notebooks import HomeVolume, Identity, Notebook
from gpu_pool.cluster.pod_choices import chosen_body, refuse_beside_server, refuse_other_nodes
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.courses import CourseFile, Courses, parse_course
from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import BadRequest, Device, NotAllowed, parse_request

NOTEBOOK = Notebook("hub", "jupyter-ada", "u", "ada", "", "n1", "server:1", HomeVolume("claim-ada"))
GPU = Device("GPU-1", 0, "V100", 32768, node="n1")


def course(kubernetes: str) -> CourseFile:
    text = f"title: T\nslices: [{{name: Small, request: 2%}}]\nkubernetes: {kubernetes}\n"
    return parse_course("t.yaml", text.encode())


@pytest.mark.parametrize(
    ("said", "set_", "image", "cpu", "memory"),
    [
        (None, {}, "server:1", 0.0, 4096),
        (None, {"image": "admin:1", "cpu": 1.5, "memory_mib": 0}, "admin:1", 1.5, 0),
        ("{}", {"image": "admin:1"}, "admin:1", 0.0, 4096),
        ("{image: course:1, cpu: 2, memory: 1GiB}", {"image": "admin:1"}, "course:1", 2.0, 1024),
        (
            "{image: course:1, kernel_image: kernel:1, cpu: 2, kernel_cpu: 4,"
            " memory: 1GiB, kernel_memory: 8GiB}",
            {},
            "kernel:1",
            4.0,
            8192,
        ),
    ],
)
def test_the_course_comes_before_the_administrator_and_the_server_last(
    said: str | None, set_: dict[str, object], image: str, cpu: float, memory: int
) -> None:
    body = chosen_body(KubernetesSettings(**set_), course(said) if said else None, NOTEBOOK)
    assert (body.image, body.cpu, body.memory_mib) == (image, cpu, memory)
    assert body.home == HomeVolume("claim-ada")


def test_a_home_that_goes_with_the_pod_is_the_courses_to_say() -> None:
    assert chosen_body(KubernetesSettings(), course("{home: none}"), NOTEBOOK).home is None
    homeless = replace(NOTEBOOK, home=None)
    assert chosen_body(KubernetesSettings(), course("{home: none}"), homeless).home is None
    for said in (None, course("{home: 10GiB}")):
        with pytest.raises(NotAllowed, match="no volume at /home/jovyan"):
            chosen_body(KubernetesSettings(), said, homeless)


def test_a_home_that_cannot_be_mounted_in_the_same_way_is_refused_in_words() -> None:
    unclear = replace(NOTEBOOK, home=None, home_problem="its volume is of the kind hostPath")
    with pytest.raises(NotAllowed, match="cannot have your home .* its volume is of the kind hostPath."):
        chosen_body(KubernetesSettings(), None, unclear)
    assert chosen_body(KubernetesSettings(), course("{home: none}"), unclear).home is None


@pytest.mark.parametrize(
    ("identity", "expected"),
    [
        # What the server does not say, the administrator does; and its volume keeps its groups.
        (Identity(), Identity(1000, 100, None)),
        (Identity(4711, 5000, 6000, (7,), "Strict"), Identity(4711, 5000, 6000, (7,), "Strict")),
        # A server that starts as root does so to change to somebody else; a kernel has nothing to change.
        (Identity(0, 0, 100), Identity(1000, 100, 100)),
        (Identity(fs_group=0), Identity(1000, 100, 0)),
        (
            Identity(1000, 100, 100, selinux_level="s0:c1", host_users=False),
            Identity(1000, 100, 100, selinux_level="s0:c1", host_users=False),
        ),
    ],
)
def test_a_kernel_is_whom_its_notebook_server_is_and_never_root(
    identity: Identity, expected: Identity
) -> None:
    assert chosen_body(KubernetesSettings(), None, replace(NOTEBOOK, identity=identity)).run_as == expected


def test_a_kernel_without_the_home_is_whom_the_administrator_says() -> None:
    server = replace(NOTEBOOK, identity=Identity(4711, 5000, 6000, (7,), "Strict"))
    body = chosen_body(KubernetesSettings(uid=1001, gid=101), course("{home: none}"), server)
    assert body.run_as == Identity(1001, 101, 101)


@pytest.mark.parametrize(
    ("devices", "request_text", "words"),
    [
        ([], "2%", "on n1, and that machine has no GPU."),
        ([GPU], "2", "that machine has no GPU for 2."),
        ([GPU], "2% model=A100", "no GPU for 2% model=A100"),
    ],
)
def test_a_machine_that_can_never_grant_it_is_refused_with_what_would_help(
    devices: list[Device], request_text: str, words: str
) -> None:
    with pytest.raises(NotAllowed, match=words) as caught:
        refuse_other_nodes(parse_request(request_text), devices, "n1", Rules())
    assert "ReadWriteMany" in str(caught.value)
    refuse_other_nodes(parse_request("2%"), [GPU], "n1", Rules())


def test_kernels_of_a_server_that_has_the_slice_get_none_of_their_own() -> None:
    courses = Courses({"server": course("{kernels: server}"), "pods": course("{kernels: pods}")})
    for name in ("pods", "unknown", None):
        refuse_beside_server(name, courses)
    with pytest.raises(NotAllowed, match="Kernels of course server use the slice of their") as caught:
        refuse_beside_server("server", courses)
    assert "as ordinary kernels" in str(caught.value)


def test_options_of_no_dialect_are_refused() -> None:
    assert KubernetesSettings(options={"queue": "students"}).dialect_options.queue == "students"
    with pytest.raises(BadRequest, match="options has 'container'"):
        _ = KubernetesSettings(options={"container": "x"}).dialect_options
