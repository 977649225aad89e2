from __future__ import annotations

import pytest

# What is asserted there says what it saw, as in a test.
pytest.register_assert_rewrite("model")
