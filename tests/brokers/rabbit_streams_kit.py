"""What the tests of RabbitMQ's streams share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from streamfw import App
from streamfw.broker import Delivery, Subscription
from streamfw.testing.conformance import Member
from streamfw_rabbit import MemoryOffsets, RabbitBroker, Stream
from streamfw_rabbit.connection import RabbitConnection
from streamfw_rabbit.offsets import OffsetStore, Place
from streamfw_rabbit.stream_readership import Readership
from streamfw_rabbit.stream_source import StreamSource
from streamfw_rabbit.streams import StreamDelivery
from tests.brokers.rabbit_broker_kit import PATIENCE, connected, outgoing, send
from tests.helpers import eventually
from tests.services.rabbit import Rabbit

__all__ = [
    "NAME",
    "Desk",
    "app_of",
    "desk",
    "numbers",
    "offsets",
    "reader",
    "readership_of",
    "source_of",
    "standing_by",
]

NAME = "events"


class Desk:
    """A connection, and a store that goes with it."""

    def __init__(self, server: Rabbit, connection: RabbitConnection, store: OffsetStore) -> None:
        self.server, self.connection, self.store = server, connection, store

    async def fill(self, bodies: Iterable[bytes] | int, *, first: int = 0, **options: Any) -> None:
        """Publish numbers, or these bodies, in one call. The stream must be there."""
        given = numbers(range(first, first + bodies)) if isinstance(bodies, int) else list(bodies)
        assert await send(self.connection, *(outgoing(NAME, body, **options) for body in given)) == [None] * len(given)

    async def make(self) -> None:
        """The stream, without a group that reads it."""
        async with reader(self, "nobody"):
            pass

    def stored(self, group: str = "shop") -> int | None:
        assert isinstance(self.store, MemoryOffsets)
        return self.store.stored.get(Place(self.server.vhost, NAME, group))

    async def cut(self) -> None:
        """The server ends every connection to the vhost."""
        await asyncio.to_thread(self.server.close_connections)


@asynccontextmanager
async def desk(server: Rabbit, store: OffsetStore | None = None, **options: Any) -> AsyncIterator[Desk]:
    async with connected(server, **options) as connection:
        yield Desk(server, connection, store if store is not None else MemoryOffsets())


@asynccontextmanager
async def reader(
    desk: Desk, group: str = "shop", stream: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Member]:
    """A source of a group, closed in good order. `stream`: options of the `Stream`."""
    given = {"store": desk.store} | (stream or {})
    subscription = Subscription(NAME, group, source=Stream(NAME, **given), **options)
    member = Member(desk.connection, await desk.connection.open(subscription), PATIENCE)
    try:
        yield member
    finally:
        await member.close()


def source_of(member: Member) -> StreamSource:
    assert isinstance(member.source, StreamSource)
    return member.source


def readership_of(member: Member) -> Readership:
    return source_of(member)._readership


async def standing_by(member: Member) -> None:
    await eventually(lambda: "standing by" in member.source.health().detail)


def offsets(deliveries: Sequence[Delivery]) -> list[int]:
    found = []
    for delivery in deliveries:
        assert isinstance(delivery, StreamDelivery)
        found.append(delivery.offset)
    return found


def numbers(values: Iterable[int]) -> list[bytes]:
    """Bodies in JSON."""
    return [b"%d" % value for value in values]


def app_of(server: Rabbit, *handlers: Any, name: str = "shop", drain_timeout: float = 5.0, **options: Any) -> App:
    """An app of these subscribers; `options` are the broker's."""
    broker = RabbitBroker(server.url, **options)
    return App(*handlers, name=name, brokers={"default": broker}, drain_timeout=drain_timeout)
