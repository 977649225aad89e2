from __future__ import annotations

import pytest

from gpu_pool.plugins import needs_extra
from gpu_pool_client import NotAllowed


def test_what_is_not_installed_is_said_with_how_to_get_it() -> None:
    with pytest.raises(NotAllowed) as caught, needs_extra("hub", "JupyterHub support"):
        import gpu_pool.no_such_module  # noqa: F401
    assert caught.value.message == (
        "JupyterHub support is not installed: No module named 'gpu_pool.no_such_module'."
    )
    assert caught.value.remedy == "Install it: pip install 'jupyter-gpu-pool[hub]'."
