"""Channels over both transports, on a real server: the same tests run on either."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, cast

import aiormq
import pytest
from aiormq.abc import ChannelFrame

from streamfw.errors import BrokerUnavailable
from streamfw_rabbit._epoch import WriteQueue
from streamfw_rabbit.channel import NACKED, OPEN, SEQUENCE_HEADER, Closed, Properties, Receipts, Returned
from streamfw_rabbit.errors import AccessRefused, ChannelGone, NotFound, TopologyMismatch
from streamfw_rabbit.fastlane import FastChannel
from streamfw_rabbit.library import LibraryChannel
from tests.helpers import eventually
from tests.services.proxy import Proxy
from tests.services.rabbit import Rabbit

from .rabbit_kit import Tap, TransportName, ended, publish, rig, send

# ---------------------------------------------------------------------- messages


async def test_bodies_of_every_size_in_order(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        room = r.epoch.frame_max - 8
        sizes = [0, 1, 150, room, room + 1, 0, 1_000_000, 3 * room, 150]
        bodies = [bytes([65 + place]) * size for place, size in enumerate(sizes)]
        await r.queue()
        await r.fill(*bodies)
        tap = await r.consumer()
        got = await tap.until(len(bodies))
        assert tap.bodies == bodies
        assert [delivery.tag for delivery in got] == list(range(1, len(bodies) + 1))
        assert {(d.exchange, d.routing_key, d.consumer_tag, d.redelivered) for d in got} == {("", "q", "tests", False)}
        assert tap.channel.counters.deliveries == len(bodies)


HEADERS: dict[str, Any] = {
    "text": "é\0",
    "empty": "",
    "bytes": b"\xff\xfe",
    "array of bytes": bytearray(b"\0\1\xff"),
    "none": None,
    "bool": True,
    "small": -1,
    "short": 300,
    "unsigned short": 40_000,
    "int": -70_000,
    "unsigned int": 3_000_000_000,
    "long": -(2**63),
    "double": 0.1,
    "decimal": Decimal("12.345"),
    "time": datetime(2024, 2, 29, 12, 0, 1, tzinfo=UTC),
    "nested": {"list": [1, "two", None, {"three": 3.5}], "table": {}},
}
ALL = Properties(
    raw_headers=HEADERS,
    content_type="application/json",
    content_encoding="gzip",
    delivery_mode=2,
    priority=7,
    correlation_id="correlation",
    reply_to="somewhere",
    expiration="600000",
    message_id="0190-é",
    timestamp=1_700_000_000,
    message_type="order",
    app_id="shop",
)


async def test_properties_and_headers_survive(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        await r.queue()
        channel = await r.channel(confirms=True)
        receipts = Receipts(3)
        channel.publish("", "q", ALL, b"1", receipts, 0)
        channel.publish("", "q", Properties(), b"2", receipts, 1)
        channel.publish("", "q", Properties(), b"3", receipts, 2, mandatory=False)
        assert await receipts.wait() == [None] * 3
        tap = await r.consumer()
        full, *bare = await tap.until(3)
        properties = full.properties
        assert properties.headers == HEADERS
        # From 4.0 on the server sorts them, always.
        assert list(properties.headers) == (sorted(HEADERS) if r.epoch.server_version >= (4,) else list(HEADERS))
        assert type(properties.headers["bytes"]) is bytes
        assert properties == ALL
        for delivery in bare:
            assert delivery.properties == Properties()
        # What was read can be sent again as it is.
        assert (await publish(channel, "q", b"copy", **_fields(full.properties))) == [None]
        copy = (await tap.until(4))[3].properties
        assert SEQUENCE_HEADER not in copy.headers
        assert copy.headers == HEADERS


def _fields(properties: Properties) -> dict[str, Any]:
    return {name: getattr(properties, name) for name in Properties.__struct_fields__}


async def test_both_transports_read_the_same(rabbit: Rabbit) -> None:
    """Also of what others sent: here the library, by its own publish and encoder."""
    headers: Any = {"a": [1, {"b": None}], "f": 1.5, "x": bytearray(b"\0")}
    theirs = aiormq.spec.Basic.Properties(headers=headers, message_id="m", timestamp=datetime.now(UTC))
    async with rig(rabbit, "aiormq") as slow, rig(rabbit, "fast") as fast:
        seen = []
        for r in (slow, fast):
            queue = await r.queue(r.epoch.transport)
            async with r.epochs.declarations() as channel:
                await channel.basic_publish(b"theirs", routing_key=queue, properties=theirs)
            await r.fill(b"ours", name=queue)
            read = [delivery.properties for delivery in await (await r.consumer(queue)).until(2)]
            seen.append([_fields(each) | {"raw_headers": each.headers} for each in read])
        assert seen[0] == seen[1]
        assert seen[0][0]["raw_headers"] == headers


async def test_what_amqp_cannot_carry_sends_nothing(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        await r.queue()
        channel = await r.channel(confirms=True)
        receipts = Receipts()
        bad: list[tuple[str, Properties]] = [
            ("k" * 256, Properties()),
            ("q", Properties(message_id="m" * 256)),
            ("q", Properties(raw_headers={"a": "x" * r.epoch.frame_max})),
        ]
        for key, properties in bad:
            with pytest.raises(ValueError):
                channel.publish("", key, properties, b"", receipts)
        with pytest.raises(TypeError, match="header or argument 'a'"):
            channel.publish("", "q", Properties(raw_headers=cast("Any", {"a": object()})), b"", receipts)
        assert channel.unconfirmed == 0
        assert channel.publish("", "q", Properties(), b"", receipts) == 1
        assert await receipts.wait() == [None]


async def test_a_malformed_message_is_bad_alone(rabbit: Rabbit, transport: TransportName) -> None:
    """Text that is no UTF-8, which the server does not look at. The library's reader would end its connection."""
    async with rig(rabbit, "fast") as writer, rig(rabbit, transport) as r:
        await r.queue()
        channel = await writer.channel(confirms=True)
        assert isinstance(channel, FastChannel)
        receipts = Receipts(3)
        for place, message_id in enumerate(("good", "bad-id", "good too")):
            properties = Properties(message_id=message_id, raw_headers={"a": 1})
            channel.publish("", "q", properties, b"body", receipts, place)
        [frames] = [b"".join(writer.epoch._out)]  # type: ignore[attr-defined]
        writer.epoch._out[:] = [frames.replace(b"bad-id", b"b\xff\xff-id")]  # type: ignore[attr-defined]
        assert await receipts.wait() == [None] * 3
        tap = await r.consumer()
        good, bad, after = await tap.until(3)
        assert (good.properties.message_id, after.properties.message_id) == ("good", "good too")
        with pytest.raises(ValueError, match="malformed message properties"):
            _ = bad.properties
        assert (bad.body, bad.routing_key) == (b"body", "q")
        assert tap.channel.ack(3, multiple=True)
        assert tap.channel.closed is None


