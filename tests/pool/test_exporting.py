"""Courses as objects of Kubernetes. The files in ``exported`` are what is written for two courses."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gpu_pool.coursefiles import CourseFile, parse_course
from gpu_pool.dialects import Cluster, Dialect, choose
from gpu_pool.exporting import documents, has_kueue
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
        ("hami", "{gpu_hours_per_term: 10}", "[{name: S, request: 2%}]", "GPU hours are counted by the pool"),
        ("kai", "{share: 50%}", "[{name: S, request: 2%}]", "cannot count slices of"),
        ("whole", "{share: 50%}", "[{name: S, request: 2%}]", "handed out whole only"),
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
    assert "research: GPU hours are counted by the pool alone." in notes


def test_a_namespace_that_no_quota_would_bind_needs_no_words() -> None:
    free = {"free": COURSES["free"], "more": COURSES["free"]}
    assert documents(free, speaks("hami"), "jupyterhub", kueue=False) == ([], [])


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
