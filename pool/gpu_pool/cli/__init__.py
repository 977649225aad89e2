"""The command line: ``gpu-pool``, and ``jupyter gpu-pool``, which is the same.

Here the packages are put together: verbs read what a person wrote, ask a pool, and
print values as tables or JSON. ``session`` holds the options that all verbs share,
``formatting`` turns values into texts, rows and JSON, and ``screen`` prints them.
"""

from __future__ import annotations

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run one command (by default the process's own arguments) and return its exit status."""
    # Imported here so that importing the package costs nothing.
    from gpu_pool.cli.app import execute

    return execute(argv)
