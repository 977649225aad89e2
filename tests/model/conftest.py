from __future__ import annotations

import pytest

from support.hub import hub
from support.kernel_pods import cluster_children
from support.service import children

__all__ = ["children", "cluster_children", "hub"]

# What is asserted there says what it saw, as in a test.
pytest.register_assert_rewrite("model")
