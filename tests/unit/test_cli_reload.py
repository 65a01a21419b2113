"""``streamfw run --reload``: new code after each change, and what the old code had begun is finished first."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from watchfiles import Change

from streamfw.cli.reload import Source
from tests.unit.cli_rig import SERVICE, SLOW, Running, Start, starting

BROKEN = "if True\n    pass"


pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as start:
        yield start


def version(number: int) -> str:
    """The service as it says its version, always with as many bytes."""
    return f"{SERVICE}\nprint('version {number} is here', flush=True)\n"


def ran(running: Running) -> list[int]:
    """The processes that ran, in order."""
    return [int(pid) for pid in re.findall(r"worker 1 is process (\d+)", running.said)]


def test_a_change_runs_the_new_code(start: Start) -> None:
    running = start("service:app", "--reload")
    for number in range(1, 4):
        running.until_runs(number)
        running.write(version(number))
        running.until_said(f"version {number} is here")
    running.until_runs(4)
    *old, new = ran(running)
    assert running.noted("ended") == set(old)
    assert {child.pid for child in running.children()} == {new}
    assert "each worker process has messages of its own there, which end with it" in running.said
    assert running.end() == 0
    assert running.noted("ended") == {*old, new}


def test_what_runs_is_finished_before_the_new_code_starts(start: Start) -> None:
    running = start("service:app", "--reload", BODY="until the drain")
    (old,) = running.until_runs(1)
    running.until_noted("began")
    running.write(version(1))
    running.until_said(": draining\n")
    assert running.noted("ran") == {old}
    assert not running.noted("done")
    (running.directory / "go-on").touch()
    running.until_runs(2)
    assert running.noted("done") >= {old}
    assert running.noted("ended") == {old}
    assert running.end() == 0


def test_a_drain_is_bounded(start: Start) -> None:
    running = start("service:app", "--reload", BODY="for ever", DRAIN="0.1")
    (old,) = running.until_runs(1)
    running.until_noted("began")
    running.write(version(1))
    running.until_runs(2)
    assert running.noted("ended") == {old}
    assert running.end() == 0


def test_a_handler_that_blocks_does_not_stop_a_reload(start: Start) -> None:
    running = start("service:app", "--reload", BODY="block", DRAIN="0")
    running.until_noted("began")
    running.write(version(1))
    running.until_said("version 1 is here")
    assert "a handler blocks" in running.said
    running.until_noted("began", 2)
    assert running.end(signal.SIGINT) == 1


def test_a_mistake_in_the_new_code_waits_for_the_next_change(start: Start) -> None:
    running = start("service:app", "--reload")
    (first,) = running.until_runs(1)
    running.write(BROKEN)
    running.until_said("the app cannot run: waiting for a change in ")
    assert "SyntaxError: expected ':'" in running.said
    assert re.search(r"service\.py:1\n", running.said)
    assert running.noted("ended") == {first}
    running.write("1 / 0")
    running.until_said("ZeroDivisionError: division by zero")
    running.until_said("the app cannot run: waiting for a change in ", 2)
    assert running.children() == []
    running.write(version(1))
    running.until_runs(2)
    assert running.end() == 0


@pytest.mark.parametrize("source", [BROKEN, SERVICE + "\napp = wrong", SERVICE + "\napp = refused", "no_app = 1"])
def test_a_signal_while_it_waits_for_a_change(start: Start, source: str, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(source)
    running = start("other:app", "--reload")
    running.until_said("the app cannot run: waiting for a change")
    assert running.end() == 0


def test_a_signal_and_a_change_while_the_code_is_imported(start: Start, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    running = start("slow:app", "--reload")
    running.until_noted("began")
    (tmp_path / "began-0").unlink()
    running.write(SLOW, "slow.py")
    running.until_noted("began")
    running.children()
    assert len(ran(running)) == 2
    assert running.end() == 0
    running.until(running.nobody_left, "no worker is left")


def test_a_second_signal_ends_at_once(start: Start) -> None:
    running = start("service:app", "--reload", BODY="for ever")
    running.until_noted("began")
    running.children()
    running.process.send_signal(signal.SIGTERM)
    running.until_said("SIGTERM: draining 1 workers")
    assert running.end(signal.SIGINT) == 130
    running.until(running.nobody_left, "no worker is left")
    assert not running.noted("ended")


def test_a_crashed_worker_comes_back(start: Start) -> None:
    running = start("service:app", "--reload")
    (victim,) = running.until_runs(1)
    os.kill(victim, signal.SIGKILL)
    running.until_said(f"(process {victim}) was ended by SIGKILL; starting another in")
    running.until_runs(2)
    assert running.end() == 0


def test_a_hangup_is_like_a_change(start: Start) -> None:
    running = start("service:app", "--reload", "--workers", "2")
    old = running.until_runs(2)
    running.process.send_signal(signal.SIGHUP)
    running.until_runs(4)
    assert running.noted("ended") == old
    assert running.end() == 0


def test_the_end_of_the_parent_drains_the_worker(start: Start) -> None:
    running = start("service:app", "--reload")
    workers = running.until_runs(1)
    assert running.end(signal.SIGKILL) == -signal.SIGKILL
    running.until(running.nobody_left, "no worker is left")
    assert running.noted("ended") == workers


def test_many_changes_at_once_are_one(start: Start) -> None:
    running = start("service:app", "--reload")
    running.until_runs(1)
    for number in range(50):
        running.write("", f"module{number}.py")
    running.write(version(1))
    running.until_said("version 1 is here")
    assert running.said.count("changed: ") < 10
    assert running.end() == 0


def test_the_configuration_file_is_watched_too(start: Start, tmp_path: Path) -> None:
    """Also when it lies elsewhere than the source, and is not there yet."""
    source = tmp_path / "source"
    source.mkdir()
    running = start("service:app", "--reload", "--reload-dir", str(source))
    running.until_runs(1)
    running.write(version(1))  # not watched
    running.write("name = 'elsewhere'", "streamfw.toml")
    running.until_said("elsewhere runs with 1 subscriber")
    assert f"changed: {tmp_path / 'streamfw.toml'}\n" in running.said
    (source / "part.py").write_text("")
    running.until_said(f"changed: {source / 'part.py'}\n")
    running.until_runs(3)
    assert f"{tmp_path / 'service.py'}" not in running.said
    assert running.end() == 0


def test_what_is_no_source_is_not_heeded(tmp_path: Path) -> None:
    project = tmp_path / ".venv" / "project"  # that it lies in a directory of this name does not matter
    source = Source([project], tmp_path / "etc" / "streamfw.toml")

    def heeds(name: str) -> bool:
        return source(Change.modified, str(project / name))

    assert heeds("shop.py")
    assert heeds("a/b/shop.py")
    assert source(Change.added, str(tmp_path / "etc" / "streamfw.toml"))
    for name in ("shop.pyc", "shop.txt", "streamfw.toml", ".venv/lib/x.py", "node_modules/x.py", ".git/x.py", "py"):
        assert not heeds(name), name
    assert not source(Change.modified, str(tmp_path / "etc" / "other.toml"))
    assert not source(Change.modified, f"{project}s/shop.py")


def test_the_places_to_watch(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    config = tmp_path / "streamfw.toml"
    assert Source([tmp_path], config).places == [(tmp_path, True)]
    assert Source([tmp_path / "a"], config).places == [(tmp_path / "a", True), (tmp_path, False)]
    assert Source([tmp_path], tmp_path / "absent" / "streamfw.toml").places == [(tmp_path, True)]


def test_a_directory_to_watch_without_reload(start: Start, tmp_path: Path) -> None:
    running = start("service:app", "--reload-dir", str(tmp_path))
    assert running.code() == 1
    assert running.said == "error: --reload-dir says what --reload watches; give that, too\n"


def test_what_cannot_be_watched_is_said(start: Start, tmp_path: Path) -> None:
    """The kernel's limit of watches, as the library tells it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import watchfiles.main as main\n"
        "def refuse(*args): raise OSError(28, 'OS file watch limit reached')\n"
        "main.RustNotify = refuse\n"
    )
    running = start("service:app", "--reload", PYTHONPATH=str(tmp_path))
    assert running.code() == 1
    assert running.said == f"error: cannot watch {tmp_path}: [Errno 28] OS file watch limit reached\n"


def test_without_watchfiles() -> None:
    code = (
        "import sys; sys.modules['watchfiles'] = None; from streamfw.cli import main; main(['run', 'a:b', '--reload'])"
    )
    ended = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "error: --reload needs watchfiles; install it with: pip install 'streamfw[cli]'\n"
