"""An app as a process: exit codes, signals, what it prints."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from streamfw.runtime.main import _run

HEAD = """
import asyncio, sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
import msgspec
from streamfw import App, Broker, BrokerRefused, BrokerUnavailable, subscriber

class Away(Broker):
    error = BrokerUnavailable("nobody listens")
    @asynccontextmanager
    async def connect(self):
        raise self.error
        yield

class Refusing(Away):
    error = BrokerRefused("wrong password")

def say(text):
    print(text, flush=True)

async def publishing(app: App) -> AsyncIterator[None]:
    task = asyncio.create_task(publish_when_it_runs(app))
    try:
        yield
    finally:
        task.cancel()
        say("lifespan ends")

async def publish_when_it_runs(app):
    while not app.health().ok:
        await asyncio.sleep(0.005)
    say("running")
    await app.publish("orders", 1)
"""
LOOPS = pytest.mark.parametrize("uvloop", ["true", "false"])


class Program:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[str] = []

    async def until(self, text: str) -> None:
        """Wait for a line on standard output that holds `text`."""
        assert self._process.stdout is not None
        async with asyncio.timeout(20):
            while True:
                line = (await self._process.stdout.readline()).decode()
                assert line, f"it ended without {text!r}: {self.lines} {await self._errors()}"
                self.lines.append(line.strip())
                if text in line:
                    return

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def end(self) -> tuple[int, str, str]:
        """Exit code, the rest of standard output, standard error."""
        async with asyncio.timeout(20):
            out, errors = await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode, out.decode(), errors.decode()

    async def _errors(self) -> str:
        assert self._process.stderr is not None
        return (await self._process.stderr.read()).decode()

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.communicate()


@asynccontextmanager
async def program(directory: Path, source: str, **environ: str) -> AsyncIterator[Program]:
    path = directory / "program.py"
    path.write_text(HEAD + textwrap.dedent(source))
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(path), cwd=directory, env={**os.environ, **environ},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    running = Program(process)
    try:
        yield running
    finally:
        await running.kill()


@LOOPS
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_drains(tmp_path: Path, uvloop: str, number: signal.Signals) -> None:
    source = """
    @subscriber("orders")
    async def ship(order: int) -> None:
        say("begun")
        await asyncio.sleep(0.3)
        say("handled")

    App(ship, lifespan=publishing).run()
    """
    async with program(tmp_path, source, STREAMFW_UVLOOP=uvloop) as running:
        await running.until("begun")
        running.send(number)
        code, out, errors = await running.end()
    assert code == 0
    assert out.split("\n") == ["handled", "lifespan ends", ""]
    assert f"{number.name}: draining" in errors
    assert "drained" in errors


async def test_the_drain_has_a_deadline(tmp_path: Path) -> None:
    source = """
    @subscriber("orders")
    async def ship(order: int) -> None:
        try:
            say("begun")
            await asyncio.sleep(60)
        finally:
            say("cancelled")

    App(ship, lifespan=publishing, drain_timeout=0.1).run()
    """
    async with program(tmp_path, source) as running:
        await running.until("begun")
        running.send(signal.SIGTERM)
        code, out, _ = await running.end()
    assert (code, out) == (0, "cancelled\nlifespan ends\n")


@LOOPS
async def test_a_second_signal_ends_at_once(tmp_path: Path, uvloop: str) -> None:
    source = """
    @subscriber("orders")
    async def ship(order: int) -> None:
        print("printed, not flushed")
        sys.stderr.write("begun\\n")
        await asyncio.sleep(60)

    import logging
    logging.basicConfig(stream=sys.stdout, level=logging.INFO)
    App(ship, lifespan=publishing).run()
    """
    async with program(tmp_path, source, STREAMFW_UVLOOP=uvloop, PYTHONUNBUFFERED="1") as running:
        await running.until("printed")
        running.send(signal.SIGINT)
        await running.until("draining (a second signal ends at once)")
        running.send(signal.SIGTERM)
        code, _, _ = await running.end()
    assert code == 130


async def test_a_signal_while_it_waits_for_a_server(tmp_path: Path) -> None:
    source = """
    import logging
    logging.basicConfig(stream=sys.stdout, level=logging.INFO)
    App(brokers={"default": Away("away://user:hidden@host")}).run()
    """
    async with program(tmp_path, source, PYTHONUNBUFFERED="1") as running:
        await running.until("broker 'default' (away://user@host): nobody listens; trying again")
        running.send(signal.SIGTERM)
        code, out, errors = await running.end()
    assert (code, errors) == (0, "")
    assert "hidden" not in out


FAILURES = {
    "a mistake": ('App("orders").run()', "  1. 'orders': is not marked with @subscriber"),
    "a wrong setting": ('import os; os.environ["STREAMFW_WIAT"] = "1"; App().run()', "wiat: unknown option"),
    "away for too long": ('App(brokers={"default": Away("away://")}).run(wait=0.2)', "nobody listens"),
    "refused": ('App(brokers={"default": Refusing("away://")}).run()', "wrong password"),
    "a lifespan that raises": (
        """
        async def lifespan():
            raise LookupError("no table")
            yield
        App(lifespan=lifespan).run()
        """,
        "LookupError: no table",
    ),
    "a lifespan that raises at its end": (
        """
        async def lifespan():
            import os, signal
            asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
            yield
            raise LookupError("no table")
        App(lifespan=lifespan).run()
        """,
        "LookupError: no table",
    ),
    "a lifespan that yields something else": (
        """
        from typing import Annotated
        from streamfw import State
        @subscriber("orders")
        async def ship(order: int, state: Annotated[dict, State]) -> None: ...
        async def lifespan():
            yield "text"
        App(ship, lifespan=lifespan).run()
        """,
        "the lifespan yielded no <class 'dict'>",
    ),
    "a subscriber that ends": (
        """
        from streamfw.memory import MemorySource
        async def fails(self, limit, max_bytes):
            raise BrokerRefused("the table was dropped")
        MemorySource.fetch = fails
        @subscriber("orders")
        async def ship(order: int) -> None: ...
        App(ship).run()
        """,
        "the table was dropped",
    ),
}


@pytest.mark.parametrize("uvloop", [True, False])
def test_a_look_up_that_was_broken_off_is_not_told(uvloop: bool, caplog: pytest.LogCaptureFixture) -> None:
    """uvloop leaves its failure to nobody; what else nobody waits for is told as ever."""

    async def main() -> int:
        for error in (socket.gaierror(-2, "Name or service not known"), RuntimeError("something else")):
            asyncio.get_running_loop().create_future().set_exception(error)
        return 3

    assert _run(main(), uvloop) == 3
    gc.collect()
    told = [record.exc_info[1] for record in caplog.records if record.name == "asyncio" and record.exc_info]
    assert [type(error) for error in told] == [RuntimeError]


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_is_told_and_ends_with_1(tmp_path: Path, name: str) -> None:
    source, text = FAILURES[name]
    async with program(tmp_path, source) as running:
        code, _, errors = await running.end()
    assert code == 1
    assert text in errors
    if not name.startswith("a lifespan that raises"):
        assert "Traceback" not in errors, "what we say ourselves needs none"


async def test_an_interrupt_in_a_handler_ends_the_process_as_one(tmp_path: Path) -> None:
    source = """
    @subscriber("orders")
    async def ship(order: int) -> None:
        raise KeyboardInterrupt

    App(ship, lifespan=publishing).run()
    """
    async with program(tmp_path, source) as running:
        code, out, _ = await running.end()
    assert code == -signal.SIGINT, "130 to a shell"
    assert out == "running\nlifespan ends\n", "and it has drained before"


async def test_a_handler_that_exits_ends_the_process_with_its_code(tmp_path: Path) -> None:
    source = """
    @subscriber("orders")
    async def ship(order: int) -> None:
        sys.exit(3)

    App(ship, lifespan=publishing).run()
    """
    async with program(tmp_path, source) as running:
        code, out, _ = await running.end()
    assert code == 3
    assert out == "running\nlifespan ends\n", "and it has drained before"
