"""Course files are read beside the service's event loop, which answers everybody."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.course_editing import COURSE, EDIT, LARGER, folder, send, site
from support.dashboard import ADMIN, Site

__all__ = ["folder", "site"]

#: Where the threads that open files are noted; None while nobody asks.
_noted: list[tuple[str, threading.Thread]] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _noted is not None and event == "open":
        _noted.append((str(arguments[0]), threading.current_thread()))


# It cannot be removed.
sys.addaudithook(_note)


@contextmanager
def noting_who_opens() -> Iterator[list[tuple[str, threading.Thread]]]:
    global _noted
    _noted = noted = []
    try:
        yield noted
    finally:
        _noted = None


def threads_that_read(name: str, noted: list[tuple[str, threading.Thread]]) -> set[threading.Thread]:
    """Return those that have opened a course file as its reader does, by its name in its folder."""
    return {thread for path, thread in noted if path == name}


async def test_no_page_and_no_save_reads_course_files_on_the_event_loop(site: Site, folder: Path) -> None:
    with noting_who_opens() as noted:
        for path, user in (("", "ada"), ("courses", "ada"), ("courses/ml", "turing"), ("admin", ADMIN)):
            await site.page(path, user)
        assert (await send(site, LARGER, do="check")).code == 200
        assert (await send(site, LARGER)).code == 303
        assert "5%" in await site.page("courses/ml", "ada")
        (folder / "ml.yaml").write_text(COURSE)
        await site.page(EDIT, "turing")
    readers = threads_that_read("ml.yaml", noted)
    assert readers
    assert threading.main_thread() not in readers
