"""Dead letters on RabbitMQ: kept while nobody subscribes, moved by the server itself where a process dies, and what a
person does with them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from aiormq.abc import AbstractChannel, ChannelFrame, DeliveredMessage

from streamfw.errors import BrokerClosed, BrokerRefused, Unroutable
from streamfw.message import ERROR, ERROR_TYPE, ORIGIN, ORIGIN_ATTEMPT, ORIGIN_GROUP, Outgoing
from streamfw_rabbit import Exchange, RabbitQueue, TopologyMismatch
from streamfw_rabbit._epoch import WriteQueue
from streamfw_rabbit.channel import Properties, Receipts
from streamfw_rabbit.connection import RabbitConnection
from streamfw_rabbit.deadletters import adopt, looking
from streamfw_rabbit.errors import NotFound
from tests.brokers.rabbit_broker_kit import Raw, connected, member, new_name, outgoing, send, source_of
from tests.brokers.rabbit_kit import TransportName, rig
from tests.helpers import eventually
from tests.services.rabbit import Rabbit


def letter(dead: str, name: str, group: str, body: bytes = b"x", **options: Any) -> Outgoing:
    headers = {ERROR: "broken", ORIGIN: name, ORIGIN_GROUP: group, ORIGIN_ATTEMPT: "1", "tenant": "acme"}
    return outgoing(dead, body, headers=headers, **options)


async def test_a_stream_has_no_dead_letters_to_take(connection: RabbitConnection, other: Raw) -> None:
    """The server ends the connection of who tries, so it is not one that others use."""
    stream = await other.declare(new_name("audit"), queue_type="stream")
    letters = await connection.dead_letters(stream)
    with pytest.raises(BrokerRefused, match=f"'{stream}' is a stream"):
        await letters.list()
    assert (connection.consuming.connects, connection.publisher.connects) == (1, 1)


@pytest.mark.parametrize("part", ["message properties", "header table"])
async def test_a_letter_that_cannot_be_read_stops_nobody(
    connection: RabbitConnection, rabbit: Rabbit, other: Raw, part: str
) -> None:
    """Its properties are no UTF-8: the library ends its connection over that, and all that goes over it."""
    name = new_name()
    dead = f"{name}.dead"
    async with member(connection, name, dead_letter=dead):
        pass
    async with rig(rabbit, "fast") as r:
        writer, receipts = await r.channel(confirms=True), Receipts(3)
        for place, message_id in enumerate(("one", "bad-id", "three")):
            properties = Properties(message_id=message_id)
            if part == "header table" and message_id == "bad-id":
                properties = Properties(raw_headers={message_id: 1})
            writer.publish("", dead, properties, b"%d" % place, receipts, place)
        frames = b"".join(r.epoch._out)  # type: ignore[attr-defined]
        r.epoch._out[:] = [frames.replace(b"bad-id", b"b\xff\xff-id")]  # type: ignore[attr-defined]
        assert await receipts.wait() == [None] * 3
    await other.left(dead, 3)
    letters = await connection.dead_letters(dead)
    shown = await letters.list()
    assert [(one.message_id, one.body) for one in shown] == [("one", b"0"), ("", b"1"), ("three", b"2")]
    assert f"malformed {part}" in shown[1].headers["malformed-properties"]
    assert await letters.purge(["one"]) == 1
    async with member(connection, dead, "undertaker") as taker:
        taken = await taker.take(2)
        assert [delivery.body for delivery in taken] == [b"1", b"2"]
        assert f"malformed {part}" in taken[0].headers["malformed-properties"]
        await taker.acknowledge(taken)
    assert connection.consuming.connects == 1


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods that are written on the library's channels, in order; what goes out at once counts once."""
    names = {(20, 10): "open", (20, 40): "close", (50, 10): "declare", (60, 70): "get", (60, 120): "nack"}
    found: list[str] = []

    def look(queue: WriteQueue, frame: ChannelFrame) -> bool:
        method = struct.unpack_from(">HH", frame.payload, 7)
        found.append(names.get(method, str(method)))
        return real(queue, frame)

    real = WriteQueue._look
    monkeypatch.setattr(WriteQueue, "_look", look)
    return found


