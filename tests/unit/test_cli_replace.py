"""SIGHUP to a parent of workers: they are replaced one by one, and what cannot start replaces nobody."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli_rig import SERVICE, SLOW, Running, Start, starting

AWAY = SERVICE + "\napp = away\n"
# Runs, and crashes a moment later.
BRITTLE = SERVICE.replace('note("ran")', 'note("ran"); asyncio.get_running_loop().call_later(0.2, os._exit, 3)', 1)


pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as start:
        yield start


def hang_up(running: Running) -> None:
    running.children()
    running.process.send_signal(signal.SIGHUP)


def test_workers_are_replaced_one_by_one(start: Start) -> None:
    running = start("service:app", "--workers", "2", BODY="until the drain")
    old = running.until_runs(2)
    running.until_noted("began", 2)
    hang_up(running)
    (third,) = running.until_noted("ran", 3) - old
    running.until_said(f"is process {third} now")
    running.until_said(": draining\n")
    assert not running.noted("ended"), "the first one drains, and waits for its handler"
    assert len(running.noted("ran")) == 3, "the second one is not touched before that"
    (running.directory / "go-on").touch()
    running.until_said("replaced 2 workers")
    new = {child.pid for child in running.children()}
    assert third in new
    assert len(new) == 2
    assert not new & old
    assert running.noted("ended") == old
    assert running.noted("done") >= old
    assert running.end() == 0
    assert running.noted("ended") == old | new


def test_a_single_worker_under_a_parent_is_replaced(start: Start) -> None:
    running = start("service:app", "--supervise")
    old = running.until_runs(1)
    for times in (1, 2):
        hang_up(running)
        running.until_said("replaced 1 workers", times)
    assert running.noted("ended") > old
    assert running.end() == 0
    assert len(running.noted("ended")) == 3


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("if True\n    pass", "SyntaxError: expected ':'"),
        (SERVICE + "\napp = refused", "the password is wrong"),
        (BRITTLE, "ended with exit code 3"),
    ],
)
def test_what_cannot_run_replaces_nobody(start: Start, source: str, said: str) -> None:
    running = start("service:app", "--workers", "2")
    old = running.until_runs(2)
    running.write(source)
    hang_up(running)
    running.until_said("the replacement stops here: mend what is wrong, and send SIGHUP again")
    assert said in running.said
    assert "worker 1 cannot be replaced: process" in running.said
    assert "runs on" in running.said
    assert {child.pid for child in running.children()} == old
    assert not running.noted("ended")
    assert running.end() == 0
    assert running.noted("ended") == old


def test_what_is_mended_replaces_them(start: Start) -> None:
    running = start("service:app", "--supervise")
    old = running.until_runs(1)
    running.write("1 / 0")
    hang_up(running)
    running.until_said("the replacement stops here")
    running.write(SERVICE)
    hang_up(running)
    running.until_said("replaced 1 workers")
    assert running.noted("ended") == old
    assert running.end() == 0


def test_another_hangup_gives_up_a_successor_that_waits(start: Start) -> None:
    running = start("service:app", "--workers", "2")
    running.until_runs(2)
    running.write(AWAY)
    hang_up(running)
    running.until_said("nobody answers; trying again")
    assert not running.noted("ended")
    running.write(SERVICE)
    hang_up(running)
    running.until_said("replaced 2 workers")
    assert "cannot be replaced" not in running.said
    assert running.end() == 0
    running.until(running.nobody_left, "no worker is left")


def test_a_signal_while_a_successor_waits(start: Start) -> None:
    running = start("service:app", "--workers", "2")
    old = running.until_runs(2)
    running.write(AWAY)
    hang_up(running)
    running.until_said("nobody answers; trying again")
    running.children()
    assert running.end() == 0
    assert running.noted("ended") == old
    assert "cannot be replaced" not in running.said
    running.until(running.nobody_left, "no worker is left")


def test_a_successor_takes_the_place_of_one_that_died_meanwhile(start: Start) -> None:
    running = start("service:app", "--supervise")
    (old,) = running.until_runs(1)
    slow = SLOW.replace("time.sleep(600)", "[time.sleep(0.01) for _ in iter(pathlib.Path('go-on').exists, True)]")
    running.write(slow + SERVICE)
    hang_up(running)
    running.until_noted("began")
    os.kill(old, signal.SIGKILL)
    (running.directory / "go-on").touch()
    running.until_said("replaced 1 workers")
    assert "starting another" not in running.said
    assert running.end() == 0


def test_a_hangup_ends_the_pause_of_one_that_crashed(start: Start) -> None:
    running = start("service:app", "--workers", "2")
    old = running.until_runs(2)
    victim = min(old)
    os.kill(victim, signal.SIGKILL)
    hang_up(running)
    running.until_said("replaced 2 workers")
    new = {child.pid for child in running.children()}
    assert len(new) == 2
    assert not new & old
    assert running.end() == 0


def test_a_worker_does_not_heed_a_hangup_itself(start: Start) -> None:
    """As when a service manager sends it to all processes of a service."""
    running = start("service:app", "--workers", "2", BODY="until the drain")
    old = running.until_runs(2)
    running.until_noted("began", 2)
    for pid in old:
        os.kill(pid, signal.SIGHUP)
    (running.directory / "go-on").touch()
    assert running.end() == 0
    assert running.noted("done") == running.noted("ended") == old
    assert "SIGHUP" not in running.said


@pytest.mark.parametrize("option", ["--supervise", "--reload"])
def test_a_terminal_that_is_closed_drains(start: Start, tmp_path: Path, option: str) -> None:
    """The kernel sends SIGHUP then; there is nobody any more for whom to go on."""
    terminal, line = pty.openpty()
    log = tmp_path / "log"
    log.touch()
    command = f"exec {sys.executable} -m streamfw.cli run service:app {option} < {os.ttyname(line)} > {log} 2>&1"
    # The shell leads a session of its own, and the terminal it opens becomes that session's.
    process = subprocess.Popen(["sh", "-c", command], cwd=tmp_path, start_new_session=True)
    try:
        running = Running.of(process, tmp_path)
        running.until_runs(1)
        os.close(line)
        os.close(terminal)
        assert running.code() == 0
        assert "SIGHUP, and the terminal is gone: draining 1 workers" in running.said
        running.until(running.nobody_left, "no worker is left")
    finally:
        process.kill()
        process.wait()
