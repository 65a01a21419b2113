"""The command line on a real Postgres: the schema, publishing, dead letters, status, and a service of two processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamfw_postgres.migrations import MIGRATIONS
from tests.brokers.cli_kit import Run, commands_on
from tests.helpers import eventually_blocking
from tests.services.postgres import Postgres

SERVICE = """
import os
from pathlib import Path
from streamfw import App, DeadLetter, subscriber

@subscriber("orders", attempts=1)
async def ship(order: dict) -> None:
    if "item" not in order:
        raise ValueError("no item")
    with open("shipped", "a") as file:
        file.write(f"{os.getpid()} {order['item']}\\n")

app = App(ship, name="shop")
"""


@pytest.fixture
def run(database: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command on the test's database, which the environment names."""
    return commands_on(database.dsn, tmp_path, monkeypatch, columns=200, secret=database.password)


def execute(database: Postgres, sql: str) -> list[tuple[object, ...]]:
    async def connected() -> list[tuple[object, ...]]:
        connection = await database.connect()
        try:
            return [tuple(row) for row in await connection.fetch(sql)]
        finally:
            await connection.close()

    return asyncio.run(connected())


def test_migrate(run: Run, database: Postgres) -> None:
    code, plan, _ = run("postgres", "migrate", "--plan")
    assert code == 0
    assert 'create table "streamfw".message' in plan
    assert execute(database, "select to_regclass('streamfw.message')") == [(None,)]
    code, out, _ = run("postgres", "migrate")
    assert code == 0
    assert out.startswith("applied 1: ")
    assert run("postgres", "migrate") == (0, "up to date: nothing to do\n", "")
    assert run("postgres", "migrate", "--plan") == (0, "-- up to date: nothing to do\n", "")


def test_the_printed_plan_is_what_migrate_does(run: Run, database: Postgres) -> None:
    """A plan can be applied by somebody else's hand."""
    plan = run("postgres", "migrate", "--plan")[1]

    async def apply() -> None:
        connection = await database.connect()
        await connection.execute(plan)
        await connection.close()

    asyncio.run(apply())
    assert run("postgres", "migrate") == (0, "up to date: nothing to do\n", "")
    assert run("publish", "orders", "{}")[0] == 0


def test_the_configured_schema(run: Run, database: Postgres, tmp_path: Path) -> None:
    (tmp_path / "streamfw.toml").write_text('[brokers.default]\nurl = "postgres://nowhere"\nschema = "my own"\n')
    assert run("postgres", "migrate")[0] == 0
    assert execute(database, 'select count(*) from "my own".message') == [(0,)]


@pytest.mark.parametrize(
    "command", [["publish", "orders", "{}"], ["dlq", "list", "orders.dead"], ["postgres", "status"]]
)
def test_a_missing_schema_says_what_to_do(run: Run, command: list[str]) -> None:
    code, out, error = run(*command)
    assert (code, out) == (1, "")
    assert "schema 'streamfw' does not exist" in error
    assert "run `streamfw postgres migrate`" in error


@pytest.mark.parametrize("command", [["publish", "orders", "{}"], ["postgres", "migrate"], ["postgres", "status"]])
def test_a_server_that_refuses_or_is_away(run: Run, database: Postgres, command: list[str]) -> None:
    wrong = database.dsn.replace(database.password, "a-wrong-word")
    code, out, error = run(*command, "--broker", wrong)
    assert (code, out) == (1, "")
    assert error.startswith("error: ")
    assert "password authentication failed" in error
    assert "a-wrong-word" not in error
    code, _, error = run(*command, "--broker", "postgres://user:a-wrong-word@127.0.0.1:1/shop")
    assert code == 1
    assert error.startswith("error: ")
    assert "a-wrong-word" not in error


def test_postgres_commands_need_postgres(run: Run) -> None:
    for command in ("migrate", "status"):
        code, _, error = run("postgres", command, "--broker", "memory://")
        assert (code, error) == (1, "error: memory:// is not Postgres: name one with --broker postgres://..\n")


