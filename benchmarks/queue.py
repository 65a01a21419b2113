"""A Postgres queue to drain: the server, the rows, and what a person would write by hand with the same statements."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg
import msgspec

from streamfw import App
from streamfw.message import NO_HEADERS, Outgoing
from streamfw_postgres import PostgresBroker, migrate
from streamfw_postgres.connection import PostgresConnection
from streamfw_postgres.roles import SESSION, set_session
from streamfw_postgres.sql import LAST, Statements
from tests.services.postgres import NEWEST, OwnPostgres, own, run_directory

__all__ = [
    "GROUP",
    "NAME",
    "Job",
    "Queue",
    "drain_by_hand",
    "publish_by_hand",
    "server",
    "settings_of",
    "statements_sent",
]

NAME, GROUP = "emails", "bench"
SQL = Statements()
LEASE, MAX_BODY = 30.0, 16 * 1024 * 1024
SETTINGS = {
    "wal_level": "replica",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",  # and a checkpoint before each load: none falls into a window
    "checkpoint_timeout": "1h",
    "autovacuum": "off",  # each load vacuums; a worker of it in one window of two would be chance
}
# 105 bytes on average, with ids from 1.
BODY = """convert_to('{"id":' || g || ',"customer":"customer-' || g % 1000 || '","quantity":' || g % 10
  || ',"note":"' || repeat('x', 46) || '"}', 'UTF8')"""


class Job(msgspec.Struct, gc=False):
    """What the bodies hold."""

    id: int
    customer: str
    quantity: int
    note: str


@contextmanager
def server() -> Iterator[OwnPostgres]:
    """The wheel's Postgres with fsync on, with our schema in it."""
    directory = run_directory(f"bench-{os.getpid()}")
    with own(NEWEST, directory, fsync=True, settings=SETTINGS) as running:
        asyncio.run(migrate(PostgresBroker(running.facts.dsn)))
        yield running


async def settings_of(dsn: str) -> dict[str, str]:
    """What a reader has to know of the server, as it says itself."""
    sql = await asyncpg.connect(dsn)
    try:
        names = {
            "server_version": "Postgres",
            "fsync": "fsync",
            "autovacuum": "autovacuum",
            "shared_buffers": "buffers",
        }
        return {told: str(await sql.fetchval(f"show {name}")) for name, told in names.items()}
    finally:
        await sql.close()


def statements_sent(app: App) -> int:
    """How many statements a running app has sent on its default broker."""
    connection = app.connection()
    assert isinstance(connection, PostgresConnection)
    return connection.sent


class Queue:
    """The table, over a connection of its own beside those that are measured."""

    def __init__(self, dsn: str, sql: asyncpg.Connection) -> None:
        self.dsn, self._sql = dsn, sql
        self.consumer = 0

    @classmethod
    @asynccontextmanager
    async def opened(cls, dsn: str) -> AsyncIterator[Queue]:
        sql = await asyncpg.connect(dsn)
        try:
            yield cls(dsn, sql)
        finally:
            await sql.close()

    async def load(self, rows: int) -> None:
        """Exactly `rows` messages, in a fresh table without dead rows."""
        self.consumer = await self._sql.fetchval(SQL.register_group, NAME, GROUP)
        await self._sql.execute("checkpoint")
        await self._sql.execute("truncate streamfw.message")
        await self._sql.execute(
            "insert into streamfw.message (consumer, message_id, body) "
            f"select $1, gen_random_uuid()::text, {BODY} from generate_series(1, $2::int) g",
            self.consumer,
            rows,
        )
        await self._sql.execute("vacuum analyze streamfw.message")

    async def left(self) -> bool:
        """Whether any row is left."""
        found: bool = await self._sql.fetchval("select exists (select from streamfw.message)")
        return found

    async def count(self) -> int:
        found: int = await self._sql.fetchval("select count(*) from streamfw.message")
        return found

    async def all_gone(self) -> None:
        """Raises `AssertionError` where rows are left."""
        if left := await self.count():
            raise AssertionError(f"{left} rows are left")

    @asynccontextmanager
    async def transaction_held_open(self) -> AsyncIterator[None]:
        """Somebody's transaction that keeps every dead row, as long as the context lasts."""
        other = await asyncpg.connect(self.dsn)
        try:
            await other.execute("begin isolation level repeatable read")
            await other.fetchval("select pg_current_xact_id()")
            yield
        finally:
            await other.close()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.Connection]:
        """A connection with the session settings that the broker uses."""
        made = await asyncpg.connect(self.dsn)
        try:
            await set_session(made, SESSION)
            yield made
        finally:
            await made.close()


async def drain_by_hand(
    connection: asyncpg.Connection,
    queue: Queue,
    rows: int,
    handler: Callable[[Job], Awaitable[None]],
    batch: int,
    hint: bool,
) -> None:
    """One connection: claim, decode, handle, acknowledge; with the broker's own statements.

    `hint`: start each claim behind the last one, which most would not think of; without it a claim walks over the
    dead entries of all before it.
    """
    decode = msgspec.json.Decoder(Job).decode
    done = low = 0
    while done < rows:
        token = secrets.randbits(62) | 1
        ranges = ([0], [low], [LAST]) if hint else ([-LAST], [0], [LAST])
        got = await connection.fetch(SQL.claim, queue.consumer, batch, token, LEASE, MAX_BODY, *ranges)
        ids = []
        for row in got:
            await handler(decode(row[8]))
            ids.append(row[0])
        await connection.fetch(SQL.ack, ids, [token])
        low = max(ids)
        done += len(ids)


async def publish_by_hand(connection: asyncpg.Connection, messages: list[Outgoing], batch: int) -> None:
    """One connection: a statement for each `batch` messages."""
    for start in range(0, len(messages), batch):
        group = messages[start : start + batch]
        columns: tuple[list[Any], ...] = (
            [m.message_id for m in group],
            [m.key for m in group],
            [None if m.headers is NO_HEADERS else b"" for m in group],
            [m.body for m in group],
            [m.priority for m in group],
        )
        await connection.fetch(SQL.publish_one, NAME, *columns)