# ---------------------------------------------------------------------- kept, and adopted


@asynccontextmanager
async def kept(connection: RabbitConnection, other: Raw, count: int, **options: Any) -> AsyncIterator[str]:
    """A name whose dead letters nobody has subscribed to, with so many of them, numbered."""
    name = new_name()
    dead = f"{name}.dead"
    async with member(connection, name, dead_letter=dead):
        messages = [outgoing(dead, b"%d" % n, **options) for n in range(count)]
        assert await send(connection, *messages) == [None] * count
        await other.left(dead, count)
        yield dead


async def test_dead_letters_are_kept_until_a_group_subscribes(connection: RabbitConnection, other: Raw) -> None:
    async with kept(connection, other, 250, key="k", headers={"tenant": "a"}) as dead:
        async with member(connection, dead, "first") as first:
            taken = await first.take(250)
            assert [delivery.body for delivery in taken] == [b"%d" % n for n in range(250)]
            assert {(delivery.key, delivery.headers.pairs) for delivery in taken} == {("k", (("tenant", b"a"),))}
            await first.acknowledge(taken)
            assert await send(connection, outgoing(dead, b"later")) == [None]
            later = await first.take(1)
            await first.acknowledge(later)
        await other.left(dead, 0)
        await other.left(f"{dead}.first", 0)
        async with member(connection, dead, "second") as second:
            await second.expect_nothing(0.3)


async def test_taking_over_does_not_take_a_round_trip_a_letter(
    connection: RabbitConnection, other: Raw, written: list[str]
) -> None:
    async with kept(connection, other, 100) as dead:
        async with member(connection, dead, "first") as first:
            await first.acknowledge(await first.take(100))
            await other.left(dead, 0)
            adopting = source_of(first)._adopting
            assert adopting is not None
            await adopting
        assert written.count("get") == 6, "three pages of 32, one of 4, and twice that there are no more"


async def test_who_leaves_while_it_takes_over_leaves_each_letter_once_and_in_order(
    connection: RabbitConnection, other: Raw, written: list[str]
) -> None:
    async with kept(connection, other, 250) as dead:
        async with member(connection, dead, "first"):
            await eventually(lambda: "get" in written)
        async with member(connection, dead, "first") as first:
            taken = await first.take(250)
            assert [int(delivery.body) for delivery in taken] == list(range(250))
            await first.acknowledge(taken)
            await first.expect_nothing(0.3)
        await other.left(dead, 0)


async def test_a_name_whose_last_group_is_withdrawn(connection: RabbitConnection, other: Raw) -> None:
    name = new_name()
    async with member(connection, name, dead_letter=f"{name}.dead"):
        async with member(connection, f"{name}.dead", "g"):
            pass
        await connection.withdraw(f"{name}.dead", "g")
        assert await send(connection, outgoing(f"{name}.dead")) == [None], "dead letters are kept again"
        await other.left(f"{name}.dead", 1)
    await connection.withdraw(name, "shop")
    assert await send(connection, outgoing(name)) == [Unroutable]


async def test_what_cannot_be_taken_over_stays(connection: RabbitConnection, other: Raw) -> None:
    name = new_name()
    async with member(connection, name, dead_letter=f"{name}.dead"):
        assert await send(connection, *(outgoing(f"{name}.dead") for _ in range(3))) == [None] * 3
        with pytest.raises(Exception, match="is gone"):
            await adopt(connection.consuming, connection.publishing, f"{name}.dead", "no.such.queue")
        await other.left(f"{name}.dead", 3)


async def test_taking_over_is_tried_again(connection: RabbitConnection, rabbit: Rabbit, other: Raw) -> None:
    name = new_name()
    async with member(connection, name, dead_letter=f"{name}.dead"):
        assert await send(connection, *(outgoing(f"{name}.dead") for _ in range(3))) == [None] * 3
        rabbit.permit(write="^orders")  # not to the default exchange, by which they are moved
        async with member(connection, f"{name}.dead", "g") as taker:
            lane = connection.publishing.lane
            await eventually(lambda: lane.channel is None, message="the server ends the channel of who may not")
            assert await other.depth(f"{name}.dead.g") == 0
            rabbit.permit()
            taken = await taker.take(3)
            await taker.acknowledge(taken)
        await other.left(f"{name}.dead", 0)


