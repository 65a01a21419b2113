"""An open connection to a Postgres broker: it publishes, opens sources, and answers for its server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import asyncpg

from streamfw.broker import REPLY_PREFIX, Connection, DeadLetters, Health, Subscription
from streamfw.errors import BrokerClosed, BrokerError, BrokerRefused, PublishError
from streamfw.message import Outgoing

from .deadletters import PostgresDeadLetters
from .lease import LeaseSource
from .lock_sql import LockStatements
from .migrations import check_version, current_version
from .notify import Listener, Notifier, Wakes, channel_of, shared_wakes
from .pool import UnitPool
from .publish import Publisher
from .queue import CONNECTIONS, Queue, form_of
from .roles import Connector, Role
from .rowlock import RowLockSource
from .schema import quoted
from .settings import Settings
from .sql import Statements
from .status import Status, read_status
from .suspects import Solo

__all__ = ["PostgresConnection", "subscription_mistakes"]

# Administration reads whole queues.
_PATIENT = 120.0


class PostgresConnection(Connection):
    """Made by `PostgresBroker.connect`. Publishing has a connection of its own, and so has listening; each source has
    two (by row locks those that hold rows, and one more); transactional handlers share a pool."""

    def __init__(self, connect: Connector, settings: Settings) -> None:
        self._connect = connect
        self.settings = settings
        self.statements = Statements(settings.schema)
        self.lock_statements = LockStatements(settings.schema)
        self.closed = False
        self.solo = Solo()
        self.pool = UnitPool(connect, settings.pool_size, settings.isolation, settings.command_timeout)
        self._roles: list[Role] = []
        self._sources: list[LeaseSource] = []
        self._publishes = self.role("publishing")
        self._admin: Role | None = None
        channel = channel_of(settings.schema)
        self._notifier = Notifier(self._publishes, channel)
        self._publisher = Publisher(self._publishes, self.statements, settings.max_body, self._published)
        self._wakes = Wakes()
        self._channel = channel
        self._listener: Listener | None = None
        self._opening = asyncio.Lock()

    def role(self, name: str, timeout: float | None = None, session: dict[str, str] | None = None) -> Role:
        """A new connection for one purpose; it connects when first used. `session`: settings of its own."""
        role = Role(name, self._connect, timeout or self.settings.command_timeout, session)
        self._roles.append(role)
        return role

    @property
    def sent(self) -> int:
        """How many statements all roles of this connection have sent."""
        return sum(role.statements for role in self._roles)

    async def begin(self) -> None:
        """Connect and check the schema. Raises `BrokerError`. Called once, by `PostgresBroker.connect`."""
        schema = self.settings.schema

        async def look(connection: asyncpg.Connection) -> tuple[object, ...]:
            version, compatible = await current_version(connection, schema)
            check_version(version, compatible, schema)
            # What tells one schema of one database from all others, well enough to share wake-ups in a process.
            return tuple(
                await connection.fetchrow(
                    "select d.oid, current_setting('port'), m.applied_at from pg_database d, "
                    f"{quoted(schema)}.migration m where d.datname = current_database() order by m.version limit 1"
                )
                or ()
            )

        identity = await self._publishes.run(look)
        self._wakes = shared_wakes(schema, *identity)

    # ---------------------------------------------------------------- sources

    async def open(self, subscription: Subscription) -> LeaseSource:
        """See `Connection.open`. One at a time: they share a connection for it, and are counted against the pool."""
        async with self._opening:
            return await self._open(subscription)

    async def _open(self, subscription: Subscription) -> LeaseSource:
        self._check_open()
        mistakes = subscription_mistakes(subscription, self.settings) + self._too_few(subscription)
        if mistakes:
            raise BrokerRefused(f"{subscription!r}: {'; '.join(mistakes)}")
        sql = self.statements
        if subscription.dead_letter is not None:
            await self._publishes.fetch(sql.ensure_queue, subscription.dead_letter)
        consumer = await self._publishes.value(sql.register_group, subscription.name, subscription.group)
        source = self._source(subscription, consumer)
        self._sources.append(source)
        self.solo.sources.append(source)
        try:
            await source.begin()
        except BaseException:
            await source.close()
            raise
        self._wakes.add(subscription.name, source)
        self._listen()
        return source

    def _source(self, subscription: Subscription, consumer: int) -> LeaseSource:
        queue = subscription.source if isinstance(subscription.source, Queue) else Queue(subscription.name)
        lease = float(queue.lease if queue.lease is not None else self.settings.lease)
        if form_of(subscription, self.settings.form) == "rowlock":
            return RowLockSource(self, subscription, consumer, lease, queue.connections or CONNECTIONS)
        return LeaseSource(self, subscription, consumer, lease)

    def _too_few(self, subscription: Subscription) -> list[str]:
        """Row locks of transactional handlers hold their connections while they wait for nothing else: all of them
        together must fit into the pool."""
        if not subscription.transactional or form_of(subscription, self.settings.form) != "rowlock":
            return []
        opened = [s.workers_of_pool for s in self._sources if isinstance(s, RowLockSource)]
        needed, size = sum(opened) + subscription.workers, self.settings.pool_size
        if needed <= size:
            return []
        return [f"the transactional subscribers of this app need {needed} connections: set pool_size={needed} ({size})"]

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = Listener(self.role("listening"), self._channel, self._wakes, self._is_own)
            self._listener.start()

    def _is_own(self, pid: int) -> bool:
        return pid == self._publishes.pid

    def forget(self, source: LeaseSource) -> None:
        """It was closed."""
        self._wakes.discard(source.name, source)
        for sources in (self._sources, self.solo.sources):
            if source in sources:
                sources.remove(source)

    def available(self, queue: str) -> None:
        """Something was given back: wake who else serves this queue, here and elsewhere."""
        if not self.closed:
            self._wakes.wake(queue, rescan=True)
            self._notifier.note(queue, rescan=True)

    # ------------------------------------------------------------- publishing

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        """See `Connection.publish`; accepted means committed."""
        self._check_open()
        return await self._publisher.publish(messages)

    def _published(self, queues: dict[str, float]) -> None:
        for queue, delay in queues.items():
            self._wakes.wake(queue, after=delay)
        self._notifier.published(queues)

    # ------------------------------------------------------------------ others

    async def withdraw(self, name: str, group: str) -> int:
        """See `Connection.withdraw`."""
        self._check_open()
        gone: int = await self._patient().value(self.statements.remove_group, name, group)
        if name.startswith(REPLY_PREFIX):
            await self._patient().fetch(self.statements.sweep_replies, REPLY_PREFIX, name)
        return gone

    async def check(self) -> Health:
        """See `Connection.check`."""
        self._check_open()
        schema = self.settings.schema
        try:
            version, compatible = await self._publishes.run(lambda c: current_version(c, schema))
            check_version(version, compatible, schema)
        except BrokerClosed:
            raise
        except BrokerError as error:
            return Health(False, str(error))
        return Health(True, f"schema {schema!r} at version {version}")

    async def dead_letters(self, name: str) -> DeadLetters:
        """See `Connection.dead_letters`."""
        self._check_open()
        return PostgresDeadLetters(self, self._patient(), name)

    async def status(self) -> Status:
        """Depth, age and health of every queue and of the table. Reads every message's entry: for a person."""
        self._check_open()
        return await read_status(self._patient(), self.settings.schema)

    def _patient(self) -> Role:
        if self._admin is None:
            self._admin = self.role("administration", _PATIENT)
        return self._admin

    def check_open(self) -> None:
        """Raise `BrokerClosed` after `close`."""
        self._check_open()

    def _check_open(self) -> None:
        if self.closed:
            raise BrokerClosed("the connection to Postgres was closed")

    async def close(self) -> None:
        """Close the sources, send what waits, end every connection. Twice is once; never raises for a server that is
        away."""
        if self.closed:
            return
        await self._publisher.close(seconds=2.0)
        await asyncio.gather(*(source.close() for source in list(self._sources)))
        self.closed = True
        await self._notifier.close()
        if self._listener is not None:
            await self._listener.close()
        await self.pool.close()
        await asyncio.gather(*(role.close() for role in self._roles))


def subscription_mistakes(subscription: Subscription, settings: Settings) -> list[str]:
    """What cannot be honoured of a subscription, as sentences."""
    found = []
    for what, text in (("queue", subscription.name), ("group", subscription.group)):
        if not text or "\0" in text or text.encode("utf-8", "replace").decode() != text:
            found.append(f"a {what}'s name is text, not empty and without NUL, not {text!r}")
    source = subscription.source
    if isinstance(source, Queue):
        found += source.mistakes()
    elif source is not None:
        found.append(f"{type(source).__name__} is not a source of Postgres: use Queue(..) or a plain name")
    if subscription.ordered_by == "key" and form_of(subscription, settings.form) == "rowlock":
        found.append(
            "ordered_by='key' needs form='lease': whoever skips a locked row takes the next one of its key, so an "
            "ordered subscription has one owner, whose leases a successor can read"
        )
    if subscription.transactional and subscription.workers > settings.pool_size:
        found.append(
            f"transactional=True with workers={subscription.workers} needs as many connections, and "
            f"pool_size={settings.pool_size}: set pool_size to the sum of all transactional workers"
        )
    return found
