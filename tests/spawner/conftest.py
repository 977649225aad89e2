from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.hub_with_proxy import Hub, Visitor, need_proxy

INTRO = """\
title: Introduction
who:
  groups: [intro]
slices:
  - {name: Small, request: 2%}
  - {name: Large, request: 50%}
"""
THESIS = """\
title: <script>alert("theses")</script> & projects
who:
  users: [ada, grace]
slices:
  - {name: Some memory, request: 4GiB}
"""
OVER = """\
title: Last year
who:
  users: [ada, alan]
slices:
  - {name: Small, request: 2%}
weeks: {from: 2020-01-01, to: 2020-02-01}
time_zone: UTC
"""
LATER = """\
title: Next century
who:
  users: [alan]
slices:
  - {name: Small, request: 2%}
weeks: {from: 2101-01-03, to: 2101-02-01}
hours: Mon 10:00-12:00
time_zone: UTC
"""
FILES = {"intro": INTRO, "thesis": THESIS, "over": OVER, "later": LATER}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hub]:
    """Run a Hub with four courses over a simulated V100."""
    need_proxy()
    hub = Hub(tmp_path_factory.mktemp("hub"), {"intro": ["ada", "grace"]}, FILES)
    await hub.start()
    try:
        yield hub
    finally:
        await hub.end()


@pytest_asyncio.fixture(loop_scope="module")
async def ada(hub: Hub) -> Visitor:
    """Somebody in the courses intro, thesis and over."""
    return await _visitor(hub, "ada")


@pytest_asyncio.fixture(loop_scope="module")
async def grace(hub: Hub) -> Visitor:
    """Somebody in the courses intro and thesis."""
    return await _visitor(hub, "grace")


@pytest_asyncio.fixture(loop_scope="module")
async def alan(hub: Hub) -> Visitor:
    """Somebody in no course that is open now."""
    return await _visitor(hub, "alan")


async def _visitor(hub: Hub, name: str) -> Visitor:
    visitor = Visitor(hub.url, name)
    await visitor.log_in()
    return visitor
