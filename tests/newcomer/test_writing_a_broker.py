"""The broker that docs/writing-a-broker.md builds: the page's own blocks, imported from the page.

The conformance suite is the page's `test_filebroker.py`, run here; beside it stands what the page says and the suite
does not ask: the registration, and processes that die.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamfw import App, Message, subscriber
from streamfw.broker import Broker, Subscription
from streamfw.errors import BrokerError
from streamfw.message import ERROR_TYPE, ORIGIN, ORIGIN_ATTEMPT, ORIGIN_GROUP, Outgoing
from streamfw.testing.conformance import BrokerConformance
from tests.helpers import eventually, eventually_blocking

from .blocks import ROOT, Page

PAGE = Page(ROOT / "docs" / "writing-a-broker.md")
FileBroker: type[Broker] = PAGE.module("filebroker.py").FileBroker
TestFileBroker: type[BrokerConformance] = PAGE.module("test_filebroker.py").TestFileBroker

ALL = [name for name in dir(BrokerConformance) if name.startswith("test_")]
BEGIN = [sys.executable, "-m"]
WORKER = """
import os, signal
from streamfw import App, Message, subscriber

@subscriber("work", attempts=3, workers=4)
async def handle(number: int, message: Message) -> None:
    with open("handled", "a") as file:
        file.write(f"{number} {message.attempt}\\n")
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)

App(handle, name="shop").run()
"""


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    return FileBroker(f"file://{tmp_path}/spool")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The page's files in a directory, its package registered as its pyproject says, as an installer does it."""
    PAGE.write(tmp_path)
    package = tomllib.loads(PAGE.file("pyproject.toml"))["project"]
    points = package["entry-points"]["streamfw.brokers"]
    installed = tmp_path / f"{package['name'].replace('-', '_')}-{package['version']}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Name: {package['name']}\nVersion: {package['version']}\n")
    lines = "".join(f"{scheme} = {where}\n" for scheme, where in points.items())
    (installed / "entry_points.txt").write_text(f"[streamfw.brokers]\n{lines}")
    return tmp_path


