"""What type checkers make of a user's program; and that the program builds."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROGRAM = ROOT / "tests/typing/user_code.py"
CHECKERS = {
    "mypy": ["-m", "mypy", "--strict", "--warn-unused-ignores", "--cache-dir", ".mypy_cache/typing"],
    "pyright": ["-m", "pyright", "--project", "pyproject.toml"],
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_users_program(checker: str) -> None:
    if checker == "pyright":
        assert shutil.which("node"), "pyright runs on node: install nodejs"
    command = [sys.executable, *CHECKERS[checker], str(PROGRAM)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_the_program_runs() -> None:
    program = import_module("tests.typing.user_code")
    await program.types_of_handlers()
    async with program.app.running():
        program.app.health()
        await asyncio.sleep(0)


def test_the_checkers_see_what_is_wrong(tmp_path: Path) -> None:
    """They do check: a type that is not so is an error."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from typing import assert_type\nfrom streamfw import App\nassert_type(App(), int)\n")
    command = [sys.executable, *CHECKERS["mypy"], str(wrong)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "assert-type" in done.stdout
