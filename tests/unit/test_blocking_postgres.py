"""Handlers in threads on Postgres: a message is nobody else's while its thread lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Annotated

import msgspec

from streamfw import App, Attempt, subscriber
from streamfw_postgres import PostgresBroker
from tests.helpers import eventually, eventually_blocking
from tests.services.postgres import Postgres

ROOT = Path(__file__).parents[2]
SOON = 30.0
LEASE = 1.0  # seconds


class Order(msgspec.Struct):
    id: int


async def test_a_thread_that_is_overdue_keeps_its_lease(database: Postgres) -> None:
    go, runs = threading.Event(), [0]

    @subscriber("orders", timeout=0.05, attempts=1)
    def handle(order: Order, attempt: Annotated[int, Attempt]) -> None:
        runs[0] += 1
        assert go.wait(SOON)

    def broker() -> PostgresBroker:
        return PostgresBroker(database.dsn, auto_migrate=True, lease=LEASE)

    apps = [App(handle, brokers={"default": broker()}) for _ in range(2)]
    sql = await database.connect()
    try:
        async with apps[0].running(), apps[1].running():
            await apps[0].publish("orders", Order(1))
            await eventually(lambda: runs[0] == 1)
            until = await sql.fetchval("select lease_until from streamfw.message")
            two_leases_on = f"select lease_until > $1::timestamptz + interval '{2 * LEASE} s' from streamfw.message"
            assert await eventually(lambda: sql.fetchval(two_leases_on, until))
            assert runs == [1]
            go.set()
            await eventually(lambda: sum(app.pumps[0].counters.dead for app in apps) == 1)
        assert await sql.fetchval("select count(*) from streamfw.message where lease_until > now()") == 0
    finally:
        go.set()
        await sql.close()
    assert runs == [1]


SHOP = """
import sys, time
from pathlib import Path
from streamfw import App, subscriber

@subscriber("orders", workers=2)
def handle(number: int) -> None:
    Path(f"runs-{number}").touch()
    if number == 1:
        time.sleep(600)

if __name__ == "__main__":
    App(handle, drain_timeout=0.1, brokers={"default": {"url": sys.argv[1], "auto_migrate": True}}).run()
"""


async def test_what_a_thread_still_handles_is_not_given_back_when_the_process_ends(
    database: Postgres, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command, pipe = [sys.executable, "shop.py", database.dsn], subprocess.PIPE
    sql = await database.connect()
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=pipe, text=True) as process:
        try:
            async with App(brokers={"default": PostgresBroker(database.dsn, auto_migrate=True)}).running() as app:
                for number in (1, 2):
                    await app.publish("orders", number, message_id=f"m{number}")
            eventually_blocking(lambda: all((tmp_path / f"runs-{number}").exists() for number in (1, 2)), SOON)
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=SOON)
        finally:
            process.kill()
    rows = await sql.fetch("select body, lease_until > now() as leased from streamfw.message")
    await sql.close()
    assert process.returncode == 1, log
    assert [(row["body"], row["leased"]) for row in rows] == [(b"1", True)], log