async def test_somebody_elses_exchange_keeps_no_dead_letters(connection: RabbitConnection, other: Raw) -> None:
    """As a name it will do; as a dead letter it is refused, because it would lose what no group takes."""
    name = new_name()
    channel = await other.channel()
    await channel.exchange_declare(name, exchange_type="fanout", durable=True)
    async with member(connection, name) as taker:
        assert await send(connection, outgoing(name)) == [None]
        await taker.acknowledge(await taker.take(1))
    with pytest.raises(TopologyMismatch, match="alternate-exchange is none"):
        async with member(connection, new_name(), dead_letter=name):
            pytest.fail("it was opened")


async def test_somebody_elses_queue_of_the_name_is_not_taken_over(connection: RabbitConnection, other: Raw) -> None:
    """Only what is kept by us of a dead letter is: a queue that happens to have the name has other consumers."""
    name = await other.declare(new_name("legacy"))
    await other.publish("", name, b"theirs")
    async with member(connection, name) as taker:
        assert await send(connection, outgoing(name, b"ours")) == [None]
        (delivery,) = await taker.take(1)
        assert delivery.body == b"ours"
        await taker.acknowledge([delivery])
        assert await adopt(connection.consuming, connection.publishing, name, f"{name}.shop") == 0
    await other.left(name, 1)


# ---------------------------------------------------------------------- the net


async def test_what_the_server_put_aside_tells_why_and_goes_back(connection: RabbitConnection, other: Raw) -> None:
    queue = new_name("held")
    dead = f"{queue}.dead"
    source = RabbitQueue(queue, message_ttl=0.05)
    async with member(connection, queue, source=source, dead_letter=dead):
        pass
    assert await send(connection, outgoing(queue, b"old", key="k")) == [None]
    await other.left(dead, 1)
    letters = await connection.dead_letters(dead)
    (shown,) = await letters.list()
    assert (shown.headers[ORIGIN], shown.headers[ERROR_TYPE]) == (queue, "Expired")
    async with member(connection, queue, source=source, dead_letter=dead) as taker:
        assert await letters.requeue() == 1
        (delivery,) = await taker.take(1)
        assert (delivery.body, delivery.key, delivery.attempt) == (b"old", "k", 1)
        await taker.acknowledge([delivery])


async def test_who_kills_its_process_each_time_ends_as_a_dead_letter(connection: RabbitConnection, other: Raw) -> None:
    name = new_name()
    dead = f"{name}.dead"
    async with member(connection, name, dead_letter=dead):
        pass
    assert await send(connection, outgoing(name, b"poison", key="k", headers={"tenant": "a"})) == [None]
    for _ in range(21):
        channel = await other.channel()
        assert await eventually(partial(other_get, channel, f"{name}.shop"))
        await channel.close()  # as the death of its process does
    await other.left(dead, 1)
    letters = await connection.dead_letters(dead)
    (shown,) = await letters.list()
    assert (shown.body, shown.key) == (b"poison", "k")
    assert shown.headers["tenant"] == "a"
    assert shown.headers[ERROR_TYPE] == "DeliveryLimit"
    assert f"'{name}.shop'" in shown.headers[ERROR]
    assert await letters.requeue() == 1
    async with member(connection, name, dead_letter=dead) as taker:
        (delivery,) = await taker.take(1)
        assert (delivery.body, delivery.attempt, delivery.key) == (b"poison", 1, "k")
        assert delivery.headers.pairs == (("tenant", b"a"),)
        await taker.acknowledge([delivery])


async def other_get(channel: AbstractChannel, queue: str) -> DeliveredMessage | None:
    message = await channel.basic_get(queue)
    return message if message.delivery_tag else None


# ---------------------------------------------------------------------- what a person does


