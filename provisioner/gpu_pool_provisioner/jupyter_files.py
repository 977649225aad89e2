"""What of ours stands in Jupyter's files: in kernelspecs, and in notebooks. Imports nothing of ours.

A kernelspec says that it asks for this package's provisioner, and with what.

A cell that waits says so in an output, since that is all that every frontend shows of a kernel. It is taken
away when the cell runs; but a page that is closed by then does not hear of that, and would have saved for
good that the cell waits. So the output is marked, and a Jupyter server leaves marked ones out of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: The name under which kernelspecs ask for the provisioner.
PROVISIONER: Final = "gpu-pool"
#: Marks an output that says how its cell waits, in its metadata, which notebooks keep.
NOTICE_MARK: Final = {"gpu_pool": {"notice": "waiting"}}


def config_of(spec: object) -> Mapping[str, Any] | None:
    """Return what a kernelspec, as JSON has it, configures of the provisioner; None where it asks for none.

    Anybody's kernelspec may be malformed: what is not of the right kind configures nothing.
    """
    stanza = _entry(_entry(spec, "metadata"), "kernel_provisioner")
    if _entry(stanza, "provisioner_name") != PROVISIONER:
        return None
    config = _entry(stanza, "config")
    return config if isinstance(config, Mapping) else {}


def _entry(mapping: object, key: str) -> object:
    """Return an entry of what should be a mapping; None if it is not one, or has none."""
    return mapping.get(key) if isinstance(mapping, Mapping) else None


def is_notice(output: Any) -> bool:
    """Whether an output of a notebook's cell says how its kernel waits."""
    metadata = output.get("metadata") if isinstance(output, Mapping) else None
    return isinstance(metadata, Mapping) and metadata.get("gpu_pool") == NOTICE_MARK["gpu_pool"]


def remove_notices(notebook: Any) -> None:
    """Take such outputs out of a notebook's content, as nbformat's version 4 has it; leave all else."""
    cells = notebook.get("cells") if isinstance(notebook, Mapping) else None
    for cell in cells if isinstance(cells, list) else ():
        outputs = cell.get("outputs") if isinstance(cell, dict) else None
        if isinstance(outputs, list) and any(map(is_notice, outputs)):
            cell["outputs"] = [each for each in outputs if not is_notice(each)]


def before_saving(model: Mapping[str, Any], **_: Any) -> None:
    """Leave such outputs out of a notebook that is about to be saved. Called by contents managers."""
    if model.get("type") == "notebook":
        remove_notices(model.get("content"))
