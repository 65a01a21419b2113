"""`PostgresBroker`: what a URL and its options become, and how one connects with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import msgspec

from streamfw.broker import Broker, Capabilities, Connection, Subscription
from streamfw.ending import to_its_end
from streamfw.errors import BrokerRefused

from . import migrations
from .connection import PostgresConnection, subscription_mistakes
from .errors import DRIVER_ERRORS, translated
from .pool import Isolation
from .queue import Form, form_of
from .roles import SESSION, Connector, Session, set_session
from .rowlock import LONGEST_CLAIM
from .schema import DEFAULT_SCHEMA
from .settings import EMBEDDED, Settings, checked_url

__all__ = ["PostgresBroker", "migrate"]

_MAX_BODY = 16 * 1024 * 1024


class PostgresBroker(Broker):
    """Queues in Postgres 14 or later, over asyncpg.

    `url` is ``postgres://user:password@host:port/database?sslmode=..`` (also ``postgresql://``; parameters as asyncpg
    and libpq know them), or ``postgres+embedded://PATH`` for a server of the project's own in a directory.

    - `schema`: where the tables are.
    - `form`: how rows are held, unless a `Queue` says: ``lease`` or ``rowlock``.
    - `lease`: seconds a row is ours without a renewal; it is renewed at half of it.
    - `pool_size`: connections for transactional handlers.
    - `max_body`: the largest body, in bytes: a larger one is refused at publish, and put aside when one comes.
    - `auto_migrate`: bring the schema up to date when connecting (default: only for an embedded server).
    - `poll`: seconds between two looks of an idle subscriber (up to 1.3 of it); wake-ups come in between.
    - `isolation`: of transactional handlers: ``read_committed``, ``repeatable_read`` or ``serializable``.
    - `command_timeout`: seconds after which a statement's connection counts as dead.
    - `connect_timeout`: seconds to connect.

    Raises `ValueError`, naming the option, for a wrong value.
    """

    capabilities = Capabilities(
        settlement="immediate",
        retry=True,
        delay=1.3,
        release=True,
        attempts="durable",
        dead_letter=True,
        ordered_by=frozenset({"key"}),
        priorities=True,
        transactions=True,
        replies=True,
        kept=True,
        prefetch=100,
        max_body=_MAX_BODY,
    )

    def __init__(
        self,
        url: str,
        *,
        schema: str = DEFAULT_SCHEMA,
        form: Form = "lease",
        lease: float = 30.0,
        pool_size: int = 10,
        max_body: int = _MAX_BODY,
        auto_migrate: bool | None = None,
        poll: float = 1.0,
        isolation: Isolation = "read_committed",
        command_timeout: float = 15.0,
        connect_timeout: float = 10.0,
    ) -> None:
        super().__init__(checked_url(url))
        self._settings = Settings(
            schema=schema,
            form=form,
            lease=lease,
            pool_size=pool_size,
            max_body=max_body,
            poll=poll,
            isolation=isolation,
            command_timeout=command_timeout,
            connect_timeout=connect_timeout,
        )
        self._embedded = url.startswith(EMBEDDED)
        self._auto_migrate = self._embedded if auto_migrate is None else auto_migrate
        # The poll is what guarantees a delay's end; wake-ups and timers mostly bring it to the millisecond.
        self._by_leases = msgspec.structs.replace(PostgresBroker.capabilities, delay=1.3 * poll, max_body=max_body)
        # A pause begins when its claim ends; without attempts= nobody counts the deliveries that a crash took.
        self._by_locks = msgspec.structs.replace(
            self._by_leases, settlement="grouped", delay=1.3 * poll + LONGEST_CLAIM, ordered_by=frozenset()
        )
        self.capabilities = self.capabilities_of(Subscription("any"))

    def capabilities_of(self, subscription: Subscription) -> Capabilities:
        """An ordered subscription retries in place: a row given back would be overtaken by those of its key."""
        if form_of(subscription, self._settings.form) == "rowlock" and subscription.ordered_by != "key":
            counts = "process" if subscription.attempts is None else "durable"
            return msgspec.structs.replace(self._by_locks, attempts=counts)
        if subscription.ordered_by is None:
            return self._by_leases
        # What is ordered by key and held by row locks is refused with its reason, in `mistakes`.
        return msgspec.structs.replace(self._by_leases, retry=False, attempts="process")

    def mistakes(self, subscription: Subscription) -> Iterable[str]:
        """See `Broker.mistakes`."""
        return subscription_mistakes(subscription, self._settings)

    def connect(self) -> AbstractAsyncContextManager[Connection]:
        """See `Broker.connect`."""
        return self._connected()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Connection]:
        async with self._connector() as connect:
            if self._auto_migrate:
                await _migrated(connect, self._settings.schema, plan=False)
            connection = PostgresConnection(connect, self._settings)
            try:
                await connection.begin()
                yield connection
            finally:
                await to_its_end(connection.close())

    @asynccontextmanager
    async def _connector(self) -> AsyncIterator[Connector]:
        """How to connect, while the context lasts: an embedded server runs as long."""
        if not self._embedded:
            yield _connector_of(self._settings.connect_timeout, dsn=self.url)
            return
        try:
            from .embedded import EmbeddedError, embedded
        except ImportError as error:
            raise BrokerRefused(f"{self.describe()}: install streamfw[embedded]: {error}") from error
        path = self.url.partition("://")[2].partition("?")[0]
        entered = False
        try:
            async with embedded(Path(path)) as server:
                entered = True
                yield _connector_of(self._settings.connect_timeout, **server.connect_arguments())
        except EmbeddedError as error:
            if entered:
                raise
            raise BrokerRefused(f"{self.describe()}: {error}") from error


def _connector_of(timeout: float, **arguments: Any) -> Connector:
    async def connect(purpose: str) -> asyncpg.Connection:
        """Connect for a purpose, with our session's settings. Raises `BrokerError`."""
        try:
            async with asyncio.timeout(timeout):
                return await _opened(purpose, arguments)
        except DRIVER_ERRORS as error:
            raise translated(error, f"connecting ({purpose})") from error
        except ValueError as error:  # asyncpg, of a parameter in the URL; its message may hold pieces of it
            raise BrokerRefused(f"Postgres: connecting ({purpose}): the URL is malformed") from error

    return connect


