"""What the tests of the Postgres broker share: short ways to publish, fetch and look at the tables."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import asyncpg

from streamfw.broker import Delivery, Settlement, Subscription
from streamfw.errors import PublishError, SettleError
from streamfw.message import NO_HEADERS, Headers, Outgoing, new_message_id
from streamfw.outcome import ACK, Outcome
from streamfw_postgres import PostgresBroker
from streamfw_postgres.connection import PostgresConnection
from streamfw_postgres.deliveries import PostgresDelivery
from streamfw_postgres.lease import LeaseSource
from streamfw_postgres.rowlock import RowLockSource
from streamfw_postgres.suspects import Solo
from tests.services.postgres import Postgres

BIG = 64 * 1024 * 1024


class Kit:
    """One connection of a broker, and a plain one beside it to look at the tables."""

    def __init__(self, broker: PostgresBroker, connection: PostgresConnection, sql: asyncpg.Connection[Any]) -> None:
        self.broker = broker
        self.connection = connection
        self.sql = sql

    async def publish(self, name: str, *bodies: bytes, **options: Any) -> Sequence[PublishError | None]:
        return await self.connection.publish([outgoing(name, body, **options) for body in bodies])

    async def open(self, name: str, group: str = "g", **options: Any) -> LeaseSource:
        return await self.connection.open(Subscription(name, group, **options))

    async def rows(self, columns: str = "*") -> list[asyncpg.Record]:
        return await self.sql.fetch(f"select {columns} from streamfw.message order by id")

    async def locked(self) -> list[bytes]:
        """The bodies of the rows that somebody's transaction holds."""
        rows = await self.sql.fetch(
            "select body from streamfw.message where id not in "
            "(select id from streamfw.message for update skip locked) order by id"
        )
        return [row[0] for row in rows]

    async def expire(self) -> None:
        """End every lease, as time would."""
        await self.sql.execute("update streamfw.message set lease_until = '-infinity' where token <> 0")

    async def count(self) -> int:
        return cast(int, await self.sql.fetchval("select count(*) from streamfw.message"))


@asynccontextmanager
async def kit(database: Postgres, **options: Any) -> AsyncIterator[Kit]:
    """A connected broker on a fresh schema."""
    broker = PostgresBroker(options.pop("url", None) or database.dsn, auto_migrate=True, **options)
    sql = await database.connect()
    try:
        async with broker.connect() as connection:
            yield Kit(broker, cast(PostgresConnection, connection), sql)
    finally:
        await sql.close()


def outgoing(
    name: str,
    body: bytes = b"x",
    *,
    key: str | None = None,
    headers: Headers = NO_HEADERS,
    delay: float = 0.0,
    priority: int = 0,
    message_id: str | None = None,
) -> Outgoing:
    return Outgoing(
        name=name,
        body=body,
        message_id=message_id or new_message_id(),
        key=key,
        headers=headers,
        delay=delay,
        priority=priority,
    )


async def fetch(source: LeaseSource, limit: int = 100, max_bytes: int = BIG) -> list[PostgresDelivery]:
    return cast("list[PostgresDelivery]", list(await source.fetch(limit, max_bytes)))


async def settle(source: LeaseSource, *pairs: tuple[Delivery, Outcome]) -> Sequence[SettleError]:
    return await source.settle([Settlement(delivery, outcome) for delivery, outcome in pairs])


async def ack(source: LeaseSource, deliveries: Sequence[Delivery]) -> Sequence[SettleError]:
    return await settle(source, *[(delivery, ACK) for delivery in deliveries])


def bodies(deliveries: Sequence[Delivery]) -> list[bytes]:
    return [delivery.body for delivery in deliveries]


async def abandon(source: LeaseSource) -> None:
    """End a source as a killed process does: nothing is given back, nothing is settled any more."""
    await source._renewer.close()
    holders = source._holders.all if isinstance(source, RowLockSource) else []
    for role in (source._claims, source._settles, *(holder.role for holder in holders)):
        await role.close()
    source._connection.forget(source)
    source._connection.solo = Solo()  # a new process knows nothing of the old one's suspects
    source._closed = True


class RecordingPump:
    """A pump that says what was asked of it; `busy` makes it never quiet."""

    def __init__(self, busy: bool = False) -> None:
        self.calls: list[str] = []
        self.busy = busy
        self._held = False

    def held(self) -> bool:
        return self._held

    def hold(self) -> None:
        self._held = True
        self.calls.append("hold")

    async def quiesce(self, seconds: float, finish: Callable[[Delivery], bool] | None = None) -> bool:
        return not self.busy

    def release(self, drop: Callable[[Delivery], bool] | None = None) -> None:
        self._held = False
        self.calls.append("release" if drop is None else "drop")

    def take_back(self, wanted: Callable[[Delivery], bool]) -> Sequence[Delivery]:
        return ()

    def vouch(self, seconds: float, look: Callable[[], None]) -> None: ...
