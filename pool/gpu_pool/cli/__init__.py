"""The command line: ``gpu-pool``, and ``jupyter gpu-pool``, which is the same.

Here the rooms are composed: verbs read what a person wrote, ask a pool, and
print values as tables or JSON. ``session`` holds the options all verbs share,
``plain`` the JSON shapes, ``words`` and ``screen`` what people read.
"""

from __future__ import annotations

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run one command (by default the process's own arguments) and return its exit status."""
    # Imported here so that importing the package costs nothing.
    from gpu_pool.cli.app import execute

    return execute(argv)