def test_status(run: Run) -> None:
    run("postgres", "migrate")
    assert "There are no queues yet." in run("postgres", "status")[1]
    run("publish", "orders", "{}", "--count", "3")
    run("publish", "orders", "{}", "--delay", "600")
    run("publish", "orders.dead", "{}")
    code, out, _ = run("postgres", "status")
    assert code == 0
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines()]
    (orders,) = [row for row in rows if row[:1] == ["orders"]]
    assert orders[1:5] == ["(none yet)", "3", "1", "0"]
    assert orders[-2:] == ["1", "no"]
    assert ["version", str(MIGRATIONS[-1].version)] in rows
    code, out, _ = run("postgres", "status", "--json")
    queues = {queue["queue"]: queue for queue in json.loads(out)["queues"]}
    assert (queues["orders"]["ready"], queues["orders"]["delayed"], queues["orders"]["dead"]) == (3, 1, 1)
    assert queues["orders"]["oldest"] >= 0
    assert json.loads(out)["table"]["version"] == MIGRATIONS[-1].version


def test_a_refused_message_is_told(run: Run) -> None:
    run("postgres", "migrate")
    code, out, error = run("publish", "or\0ders", "{}")
    assert (code, out) == (1, "")
    assert error.startswith("error: not published: Rejected: ")


def test_check_on_postgres(run: Run, tmp_path: Path) -> None:
    (tmp_path / "postgres_shop.py").write_text(SERVICE)
    code, out, _ = run("check", "postgres_shop:app")
    assert code == 0
    assert "delivered again, also after a crash" in out
    assert "counted by the broker" in out
    assert "with transactional=True" in out
    sys.modules.pop("postgres_shop")


def test_a_queue_object_cannot_move(run: Run, tmp_path: Path) -> None:
    source = SERVICE.replace('subscriber("orders"', 'subscriber(Queue("orders", lease=5)')
    (tmp_path / "postgres_queue.py").write_text(f"from streamfw_postgres import Queue\n{source}")
    assert "Queue(name='orders', lease=5" in run("check", "postgres_queue:app")[1]
    code, out, error = run("check", "postgres_queue:app", "--broker", "memory://")
    assert code == 1
    assert "Queue is not a source of MemoryBroker; a source object is one broker's own; a plain name moves" in out
    assert "1. ship('orders'): Queue is not a source of MemoryBroker" in error
    sys.modules.pop("postgres_queue")


def test_a_service_of_two_processes(run: Run, tmp_path: Path) -> None:
    """From an empty database to a drained service: what failed is put back, mended, and shipped."""
    (tmp_path / "service.py").write_text(SERVICE)
    run("postgres", "migrate")
    run("publish", "orders", '{"item": "tea"}', "--count", "50")
    bad = run("publish", "orders", '{"no": "thing"}')[1].strip()
    command = [sys.executable, "-m", "streamfw.cli", "run", "service:app", "--workers", "2"]
    log = tmp_path / "log"
    with log.open("wb") as file:
        service = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        shipped = tmp_path / "shipped"
        eventually_blocking(lambda: shipped.exists() and len(shipped.read_text().splitlines()) == 50, 30)
        eventually_blocking(lambda: bad in run("dlq", "list", "orders.dead")[1], 30)
        code, out, _ = run("dlq", "show", "orders.dead", "--id", bad)
        assert code == 0
        assert "orders (group shop)" in out
        assert "ValueError: no item" in out
        assert json.loads(out[out.index("{") :]) == {"no": "thing"}
        assert run("dlq", "requeue", "orders.dead", "--id", bad) == (0, "1 put back.\n", "")
        eventually_blocking(lambda: bad in run("dlq", "list", "orders.dead")[1], 30)
        assert run("dlq", "purge", "orders.dead", "--all", "--yes") == (0, "1 discarded.\n", "")
        assert run("dlq", "list", "orders.dead") == (0, "orders.dead is empty.\n", "")
        os.kill(service.pid, signal.SIGTERM)
        assert service.wait(timeout=30) == 0, log.read_text()
    finally:
        if service.poll() is None:
            service.kill()
            service.wait()
