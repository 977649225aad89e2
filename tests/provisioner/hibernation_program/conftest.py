"""Users of this machine, and the program as it is installed for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from support.hibernating import CRIU, Installation, User, installed, users


@pytest.fixture(scope="module")
def installation() -> Iterator[Installation]:
    with installed() as found:
        yield found


@pytest.fixture(scope="module")
def both(installation: Installation) -> Iterator[list[User]]:
    with users(installation, "ada", "bob") as made:
        yield made


@pytest.fixture
def ada(both: list[User]) -> Iterator[User]:
    yield both[0]
    both[0].end()


@pytest.fixture
def bob(both: list[User]) -> Iterator[User]:
    yield both[1]
    both[1].end()


@pytest.fixture
def criu(installation: Installation) -> Iterator[Callable[[str], None]]:
    """Have a shell run something with the rights of CRIU, before CRIU itself."""
    wrapper = installation.folder / "criu"

    def install(before: str) -> None:
        wrapper.write_text(f'#!/bin/sh\n{before}\nexec {os.path.realpath(CRIU)} "$@"\n')
        wrapper.chmod(0o755)
        installation.configure(criu=str(wrapper))

    yield install
    installation.configure()
