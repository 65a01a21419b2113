"""What the tests of the whole RabbitMQ broker share: connections, members of a group, the server as others see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast
from uuid import uuid4

import aiormq
from pamqp import commands

from streamfw.broker import Subscription
from streamfw.errors import PublishError
from streamfw.message import NO_HEADERS, Headers, Outgoing, new_message_id
from streamfw.testing.conformance import Member
from streamfw_rabbit import RabbitBroker
from streamfw_rabbit.connection import RabbitConnection
from streamfw_rabbit.source import RabbitSource
from tests.helpers import eventually
from tests.services.rabbit import Rabbit

__all__ = ["HANDS", "Raw", "connected", "member", "new_name", "outgoing", "raw", "send", "source_of", "version_of"]

PATIENCE = 20.0
HANDS = 500


def new_name(what: str = "orders") -> str:
    """A name that nobody else has."""
    return f"{what}-{uuid4().hex[:10]}"


def outgoing(name: str, body: bytes = b"x", **options: Any) -> Outgoing:
    """A message with a new id; `headers` as a handler would give them."""
    headers = options.pop("headers", NO_HEADERS)
    options.setdefault("message_id", new_message_id())
    return Outgoing(name=name, body=body, headers=Headers(headers), **options)


@asynccontextmanager
async def connected(server: Rabbit, **options: Any) -> AsyncIterator[RabbitConnection]:
    """A connection of the broker, with its options."""
    async with RabbitBroker(server.url, **options).connect() as connection:
        assert isinstance(connection, RabbitConnection)
        yield connection


@asynccontextmanager
async def member(connection: RabbitConnection, name: str, group: str = "shop", **options: Any) -> AsyncIterator[Member]:
    """A source of a group on that connection, closed in good order. It has workers for all that a test takes."""
    options.setdefault("workers", HANDS)
    opened = Member(connection, await connection.open(Subscription(name, group, **options)), PATIENCE)
    try:
        yield opened
    finally:
        await opened.close()


def version_of(connection: RabbitConnection) -> tuple[int, ...]:
    """The server's version."""
    epoch = connection.consuming.current
    assert epoch is not None
    return epoch.server_version


def source_of(one: Member) -> RabbitSource:
    assert isinstance(one.source, RabbitSource)
    return one.source


async def send(connection: RabbitConnection, *messages: Outgoing) -> list[type[PublishError] | None]:
    """Publish in one call; the kinds of the answers."""
    async with asyncio.timeout(30):
        answers = await connection.publish(messages)
    assert len(answers) in (0, len(messages))
    return [None if one is None else type(one) for one in answers] or [None] * len(messages)


class Raw:
    """The server as another program sees it."""

    def __init__(self, connection: aiormq.abc.AbstractConnection) -> None:
        self.connection = connection

    async def channel(self) -> aiormq.abc.AbstractChannel:
        return await self.connection.channel()

    async def declare(self, queue: str, **arguments: Any) -> str:
        """A quorum queue, with ``x-`` arguments by their names."""
        channel = await self.channel()
        given = {"x-queue-type": "quorum"} | {f"x-{name.replace('_', '-')}": value for name, value in arguments.items()}
        await channel.queue_declare(queue, durable=True, arguments=given)
        await channel.close()
        return queue

    async def delete(self, queue: str) -> None:
        channel = await self.channel()
        await channel.queue_delete(queue)
        await channel.close()

    async def exists(self, queue: str) -> bool:
        channel = await self.channel()
        try:
            await channel.queue_declare(queue, passive=True)
        except aiormq.exceptions.ChannelNotFoundEntity:
            return False
        await channel.close()
        return True

    async def depth(self, queue: str) -> int:
        """How many messages wait in it; those that are out are not among them."""
        channel = await self.channel()
        found = await channel.queue_declare(queue, passive=True)
        await channel.close()
        return (found.message_count or 0) if found is not None else 0

    async def left(self, queue: str, count: int, deadline: float = PATIENCE) -> None:
        """Wait until so many wait in it."""

        async def as_many() -> bool:
            return await self.depth(queue) == count

        await eventually(as_many, deadline)

    async def publish(
        self, exchange: str, key: str, body: bytes = b"x", headers: Mapping[str, Any] | None = None, **properties: Any
    ) -> None:
        channel = await self.channel()
        given = commands.Basic.Properties(headers=cast("dict[str, Any]", dict(headers or {})), **properties)
        await channel.basic_publish(body, exchange=exchange, routing_key=key, mandatory=True, properties=given)
        await channel.close()

    async def get(self, queue: str) -> aiormq.abc.DeliveredMessage | None:
        """Take one message for good; None when there is none."""
        channel = await self.channel()
        message = await channel.basic_get(queue, no_ack=True)
        await channel.close()
        return None if isinstance(message.delivery, commands.Basic.GetEmpty) else message


@asynccontextmanager
async def raw(server: Rabbit) -> AsyncIterator[Raw]:
    connection = await aiormq.connect(server.url)
    try:
        yield Raw(connection)
    finally:
        await connection.close()
