"""TestApp in the tests of others: as a fixture under pytest-asyncio and anyio's plugin, and as docs/testing.md says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.newcomer.blocks import ROOT, Page

APP = """
import asyncio
from contextlib import asynccontextmanager

import anyio
import pytest
from streamfw import App, subscriber
from streamfw.testing import TestApp

@subscriber("orders")
async def ship(number: int) -> None:
    if number == 13:
        raise ValueError("thirteen")
    await asyncio.sleep(number)

async def lifespan():
    async with anyio.create_task_group() as tasks:  # has to be left in the task that entered it
        yield tasks

app = App(ship, lifespan=lifespan)
"""

SCOPE = ("-o", "asyncio_default_fixture_loop_scope=function")

TESTS = """
{mark}
async def test_it_works(tb):
    await tb.publish("orders", 0)
    await tb.settle()
    tb.assert_acked(ship, times=1)

{mark}
async def test_again_with_time(tb):
    assert tb.received(ship) == []
    await tb.publish("orders", 3600)
    await tb.advance(3600)
    tb.assert_acked(ship, times=1)

{mark}
async def test_an_error_shows_its_line(tb):
    await tb.publish("orders", 13)
    await tb.settle()

{mark}
async def test_an_assertion(tb):
    tb.assert_acked(ship)
"""

FIXTURE = """
async def tb({arguments}):
    async with TestApp(app) as tb:
        yield tb
"""


def run_pytest(directory: Path, *arguments: str) -> str:
    """pytest in a process of its own, warnings being errors; what it printed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("STREAMFW_", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "--rootdir", str(directory), *arguments],
        cwd=directory, env=environ, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def expect_two_of_each(output: str) -> None:
    assert "2 failed, 2 passed" in output, output
    assert 'raise ValueError("thirteen")' in output and "test_shop.py:13: ValueError" in output, output
    assert "it received nothing; was there an `await tb.settle()`?" in output, output
    assert "_observations.py" not in output, output  # the helpers hide themselves
    assert "cannot collect" not in output, output  # TestApp is no class of tests


def test_under_pytest_asyncio(tmp_path: Path) -> None:
    fixture = "import pytest_asyncio\n\n@pytest_asyncio.fixture\n" + FIXTURE.format(arguments="").strip()
    tests = TESTS.format(mark="@pytest.mark.asyncio")
    (tmp_path / "test_shop.py").write_text(f"{APP}\n{fixture}\n{tests}")
    expect_two_of_each(run_pytest(tmp_path, "-p", "no:anyio", *SCOPE))


def test_under_anyios_plugin(tmp_path: Path) -> None:
    backend = '@pytest.fixture\ndef anyio_backend():\n    return "asyncio"\n'
    fixture = f"{backend}\n@pytest.fixture\n{FIXTURE.format(arguments='anyio_backend').strip()}"
    tests = TESTS.format(mark="@pytest.mark.anyio")
    (tmp_path / "test_shop.py").write_text(f"{APP}\n{fixture}\n{tests}")
    expect_two_of_each(run_pytest(tmp_path, "-p", "no:asyncio"))


@pytest.mark.parametrize(
    ("what", "options", "passed"),
    [
        (("test_shop.py", "test_fixture.py"), (*SCOPE, "-o", "asyncio_mode=auto"), "4 passed"),
        (("anyio_tests",), ("-p", "no:asyncio", "--confcutdir", "anyio_tests"), "1 passed"),
    ],
)
def test_the_tests_of_the_page(tmp_path: Path, what: tuple[str, ...], options: tuple[str, ...], passed: str) -> None:
    Page(ROOT / "docs" / "testing.md").write(tmp_path)
    output = run_pytest(tmp_path, *options, *what)
    assert passed in output and "failed" not in output, output
