"""The pytest plugin of streamfw; pytest finds it by itself.

All it does is to let the conformance suite's assertions explain themselves, as those of a test module do. The suite
is imported by the test modules that use it, and costs nobody else anything.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("streamfw.testing.conformance")
