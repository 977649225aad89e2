"""Whether the nodes with GPUs have the images of courses, and how long it took to fetch them: for the doctor.

The first kernel on a node that lacks its image waits for it. What a fetch took is what kubelets said of it,
which a cluster remembers for about an hour.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpu_pool.cli.checks import Check
from gpu_pool.cli.formatting import safe
from gpu_pool.cluster.dialects.objects import mapping
from gpu_pool_client import format_duration

#: By which the events of fetched images are asked for, and what a kubelet says in them. Newer ones tell the
#: wait for other fetches as well.
FETCHED: Final = "reason=Pulled,involvedObject.kind=Pod"
_SAID: Final = re.compile(r'Successfully pulled image "([^"]+)" in (\S+)(?: \((\S+) including waiting\))?')
_PARTS: Final = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s|µs|ns)")
_SECONDS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
#: How many images a node names at most: a kubelet's default.
_MOST_NAMED: Final = 50
#: Characters of a message.
_LONG: Final = 400
_REMEDY: Final = (
    "fetch it beforehand, with gpu-pool courses export --images: see docs/administrator/kubernetes, "
    "Images before class"
)


@dataclass(frozen=True, slots=True)
class Fetch:
    """How long an image took to get to a node."""

    node: str
    seconds: float


def longest_fetches(events: Iterable[Mapping[str, Any]]) -> dict[str, Fetch]:
    """Return for each image the longest fetch of which these events tell."""
    found: dict[str, Fetch] = {}
    for event in events:
        said = _SAID.search(str(event.get("message") or ""))
        if said is None:
            continue
        image, seconds = full_name(said[1]), _seconds(said[3] or said[2])
        if image not in found or seconds > found[image].seconds:
            found[image] = Fetch(str(mapping(event.get("source")).get("host") or "a node"), seconds)
    return found


def _seconds(written: str) -> float:
    """Return a duration as Go writes it: ``1m23.4s``, ``850ms``."""
    return sum(float(number) * _SECONDS[unit] for number, unit in _PARTS.findall(written))


def full_name(image: str) -> str:
    """Return an image's name as nodes write it: with its registry, and with a tag where it has no digest."""
    first, slash, _ = image.partition("/")
    if not slash:
        image = f"docker.io/library/{image}"
    elif not (first == "localhost" or re.search("[.:]", first)):
        image = f"docker.io/{image}"
    return image if re.search("[@:]", image.rpartition("/")[2]) else f"{image}:latest"


def check_images(
    images: Collection[str],
    nodes: Iterable[Mapping[str, Any]],
    fetches: Mapping[str, Fetch],
) -> Iterator[Check]:
    """Say of each image how many of these nodes have it, and what its longest fetch took."""
    named = [_named(node) for node in nodes]
    for image in sorted(images):
        name = full_name(image)
        # What a node with many images does not name, it may have.
        telling = [names for names, is_all in named if is_all or name in names]
        have, fetch = sum(name in names for names in telling), fetches.get(name)
        if not telling:
            continue
        took = f"; it took {format_duration(fetch.seconds)} to get to {fetch.node}" if fetch else ""
        text = f"{image} is on {have} of {len(telling)} nodes with GPUs{took}"
        if have == len(telling):
            yield Check("image", "ok", safe(text, _LONG))
        else:
            text = f"{text}: the first kernel on each other node waits for it"
            yield Check("image", "note", safe(text, _LONG), _REMEDY)


def _named(node: Mapping[str, Any]) -> tuple[Collection[str], bool]:
    """Return the images that a node names, by all their names, and whether these are all that it has."""
    images = mapping(node.get("status")).get("images") or ()
    return {name for image in images for name in image.get("names") or ()}, len(images) < _MOST_NAMED
