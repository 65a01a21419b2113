"""Messages of others that cannot be published again as they are: they end as dead letters, and are tried again, all the
same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from streamfw import App, DeadLetter, Message, Retry, subscriber
from streamfw.errors import Rejected, TooLarge
from streamfw.message import ERROR, LEFT_OUT
from streamfw_rabbit import RabbitBroker
from streamfw_rabbit.channel import Properties, Receipts
from streamfw_rabbit.connection import RabbitConnection
from streamfw_rabbit.epochs import Epochs
from streamfw_rabbit.errors import AccessRefused
from streamfw_rabbit.headers import KEY
from tests.brokers.rabbit_broker_kit import Raw, new_name, outgoing
from tests.brokers.rabbit_kit import Rig, TransportName, options
from tests.helpers import eventually
from tests.services.rabbit import Rabbit

# A header of as many bytes fills a frame: of 131072, that has 8 of its own, and 12, 2 of flags, 4 for the table, 9 for
# the header's name and lengths.
FULL = 131072 - 8 - 12 - 2 - 4 - 9


@pytest.fixture
async def stranger(rabbit: Rabbit) -> AsyncIterator[Rig]:
    epochs = Epochs(options(rabbit, "fast"))
    epochs.start()
    yield Rig(epochs)
    await epochs.close()


async def foreign(stranger: Rig, exchange: str, body: bytes = b"{}", **headers: Any) -> None:
    """Publish as somebody else does: nothing but these headers."""
    channel, receipts = await stranger.channel(confirms=True), Receipts(1)
    channel.publish(exchange, exchange, Properties(raw_headers=headers), body, receipts, mandatory=False)
    assert await receipts.wait() == [None]


Handler = Callable[[Message], Any]


@asynccontextmanager
async def serving(
    server: Rabbit, transport: TransportName, name: str, handler: Handler, **more: Any
) -> AsyncIterator[App]:
    """An app with that handler, and one that takes its dead letters; stopped in less than its drain may take."""
    broker = RabbitBroker(server.url, transport=transport, **more)
    app = App(subscriber(name)(handler), name="shop", brokers={"default": broker})
    async with app.running():
        yield app
        await eventually(lambda: app.health().ok)
        ending = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - ending < 20


async def test_a_dead_letter_leaves_out_what_does_not_fit(
    rabbit: Rabbit, transport: TransportName, other: Raw, stranger: Rig
) -> None:
    name = new_name()

    async def handle(message: Message) -> None:
        assert len(message.headers["big"]) > 100_000
        raise DeadLetter("no")

    async with serving(rabbit, transport, name, handle):
        await foreign(stranger, name, tenant="acme", big="x" * (FULL - 16))
        await other.left(f"{name}.dead", 1)
        await other.left(f"{name}.shop", 0)
    letter = await other.get(f"{name}.dead")
    assert letter is not None
    headers = letter.header.properties.headers or {}
    assert (letter.body, headers["tenant"], headers[ERROR], headers[LEFT_OUT]) == (b"{}", "acme", "no", "big")
    assert "big" not in headers


async def test_what_does_not_fit_into_a_retry_queue_waits_in_the_process(
    rabbit: Rabbit, transport: TransportName, other: Raw, stranger: Rig
) -> None:
    name, seen = new_name(), []

    async def handle(message: Message) -> None:
        seen.append((message.attempt, len(message.headers["big"])))
        if message.attempt < 3:
            raise Retry(after=1)

    async with serving(rabbit, transport, name, handle):
        await foreign(stranger, name, big="x" * FULL)
        await eventually(lambda: len(seen) == 3)
        assert seen == [(attempt, FULL) for attempt in (1, 2, 3)]
    await other.left(f"{name}.shop", 0)
    assert not await other.exists(f"{name}.shop.retry.1000")


async def test_a_key_that_is_no_text_travels_as_the_bytes_it_was(
    rabbit: Rabbit, transport: TransportName, other: Raw, stranger: Rig
) -> None:
    name, seen = new_name(), []

    async def handle(message: Message) -> None:
        seen.append((message.key, message.attempt))
        raise Retry(after=1) if message.attempt == 1 else DeadLetter("no")

    async with serving(rabbit, transport, name, handle):
        await foreign(stranger, name, **{KEY: b"\xff\xfe"})
        await other.left(f"{name}.dead", 1)
    assert seen == [("\udcff\udcfe", 1), ("\udcff\udcfe", 2)]
    letter = await other.get(f"{name}.dead")
    assert letter is not None
    assert (letter.header.properties.headers or {})[KEY] == b"\xff\xfe"
    assert letter.routing_key == f"{name}.dead", "the key is none that AMQP could route by"


async def test_a_body_beyond_our_own_limit_is_no_reason_to_keep_it(
    rabbit: Rabbit, transport: TransportName, other: Raw, stranger: Rig
) -> None:
    name, seen = new_name(), []

    async def handle(message: Message) -> None:
        seen.append(message.attempt)
        raise Retry(after=1) if message.attempt == 1 else DeadLetter("no")

    async with serving(rabbit, transport, name, handle, max_body=10) as app:
        await foreign(stranger, name, b"x" * 100)
        await other.left(f"{name}.dead", 1)
        with pytest.raises(TooLarge, match="max_body=10"):
            await app.publish(name, "x" * 100)
    assert seen == [1, 2]


async def test_headers_that_are_too_large_are_answered_with_by_how_much(connection: RabbitConnection) -> None:
    name = new_name()
    plain = outgoing(name, headers={"big": b"x" * FULL}, message_id="1" * 36)
    (error,) = await connection.publish([plain])
    assert isinstance(error, TooLarge) and isinstance(error, Rejected)
    assert "put what is large into the body" in str(error)
    fits = outgoing(name, headers={"big": b"x" * (FULL - error.headers_over)}, message_id="1" * 36)
    (answer,) = await connection.publish([fits])
    assert not isinstance(answer, TooLarge), "only, nobody takes it"


async def test_a_permission_that_is_taken_away_ends_the_app_at_once(rabbit: Rabbit, transport: TransportName) -> None:
    """Also with a dead letter that cannot be written any more: no drain waits for it."""
    name, begun, gone = new_name(), asyncio.Event(), asyncio.Event()

    async def handle(message: Message) -> None:
        begun.set()
        await gone.wait()
        raise DeadLetter("no")

    broker = RabbitBroker(rabbit.url, transport=transport)
    app = App(subscriber(name)(handle), name="shop", brokers={"default": broker}, drain_timeout=600)

    async def serve() -> None:
        async with asyncio.timeout(60), app.running():
            await app.publish(name, 1)
            await begun.wait()
            await asyncio.to_thread(rabbit.permit, "", "", "")
            gone.set()
            await eventually(lambda: "403" in next(iter(app.health().subscribers.values())).detail)
            await asyncio.to_thread(rabbit.close_connections)
            await asyncio.sleep(60)

    with pytest.raises(AccessRefused, match="403"):
        await serve()
