"""What ``gpu-pool doctor --cluster --namespace`` says of the images of courses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gpu_pool.cli.cluster_images import Fetch, check_images, full_name, longest_fetches

IMAGE = "registry.example.org/gpu-kernel:1"


def node(*images: str) -> Mapping[str, Any]:
    return {"status": {"images": [{"names": [f"{image}@sha256:0", image]} for image in images]}}


def fetched(message: str, host: str = "node-1") -> Mapping[str, Any]:
    return {"reason": "Pulled", "message": message, "source": {"host": host}}


def look(nodes: Sequence[Any], fetches: Mapping[str, Fetch] | None = None) -> list[tuple[str, str, str]]:
    found = check_images([IMAGE], nodes, fetches or {})
    return [(each.state, each.text, each.remedy) for each in found]


def test_a_node_without_the_image_lets_its_first_kernel_wait() -> None:
    ((state, text, remedy),) = look([node(IMAGE), node("other:1")])
    assert state == "note"
    assert text.startswith(f"{IMAGE} is on 1 of 2 nodes with GPUs: the first kernel on each other node waits")
    assert "gpu-pool courses export --images" in remedy


def test_what_fetching_took_is_said() -> None:
    ((state, text, _),) = look([node(IMAGE)], {IMAGE: Fetch("node-2", 83.4)})
    assert (state, text) == (
        "ok",
        f"{IMAGE} is on 1 of 1 nodes with GPUs; it took 1min23s to get to node-2",
    )


def test_a_node_that_does_not_name_all_of_its_images_is_left_out() -> None:
    many = node(*(f"other:{number}" for number in range(50)))
    assert look([many]) == []
    ((state, text, _),) = look([many, node(IMAGE)])
    assert (state, text) == ("ok", f"{IMAGE} is on 1 of 1 nodes with GPUs")
    assert look([node(IMAGE, *(f"other:{number}" for number in range(49)))])[0][0] == "ok"


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("in 1m23.4s (2m0.5s including waiting). Image size: 3400000000 bytes.", 120.5),
        ("in 850ms (850ms including waiting)", 0.85),
        ("in 1h0m5s", 3605.0),
    ],
)
def test_kubelets_say_how_long_it_took(said: str, seconds: float) -> None:
    (found,) = longest_fetches([fetched(f'Successfully pulled image "{IMAGE}" {said}')]).values()
    assert found == Fetch("node-1", pytest.approx(seconds))


def test_the_longest_fetch_counts_and_an_image_that_was_there_is_none() -> None:
    words = 'Successfully pulled image "{}" in {} ({} including waiting). Image size: 1 bytes.'
    events = [fetched(words.format(IMAGE, each, each), each) for each in ("3s", "1m0s", "40s")]
    events.append(fetched(f'Container image "{IMAGE}" already present on machine'))
    events.append({"reason": "Pulled"})
    assert longest_fetches(events) == {IMAGE: Fetch("1m0s", 60.0)}


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("python", "docker.io/library/python:latest"),
        ("jupyter/base:1", "docker.io/jupyter/base:1"),
        ("localhost/a", "localhost/a:latest"),
        ("example.org:5000/a/b", "example.org:5000/a/b:latest"),
        ("example.org/a@sha256:0", "example.org/a@sha256:0"),
    ],
)
def test_an_image_is_compared_by_its_full_name(image: str, name: str) -> None:
    assert full_name(image) == name
