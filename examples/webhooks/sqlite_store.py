"""The summary in a file: for brokers that keep no tables. Any number of processes of one machine."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Literal

import anyio

from .store import Delivered, Store, Stored, Total, Unit

__all__ = ["SqliteStore", "open_sqlite_store"]

TABLES: Final = """
create table if not exists webhook (
    position integer primary key, message_id text not null unique, owner text not null, event text not null,
    line text not null, attempt int not null, worker int not null, at real not null
);
create table if not exists total (event text primary key, webhooks int not null);
create table if not exists delivery (
    entry integer primary key, message_id text not null, what text not null, worker int not null, at real not null
);
"""
ADD: Final = """
insert into webhook (message_id, owner, event, line, attempt, worker, at) values (?, ?, ?, ?, ?, ?, ?)
on conflict (message_id) do nothing
"""
COUNT: Final = """
insert into total (event, webhooks) values (?, 1) on conflict (event) do update set webhooks = webhooks + 1
"""
UNFINISHED: Final = """
select coalesce(sum(what = 'began'), 0) - coalesce(sum(what = 'failed'), 0)
    - (select count(*) from webhook where worker = ?1)
from delivery where worker = ?1
"""


class SqliteStore(Store):
    """Calls run in a thread, one at a time."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._limit = anyio.CapacityLimiter(1)

    async def _run(self, work: Callable[..., Any], *arguments: object) -> Any:
        # Not abandoned when the handler is cancelled: a transaction that nobody ends would lock the file.
        return await anyio.to_thread.run_sync(partial(work, *arguments), limiter=self._limit)

    def _rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, values).fetchall()

    async def add(self, webhook: Stored, unit: Unit | None) -> None:
        await self._run(self._add, webhook)

    def _add(self, w: Stored) -> None:
        with self._connection:
            self._connection.execute("begin immediate")
            row = (w.message_id, w.owner, w.event, w.line, w.attempt, w.worker, time.time())
            if self._connection.execute(ADD, row).rowcount:  # counting is not idempotent by itself
                self._connection.execute(COUNT, (w.event,))

    async def note(self, message_id: str, what: Literal["began", "failed"], worker: int) -> None:
        sql = "insert into delivery (message_id, what, worker, at) values (?, ?, ?, ?)"
        await self._run(self._rows, sql, message_id, what, worker, time.time())

    async def count(self) -> int:
        ((count,),) = await self._run(self._rows, "select count(*) from webhook")
        return int(count)

    async def last_worker(self) -> int | None:
        rows = await self._run(self._rows, "select worker from webhook order by position desc limit 1")
        return rows[0][0] if rows else None

    async def unfinished(self, worker: int) -> int:
        ((unfinished,),) = await self._run(self._rows, UNFINISHED, worker)
        return int(unfinished)

    async def webhooks(self) -> Sequence[Stored]:
        columns = ("message_id", "owner", "event", "line", "attempt", "worker", "at")
        rows = await self._run(self._rows, f"select {', '.join(columns)} from webhook order by position")
        return [Stored(**dict(zip(columns, row, strict=True))) for row in rows]

    async def journal(self) -> Sequence[Delivered]:
        rows = await self._run(self._rows, "select message_id, what, worker, at from delivery order by entry")
        return [Delivered(*row) for row in rows]

    async def totals(self) -> Sequence[Total]:
        rows = await self._run(self._rows, "select event, webhooks from total order by webhooks desc, event")
        return [Total(*row) for row in rows]


@asynccontextmanager
async def open_sqlite_store(path: str) -> AsyncIterator[SqliteStore]:
    """The store in a file; makes its tables where they are missing."""
    connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
    try:
        # The file must survive the death of a worker, not of the machine: a commit need not wait for the disk.
        connection.executescript(f"pragma journal_mode = wal; pragma synchronous = off; {TABLES}")
        yield SqliteStore(connection)
    finally:
        connection.close()
