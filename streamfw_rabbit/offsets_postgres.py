"""Offsets of streams in a table of Postgres.

Theory of operation
    One row a group and stream. Whoever takes it writes a new token into it; storing needs the token. A statement whose
    connection broke may still be executed, when later ones have been: so each has a number, and does nothing behind a
    higher one.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from streamfw.errors import BrokerClosed, BrokerError, BrokerRefused, BrokerUnavailable, redact

from .offsets import Bookmark, OffsetStore, Place

if TYPE_CHECKING:
    import asyncpg

__all__ = ["PostgresOffsets"]

_T = TypeVar("_T")
_SCHEMES: Final = ("postgres://", "postgresql://")
_CONNECT: Final = 10.0  # seconds
_CLOSE: Final = 2.0
_MIGRATE: Final = 30.0

# Small, and written several times a second: so that its dead rows are reused on the spot.
_TABLE: Final = """
create table if not exists {schema}.stream_offset (
  vhost text not null,
  stream text not null,
  grp text not null,
  next_offset bigint,
  token bigint not null,
  number bigint not null default 0,
  updated_at timestamptz not null default now(),
  witness text,
  primary key (vhost, stream, grp)
) with (
  fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
  autovacuum_vacuum_cost_delay = 0
);
alter table {schema}.stream_offset add column if not exists witness text;
comment on table {schema}.stream_offset is
  'How far groups have read streams of RabbitMQ: next_offset is the one to read next, token is whose row it is, '
  'witness is a message before it, by which the stream is known.'
