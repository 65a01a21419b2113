"""What the tests of the RabbitMQ broker share: connections over either transport, and short ways to use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeAlias

from streamfw_rabbit.channel import Answer, Channel, Closed, Properties, RawDelivery, Receipts
from streamfw_rabbit.epochs import ConnectionOptions, Epoch, Epochs
from tests.helpers import eventually
from tests.services.rabbit import Rabbit

TransportName: TypeAlias = Literal["aiormq", "fast"]
TRANSPORTS: tuple[TransportName, ...] = ("aiormq", "fast")
QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}


def options(server: Rabbit, transport: TransportName | Literal["auto"], **more: Any) -> ConnectionOptions:
    values: dict[str, Any] = {
        "hosts": ((server.host, server.port),),
        "user": server.user,
        "password": server.password,
        "vhost": server.vhost,
        "transport": transport,
        "name": "tests",
    }
    return ConnectionOptions(**(values | more))


class Rig:
    """A supervised connection, and what happened to it."""

    def __init__(self, epochs: Epochs) -> None:
        self.epochs = epochs
        self.ends: list[Closed] = []
        self.ups: list[Epoch] = []
        self.blocks: list[bool] = []
        epochs.listen(self._changed)
        epochs.blocked_changed = lambda blocked, _: self.blocks.append(blocked)

    def _changed(self, epoch: Epoch | None, closed: Closed | None) -> None:
        if epoch is not None:
            self.ups.append(epoch)
        elif closed is not None:
            self.ends.append(closed)

    @property
    def epoch(self) -> Epoch:
        assert self.epochs.current is not None
        return self.epochs.current

    async def queue(self, name: str = "q", **arguments: Any) -> str:
        """Make a queue, a quorum queue unless told otherwise."""
        async with self.epochs.declarations() as channel:
            given = QUORUM | {f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}
            await channel.queue_declare(name, durable=True, arguments=given)
        return name

    async def delete(self, name: str) -> None:
        async with self.epochs.declarations() as channel:
            await channel.queue_delete(name)

    async def depth(self, name: str = "q") -> int:
        """How many messages wait in the queue; those that are out are not among them."""
        async with self.epochs.declarations() as channel:
            return (await channel.queue_declare(name, passive=True)).message_count or 0

    async def left(self, count: int, name: str = "q") -> None:
        """Wait until that many wait, and see that it stays so."""

        async def as_many() -> bool:
            return await self.depth(name) == count

        await eventually(as_many)

    async def channel(self, *, confirms: bool = False) -> Channel:
        return await self.epochs.channel(confirms=confirms)

    async def consumer(self, name: str = "q", *, prefetch: int = 1000, **consume: Any) -> Tap:
        """A channel that consumes, with what it gets."""
        channel = await self.channel()
        tap = Tap(channel)
        await channel.qos(prefetch)
        await channel.consume(name, "tests", **consume)
        return tap

    async def fill(self, *bodies: bytes, name: str = "q") -> None:
        """Publish to a queue, over a channel for this alone."""
        channel = await self.channel(confirms=True)
        assert await publish(channel, name, *bodies) == [None] * len(bodies)
        await channel.close()


_open = 0


@asynccontextmanager
async def rig(server: Rabbit, transport: TransportName | Literal["auto"], **more: Any) -> AsyncIterator[Rig]:
    """A connection that is up; closed at the end, with nothing left running once the last is closed."""
    global _open
    before = asyncio.all_tasks()
    _open += 1
    epochs = Epochs(options(server, transport, **more))
    made = Rig(epochs)
    epochs.start()
    try:
        await epochs.connected(20)
        yield made
    finally:
        _open -= 1
        await epochs.close()
    if not _open:
        await eventually(lambda: not [task for task in asyncio.all_tasks() - before if not task.done()])


class Tap:
    """Takes what a channel is delivered."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.got: list[RawDelivery] = []
        self.cancelled: list[str] = []
        self.closed: list[Closed] = []
        self.calls = 0
        self._event = asyncio.Event()
        channel.on_delivery = self._delivered
        channel.on_cancelled = self.cancelled.append
        channel.on_closed = self.closed.append

    def _delivered(self) -> None:
        self.calls += 1
        self._event.set()

    async def until(self, count: int, deadline: float = 15.0) -> list[RawDelivery]:
        """All that came, when it is at least so many."""
        async with asyncio.timeout(deadline):
            while len(self.got) < count:
                await self._event.wait()
                self._event.clear()
                self.got += self.channel.take()
        return self.got

    @property
    def bodies(self) -> list[bytes]:
        self.got += self.channel.take()
        return [delivery.body for delivery in self.got]


def send(channel: Channel, key: str, *bodies: bytes, exchange: str = "", **properties: Any) -> Receipts:
    """Publish, and do not wait."""
    receipts = Receipts(len(bodies))
    given = Properties(**({"delivery_mode": 2} | properties))
    for place, body in enumerate(bodies):
        channel.publish(exchange, key, given, body, receipts, place)
    return receipts


async def publish(channel: Channel, key: str, *bodies: bytes, **more: Any) -> Sequence[Answer]:
    async with asyncio.timeout(20):
        return await send(channel, key, *bodies, **more).wait()


async def ended(channel: Channel) -> Closed:
    """Wait for a channel's end."""
    await eventually(lambda: channel.closed is not None)
    assert channel.closed is not None
    return channel.closed
