"""``streamfw run`` as real processes: drain, exit codes, crashes, and no process left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from streamfw.cli import supervise
from streamfw.outcome import Backoff
from tests.helpers import eventually_blocking

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

    def noted(self, what: str) -> set[int]:
        """The processes that noted `what`."""
        return {int(path.name.rpartition("-")[2]) for path in self.directory.glob(f"{what}-*")}

    def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            eventually_blocking(condition, 20.0, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\nIt said:\n{self.log.read_text()}") from None

    def until_noted(self, what: str, count: int = 1) -> set[int]:
        self.until(lambda: len(self.noted(what)) >= count, f"{count} processes noted {what!r}")
        return self.noted(what)

    def until_said(self, text: str) -> None:
        self.until(lambda: text in self.log.read_text(), f"said {text!r}")

    def until_runs(self, workers: int) -> set[int]:
        """Until so many workers run; their process ids."""
        self.until(lambda: self.log.read_text().count("runs with") >= workers, f"{workers} workers run")
        return {child.pid for child in self.children()}

    def children(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children()
        self.seen.update(children)
        return children

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.code()

    def code(self) -> int:
        return self.process.wait(timeout=20)

    def nobody_left(self) -> bool:
        return not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in self.seen)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "service.py").write_text(SERVICE)
    started: list[Running] = []

    def begin(*arguments: str, **environ: str) -> Running:
        started.append(Running(tmp_path, arguments, **environ))
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


# -- one process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(start: Start, number: signal.Signals) -> None:
    running = start("service:app", BODY="until the drain")
    running.until_noted("began")
    running.process.send_signal(number)
    running.until_said("draining")
    assert not running.noted("done")
    (running.directory / "go-on").touch()
    assert running.code() == 0
    assert running.noted("done") == running.noted("ended") == {running.process.pid}


def test_a_second_signal_ends_at_once(start: Start) -> None:
    running = start("service:app", BODY="for ever")
    running.until_noted("began")
    running.process.send_signal(signal.SIGTERM)
    running.until_said("draining")
    assert running.end() == 130
    assert not running.noted("ended")


def test_every_mistake_is_said(start: Start) -> None:
    running = start("service:wrong")
    assert running.code() == 1
    assert "1. first('a'): workers: 0 is below 1" in running.log.read_text()
    assert "2. second('b'): attempts: 0 is below 1" in running.log.read_text()
    assert "Traceback" not in running.log.read_text()


def test_waiting_for_a_server_is_bounded(start: Start) -> None:
    running = start("service:away", "--wait", "0.3")
    assert running.code() == 1
    assert "nobody answers; trying again" in running.log.read_text()


def test_the_configuration_file_wins_over_the_apps_own(start: Start) -> None:
    running = start("service:app", "--config", "other.toml")
    assert running.code() == 1
    assert "other.toml: there is no such configuration file" in running.log.read_text()
    (running.directory / "other.toml").write_text("name = 'elsewhere'")
    running = start("service:app", "--config", "other.toml")
    running.until_said("elsewhere runs with 1 subscribers")
    assert running.end() == 0


def test_the_brokers_url_is_checked_with_everything_else(start: Start) -> None:
    running = start("service:wrong", "--broker", "nowhere://user:secret@host/")
    assert running.code() == 1
    assert "'nowhere://user@host/' has no known scheme" in running.log.read_text()
    assert "secret" not in running.log.read_text()


# -- several


def test_several_workers_drain(start: Start) -> None:
    running = start("service:app", "--workers", "2", BODY="until the drain")
    workers = running.until_runs(2)
    assert len(workers) == 2
    running.until_noted("began", 2)
    running.process.send_signal(signal.SIGTERM)
    running.until(lambda: running.log.read_text().count(": draining\n") == 2, "both workers drain")
    (running.directory / "go-on").touch()
    assert running.code() == 0
    assert running.noted("done") == running.noted("ended") == workers


def test_a_signal_to_every_process_drains_too(start: Start) -> None:
    """As a service manager sends it. What the parent asks for must not count as a worker's second signal."""
    running = start("service:app", "--workers", "2", BODY="until the drain")
    workers = running.until_runs(2)
    running.until_noted("began", 2)
    for pid in (running.process.pid, *workers, *workers):
        os.kill(pid, signal.SIGTERM)
    running.until(lambda: running.log.read_text().count(": draining\n") == 2, "both workers drain")
    (running.directory / "go-on").touch()
    assert running.code() == 0
    assert running.noted("ended") == workers


