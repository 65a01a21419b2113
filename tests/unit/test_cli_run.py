"""``streamfw run`` as real processes: drain, exit codes, crashes, and no process left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamfw.cli import fleet, worker
from streamfw.outcome import Backoff
from tests.unit.cli_rig import SERVICE, SLOW, Start, starting

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as start:
        yield start


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
    assert running.end(signal.SIGINT) == 130
    assert not running.noted("ended")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_signal_that_comes_twice_is_one(start: Start, workers: str) -> None:
    """As `timeout` sends it: to a process, and then to its whole group."""
    running = start("service:app", "--workers", workers, BODY="until the drain")
    running.until_runs(int(workers))
    running.until_noted("began", int(workers))
    running.process.send_signal(signal.SIGTERM)
    running.process.send_signal(signal.SIGTERM)
    running.until_said("draining")
    (running.directory / "go-on").touch()
    assert running.code() == 0


def test_a_hangup_drains_however_often_it_comes(start: Start) -> None:
    running = start("service:app", BODY="until the drain")
    running.until_noted("began")
    running.process.send_signal(signal.SIGHUP)
    running.until_said("SIGHUP: draining")
    running.process.send_signal(signal.SIGHUP)
    (running.directory / "go-on").touch()
    assert running.code() == 0
    assert running.noted("done") == running.noted("ended") == {running.process.pid}


@pytest.mark.parametrize("options", [(), ("--supervise",)])
def test_a_hangup_that_is_ignored_stays_ignored(start: Start, options: tuple[str, ...]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; children inherit it
    try:
        running = start("service:app", *options)
    finally:
        signal.signal(signal.SIGHUP, before)
    running.until_said("runs with")
    running.process.send_signal(signal.SIGHUP)
    assert running.end() == 0
    assert "SIGHUP" not in running.said


def test_every_mistake_is_said(start: Start) -> None:
    running = start("service:wrong")
    assert running.code() == 1
    assert "1. first('a'): workers: 0 is below 1" in running.said
    assert "2. second('b'): attempts: 0 is below 1" in running.said
    assert "Traceback" not in running.said


def test_waiting_for_a_server_is_bounded(start: Start) -> None:
    running = start("service:away", "--wait", "0.3")
    assert running.code() == 1
    assert "nobody answers; trying again" in running.said


def test_the_configuration_file_wins_over_the_apps_own(start: Start) -> None:
    running = start("service:app", "--config", "other.toml")
    assert running.code() == 1
    assert "other.toml: there is no such configuration file" in running.said
    (running.directory / "other.toml").write_text("name = 'elsewhere'")
    running = start("service:app", "--config", "other.toml")
    running.until_said("elsewhere runs with 1 subscriber")
    assert running.end() == 0


def test_the_brokers_url_is_checked_with_everything_else(start: Start) -> None:
    running = start("service:wrong", "--broker", "nowhere://user:secret@host/")
    assert running.code() == 1
    assert "'nowhere://user@host/' has no known scheme" in running.said
    assert "secret" not in running.said


# -- several


def test_several_workers_drain(start: Start) -> None:
    running = start("service:app", "--workers", "2", BODY="until the drain")
    workers = running.until_runs(2)
    assert len(workers) == 2
    running.until_noted("began", 2)
    running.process.send_signal(signal.SIGTERM)
    running.until(lambda: running.said.count(": draining\n") == 2, "both workers drain")
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
    running.until(lambda: running.said.count(": draining\n") == 2, "both workers drain")
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
    assert "a handler blocks" in running.said


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
    assert running.said.count(said) == 1
    assert "ended with exit code 1 before it ran\n" in running.said


def test_one_that_cannot_start_ends_the_others(start: Start) -> None:
    running = start("service:narrow", "--workers", "2")
    assert running.code() == 1
    assert re.search(r"worker 2 \(process \d+\) ended with exit code 1 before it ran: ending the others", running.said)
    assert len(running.noted("ran")) == 2
    assert len(running.noted("ended")) == 1


def test_a_signal_while_the_workers_wait_for_a_server(start: Start) -> None:
    running = start("service:away", "--workers", "2")
    running.until_said("nobody answers; trying again")
    running.children()
    assert running.end() == 0
    running.until(running.nobody_left, "no worker is left")


def test_one_that_comes_back_broken_does_not_end_the_others(start: Start) -> None:
    """A deployment is half done, and a worker crashes meanwhile."""
    running = start("service:app", "--workers", "2")
    workers = running.until_runs(2)
    running.write("1 / 0")
    victim = min(workers)
    os.kill(victim, signal.SIGKILL)
    running.until_said("ended with exit code 1; starting another")
    assert max(workers) in {child.pid for child in running.children()}
    running.write(SERVICE)
    running.until_runs(3)
    assert running.end() == 0


def test_one_that_comes_back_broken_ends_the_service_when_it_was_the_last(start: Start) -> None:
    running = start("service:app", "--supervise")
    (worker,) = running.until_runs(1)
    running.write("1 / 0")
    os.kill(worker, signal.SIGKILL)
    assert running.code() == 1
    assert "ended with exit code 1 before it ran\n" in running.said


# A worker that never ends by itself once it is to drain: it says that a drain takes it a tenth of a second.
_DEAF = "import socket, sys, time; s = socket.socket(fileno=int(sys.argv[-1])); s.send(b'r0.1'); time.sleep(600)"


async def test_a_worker_that_does_not_drain_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "_BEYOND", 0.2)
    deaf = await worker.Worker.start([sys.executable, "-c", _DEAF])
    try:
        assert await deaf.running()
        deaf.drain()
        assert await deaf.ended == -signal.SIGKILL
    finally:
        deaf.kill()
    assert f"process {deaf.pid} has not drained in 0 s: killing it" in caplog.text


def test_no_process_can_be_started(caplog: pytest.LogCaptureFixture) -> None:
    assert asyncio.run(fleet.Fleet(["/nothing/like/it"], 2).run()) == 1
    assert "worker 1 cannot be started: " in caplog.text


def test_the_pause_grows() -> None:
    pauses = [fleet._PAUSE.pause(crashes) for crashes in range(1, 12)]
    bounds = [Backoff(first=0.5, factor=2.0, max=30.0, jitter=False).pause(crashes) for crashes in range(1, 12)]
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))
    assert bounds[0] == 0.5
    assert bounds[-1] == 30.0
