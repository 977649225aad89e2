"""The manual pages say what the help says, and can be read."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from gpu_pool.cli.app import VERBS

DOCS = Path(__file__).parents[3] / "docs"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("man", DOCS / "man.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES: dict[str, str] = _load().pages()
COMMITTED = sorted((DOCS / "man").glob("*.1"))


def test_there_is_a_page_for_the_program_and_for_each_verb() -> None:
    assert sorted(PAGES) == [page.name for page in COMMITTED]
    assert {"gpu-pool.1", "gpu-pool-kernels-install.1"} <= set(PAGES)
    assert {f"gpu-pool-{name}.1" for name in VERBS} <= set(PAGES)


@pytest.mark.skipif(version("click").startswith("8.1."), reason="this Click words its own help otherwise")
@pytest.mark.parametrize("page", COMMITTED, ids=lambda page: page.name)
def test_each_is_as_the_help_is_now(page: Path) -> None:
    assert page.read_text() == PAGES[page.name], "run make man"


@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not here")
def test_each_can_be_set_without_a_warning() -> None:
    for page in COMMITTED:
        done = subprocess.run(
            ["groff", "-z", "-ww", "-man", page], capture_output=True, text=True, check=True
        )
        assert done.stderr == "", page.name


@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not here")
def test_what_is_read_has_the_options_and_the_examples_as_they_are_typed() -> None:
    page = DOCS / "man" / "gpu-pool-run.1"
    done = subprocess.run(
        ["groff", "-man", "-Tascii", "-P-cbou", page], capture_output=True, text=True, check=True
    )
    assert "--no-wait" in done.stdout
    assert """gpu-pool run "50% model=V100" --no-wait -- ./simulate --steps 1000""" in done.stdout
    assert "python -c 'import torch;" in done.stdout
