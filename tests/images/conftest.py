"""The images of ``make images``, built by buildah."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.images import Container, build_twice, started

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what builds images: ``make test-images`` runs it."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.images)


@pytest.fixture(scope="session", params=["service", "notebook-cpu"])
def image(request: pytest.FixtureRequest) -> str:
    """Return the name of an image that was built twice, the second time from nothing."""
    return build_twice(request.param)


@pytest.fixture
def container(image: str) -> Iterator[Container]:
    """Return a container of it."""
    with started(image) as container:
        yield container
