"""Pages that come from code and results are what `make docs` would write now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_rendered_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/render_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
