"""Courses as objects of Kubernetes. The files in ``exported`` are what is written for two courses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from gpu_pool.cluster.dialects import Cluster, Dialect, choose
from gpu_pool.cluster.export import documents, has_kueue, pulled
from gpu_pool.courses import CourseFile, parse_course
from gpu_pool_client import BadRequest
from support.clusters import everything, hami, kai, named, plain

EXPORTED = Path(__file__).parent / "exported"


def course(quota: str, slices: str = "[{name: Small, request: 2%}]", weight: float = 1) -> CourseFile:
    text = f"title: A\nslices: {slices}\nquota: {quota}\nweight: {weight}\n"
    return parse_course("a.yaml", text.encode())


COURSES = {
    "research": course("{share: 4, gpu_hours_per_week: 100}", "[{name: Two, request: 2}]", 0.5),
    "ml": course("{slices: 40, share: 50%, memory: 20GiB}", weight=2),
    "free": parse_course("free.yaml", b"title: A\nslices: [{name: Small, request: 2%}]\n"),
}


def speaks(name: str) -> Dialect:
    dialect = choose(*everything()[name]).dialect
    assert dialect is not None
    return dialect


def hard(name: str, quota: str, slices: str = "[{name: Small, request: 2%}]") -> dict[str, str]:
    made, _ = documents({"a": course(quota, slices)}, speaks(name), "ns", kueue=False)
    return dict(made[0]["spec"]["hard"]) if made else {}


@pytest.mark.parametrize(("name", "kueue"), [("hami", True), ("whole", False)])
def test_the_objects_are_these(name: str, kueue: bool) -> None:
    made, _ = documents(COURSES, speaks(name), "course-{course}", kueue=kueue)
    written = yaml.safe_dump_all(made, sort_keys=False, explicit_start=True)
    assert written == (EXPORTED / f"{name}.yaml").read_text()


@pytest.mark.parametrize(
    ("name", "quota", "slices", "wanted"),
    [
        ("hami", "{share: 50%}", "[{name: S, request: 2%}]", {"gpumem": 25 * 655, "gpucores": 50}),
        ("hami", "{memory: 10GiB}", "[{name: S, request: 1GiB}]", {"gpumem": 10240, "gpucores": 40}),
        ("hami", "{share: 4}", "[{name: S, request: 2}]", {"gpumem": 4 * 32768, "gpucores": 400}),
        ("hami", "{share: 1%}", "[{name: S, request: 2%}]", {"gpumem": 1, "gpucores": 1}),
        ("hami", "{slices: 3, share: 50%}", "[{name: S, request: 2%}]", {"gpumem": 3 * 655, "gpucores": 6}),
        ("time-slicing", "{share: 50%}", "[{name: S, request: 2%}]", {"gpu": 25}),
        ("whole", "{share: 4}", "[{name: S, request: 2}]", {"gpu": 4}),
        ("whole", "{share: 50%}", "[{name: S, request: 1}]", {"gpu": 0}),
        ("dra", "{slices: 3}", "[{name: S, request: 2}]", {"devices": 6}),
        ("bitfusion", "{slices: 5}", "[{name: S, request: 20%}]", {"gpu": 100}),
    ],
)
def test_a_quota_is_so_many_default_slices(
    name: str, quota: str, slices: str, wanted: dict[str, int]
) -> None:
    found = {key.rpartition("/")[2]: int(value) for key, value in hard(name, quota, slices).items()}
    assert found == wanted


@pytest.mark.parametrize(
    ("name", "quota", "slices", "words"),
    [
        ("hami", "{gpu_hours_per_term: 10}", "[{name: S, request: 2%}]", "GPU-hours are counted by the pool"),
        ("kai", "{share: 50%}", "[{name: S, request: 2%}]", "cannot count slices of"),
        ("whole", "{share: 50%}", "[{name: S, request: 2%}]", "can only be granted whole"),
    ],
)
def test_what_cannot_be_said_is_named(name: str, quota: str, slices: str, words: str) -> None:
    made, notes = documents({"a": course(quota, slices)}, speaks(name), "ns", kueue=False)
    assert made == []
    assert words in notes[0]


@pytest.mark.parametrize("kueue", [False, True])
def test_courses_that_share_a_namespace_do_not_bind_each_other(kueue: bool) -> None:
    made, notes = documents(COURSES, speaks("hami"), "jupyterhub", kueue=kueue)
    kinds = ["ResourceFlavor", "ClusterQueue", *["LocalQueue"] * len(COURSES)] if kueue else []
    assert [each["kind"] for each in made] == kinds
    assert (
        "ml, research: no ResourceQuota. It would bind all courses in the namespace jupyterhub; "
        "give each course its own, with {course} in --namespace."
    ) in notes
    assert "research: GPU-hours are counted by the pool only." in notes


def test_a_namespace_that_no_quota_would_bind_needs_no_words() -> None:
    free = {"free": COURSES["free"], "more": COURSES["free"]}
    assert documents(free, speaks("hami"), "jupyterhub", kueue=False) == ([], [])


def test_kueues_objects_are_in_the_version_that_is_served() -> None:
    newest, _ = documents(COURSES, speaks("hami"), "ns", kueue=True)
    older, notes = documents(COURSES, speaks("hami"), "ns", kueue=True, kueue_version="v1beta1")
    versions = {each["apiVersion"] for each in older if "kueue" in each["apiVersion"]}
    assert versions == {"kueue.x-k8s.io/v1beta1"}
    assert [each.get("spec") for each in older] == [each.get("spec") for each in newest]
    assert "An older one does not know these fields" in " ".join(notes)


def test_kueue_gets_one_queue_for_each_course_where_it_can_count() -> None:
    card = hami("n1", count=50)
    found = choose(Cluster.read([card], crds=named("localqueues.kueue.x-k8s.io"))).dialect
    assert found is not None
    assert has_kueue(found)
    made, _ = documents({"a": course("{share: 1}")}, found, "ns", kueue=True)
    assert [each["kind"] for each in made] == [
        "ResourceQuota",
        "ResourceFlavor",
        "ClusterQueue",
        "LocalQueue",
    ]
    without = choose(kai(plain(gpus=2))).dialect
    assert without is not None
    assert not has_kueue(without)
    with pytest.raises(BadRequest, match="Kueue cannot count"):
        documents(
            {"a": course("{share: 1}")}, choose(*everything()["kai"]).dialect or without, "ns", kueue=True
        )


DIGEST = "a" * 64


def with_images(**said: str) -> CourseFile:
    kubernetes = ", ".join(f"{key}: {value!r}" for key, value in said.items())
    text = f"title: A\nslices: [{{name: Small, request: 2%}}]\nkubernetes: {{{kubernetes}}}\n"
    return parse_course("a.yaml", text.encode())


@pytest.mark.parametrize(
    ("image", "name", "tag"),
    [
        ("quay.io/cs/ml:2026-09-01", "quay.io/cs/ml", "2026-09-01"),
        ("registry:5000/cs/ml:1", "registry:5000/cs/ml", "1"),
        ("registry:5000/cs/ml", "registry:5000/cs/ml", "latest"),
        (f"quay.io/cs/ml@sha256:{DIGEST}", "quay.io/cs/ml@sha256", DIGEST),
        ("a/" + "long-_." * 20 + "x:1", "a/" + "long-_." * 20 + "x", "1"),
    ],
)
def test_an_image_is_written_as_the_chart_puts_it_together(image: str, name: str, tag: str) -> None:
    ((key, written),) = pulled({"a": with_images(image=image)})["prePuller"]["extraImages"].items()
    assert written == {"name": name, "tag": tag}
    # So the chart calls the container that fetches it.
    assert re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", f"image-pull-{key}")
    assert len(f"image-pull-{key}") <= 63


def test_each_image_of_the_courses_is_fetched_once_and_onto_gpu_nodes_too() -> None:
    courses = {
        "a": with_images(image="x/same:1", kernel_image="x/kernel:1"),
        "b": with_images(image="x/same:1"),
        "c": with_images(image="y/same:1"),
        # Its servers have the slice: there is no kernel in a pod.
        "d": with_images(kernels="server", kernel_image="x/unused:1"),
        "e": COURSES["free"],
    }
    made = pulled(courses)["prePuller"]
    images = sorted(f"{each['name']}:{each['tag']}" for each in made["extraImages"].values())
    assert images == ["x/kernel:1", "x/same:1", "y/same:1"]
    assert {key.rpartition("-")[0] for key in made["extraImages"]} == {"kernel", "same"}
    assert made["extraTolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]


def test_where_no_course_names_an_image_that_is_told() -> None:
    with pytest.raises(BadRequest, match="No course names an image"):
        pulled(COURSES)
