"""The getting-started page, followed to the letter in an empty folder (what it installs is here already)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.newcomer.walk import ROOT, Walk, matches


@pytest.mark.timeout(180)
def test_the_page_says_what_happens(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STREAMFW_")}
    clean["PATH"] = f"{Path(sys.executable).parent}:{clean['PATH']}"
    typed = Walk(tmp_path, clean).follow(ROOT / "docs" / "getting-started.md")
    assert "streamfw run shop:app" in typed
    assert typed[-1] == "pytest -q test_shop.py"


def test_dots_stand_for_anything() -> None:
    assert matches("a ... c", "a b\nb c")
    assert matches("...", "")
    assert not matches("a ... c", "a b")
    assert not matches("a", "a b")
