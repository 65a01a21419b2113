"""The summary in Postgres: where the queue is, so that a webhook's row and the end of its message are one commit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, Literal

import asyncpg

from streamfw_postgres.embedded import embedded

from .store import Delivered, Store, Stored, Total, Unit

__all__ = ["SCHEMA", "PostgresStore", "drop", "open_pool", "open_postgres_store"]

SCHEMA: Final = "webhooks_example"

TABLES: Final = f"""
create schema if not exists {SCHEMA};
create table if not exists {SCHEMA}.webhook (
    message_id text primary key,
    position bigint generated always as identity,
    owner text not null,
    event text not null,
    line text not null,
    attempt int not null,
    worker int not null,
    at timestamptz not null default clock_timestamp()
);
create table if not exists {SCHEMA}.total (event text primary key, webhooks int not null);
create table if not exists {SCHEMA}.delivery (
    entry bigint generated always as identity primary key,
    message_id text not null,
    what text not null,
    worker int not null,
    at timestamptz not null default clock_timestamp()
);
"""

# Counting is not idempotent by itself: the count goes up only when the row is new.
ADD: Final = f"""
with added as (
    insert into {SCHEMA}.webhook (message_id, owner, event, line, attempt, worker)
    values ($1, $2, $3, $4, $5, $6) on conflict (message_id) do nothing returning event
)
insert into {SCHEMA}.total (event, webhooks) select event, 1 from added
on conflict (event) do update set webhooks = total.webhooks + 1
"""

UNFINISHED: Final = f"""
select count(*) filter (where what = 'began') - count(*) filter (where what = 'failed')
    - (select count(*) from {SCHEMA}.webhook where worker = $1)
from {SCHEMA}.delivery where worker = $1
"""

EPOCH: Final = "extract(epoch from at)::float8 as at"


class PostgresStore(Store):
    """Any number of processes."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool

    async def add(self, webhook: Stored, unit: Unit | None) -> None:
        connection = unit.connection if unit is not None else self._pool
        assert isinstance(connection, asyncpg.Connection | asyncpg.Pool)
        w = webhook
        await connection.execute(ADD, w.message_id, w.owner, w.event, w.line, w.attempt, w.worker)

    async def note(self, message_id: str, what: Literal["began", "failed"], worker: int) -> None:
        sql = f"insert into {SCHEMA}.delivery (message_id, what, worker) values ($1, $2, $3)"
        await self._pool.execute(sql, message_id, what, worker)

    async def count(self) -> int:
        count: int = await self._pool.fetchval(f"select count(*) from {SCHEMA}.webhook")
        return count

    async def last_worker(self) -> int | None:
        sql = f"select worker from {SCHEMA}.webhook order by at desc limit 1"
        worker: int | None = await self._pool.fetchval(sql)
        return worker

    async def unfinished(self, worker: int) -> int:
        unfinished: int = await self._pool.fetchval(UNFINISHED, worker)
        return unfinished

    async def webhooks(self) -> Sequence[Stored]:
        columns = f"message_id, owner, event, line, attempt, worker, {EPOCH}"
        rows = await self._pool.fetch(f"select {columns} from {SCHEMA}.webhook order by position")
        return [Stored(**row) for row in rows]

    async def journal(self) -> Sequence[Delivered]:
        sql = f"select message_id, what, worker, {EPOCH} from {SCHEMA}.delivery order by entry"
        return [Delivered(*row) for row in await self._pool.fetch(sql)]

    async def totals(self) -> Sequence[Total]:
        sql = f"select event, webhooks from {SCHEMA}.total order by webhooks desc, event"
        return [Total(*row) for row in await self._pool.fetch(sql)]


@asynccontextmanager
async def open_pool(url: str) -> AsyncIterator[asyncpg.Pool]:
    """Connections to the database of a broker's URL."""
    # The journal must survive the death of a worker, not of the server: its commits need not wait for the disk.
    settings = {"synchronous_commit": "off", "application_name": "webhooks example"}
    async with AsyncExitStack() as stack:
        if url.startswith("postgres+embedded://"):
            server = await stack.enter_async_context(embedded(url.removeprefix("postgres+embedded://")))
            url = server.dsn
        yield await stack.enter_async_context(
            asyncpg.create_pool(url, min_size=1, max_size=8, server_settings=settings)
        )


@asynccontextmanager
async def open_postgres_store(url: str) -> AsyncIterator[PostgresStore]:
    """The store in the database of a broker's URL; makes its tables where they are missing."""
    async with open_pool(url) as pool:
        async with pool.acquire() as connection, connection.transaction():
            # Two processes that create the same table at the same time would get in each other's way.
            await connection.execute("select pg_advisory_xact_lock(hashtextextended($1, 0))", SCHEMA)
            await connection.execute(TABLES)
        yield PostgresStore(pool)


async def drop(pool: asyncpg.Pool, *schemas: str) -> None:
    """Drop these schemas with all that is in them."""
    for schema in schemas:
        await pool.execute(f'drop schema if exists "{schema}" cascade')