"""
_LOCK: Final = "select pg_advisory_xact_lock(7377, 2)"
_SCHEMA_EXISTS: Final = "select exists (select from pg_catalog.pg_namespace where nspname = $1)"
# Whole: an earlier one has no witness.
_TABLE_EXISTS: Final = """select exists (select from pg_catalog.pg_class c join pg_catalog.pg_namespace n
  on n.oid = c.relnamespace join pg_catalog.pg_attribute a on a.attrelid = c.oid
  where n.nspname = $1 and c.relname = 'stream_offset' and a.attname = 'witness' and not a.attisdropped)"""
_TAKE: Final = """
insert into {schema}.stream_offset as o (vhost, stream, grp, token) values ($1, $2, $3, $4)
on conflict (vhost, stream, grp) do update set token = excluded.token, number = 0, updated_at = now()
returning o.next_offset, o.witness
"""
_STORE: Final = """
update {schema}.stream_offset set next_offset = $6, number = $5, witness = $7, updated_at = now()
where vhost = $1 and stream = $2 and grp = $3 and token = $4 and number < $5 returning 1
"""
_ASK: Final = """
select from {schema}.stream_offset where vhost = $1 and stream = $2 and grp = $3 and token = $4
"""


class PostgresOffsets(OffsetStore):
    """In the table ``stream_offset``, which is made when it is missing. Needs ``pip install streamfw[postgres]``.

    - `dsn`: ``postgres://user:password@host:port/database``.
    - `schema`: where the table is. One table serves all vhosts of one RabbitMQ cluster; another cluster needs another
      schema.
    - `migrate`: make the schema and the table where they, or a column, are missing. Where that right is not ours,
      call `migrate` once as somebody who has it.
    - `timeout`: seconds after which a statement's connection counts as dead.

    Raises `ValueError` for a DSN that is none.
    """

    def __init__(self, dsn: str, *, schema: str = "streamfw", migrate: bool = True, timeout: float = 5.0) -> None:
        if not dsn.startswith(_SCHEMES):
            raise ValueError("PostgresOffsets: postgres://user:password@host:port/database is needed")
        if not schema or "\0" in schema or len(schema.encode()) > 63:
            raise ValueError(f"PostgresOffsets(schema={schema!r}): 1 to 63 bytes of text are needed")
        self.dsn, self.schema, self.timeout = dsn, schema, timeout
        self.migrates = migrate

    def open(self, place: Place) -> Bookmark:
        """See `OffsetStore.open`."""
        return _InPostgres(self, place)

    async def migrate(self) -> bool:
        """Make the schema and the table; False when all is there. Safe from many processes at once. Raises
        `BrokerError`."""
        return await self.once(self.ensure_table)

    async def once(self, work: Callable[[asyncpg.Connection], Awaitable[_T]]) -> _T:
        """Do something on a connection of its own."""
        connection = await self.connect()
        try:
            return await self.bounded(connection, work(connection), _MIGRATE)
        finally:
            connection.terminate()

    async def connect(self) -> asyncpg.Connection:
        """A new connection. Raises `BrokerError`."""
        driver = _driver()
        try:
            connection: asyncpg.Connection = await driver.connect(
                self.dsn,
                timeout=_CONNECT,
                statement_cache_size=0,  # a pooler may give each statement another session
                server_settings={"application_name": "streamfw stream offsets"},
            )
            return connection
        except ValueError as error:  # of a parameter in the URL; its message may hold pieces of it
            raise BrokerRefused(f"{self!r}: the URL is malformed") from error
        except _driver_errors() as error:
            raise self._translated(error, "connecting") from error

    async def bounded(self, connection: asyncpg.Connection, work: Awaitable[_T], timeout: float | None = None) -> _T:
        """A statement that is not answered in time ends its connection. It is not cancelled: that would take one more
        connection to a server that may be unreachable."""
        timer = asyncio.get_running_loop().call_later(timeout or self.timeout, connection.terminate)
        try:
            return await work
        except _driver_errors() as error:
            raise self._translated(error, "stream offsets") from error
        except asyncio.CancelledError:
            connection.terminate()
            raise
        finally:
            timer.cancel()

    async def ensure_table(self, connection: asyncpg.Connection) -> bool:
        """Looks first: to make what is there needs rights that a service may not have."""
        if await connection.fetchval(_TABLE_EXISTS, self.schema):
            return False
        async with connection.transaction(isolation="read_committed"):
            await connection.execute(_LOCK)
            if await connection.fetchval(_TABLE_EXISTS, self.schema):
                return False
            if not await connection.fetchval(_SCHEMA_EXISTS, self.schema):
                await connection.execute(self.sql("create schema {schema}"))
            await connection.execute(self.sql(_TABLE))
        return True

    def sql(self, statement: str) -> str:
        """The statement for our schema."""
        return statement.replace("{schema}", '"' + self.schema.replace('"', '""') + '"')

    def _translated(self, error: BaseException, doing: str) -> BrokerError:
        state: str = getattr(error, "sqlstate", None) or ""
        told = str(error).split("\n")[0][:300] or type(error).__name__
        text = f"Postgres: {doing}: {told}{f' (SQLSTATE {state})' if state else ''}"
        # Of table, schema, privilege, database, credentials: nothing that passes.
        if state.startswith(("42", "3F", "3D", "28")) or isinstance(error, ssl.SSLCertVerificationError):
            return BrokerRefused(text)
        return BrokerUnavailable(text)

    def __repr__(self) -> str:
        return f"PostgresOffsets({redact(self.dsn)!r}, schema={self.schema!r})"


class _InPostgres(Bookmark):
    def __init__(self, offsets: PostgresOffsets, place: Place) -> None:
        self._offsets, self._place = offsets, place
        self._token = self._number = 0
        self._connection: asyncpg.Connection | None = None
        self._closed = False

    async def take(self) -> int | None:
        token = secrets.randbits(62) + 1
        rows = await self._fetch(_TAKE, token)
        self._token, self._number = token, 0
        found: int | None
        found, self.witness = rows[0]
        return found

    async def store(self, offset: int) -> bool:
        self._number += 1
        return bool(await self._fetch(_STORE, self._token, self._number, offset, self.witness))

    async def is_ours(self) -> bool:
        return bool(await self._fetch(_ASK, self._token))

    async def _fetch(self, statement: str, *values: int | str | None) -> list[Any]:
        if self._closed:
            raise BrokerClosed("this bookmark was closed")
        connection = await self._connected()
        sql = self._offsets.sql(statement)
        return await self._offsets.bounded(connection, connection.fetch(sql, *self._place, *values))

    async def _connected(self) -> asyncpg.Connection:
        if self._connection is None or self._connection.is_closed():
            connection = await self._offsets.connect()
            try:
                if self._offsets.migrates:
                    await self._offsets.bounded(connection, self._offsets.ensure_table(connection), _MIGRATE)
            except BaseException:
                connection.terminate()
                raise
            self._connection = connection
        return self._connection

    async def close(self) -> None:
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is None or connection.is_closed():
            return
        try:
            await connection.close(timeout=_CLOSE)
        except _driver_errors():
            connection.terminate()


def _driver() -> Any:
    try:
        import asyncpg
    except ImportError as error:
        raise BrokerRefused(f"PostgresOffsets: install streamfw[postgres]: {error}") from error
    return asyncpg


def _driver_errors() -> tuple[type[BaseException], ...]:
    driver = _driver()
    return driver.PostgresError, driver.InterfaceError, driver.InternalClientError, OSError, TimeoutError
