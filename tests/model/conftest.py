from __future__ import annotations

import pytest

from support.hub import hub
from support.kernel_pods import cluster_nursery
from support.service import nursery

__all__ = ["cluster_nursery", "hub", "nursery"]

# What is asserted there says what it saw, as in a test.
pytest.register_assert_rewrite("model")