async def test_listing_takes_nothing_away_and_keeps_the_order(connection: RabbitConnection, other: Raw) -> None:
    name = new_name()
    dead = f"{name}.dead"
    async with member(connection, name, dead_letter=dead):
        await send(connection, *(letter(dead, name, "shop", b"%d" % n) for n in range(20)))
        letters = await connection.dead_letters(dead)
        for _ in range(30):  # more often than any delivery limit
            assert [message.body for message in await letters.list(5)] == [b"%d" % n for n in range(5)]
        await other.left(dead, 20)


@pytest.mark.parametrize(("limit", "pages"), [(250, 3), (1, 1), (1000, 4)])
async def test_letters_are_listed_in_pages(
    connection: RabbitConnection, other: Raw, written: list[str], limit: int, pages: int
) -> None:
    """Not in a round trip a letter. The last page of those that ask for more is empty: now it is known that there are
    no others."""
    name = new_name()
    dead = f"{name}.dead"
    async with member(connection, name, dead_letter=dead):
        await send(connection, *(letter(dead, name, "shop", b"%d" % n) for n in range(300)))
        await other.left(dead, 300)
        letters = await connection.dead_letters(dead)
        for _ in range(2):
            written.clear()
            found = await letters.list(limit)
            assert [message.body for message in found] == [b"%d" % n for n in range(min(limit, 300))]
            calls = [method for method in written if method not in ("open", "close")]
            assert calls[: calls.index("nack")] == ["declare", *["declare", "get"] * pages, "declare"]
        await other.left(dead, 300)


async def test_a_look_that_is_cancelled_gives_all_back(
    connection: RabbitConnection, other: Raw, written: list[str]
) -> None:
    name = new_name()
    dead = f"{name}.dead"
    async with member(connection, name, dead_letter=dead):
        await send(connection, *(letter(dead, name, "shop", b"%d" % n) for n in range(300)))
        await other.left(dead, 300)
        letters = await connection.dead_letters(dead)
        look = asyncio.create_task(letters.list(300))
        await eventually(lambda: written.count("get") == 2)
        look.cancel()
        with pytest.raises(asyncio.CancelledError):
            await look
        await other.left(dead, 300)
        assert [message.body for message in await letters.list(300)] == [b"%d" % n for n in range(300)]


async def test_a_queue_that_goes_while_it_is_looked_at(connection: RabbitConnection, other: Raw) -> None:
    queue = await other.declare(new_name())

    async def look() -> None:
        async with looking(connection.consuming, queue) as table:
            assert table is not None
            await other.delete(queue)
            await table.take(5)

    with pytest.raises(NotFound, match=queue):
        await look()


async def test_letters_of_a_queue_and_of_a_group_go_back_where_they_came_from(connection: RabbitConnection) -> None:
    source = RabbitQueue(new_name("queue"), exchange=Exchange(new_name("events")), bind="#")
    name, dead = new_name(), new_name("dead")
    async with (
        member(connection, source.name, "any", source=source, dead_letter=dead) as of_queue,
        member(connection, name, "eu.shop", dead_letter=dead) as of_group,
        member(connection, name, "other", dead_letter=dead) as bystander,
    ):
        await send(
            connection,
            letter(dead, source.name, "any", b"1"),
            letter(dead, name, "eu.shop", b"2"),
            letter(dead, name, "no such group", b"3"),
            outgoing(dead, b"4"),
        )
        letters = await connection.dead_letters(dead)
        assert await letters.requeue() == 2
        assert [message.body for message in await letters.list()] == [b"3", b"4"], "who has no way back stays"
        for taker, body in ((of_queue, b"1"), (of_group, b"2")):
            (delivery,) = await taker.take(1)
            assert (delivery.body, delivery.headers.pairs) == (body, (("tenant", b"acme"),))
            await taker.acknowledge([delivery])
        await bystander.expect_nothing(0.3)
        assert await letters.purge() == 2


async def test_a_queue_that_there_is_not_has_no_letters(rabbit: Rabbit, transport: TransportName) -> None:
    async with connected(rabbit, transport=transport) as connection:
        letters = await connection.dead_letters("nowhere")
        assert (list(await letters.list()), await letters.requeue(), await letters.purge()) == ([], 0, 0)
        assert await letters.purge(["an id"]) == 0
    for call in (letters.list, letters.requeue, letters.purge):
        with pytest.raises(BrokerClosed):
            await call()