async def _opened(purpose: str, arguments: dict[str, Any]) -> asyncpg.Connection:
    name = f"streamfw {purpose}".encode()[:63].decode("utf-8", "ignore")
    connection: asyncpg.Connection = await asyncpg.connect(
        **arguments,
        connection_class=Session,
        # Statements are few and live as long as their connection.
        max_cached_statement_lifetime=0,
        server_settings={"application_name": name},
    )
    try:
        await set_session(connection, SESSION)
    except BaseException:
        connection.terminate()
        raise
    return connection


async def _migrated(connect: Connector, schema: str, plan: bool) -> list[str]:
    connection = await connect("migrating")
    try:
        todo = await migrations.pending(connection, schema)
        if plan:
            book = [migrations.book_of(schema)] if todo and todo[0].version == 1 else []
            return book + [migrations.sql_of(m, schema) for m in todo]
        if not todo:
            return []
        return [f"{m.version}: {m.title}" for m in await migrations.apply(connection, schema)]
    except DRIVER_ERRORS as error:
        raise translated(error, f"migrating schema {schema!r}") from error
    finally:
        connection.terminate()


async def migrate(broker: PostgresBroker, plan: bool = False) -> list[str]:
    """Bring the broker's schema up to date and return what was applied, or with `plan` the SQL that would be.

    Raises `BrokerError`. Safe while the service runs, and from many processes at once.
    """
    async with broker._connector() as connect:
        return await _migrated(connect, broker._settings.schema, plan)
