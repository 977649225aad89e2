"""What a comment or docstring names in code is there: a name that was changed is changed there too."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kernels", "provisioner", "spawner", "pool_client", "pool")
#: Names of others, of the system or of the libraries that we use, and what stands for an argument.
OF_OTHERS = frozenset(
    "InteractiveShell ExecutionResult AdmissionFairSharing nvmlDeviceGetNumaNodeId xsrf_form_html "
    "PR_SET_NAME ZMQError CONTROL".split()
)
#: A name between double backticks, or in a role of Sphinx.
NAMED = re.compile(
    r"``([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)(?:\(\))?``"
    r"|:(?:meth|func|class|attr|mod|data):`~?\.?([A-Za-z_][\w.]*)`"
)


def tracked(*patterns: str) -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in done.stdout.split() if (ROOT / name).is_file()]


def prose(text: str) -> set[int]:
    """Return the lines on which docstrings begin."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return {node.body[0].lineno for node in nodes if ast.get_docstring(node, clean=False) is not None}


def read(text: str) -> Iterator[tuple[bool, int, str]]:
    """Yield names and texts, each with its line, and whether it is a comment or docstring."""
    docstrings = prose(text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT):
            yield token.type == tokenize.COMMENT or is_docstring, token.start[0], token.string


def unknown(sources: dict[str, str], known: frozenset[str] = frozenset()) -> list[str]:
    """Return what is named in comments and docstrings and is nowhere in the code."""
    there = set(known)
    named: list[tuple[str, int, str]] = []
    for path, text in sources.items():
        there.update(Path(path).with_suffix("").parts)
        for is_prose, line, content in read(text):
            if is_prose:
                found = NAMED.finditer(content)
                named += [(path, line, match[1] or match[2]) for match in found]
            else:
                there.update(re.findall(r"\w+", content))
    return [f"{path}:{line}: {name}" for path, line, name in named if not there.issuperset(name.split("."))]


@pytest.mark.long
def test_every_name_in_comments_and_docstrings_is_in_the_code() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in tracked("*.py")}
    others = tracked("*.sql", "*.js", "*.html", "*.toml", "*.yaml", "Makefile")
    known = OF_OTHERS.union(*(re.findall(r"\w+", path.read_text()) for path in others))
    assert [each for each in unknown(sources, known) if each.startswith(PACKAGES)] == []


def test_a_name_that_is_gone_is_found() -> None:
    docstring = '"""Uses ``gone`` and ``there()``, see :meth:`Class.lost`."""'
    source = f"{docstring}\nclass Class:\n    there = 1  # as ``left``\n"
    assert unknown({"a.py": source}) == ["a.py:1: gone", "a.py:1: Class.lost", "a.py:3: left"]
