"""``streamfw run`` as real processes, for the tests of the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]

from tests.helpers import eventually_blocking

__all__ = ["SERVICE", "SLOW", "Running", "Start", "starting"]

DEADLINE = 60.0  # seconds for anything that takes one or two; such tests set a timeout of their own

# Writes `ran-PID` when it runs and `ended-PID` when its lifespan ends, which is after the drain.
SERVICE = """
import asyncio, os, time
from pathlib import Path
import streamfw.cli.lifeline
from streamfw import App, BrokerRefused, BrokerUnavailable, subscriber
from streamfw.memory import MemoryBroker

def note(what):
    Path(f"{what}-{os.getpid()}").touch()

@subscriber("work")
async def work(body: str):
    note("began")
    if body == "until the drain":
        while not Path("go-on").exists():
            await asyncio.sleep(0.01)
    elif body == "for ever":
        await asyncio.Event().wait()
    elif body == "block":
        time.sleep(600)
    note("done")

async def lifespan(app):
    note("ran")
    if "BODY" in os.environ:
        await app.publish("work", os.environ["BODY"])
    yield None
    note("ended")

app = App(work, lifespan=lifespan, drain_timeout=float(os.environ.get("DRAIN", "30")))
streamfw.cli.lifeline.GRACE = 1.0

async def only_first(app):
    note("ran")
    if len(list(Path().glob("ran-*"))) > 1:
        raise RuntimeError("there is room for one")
    yield None
    note("ended")

narrow = App(work, lifespan=only_first)

wrong = App(work)
@wrong.subscriber("a", workers=0)
async def first(body: int): ...
@wrong.subscriber("b", attempts=0)
async def second(body: int): ...

class Refusing(MemoryBroker):
    def connect(self):
        note("tried")
        raise BrokerRefused("the password is wrong")

class Away(MemoryBroker):
    def connect(self):
        note("tried")
        raise BrokerUnavailable("nobody answers")

refused = App(work, brokers={"default": Refusing()})
away = App(work, brokers={"default": Away()})
"""

SLOW = "import pathlib, time; pathlib.Path('began-0').touch(); time.sleep(600)"

Start = Callable[..., "Running"]


class Running:
    """One ``streamfw run`` in a directory of its own."""

    def __init__(self, directory: Path, arguments: Sequence[str], **environ: str) -> None:
        self.directory = directory
        self.log = directory / "log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("STREAMFW_")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "streamfw.cli", "run", *arguments],
                cwd=directory,
                env={**clean, **environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.seen: set[psutil.Process] = set()

    @classmethod
    def of(cls, process: subprocess.Popen[bytes], directory: Path) -> Running:
        """One that was started otherwise, and writes to ``log`` in `directory`."""
        running = cls.__new__(cls)
        running.directory, running.log, running.process, running.seen = directory, directory / "log", process, set()
        return running

    def noted(self, what: str) -> set[int]:
        """The processes that noted `what`."""
        return {int(path.name.rpartition("-")[2]) for path in self.directory.glob(f"{what}-*")}

    @property
    def said(self) -> str:
        """What it and its workers have said so far."""
        return self.log.read_text()

    def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            eventually_blocking(condition, DEADLINE, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\nIt said:\n{self.said}") from None

    def until_noted(self, what: str, count: int = 1) -> set[int]:
        self.until(lambda: len(self.noted(what)) >= count, f"{count} processes noted {what!r}")
        return self.noted(what)

    def until_said(self, text: str, times: int = 1) -> None:
        self.until(lambda: self.said.count(text) >= times, f"said {text!r} {times} times")

    def until_runs(self, workers: int) -> set[int]:
        """Until so many workers run; their process ids."""
        self.until_said("runs with", workers)
        return {child.pid for child in self.children()}

    def children(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children()
        self.seen.update(children)
        return children

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.code()

    def code(self) -> int:
        return self.process.wait(timeout=DEADLINE)

    def write(self, text: str, name: str = "service.py") -> None:
        """Change the source, in one step, as editors do."""
        new = self.directory / f".{name}.new"
        new.write_text(text)
        new.replace(self.directory / name)

    def nobody_left(self) -> bool:
        return not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in self.seen)


@contextmanager
def starting(directory: Path) -> Iterator[Start]:
    """A function that runs ``streamfw run`` in `directory`, where there is a module ``service``."""
    (directory / "service.py").write_text(SERVICE)
    started: list[Running] = []

    def begin(*arguments: str, **environ: str) -> Running:
        started.append(Running(directory, arguments, **environ))
        return started[-1]

    yield begin
    for running in started:
        if running.process.poll() is None:
            running.children()
            running.process.kill()
            running.process.wait()
        for child in running.seen:
            if child.is_running():
                child.kill()
