"""What the supervisor of a prepared pod is told of its first kernel."""

import json
import os
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence  # noqa: UP035 - for Python 3.8


class FirstKernel(NamedTuple):
    """The first kernel of a pod."""

    #: What its connection file says.
    connection: "Mapping[str, Any]"
    argv: "Sequence[str]"
    #: Its own variables, besides those of the pod.
    environment: "Mapping[str, str]"
    #: Where it starts; None for where the pod does.
    folder: "str | None"

    @classmethod
    def read(cls, content: bytes) -> "FirstKernel":
        """Read JSON with these names. Raises ``ValueError``. A folder that is not there is left out."""
        try:
            told = json.loads(content)
        except RecursionError as error:
            raise ValueError("too deep") from error
        told = told if isinstance(told, dict) else {}
        connection, argv, variables = (told.get(name) for name in ("connection", "argv", "environment"))
        if not isinstance(connection, dict) or not connection.get("key"):
            raise ValueError("a kernel without a key would carry out what anybody sends it")
        if not isinstance(argv, list) or not argv or not isinstance(variables, dict):
            raise ValueError("there is no command, or there are no variables")
        texts = [*argv, *variables, *variables.values()]
        if not all(map(_can_be_said, texts)) or any(not name or "=" in name for name in variables):
            raise ValueError("that cannot be said to a process")
        folder = told.get("folder")
        is_there = isinstance(folder, str) and Path(folder).is_dir()
        return cls(connection, argv, variables, folder if is_there else None)


def _can_be_said(text: object) -> bool:
    """Whether a process can have it as a word or a variable. Raises ``ValueError`` for what has no bytes."""
    return isinstance(text, str) and b"\0" not in os.fsencode(text)
