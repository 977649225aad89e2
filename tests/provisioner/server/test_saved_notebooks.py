"""What a notebook's file keeps of a wait: nothing, whatever became of the page that showed it."""

from __future__ import annotations

import json
from typing import Any

import nbformat
import pytest

from gpu_pool_provisioner.jupyter_files import NOTICE_MARK, remove_notices
from support.jupyter_env import JupyterEnv
from support.slice_pages import PagesServer, cells


def notebook_with(*outputs: dict[str, Any]) -> dict[str, Any]:
    cell = nbformat.v4.new_code_cell("1", outputs=[nbformat.from_dict(each) for each in outputs])
    return dict(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# One"), cell]))


def shown(data: str, **metadata: Any) -> dict[str, Any]:
    return {"output_type": "display_data", "data": {"text/plain": data}, "metadata": metadata}


def test_notices_alone_are_left_out() -> None:
    others = [shown("Waiting for Godot."), {"output_type": "stream", "name": "stdout", "text": "well\n"}]
    notebook = notebook_with(others[0], shown("Waiting for a GPU slice of 2%.", **NOTICE_MARK), others[1])
    remove_notices(notebook)
    assert notebook["cells"][1]["outputs"] == others
    assert notebook == notebook_with(*others) | {"cells": notebook["cells"]}


@pytest.mark.parametrize(
    "content",
    [
        None,
        "text",
        {},
        {"cells": None},
        {"cells": [None, {"outputs": None}, {"outputs": [None, {"metadata": None}]}]},
        {"worksheets": [{"cells": []}]},
    ],
)
def test_what_is_no_notebook_is_left_alone(content: Any) -> None:
    before = json.dumps(content)
    remove_notices(content)
    assert json.dumps(content) == before


@pytest.mark.long
async def test_a_page_that_is_saved_and_closed_while_its_cell_waits_leaves_nothing(
    jupyter_env: JupyterEnv, pages: PagesServer
) -> None:
    held = await jupyter_env.fill("1")
    kernel_id = await pages.start("one.ipynb", jupyter_env.install("two"))
    async with cells(pages, kernel_id) as frontend:
        cell = frontend.run("print('well')")
        await cell.shows("Waiting for a GPU slice of 2%. You are next in the queue")
        # As pages do: what was heard becomes the cell's outputs.
        content = next(each["content"] for each in cell.heard if each["msg_type"] == "display_data")
        notice = {"output_type": "display_data", "data": content["data"], "metadata": content["metadata"]}
        model = {"type": "notebook", "format": "json", "content": notebook_with(notice)}
        await pages.ask("PUT", "api/contents/one.ipynb", model)
        saved = json.loads((await pages.ask("GET", "api/contents/one.ipynb?content=1")).body)
        assert saved["content"]["cells"][1]["outputs"] == []
        # Where another program keeps it, it says of when it is.
        assert "(As of " in " ".join(content["data"]["text/plain"].split())
        await jupyter_env.pool.release(held.id)
        assert (await cell.done()).outputs == ["well\n"]