def test_a_second_signal_ends_all_at_once(start: Start) -> None:
    running = start("service:app", "--workers", "2", BODY="for ever")
    running.until_runs(2)
    running.process.send_signal(signal.SIGINT)
    running.until_said("SIGINT: draining 2 workers")
    assert running.end() == 130
    running.until(running.nobody_left, "no worker is left")
    assert not running.noted("ended")


def test_a_killed_worker_comes_back(start: Start) -> None:
    running = start("service:app", "--workers", "2")
    workers = running.until_runs(2)
    victim = min(workers)
    os.kill(victim, signal.SIGKILL)
    running.until_said(f"(process {victim}) was ended by SIGKILL; starting another in")
    again = running.until_runs(3)
    assert len(again) == 2
    assert victim not in again
    assert running.end() == 0
    assert running.noted("ended") == again


def test_a_worker_that_drained_by_itself_comes_back(start: Start) -> None:
    running = start("service:app", "--workers", "2")
    victim = min(running.until_runs(2))
    os.kill(victim, signal.SIGTERM)
    running.until_said(f"(process {victim}) ended with exit code 0; starting another")
    running.until_runs(3)
    assert running.end() == 0


def test_the_end_of_the_parent_drains_the_workers(start: Start) -> None:
    running = start("service:app", "--workers", "2")
    workers = running.until_runs(2)
    assert running.end(signal.SIGKILL) == -signal.SIGKILL
    running.until(running.nobody_left, "no worker is left")
    assert running.noted("ended") == workers


def test_a_worker_that_blocks_does_not_outlive_its_parent(start: Start) -> None:
    running = start("service:app", "--workers", "2", BODY="block", DRAIN="0")
    running.until_noted("began")
    running.children()
    assert running.end(signal.SIGKILL) == -signal.SIGKILL
    running.until(running.nobody_left, "no worker is left")
    assert "a handler blocks" in running.log.read_text()


def test_a_worker_that_still_imports_does_not_outlive_its_parent(start: Start, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    running = start("slow:app", "--workers", "2")
    running.until_noted("began")
    running.children()
    assert running.end(signal.SIGKILL) == -signal.SIGKILL
    running.until(running.nobody_left, "no worker is left")


def test_a_signal_while_a_worker_still_imports(start: Start, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    running = start("slow:app", "--workers", "2")
    running.until_noted("began")
    running.children()
    assert running.end() == 0
    running.until(running.nobody_left, "no worker is left")


@pytest.mark.parametrize(
    ("app", "said"),
    [("wrong", "1. first('a'): workers: 0 is below 1"), ("refused", "the password is wrong"), ("absent", "Apps in it")],
)
def test_what_cannot_start_is_said_once(start: Start, app: str, said: str) -> None:
    running = start(f"service:{app}", "--workers", "3")
    assert running.code() == 1
    assert running.log.read_text().count(said) == 1
    assert "ended with exit code 1 before it ran: ending the others" in running.log.read_text()


def test_one_that_cannot_start_ends_the_others(start: Start) -> None:
    running = start("service:narrow", "--workers", "2")
    assert running.code() == 1
    assert re.search(r"worker 2 \(process \d+\) ended with exit code 1 before it ran", running.log.read_text())
    assert len(running.noted("ran")) == 2
    assert len(running.noted("ended")) == 1


def test_a_signal_while_the_workers_wait_for_a_server(start: Start) -> None:
    running = start("service:away", "--workers", "2")
    running.until_said("nobody answers; trying again")
    running.children()
    assert running.end() == 0
    running.until(running.nobody_left, "no worker is left")


def test_no_process_can_be_started(caplog: pytest.LogCaptureFixture) -> None:
    assert asyncio.run(supervise.Supervisor(["/nothing/like/it"], 2).run()) == 1
    assert "worker 1 cannot be started: " in caplog.text


def test_the_pause_grows() -> None:
    pauses = [supervise._PAUSE.pause(crashes) for crashes in range(1, 12)]
    bounds = [Backoff(first=0.5, factor=2.0, max=30.0, jitter=False).pause(crashes) for crashes in range(1, 12)]
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))
    assert bounds[0] == 0.5
    assert bounds[-1] == 30.0
