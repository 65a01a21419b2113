"""A connection held for one purpose, which heals itself.

Each role (claim, settle, publish, listen, ...) has its own connection, because a statement waits for the one before
it on its connection, and because a pool costs three times as much a statement.

A role connects when it is first used, and again when its connection was lost: once inside the call. A statement that
was cut is never repeated here: whether it took effect is not known, and only the caller knows what follows from that.

Every statement has a deadline. When it passes, the connection is *ended*, not the statement cancelled: a cancel
request is one more connection to a server that may be unreachable, and what it hit is not known either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import asyncpg

from streamfw.errors import BrokerClosed, BrokerError, BrokerUnavailable

from .errors import DRIVER_ERRORS, breaks_connection, translated

__all__ = ["SESSION", "Connector", "Cut", "Role", "Session", "set_session"]

T = TypeVar("T")
Connector = Callable[[str], Awaitable[asyncpg.Connection]]

# Set after connecting, not in the startup packet, which poolers refuse to pass on. Our statements have an index each,
# and statistics of a queue's table are wrong most of the time: a plan made while it was empty would scan it for ever.
# keepalives: a session whose life holds rows must not outlive a peer that is gone by two hours.
SESSION = {
    "statement_timeout": "0",
    "jit": "off",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "idle_in_transaction_session_timeout": "0",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "60000",
}


class Session(asyncpg.Connection):
    """A connection that keeps what its last command answered: a commit of a transaction in which a statement failed
    answers ROLLBACK, and asyncpg does not tell."""

    answered = ""

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        """See `asyncpg.Connection.execute`."""
        self.answered = await super().execute(query, *args, timeout=timeout)
        return self.answered


class Cut(BrokerUnavailable):
    """The connection broke, or was ended, under a statement: whether that took effect is not known."""


class Role:
    """One connection; one statement at a time, in turn. `statements` counts what was sent."""

    __slots__ = (
        "_closed",
        "_connect",
        "_connection",
        "_expired",
        "_lock",
        "_name",
        "_session",
        "_timeout",
        "pid",
        "statements",
    )

    def __init__(self, name: str, connect: Connector, timeout: float, session: dict[str, str] | None = None) -> None:
        self._session = session
        self._name = name
        self._connect = connect
        self._timeout = timeout
        self._connection: asyncpg.Connection | None = None
        self._lock = asyncio.Lock()
        self._closed = False
        self._expired = False
        self.pid = 0
        self.statements = 0

    async def fetch(self, sql: str, *args: Any, timeout: float | None = None) -> list[asyncpg.Record]:
        """The rows of a statement. Raises `BrokerError` (see errors.py); the driver's error is its cause."""
        return await self._call(lambda c: c.fetch(sql, *args), timeout)

    async def row(self, sql: str, *args: Any, timeout: float | None = None) -> asyncpg.Record:
        """The one row of a statement that always has one."""
        return (await self._call(lambda c: c.fetch(sql, *args), timeout))[0]

    async def value(self, sql: str, *args: Any, timeout: float | None = None) -> Any:
        """The first column of the first row."""
        return await self._call(lambda c: c.fetchval(sql, *args), timeout)

    async def count(self, sql: str, *args: Any, timeout: float | None = None) -> int:
        """How many rows a statement changed: the number at the end of ``DELETE 200``, which costs nothing."""
        status: str = await self._call(lambda c: c.execute(sql, *args), timeout)
        return int(status.rpartition(" ")[2])

    async def run(self, work: Callable[[asyncpg.Connection], Awaitable[T]], timeout: float | None = None) -> T:
        """Several statements in one turn, under one deadline."""
        return await self._call(work, timeout)

    async def connect(self) -> None:
        """Be connected. Raises `BrokerError`."""
        async with self._lock:
            await self._connected()

    async def _call(self, work: Callable[[asyncpg.Connection], Awaitable[T]], timeout: float | None) -> T:
        async with self._lock:
            connection = self._connection
            if connection is None or connection.is_closed():
                connection = await self._connected()
            timer = asyncio.get_running_loop().call_later(timeout or self._timeout, self._expire, connection)
            self.statements += 1
            try:
                return await work(connection)
            except DRIVER_ERRORS as error:
                raise self._error(error, timeout) from error
            finally:
                timer.cancel()

    def _error(self, error: BaseException, timeout: float | None) -> BrokerError:
        if self._closed:
            return BrokerClosed("the connection to Postgres was closed")
        if self._expired:
            self._expired = False
            return Cut(f"Postgres: {self._name}: no answer for {timeout or self._timeout:g} s")
        known = translated(error, self._name)
        return Cut(str(known)) if known.transient and breaks_connection(error) else known

    def _expire(self, connection: asyncpg.Connection) -> None:
        self._expired = True
        connection.terminate()

    async def _connected(self) -> asyncpg.Connection:
        self._check_open()
        if self._connection is None or self._connection.is_closed():
            self._expired = False
            self._connection = await self._made()
            self.pid = self._connection.get_server_pid()
            self._check_open()  # it may have been closed while it connected
        return self._connection

    async def _made(self) -> asyncpg.Connection:
        connection = await self._connect(self._name)
        if self._session:
            try:
                await set_session(connection, self._session)
            except DRIVER_ERRORS as error:
                connection.terminate()
                raise translated(error, f"connecting ({self._name})") from error
        return connection

    def _check_open(self) -> None:
        if self._closed:
            self.terminate()
            raise BrokerClosed("the connection to Postgres was closed")

    def terminate(self) -> None:
        """End the connection now, whatever runs on it; the next call connects again."""
        if self._connection is not None:
            self._connection.terminate()

    async def close(self, seconds: float = 2.0) -> None:
        """For good. Waits at most `seconds` for the server; never raises."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is None or connection.is_closed():
            return
        if self._lock.locked():  # a statement runs: whoever waits for it gets BrokerClosed
            connection.terminate()
            return
        try:
            await connection.close(timeout=seconds)
        except DRIVER_ERRORS:
            connection.terminate()


async def set_session(connection: asyncpg.Connection, settings: dict[str, str]) -> None:
    """Set parameters of the session, in one round trip; names and values are ours."""
    await connection.execute("; ".join(f"set {name} = '{value}'" for name, value in settings.items()))
