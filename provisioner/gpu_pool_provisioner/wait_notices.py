"""What a waiting cell shows, as a notebook's file has it: not at all. Light, and without anything of ours.

A cell that waits says so in an output, since that is all that every frontend shows of a kernel. It is taken
away when the cell runs; but a page that is closed by then does not hear of that, and would have saved for
good that the cell waits. So the output is marked, and a Jupyter server leaves marked ones out of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: Marks the output in its metadata, which notebooks keep.
MARK: Final = {"gpu_pool": {"notice": "waiting"}}


def is_notice(output: Any) -> bool:
    """Whether an output of a notebook's cell says how its kernel waits."""
    metadata = output.get("metadata") if isinstance(output, Mapping) else None
    return isinstance(metadata, Mapping) and metadata.get("gpu_pool") == MARK["gpu_pool"]


def remove_notices(notebook: Any) -> None:
    """Take them out of a notebook's content, as nbformat's version 4 has it; leave whatever else there is."""
    cells = notebook.get("cells") if isinstance(notebook, Mapping) else None
    for cell in cells if isinstance(cells, list) else ():
        outputs = cell.get("outputs") if isinstance(cell, dict) else None
        if isinstance(outputs, list) and any(map(is_notice, outputs)):
            cell["outputs"] = [each for each in outputs if not is_notice(each)]


def before_saving(model: Mapping[str, Any], **_: Any) -> None:
    """Leave them out of a notebook that is about to be saved. Called by Jupyter's contents managers."""
    if model.get("type") == "notebook":
        remove_notices(model.get("content"))
