"""The demo as a newcomer runs it: a process of its own, on memory and on an embedded Postgres."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from examples.webhooks.demo import QUEUES
from examples.webhooks.postgres_store import SCHEMA
from examples.webhooks.report import make_report
from examples.webhooks.store import MemoryStore, Stored
from examples.webhooks.traffic import BROKEN, Webhook, load
from streamfw import Message
from tests.helpers import eventually_blocking
from tests.services.kafka import Kafka
from tests.services.postgres import Postgres
from tests.services.rabbit import Rabbit

ROOT = Path(__file__).parents[2]
ROUNDS = 2
WEBHOOKS = 329 * ROUNDS


def command(broker: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "examples.webhooks", "--broker", broker, "--rounds", str(ROUNDS), *options]


def run_demo(broker: str, *options: str, seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(broker, *options), cwd=ROOT, capture_output=True, text=True, timeout=seconds)


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr or done.stdout
    return msgspec.json.decode(done.stdout, type=dict[str, Any])


def assert_agrees(report: dict[str, Any]) -> None:
    assert report["differences"] == []
    assert report["published"] == WEBHOOKS + 1
    assert report["handled"] == WEBHOOKS
    assert report["dead_lettered"] == 1
    assert report["lost"] == 0
    assert report["stored_twice"] == 0
    assert report["retried"] == 2 * ROUNDS  # the two workflow_dispatch webhooks of each round


@pytest.mark.timeout(60)
def test_demo_on_memory_agrees() -> None:
    report = result(run_demo("memory://", "--json", seconds=50))
    assert_agrees(report)
    assert report["failures"] == 2 * report["retried"]
    assert report["killed"] is None
    assert report["duplicates"] == 0


@pytest.mark.timeout(60)
def test_demo_shows_a_table_and_says_what_memory_leaves_out() -> None:
    done = run_demo("memory://", seconds=50)
    assert done.returncode == 0, done.stderr
    assert "no worker is killed" in done.stdout
    rows = dict(re.findall(r"│ (\S+)\s+│\s+([\d.]+) │", done.stdout))
    assert rows.pop("messages/s")
    assert rows == {
        "published": str(WEBHOOKS + 1),
        "handled": str(WEBHOOKS),
        "retried": str(2 * ROUNDS),
        "dead-lettered": "1",
        "lost": "0",
        "duplicates": "0",
    }


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """The directory of an embedded server that does not outlive a test that fails."""
    yield tmp_path / "demo"
    if server_runs(tmp_path / "demo"):
        os.kill(int((tmp_path / "demo" / "data" / "postmaster.pid").read_text().split()[0]), signal.SIGINT)


@pytest.mark.timeout(150)
def test_demo_on_embedded_postgres_agrees_although_a_worker_is_killed(home: Path) -> None:
    for _ in range(2):  # the second run finds the first one's data, and begins anew
        report = result(run_demo(f"postgres+embedded://{home}", "--json", seconds=70))
        assert_agrees(report)
        assert report["killed"] is not None
        assert report["duplicates"] >= 1  # it died in the middle of a message
        assert report["takeover"] < 15
        assert not server_runs(home)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_demo_that_is_interrupted_leaves_nothing_behind(home: Path, how: signal.Signals) -> None:
    demo = subprocess.Popen(command(f"postgres+embedded://{home}", "--json"), cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        workers = eventually_blocking(lambda: two_workers_on(home, demo.pid), deadline=40)
        demo.send_signal(how)
        assert demo.wait(timeout=40) == (-signal.SIGKILL if how == signal.SIGKILL else 130)
    finally:
        demo.kill()
        demo.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []
    assert not server_runs(home)


@pytest.mark.timeout(90)
async def test_demo_on_a_server_touches_only_its_own_schemas(database: Postgres) -> None:
    connection = await database.connect()
    await connection.execute("create schema streamfw; create table streamfw.mine as select 1 as kept")
    done = await asyncio.to_thread(run_demo, database.over_tcp().dsn, "--json", seconds=70)
    assert_agrees(result(done))
    assert database.password not in done.stdout + done.stderr
    schemas = await connection.fetch("select nspname from pg_namespace where nspname !~ '^(pg_|information_schema)'")
    assert {row["nspname"] for row in schemas} == {"public", "streamfw", SCHEMA, QUEUES}
    assert await connection.fetchval("select kept from streamfw.mine") == 1
    await connection.close()


@pytest.mark.timeout(90)
async def test_demo_on_kafka_agrees_although_a_worker_is_killed(kafka: Kafka) -> None:
    broker = f"{kafka.url}/?create_topics=true&partitions=4"
    done = await asyncio.to_thread(run_demo, broker, "--json", seconds=70)
    report = result(done)
    assert_agrees(report)
    assert report["killed"] is not None
    assert report["takeover"] is None or report["takeover"] < 30  # None: it was killed behind the last message
    assert done.stderr == ""


@pytest.mark.timeout(90)
async def test_demo_on_rabbitmq_agrees_although_a_worker_is_killed(rabbit: Rabbit) -> None:
    done = await asyncio.to_thread(run_demo, rabbit.url, "--json", seconds=70)
    report = result(done)
    assert_agrees(report)
    assert report["killed"] is not None
    assert report["takeover"] is None or report["takeover"] < 30  # None: it was killed behind the last message
    assert done.stderr == ""
    assert rabbit.password not in done.stdout


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("broker", "says"),
    [
        ("redis://me:secret@localhost", "no known scheme"),
        ("memory://?x=1", "a memory broker's URL is memory:// or memory://name"),
        ("postgres://me:secret@127.0.0.1:1/x", "cannot be reached"),
        (f"postgres+embedded://{ROOT}", "an embedded server needs a directory of its own"),
        ("kafka://me:secret@127.0.0.1:1", "127.0.0.1:1"),
        ("amqp://me:secret@127.0.0.1:1", "127.0.0.1:1"),
    ],
)
def test_demo_says_what_is_wrong_with_a_url(broker: str, says: str) -> None:
    done = run_demo(broker, "--json", seconds=50)
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr
    assert done.stdout == ""


def server_runs(home: Path) -> bool:
    return (home / "data" / "postmaster.pid").exists()


def two_workers_on(home: Path, demo: int) -> list[psutil.Process]:
    """The demo's worker processes, once there are two and both use the server in `home`."""
    workers = [child for child in psutil.Process(demo).children() if is_worker(child)]
    users = {entry.name.partition("-")[0] for entry in (home / "users").glob("*")}
    return workers if len(workers) == 2 and users.issuperset(str(worker.pid) for worker in workers) else []


