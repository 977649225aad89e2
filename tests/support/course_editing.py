"""The editor of course files on the dashboard, as an instructor uses it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from html import unescape
from pathlib import Path

import pytest
from tornado.httpclient import HTTPResponse

from support.dashboard import Site, showing
from support.pages import Document

COURSE = """\
# The comments stay.
title: Machine Learning
who: {users: [ada]}
instructors: [turing]
slices:
  - {name: Small, request: 2%}
quota: {share: 50%}
weight: 2
"""
LARGER = COURSE.replace("2%}", "5%}")
EDIT = "courses/ml/edit"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "courses"
    made.mkdir()
    (made / "ml.yaml").write_text(COURSE)
    (made / "nlp.yaml").write_text(COURSE.replace("turing", "hopper").replace("ada", "grace"))
    return made


@pytest.fixture
async def site(tmp_path: Path, folder: Path) -> AsyncIterator[Site]:
    async with showing(tmp_path, 1, courses_dir=str(folder)) as site:
        yield site


def field(page: str, name: str) -> str:
    """Return what a field of the form on a page has in it."""
    found = re.search(rf'name="{name}"[^>]*value="([^"]*)"', page)
    if found is None:
        found = re.search(rf'<textarea id="{name}"[^>]*>\n?([^<]*)</textarea>', page)
    assert found, page
    return unescape(found[1])


async def send(site: Site, text: str, user: str = "turing", do: str = "save", **more: str) -> HTTPResponse:
    """Open the editor, type a text over what is there, and send it."""
    path = more.pop("path", EDIT)
    seen = more.pop("seen", None) or field(await site.page(path, user), "seen")
    return await site.post(path, user, text=text.replace("\n", "\r\n"), seen=seen, do=do, **more)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def text_of(answer: HTTPResponse) -> str:
    return Document(answer.body.decode()).text