# ---------------------------------------------------------------------- publishing


async def test_a_thousand_publishes_are_one_write(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        await r.queue()
        channel = await r.channel(confirms=True)
        told: list[int] = []
        channel.on_answers = lambda: told.append(channel.unconfirmed)
        receipts = send(channel, "q", *[b"x" * 100] * 1000)
        assert (channel.unconfirmed, channel.unconfirmed_bytes, receipts.left) == (1000, 100_000, 1000)
        assert await receipts.wait() == [None] * 1000
        assert (channel.unconfirmed, channel.unconfirmed_bytes) == (0, 0)
        assert channel.counters.publishes == 1000
        assert channel.counters.writes == 1
        await eventually(lambda: told[-1:] == [0])
        assert len(told) <= channel.counters.confirms < 1000
        await r.left(1000)


async def test_a_return_finds_its_publish_by_our_header(rabbit: Rabbit, transport: TransportName) -> None:
    """Two messages with one business id, one of them unroutable: that one is answered so."""
    async with rig(rabbit, transport) as r:
        await r.queue()
        channel = await r.channel(confirms=True)
        receipts = Receipts(4)
        for place, key in enumerate(("q", "nowhere", "q", "nowhere either")):
            headers: dict[str, Any] = {SEQUENCE_HEADER: 1, "a": "b"}  # of a message that is sent on
            channel.publish("", key, Properties(message_id="same", raw_headers=headers), b"body", receipts, place)
        unroutable = Returned(312, "NO_ROUTE")
        assert await receipts.wait() == [None, unroutable, None, unroutable]
        assert channel.counters.returns == 2
        assert await publish(channel, "q", b"") == [None]
        await r.left(3)


async def test_not_mandatory_is_confirmed_and_gone(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        channel = await r.channel(confirms=True)
        receipts = Receipts()
        channel.publish("", "nowhere", Properties(), b"", receipts, mandatory=False)
        assert await receipts.wait() == [None]


async def test_a_full_queue_nacks(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        await r.queue("full", queue_type="classic", max_length=2, overflow="reject-publish")
        channel = await r.channel(confirms=True)
        assert await publish(channel, "full", *[b"x"] * 4) == [None, None, NACKED, NACKED]


async def test_a_receipt_that_was_given_up_on_takes_its_answer_quietly(
    rabbit: Rabbit, transport: TransportName
) -> None:
    async with rig(rabbit, transport) as r:
        await r.queue()
        channel = await r.channel(confirms=True)
        receipts = send(channel, "q", b"1", b"2")
        waiting = asyncio.create_task(receipts.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await eventually(lambda: receipts.left == 0)
        assert await receipts.wait() == [None, None]


async def test_receipts() -> None:
    receipts = Receipts(3)
    assert receipts.answers == [OPEN] * 3
    receipts.answer(1, None)
    waiting = asyncio.create_task(receipts.wait())
    await asyncio.sleep(0)
    receipts.answer(1, NACKED)  # a place is answered once
    receipts.answer(0, NACKED)
    await asyncio.sleep(0)
    assert (receipts.left, waiting.done()) == (1, False)
    receipts.answer(2, None)
    assert await waiting == [NACKED, None, None]
    assert await receipts.wait() == [NACKED, None, None]
    assert await Receipts(0).wait() == []


async def test_publishing_needs_confirms(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        channel = await r.channel()
        with pytest.raises(RuntimeError, match="confirms=True"):
            channel.publish("", "q", Properties(), b"", Receipts())
        channel, receipts = await r.channel(confirms=True), Receipts(1)
        with pytest.raises(IndexError):
            channel.publish("", "q", Properties(), b"", receipts, 1)
        receipts.answer(0, NACKED)
        with pytest.raises(ValueError, match="place 0 of the receipts has its answer"):
            channel.publish("", "q", Properties(), b"", receipts)


async def test_an_exchange_that_is_not_there_closes_the_channel(rabbit: Rabbit, transport: TransportName) -> None:
    """404: the publishes that are open may be stored, says their answer."""
    async with rig(rabbit, transport) as r:
        channel = await r.channel(confirms=True)
        [answer] = await publish(channel, "k", b"", exchange="missing")
        assert isinstance(answer, Closed)
        assert (answer.kind, answer.code) == ("channel", 404)
        assert channel.closed == answer
        assert channel.unconfirmed == 0
        with pytest.raises(ChannelGone, match="publishing: the server closed the channel: 404"):
            channel.publish("", "q", Properties(), b"", Receipts())
        assert r.epoch.closed is None


# ---------------------------------------------------------------------- consuming and settling


async def test_acks_are_one_write_a_turn(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        await r.queue()
        await r.fill(*[b"x"] * 100)
        tap = await r.consumer()
        await tap.until(100)
        channel = tap.channel
        for tag in (3, 5, 7):
            assert channel.ack(tag)
        assert channel.ack(50, multiple=True)
        await channel.flush()
        assert (channel.counters.acks, channel.counters.writes) == (4, 1)
        assert channel.reject(51, requeue=False)
        assert channel.nack(60, multiple=True, requeue=False)
        assert channel.nack(61, requeue=True)
        again = (await tap.until(101))[100]
        assert again.redelivered
        assert again.tag == 101
        await channel.close()
        await r.left(40)


async def test_prefetch_bounds_what_is_out(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        await r.queue()
        await r.fill(*[b"%d" % n for n in range(30)])
        tap = await r.consumer(prefetch=10)
        await tap.until(10)
        await r.left(20)
        assert len(tap.bodies) == 10
        tap.channel.ack(4, multiple=True)
        await tap.until(14)
        await r.left(16)
        assert tap.bodies == [b"%d" % n for n in range(14)]


async def test_one_wake_up_for_a_full_inbox(rabbit: Rabbit, transport: TransportName) -> None:
    """Not one for each delivery, and none while nobody takes what is there."""
    async with rig(rabbit, transport) as r:
        await r.queue()
        await r.fill(*[b"x"] * 200)
        channel = await r.channel()
        calls: list[int] = []
        channel.on_delivery = lambda: calls.append(len(channel.inbox))
        await channel.consume("q", "c")
        await eventually(lambda: len(channel.inbox) == 200)
        assert len(calls) == 1
        assert len(channel.take()) == 200
        assert channel.inbox == []


async def test_a_consumer_that_ends_gets_no_more(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        await r.queue()
        await r.fill(b"1", b"2")
        tap = await r.consumer(prefetch=1)
        await tap.until(1)
        await tap.channel.cancel("tests")
        await r.fill(b"3")
        assert tap.channel.ack(1)
        await tap.channel.flush()
        await r.left(2)
        assert tap.bodies == [b"1"]
        assert tap.cancelled == []  # that is for what the server does


async def test_priority_of_consumers(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        await r.queue()
        low = await r.consumer(arguments={"x-priority": 1})
        high = await r.consumer(arguments={"x-priority": 5})
        await r.fill(*[b"x"] * 20)
        await high.until(20)
        assert low.bodies == []


async def test_a_stream_from_an_offset(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        await r.queue("s", queue_type="stream")
        await r.fill(*[b"%d" % n for n in range(50)], name="s")
        tap = await r.consumer("s", prefetch=10, arguments={"x-stream-offset": 30})
        while len(tap.got) < 20:
            await tap.until(len(tap.got) + 1)
            tap.channel.ack(tap.got[-1].tag, multiple=True)
        offsets = [delivery.properties.headers["x-stream-offset"] for delivery in tap.got]
        assert offsets == list(range(30, 50))
        assert tap.bodies == [b"%d" % n for n in range(30, 50)]


async def test_direct_reply_to(rabbit: Rabbit, transport: TransportName) -> None:
    """Consuming and publishing on one channel, which this needs."""
    async with rig(rabbit, transport) as r:
        await r.queue()
        asks = await r.channel(confirms=True)
        answers = Tap(asks)
        await asks.consume("amq.rabbitmq.reply-to", "replies", no_ack=True)
        assert await publish(asks, "q", b"question", reply_to="amq.rabbitmq.reply-to", correlation_id="7") == [None]
        server = await r.consumer()
        [question] = await server.until(1)
        replies = await r.channel(confirms=True)
        to, correlation = question.properties.reply_to, question.properties.correlation_id
        assert to is not None
        receipts = Receipts()
        # For the server such a name is no queue: as mandatory it would come back, delivered or not.
        replies.publish("", to, Properties(correlation_id=correlation), b"answer", receipts, mandatory=False)
        assert await receipts.wait() == [None]
        [answer] = await answers.until(1)
        assert (answer.body, answer.properties.correlation_id, answer.consumer_tag) == (b"answer", "7", "replies")


async def test_three_channels_calls_and_large_bodies_on_one_connection(
    rabbit: Rabbit, transport: TransportName
) -> None:
    async with rig(rabbit, transport) as r:
        names = ["m1", "m2", "m3"]
        random_ = random.Random(3)
        sizes = (0, 1, 150, 150, 5000, r.epoch.frame_max - 8, r.epoch.frame_max - 7, 300_000)
        sent = {name: [random_.randbytes(random_.choice(sizes)) for _ in range(40)] for name in names}
        for name in names:
            await r.queue(name)
        taps = {name: await r.consumer(name, prefetch=13) for name in names}
        channel = await r.channel(confirms=True)

        async def take(name: str) -> None:
            tap = taps[name]
            while len(tap.got) < 40:
                await tap.until(len(tap.got) + 1)
                tap.channel.ack(tap.got[-1].tag, multiple=True)

        async def calls() -> None:
            for _ in range(30):
                await r.depth("m1")

        waits = [publish(channel, name, *bodies) for name, bodies in sent.items()]
        await asyncio.gather(calls(), *waits, *map(take, names))
        assert {name: tap.bodies for name, tap in taps.items()} == sent


# ---------------------------------------------------------------------- the ends of channels


async def test_a_deleted_queue_cancels_its_consumer(rabbit: Rabbit, transport: TransportName) -> None:
    """The channel stays open, for this and for other queues."""
    async with rig(rabbit, transport) as r:
        await r.queue()
        await r.queue("other")
        await r.fill(b"x")
        tap = await r.consumer()
        await tap.until(1)
        await r.delete("q")
        await eventually(lambda: tap.cancelled == ["tests"])
        channel = tap.channel
        assert channel.closed is None
        await channel.consume("other", "again")
        await r.fill(b"y", name="other")
        assert [delivery.consumer_tag for delivery in await tap.until(2)] == ["tests", "again"]


async def test_an_unknown_tag_closes_the_channel_alone(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        await r.queue()
        await r.fill(b"1", b"2")
        tap = await r.consumer()
        other = await r.channel(confirms=True)
        await tap.until(2)
        assert tap.channel.ack(99)
        await eventually(lambda: tap.closed)
        [closed] = tap.closed
        assert (closed.kind, closed.code) == ("channel", 406)
        assert "unknown delivery tag 99" in closed.text
        assert tap.channel.closed is closed
        # What is late is counted, not sent.
        assert not tap.channel.ack(1)
        assert not tap.channel.reject(2)
        assert tap.channel.counters.late == 2
        assert await publish(other, "q", b"3") == [None]
        await r.left(3)
        assert r.ends == []


@pytest.mark.parametrize("by", ["the server", "us", "the library"])
async def test_writing_all_around_a_close_does_not_cost_the_connection(
    rabbit: Rabbit, transport: TransportName, by: str
) -> None:
    """A frame of ours behind a Channel.Close, or a CloseOk, is an error of the connection (504). Who closes writes in
    another turn than we do, and the library closes channels by itself: here for a call that was cancelled."""
    async with rig(rabbit, transport) as r:
        await r.queue()
        for turn in range(15):
            channel = await r.channel(confirms=True)
            receipts = Receipts(5000)
            place = 0
            closing: set[asyncio.Task[Any]] = set()
            while channel.closed is None:
                channel.publish("", "q", Properties(), b"x", receipts, place)
                place += 1
                if place == 3 and by == "the server":
                    channel.ack(9999)
                elif place == 3 and by == "us":
                    closing.add(asyncio.create_task(channel.close()))
                elif place == 3:
                    closing.add(asyncio.create_task(channel.library.basic_qos(prefetch_count=7)))  # type: ignore[attr-defined]
                elif place == 5 + turn % 3 and by == "the library":
                    closing.pop().cancel()
                elif place == 60:  # the call was done when it was cancelled
                    closing.add(asyncio.create_task(channel.close()))
                await asyncio.sleep(0 if place % 3 else 0.0003)
            for late in range(place, 5000):
                receipts.answer(late, None)
            answers = await receipts.wait()
            assert set(map(type, answers)) <= {type(None), Closed}
            with pytest.raises(ChannelGone):
                channel.publish("", "q", Properties(), b"x", Receipts())
            if closing:
                await asyncio.wait(closing)
        assert await publish(await r.channel(confirms=True), "q", b"") == [None]
        assert (r.ends, len(r.ups)) == ([], 1)


async def test_numbers_of_channels_are_used_again(
    rabbit: Rabbit, transport: TransportName, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(rabbit, transport) as r:
        monkeypatch.setattr(r.epoch, "channel_max", 5)
        numbers = set()
        for turn in range(30):
            channel = await r.channel()
            numbers.add(channel.number)
            if turn % 3:
                await channel.close()
            else:
                channel.ack(5)
                await ended(channel)
            with pytest.raises(NotFound):
                await r.depth("missing")
        assert numbers <= {1, 2, 3, 4, 5}
        await eventually(lambda: not r.epoch.channels)
        many = [await r.channel() for _ in range(5)]
        with pytest.raises(BrokerUnavailable, match="all 5 channels"):
            await r.channel()
        await many[2].close()
        assert (await r.channel()).number == many[2].number
        assert (r.ends, len(r.ups)) == ([], 1)


async def test_closing_at_once_loses_no_ack(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        await r.queue()
    for single in (True, False, True):
        async with rig(rabbit, transport) as r:
            await r.fill(*[b"x"] * 500)
            tap = await r.consumer()
            for delivery in await tap.until(500):
                if single:
                    tap.channel.ack(delivery.tag)
            if not single:
                tap.channel.ack(500, multiple=True)
        async with rig(rabbit, transport) as r:
            await r.left(0)
            assert await r.depth() == 0


async def test_a_cancelled_caller_does_not_cost_the_channel(rabbit: Rabbit, transport: TransportName) -> None:
    """An AMQP call that is broken off closes its channel; ours run to their end."""
    async with rig(rabbit, transport) as r:
        await r.queue()
        channel = await r.channel()
        for turns in range(20):
            call = asyncio.create_task(channel.qos(10 + turns))
            for _ in range(turns % 7):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait({call})
        tap = Tap(channel)
        await channel.consume("q", "c")
        await r.fill(b"x")
        await tap.until(1)
        assert channel.closed is None


async def test_a_cancelled_open_leaves_nothing(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        for turns in range(20):
            opening = asyncio.create_task(r.channel(confirms=True))
            for _ in range(turns):
                await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait({opening})
            if not opening.cancelled():
                await opening.result().close()
        await eventually(lambda: not r.epoch.channels)
        await eventually(lambda: not r.epoch.library.channels)
        assert r.ends == []


async def test_callbacks_that_raise_cost_nothing(rabbit: Rabbit, transport: TransportName) -> None:
    def bad(*_: object) -> None:
        raise RuntimeError("callback")

    async with rig(rabbit, transport) as r:
        await r.queue()
        tap = await r.consumer()
        publishes = await r.channel(confirms=True)
        tap.channel.on_delivery = tap.channel.on_cancelled = tap.channel.on_closed = bad
        publishes.on_answers = publishes.on_closed = bad
        assert await publish(publishes, "q", b"1") == [None]
        await eventually(lambda: tap.bodies == [b"1"])
        await r.delete("q")
        tap.channel.ack(77)
        await ended(tap.channel)
        assert await publish(publishes, "q", b"") == [Returned(312, "NO_ROUTE")]
        await publishes.close()
        assert r.ends == []


# ---------------------------------------------------------------------- refusals


async def test_what_does_not_exist(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        channel = await r.channel()
        with pytest.raises(NotFound, match="consuming from 'missing': the server closed the channel: 404 NOT_FOUND"):
            await channel.consume("missing", "c")
        assert channel.closed is not None
        assert channel.closed.code == 404
        with pytest.raises(ChannelGone, match="setting the prefetch"):
            await channel.qos(1)
        with pytest.raises(ValueError, match=r"consuming from 'a\*b'"):
            await (await r.channel()).consume("a*b", "c")
        assert r.ends == []


async def test_a_queue_with_other_arguments(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        await r.queue("mine", max_length=10)
        with pytest.raises(TopologyMismatch) as caught:
            await r.queue("mine", max_length=20)
        error = caught.value
        assert (error.queue, error.argument) == ("mine", "x-max-length")
        assert "'20'" in error.declared
        assert "'10'" in error.actual
        async with r.epochs.declarations() as channel:
            await channel.exchange_declare("events", exchange_type="topic", durable=True)
        with pytest.raises(TopologyMismatch, match="exchange 'events' exists with other properties: type is 'topic'"):
            async with r.epochs.declarations() as channel:
                await channel.exchange_declare("events", exchange_type="fanout", durable=True)
        assert r.ends == []


async def test_a_missing_permission(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        await r.queue()
        rabbit.permit(read="none")
        channel = await r.channel()
        with pytest.raises(AccessRefused, match="403"):
            await channel.consume("q", "c")


async def test_a_queue_that_somebody_has_for_himself_may_come_free(rabbit: Rabbit, transport: TransportName) -> None:
    async with rig(rabbit, transport) as r:
        await r.queue("c", queue_type="classic")
        await r.consumer("c", exclusive=True)
        channel = await r.channel()
        with pytest.raises(ChannelGone, match="exclusive"):
            await channel.consume("c", "second")


# ---------------------------------------------------------------------- the library's queue


async def test_a_close_ok_waits_for_its_place() -> None:
    """The library drops it when its queue is full, and then the channel's number is burnt."""
    queue: asyncio.Queue[ChannelFrame] = asyncio.Queue(maxsize=1)
    shut: list[int] = []
    writes = WriteQueue(queue, lambda: shut.append(1))
    first = ChannelFrame(b"\1\0\1\0\0\0\5" + b"\0\x3c\0\x50" + b"\xce", False)
    close_ok = ChannelFrame.marshall(1, [aiormq.spec.Channel.CloseOk()])
    writes.put_nowait(first)
    with pytest.raises(asyncio.QueueFull):
        writes.put_nowait(first)
    assert not shut
    writes.put_nowait(close_ok)
    assert shut
    assert await queue.get() is first
    assert await queue.get() is close_ok


async def test_a_full_queue_of_the_library_keeps_the_order(rabbit: Rabbit) -> None:
    """Only this transport has one; it fills when the library waits for the socket."""
    async with (
        Proxy.to_tcp(rabbit.host, rabbit.port) as proxy,
        rig(rabbit.at(proxy.host, proxy.port), "aiormq") as r,
    ):
        await r.queue()
        channel = await r.channel(confirms=True)
        proxy.black_hole()
        sent = [send(channel, "q", b"x" * 16_000_000)]
        flush = asyncio.create_task(channel.flush())
        for n in range(40):
            sent.append(send(channel, "q", b"%d" % n))
            await asyncio.sleep(0)
        assert isinstance(channel, LibraryChannel)
        assert channel._flushing is not None
        proxy.resume()
        await flush
        for receipts in sent:
            assert await receipts.wait() == [None]
        tap = await r.consumer()
        assert [d.body for d in (await tap.until(41))[1:]] == [b"%d" % n for n in range(40)]
        assert r.ends == []
