"""Inputs that are tried every time: each once broke something, or looked as if it could."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import example

Test = TypeVar("Test", bound=Callable[..., Any])

_HERE = Path(__file__).parent / "corpus"


def kept(what: str, read: Callable[[bytes], Any]) -> Callable[[Test], Test]:
    """Try every file of a folder of the corpus, as ``read`` reads it, before anything is made up."""

    def decorate(test: Test) -> Test:
        for content in contents(what):
            test = example(read(content))(test)
        return test

    return decorate


def contents(what: str) -> Iterator[bytes]:
    """Yield what the files of a folder of the corpus hold, by name."""
    found = sorted((_HERE / what).iterdir())
    assert found, f"there is no corpus of {what}"
    return (path.read_bytes() for path in found)
