"""The images of ``make images``, built by buildah."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.images import ImageContainer, built, script, started

_HERE = Path(__file__).parent
#: What has too many packages to be built wherever the others are, and how that is asked for.
_LARGE = "notebook-pytorch"
_VARIABLE = "GPU_POOL_TEST_PYTORCH_IMAGE"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what builds images: ``make test-images`` runs it."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.images)


@pytest.fixture(scope="session", params=script("build").TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    """Return the name of a target; that with PyTorch is left out unless it is asked for."""
    name: str = request.param
    if name == _LARGE and os.environ.get(_VARIABLE) != "1":
        pytest.skip(f"{name} takes gigabytes and many minutes: {_VARIABLE}=1 builds it")
    return name


@pytest.fixture(scope="session")
def image(target: str) -> Iterator[str]:
    """Return the name of a target's image."""
    with built(target) as name:
        yield name


@pytest.fixture(scope="session")
def second_image(target: str) -> Iterator[str]:
    """Return the name of another, for which nothing of the first was used."""
    if target == _LARGE:
        pytest.skip("it is built once, for its size")
    with built(target, "-second") as name:
        yield name


@pytest.fixture
def container(image: str) -> Iterator[ImageContainer]:
    """Return a container of it."""
    with started(image) as container:
        yield container