def environment(project: Path, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STREAMFW_")}
    return inherited | {"PYTHONPATH": str(project), "PYTHONUNBUFFERED": "1"} | more


def call(project: Path, command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True, check=False)


@contextmanager
def running(command: list[str], project: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with (project / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=project, env=variables, stdout=output, stderr=output, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


# The suite


def test_the_page_runs_the_whole_suite_and_overrides_none_of_it() -> None:
    assert len(ALL) > 60
    for name in ALL:
        assert getattr(TestFileBroker, name) is getattr(BrokerConformance, name)


def test_a_stranger_runs_it_from_the_page_alone(project: Path) -> None:
    """In a directory of its own, with pytest's defaults: all of it is found; one test of each level is run."""
    chosen = ["test_a_delivery_carries_what_was_published", "test_a_handler_gets_what_the_app_published"]
    command = [*BEGIN, "pytest", "-q", "-p", "no:cacheprovider", "test_filebroker.py"]
    found = call(project, [*command, "--collect-only"], environment(project))
    names = {line.rpartition("::")[2].partition("[")[0] for line in found.stdout.splitlines()}
    assert set(ALL) <= names, found.stdout + found.stderr
    ran = call(project, [*command, "-k", " or ".join(chosen)], environment(project))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 passed" in ran.stdout


# The registration


def test_the_commands_of_the_page(project: Path) -> None:
    (console,) = [block for block in PAGE.blocks if block.language == "console" and "streamfw run" in block.code]
    export, publish, run = [shlex.split(line.removeprefix("$ ")) for line in console.code.splitlines()]
    assert (export[0], publish[0], run[0]) == ("export", "streamfw", "streamfw")
    variables = environment(project, **dict([export[1].partition("=")[::2]]))
    published = call(project, [*BEGIN, "streamfw.cli", *publish[1:]], variables)
    assert published.returncode == 0, published.stderr
    with running([*BEGIN, "streamfw.cli", *run[1:]], project, variables) as process:
        eventually_blocking(lambda: "shipping tea" in (project / "output").read_text(), 20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, (project / "output").read_text()


def test_its_options_in_the_configuration(project: Path) -> None:
    script = (
        "from streamfw.config import load, make_broker\n"
        "options = load().brokers['default']\n"
        "print(make_broker('brokers.default', options.pop('url'), options).fsync)"
    )
    variables = environment(
        project, STREAMFW_BROKERS__DEFAULT__URL="file://x", STREAMFW_BROKERS__DEFAULT__FSYNC="false"
    )
    assert call(project, [sys.executable, "-c", script], variables).stdout == "False\n"
    variables["STREAMFW_BROKERS__DEFAULT__URL"] = "file://"
    refused = call(project, [sys.executable, "-c", script], variables)
    assert "ConfigError: brokers.default: the URL names no directory" in refused.stderr


# What the page says beyond the suite


@pytest.mark.timeout(120)
async def test_a_message_that_kills_its_process_takes_no_other_along(project: Path, broker: Broker) -> None:
    """Among 40, one kills every process that handles it: it is the only dead letter, after its three attempts."""
    async with broker.connect() as connection:
        messages = [Outgoing(name="work", body=b"%d" % number, message_id=f"id-{number}") for number in range(40)]
        assert not any(await connection.publish(messages))
    (project / "worker.py").write_text(WORKER)
    variables = environment(project, STREAMFW_BROKERS__DEFAULT__URL=broker.url)
    buried = project / "spool" / "work.dead" / "kept" / "ready"
    deaths = 0

    def handled() -> list[tuple[int, int]]:
        lines = (project / "handled").read_text().split("\n")[:-1] if (project / "handled").exists() else []
        return [(int(number), int(attempt)) for number, attempt in map(str.split, lines)]

    def done() -> bool:
        return len({number for number, _ in handled()}) == 40 and buried.is_dir() and len(os.listdir(buried)) == 1

    while True:
        with running([sys.executable, "worker.py"], project, variables) as process:
            await eventually(lambda: process.poll() is not None or done(), 40)
            if process.poll() is None:
                process.terminate()
                assert process.wait(20) == 0
                break
            assert process.returncode == -signal.SIGKILL, (project / "output").read_text()
        deaths += 1
        assert deaths <= 3
    assert deaths == 3
    assert [attempt for number, attempt in handled() if number == 7] == [1, 2, 3]

    letters: list[Message] = []

    @subscriber("work.dead")
    async def bury(message: Message) -> None:
        letters.append(message)

    async with App(bury, brokers={"default": broker}).running():
        await eventually(lambda: letters)
    assert [(letter.message_id, letter.body) for letter in letters] == [("id-7", b"7")]
    headers = letters[0].headers
    assert (headers[ORIGIN], headers[ORIGIN_GROUP], headers[ORIGIN_ATTEMPT]) == ("work", "shop", "3")
    assert headers[ERROR_TYPE] == "ProcessDied"


async def test_a_broken_file_is_put_aside_and_holds_up_nobody(
    tmp_path: Path, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    async with broker.connect() as connection:
        source = await connection.open(Subscription("orders"))
        for number in range(3):
            assert not any(await connection.publish([Outgoing(name="orders", body=b"x", message_id=f"id-{number}")]))
        group = tmp_path / "spool" / "orders" / "groups" / "default"
        first = sorted((group / "ready").iterdir())[0]
        first.write_bytes(b"\xc1 not ours")
        (group / "ready" / "README").write_text("somebody else's")
        taken = await source.fetch(10, 1000)
        assert [delivery.message_id for delivery in taken] == ["id-1", "id-2"]
        assert [path.name for path in (group / "broken").iterdir()] == [first.name]
        assert (group / "ready" / "README").exists()
    assert "put aside" in caplog.text


async def test_a_directory_that_cannot_be_one_is_refused(tmp_path: Path, broker: Broker) -> None:
    (tmp_path / "spool").write_text("a file")
    with pytest.raises(BrokerError, match="is no directory") as caught:
        async with broker.connect():
            pytest.fail("it connected to a file")
    assert not caught.value.transient
    with pytest.raises(BrokerError, match="no directory"):
        async with FileBroker(f"file://{tmp_path}/nowhere/spool").connect():
            pytest.fail("only the last folder is made")


async def test_a_name_without_a_folder_is_a_mistake_at_build(broker: Broker) -> None:
    for mistaken in (Subscription("x" * 251), Subscription(""), Subscription("orders", "")):
        (mistake,) = broker.mistakes(mistaken)
        assert "is empty, or too long" in mistake
    async with broker.connect() as connection:
        (error,) = await connection.publish([Outgoing(name="x" * 251, body=b"", message_id="id-1")])
        assert "too long" in str(error)