def is_worker(process: psutil.Process) -> bool:
    try:
        return "examples.webhooks.worker" in process.cmdline()
    except psutil.Error:  # it is gone already
        return False


# -- what the demo says when something is wrong


def dead_letter(message_id: str) -> Message:
    return Message(name="webhooks.dead", body=b"", message_id=message_id)


async def store_of(webhooks: list[Webhook]) -> MemoryStore:
    store = MemoryStore()
    for webhook in webhooks:
        await store.note(webhook.message_id, "began", 1)
        await store.add(
            Stored(message_id=webhook.message_id, owner=webhook.owner, event="push", line="", attempt=1, worker=1), None
        )
    return store


async def test_report_names_what_was_lost() -> None:
    webhooks = load(1)
    kept = [webhook for webhook in webhooks if webhook.message_id not in (BROKEN, "001-007")]
    report = await make_report("memory://", webhooks, await store_of(kept), [dead_letter(BROKEN)], None)
    assert report.lost == 1
    assert report.differences == ["1 published, and neither handled nor dead-lettered: 001-007"]


async def test_report_names_what_was_handled_twice_over() -> None:
    webhooks = [webhook for webhook in load(1) if webhook.message_id != BROKEN]
    store = await store_of([*webhooks, Webhook("stranger", "nobody", b"")])
    report = await make_report("memory://", webhooks, store, [dead_letter(webhooks[0].message_id)], None)
    assert report.lost == 0
    assert report.differences == [
        "1 handled or dead-lettered, and never published: stranger",
        "1 handled and dead-lettered: 001-001",
    ]


async def test_report_names_the_first_webhook_out_of_order() -> None:
    webhooks = [Webhook(f"id-{number}", f"owner-{number % 2}", b"") for number in range(8)]
    swapped = [*webhooks[:2], webhooks[4], webhooks[3], webhooks[2], *webhooks[5:]]
    report = await make_report("memory://", webhooks, await store_of(swapped), [], None)
    assert report.differences == ["owner-0: out of order: id-4 was handled where id-2 was due"]
    interleaved = sorted(webhooks, key=lambda webhook: webhook.owner)  # another owner's webhooks may come first
    assert (await make_report("memory://", webhooks, await store_of(interleaved), [], None)).differences == []
