"""The connections of handlers' own transactions: a pool, made when the first of them is needed."""

from __future__ import annotations

import asyncio
from typing import Literal, TypeAlias

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from streamfw.errors import BrokerClosed, BrokerUnavailable

from .errors import DRIVER_ERRORS, translated
from .roles import Connector

__all__ = ["Isolation", "Pooled", "UnitPool", "end", "is_ended"]

# A connection that a pool has lent; it behaves as the connection itself.
Pooled: TypeAlias = "PoolConnectionProxy"
Isolation = Literal["read_committed", "repeatable_read", "serializable"]


class UnitPool:
    """At most `size` connections. They are not reset between handlers (it costs a round trip): what a handler sets it
    sets with ``set local``, as everything else of its transaction."""

    def __init__(self, connect: Connector, size: int, isolation: Isolation, timeout: float) -> None:
        self._connect = connect
        self._size = size
        self._timeout = timeout
        self._pool: asyncpg.Pool | None = None
        self._making = asyncio.Lock()
        self._closed = False
        self.isolation: Isolation = isolation

    async def acquire(self) -> Pooled:
        """A connection. Raises `BrokerError`."""
        if self._closed:
            raise BrokerClosed("the connection to Postgres was closed")
        try:
            pool = await self._made()
            connection: Pooled = await pool.acquire(timeout=self._timeout)
            return connection
        except TimeoutError as error:
            raise BrokerUnavailable(
                f"Postgres: no free connection for a transactional handler within {self._timeout:g} s: "
                f"pool_size={self._size}; it should be the sum of the workers of all transactional subscribers"
            ) from error
        except DRIVER_ERRORS as error:
            raise translated(error, "connecting for a handler's transaction") from error

    async def _made(self) -> asyncpg.Pool:
        async with self._making:
            if self._pool is None:

                async def connect(*_: object, **__: object) -> asyncpg.Connection:
                    return await self._connect("handler")

                async def keep(_: object) -> None: ...

                self._pool = await asyncpg.create_pool(
                    min_size=0, max_size=self._size, connect=connect, reset=keep, max_inactive_connection_lifetime=300
                )
            return self._pool

    def deadline(self, connection: Pooled) -> asyncio.TimerHandle:
        """A timer that ends the connection, for our own statements in a handler's transaction."""
        return asyncio.get_running_loop().call_later(self._timeout, end, connection)

    async def release(self, connection: Pooled) -> None:
        """Give it back; one that is still in a transaction is ended."""
        if self._pool is None or is_ended(connection):
            return
        if connection.is_in_transaction():
            end(connection)
            return
        try:
            await self._pool.release(connection, timeout=self._timeout)
        except DRIVER_ERRORS:
            end(connection)

    async def close(self, seconds: float = 2.0) -> None:
        """For good; what is still in use after so many seconds is ended."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is None:
            return
        try:
            await asyncio.wait_for(pool.close(), seconds)
        except (TimeoutError, *DRIVER_ERRORS):
            pool.terminate()


def is_ended(connection: Pooled) -> bool:
    """Whether it was lost, or ended, or given back: the pool takes one that was lost away from who has it."""
    try:
        return connection.is_closed()
    except asyncpg.InterfaceError:
        return True


def end(connection: Pooled) -> None:
    """End it now; the pool forgets it."""
    if not is_ended(connection):
        connection.terminate()
