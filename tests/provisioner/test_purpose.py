"""What a slice is for, as the dashboard, the command line and the history have it."""

from __future__ import annotations

import pytest

from gpu_pool_provisioner.settings import notebook_of, purpose

KERNEL = "5f0a1b2c-0000-0000"


@pytest.mark.parametrize(
    ("environment", "own", "notebook"),
    [
        ({"JPY_SESSION_NAME": "/home/ada/course/week 1.ipynb"}, {}, "week 1.ipynb"),
        ({"JPY_SESSION_NAME": "/home/ada/Console 1"}, {}, "Console 1"),
        ({}, {}, ""),
        # The server itself runs in a notebook's terminal: that one is not its kernels'.
        ({"JPY_SESSION_NAME": "/a/x.ipynb"}, {"JPY_SESSION_NAME": "/a/x.ipynb"}, ""),
        ({"JPY_SESSION_NAME": "/a/y.ipynb"}, {"JPY_SESSION_NAME": "/a/x.ipynb"}, "y.ipynb"),
        ({"JPY_SESSION_NAME": "/a/\u202ex\n.ipynb"}, {}, " x .ipynb"),
    ],
)
def test_the_notebook_is_known_where_the_server_says_it(
    environment: dict[str, str], own: dict[str, str], notebook: str
) -> None:
    assert notebook_of(environment, own) == notebook


def test_it_is_named_by_notebook_and_kernel_and_never_too_long() -> None:
    assert purpose("", "Python 3 (GPU  2%)", KERNEL) == "Python 3 (GPU 2%) [5f0a1b2c]"
    assert purpose("a.ipynb", "Python 3 (GPU  2%)", KERNEL) == "a.ipynb: Python 3 (GPU 2%) [5f0a1b2c]"
    long = notebook_of({"JPY_SESSION_NAME": f"/a/{'n' * 300}.ipynb"})
    found = purpose(long, "k" * 300, KERNEL)
    assert len(found) <= 200
    assert found.endswith(" [5f0a1b2c]")
