"""Publishing to RabbitMQ: an answer for each message, whatever happens to it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from streamfw.broker import Subscription
from streamfw.errors import (
    Blocked,
    BrokerClosed,
    BrokerRefused,
    OutcomeUnknown,
    Rejected,
    TooLarge,
    Unavailable,
    Unroutable,
)
from streamfw_rabbit import Exchange, RabbitQueue
from streamfw_rabbit.channel import OPEN, Receipts
from streamfw_rabbit.connection import RabbitConnection
from tests.brokers.rabbit_broker_kit import Raw, connected, member, new_name, outgoing, raw, send, version_of
from tests.brokers.rabbit_kit import TransportName
from tests.helpers import eventually
from tests.services import rabbit as services
from tests.services.proxy import Proxy
from tests.services.rabbit import OwnRabbit, Rabbit

# ---------------------------------------------------------------------- each its own answer


async def test_of_two_with_one_id_the_one_that_nobody_takes_fails(connection: RabbitConnection) -> None:
    """The client library matches returns by ``message_id``, and tells the wrong one."""
    name = new_name()
    async with member(connection, name) as taker:
        for _ in range(20):
            lost = [outgoing(new_name("nobody"), b"lost", message_id="the same") for _ in range(2)]
            kept = [outgoing(name, b"kept", message_id="the same") for _ in range(3)]
            answers = await send(connection, kept[0], lost[0], kept[1], lost[1], kept[2])
            assert answers == [None, Unroutable, None, Unroutable, None]
            taken = await taker.take(3)
            assert {delivery.body for delivery in taken} == {b"kept"}
            await taker.acknowledge(taken)


async def test_concurrent_publishes_with_one_id_each_get_their_own_answer(connection: RabbitConnection) -> None:
    name = new_name()
    async with member(connection, name) as taker:
        calls = [outgoing(name if n % 3 else f"{name}.nobody", b"%d" % n, message_id="the same") for n in range(60)]
        answers = await asyncio.gather(*(send(connection, message) for message in calls))
        assert answers == [[None] if n % 3 else [Unroutable] for n in range(60)]
        await taker.acknowledge(await taker.take(40))


async def test_a_name_is_an_exchange_or_else_a_queue(connection: RabbitConnection, other: Raw) -> None:
    queue = await other.declare(new_name("queue"))
    assert await send(connection, outgoing(queue, b"to the queue")) == [None]
    got = await other.get(queue)
    assert got is not None
    assert (got.body, got.exchange, got.routing_key) == (b"to the queue", "", queue)
    name = new_name()
    async with member(connection, name) as taker:
        assert await send(connection, outgoing(name)) == [None]
        await taker.acknowledge(await taker.take(1))


async def test_a_name_that_comes_to_be_is_found_at_once(connection: RabbitConnection) -> None:
    name = new_name()
    assert await send(connection, outgoing(name)) == [Unroutable]
    async with member(connection, name) as taker:
        assert await send(connection, outgoing(name)) == [None]
        await taker.acknowledge(await taker.take(1))


async def test_the_routing_key_is_the_key(connection: RabbitConnection) -> None:
    exchange = new_name("events")
    queue = RabbitQueue(new_name("queue"), exchange=Exchange(exchange, "topic"), bind="orders.*")
    async with member(connection, queue.name, source=queue) as taker:
        answers = await send(
            connection,
            outgoing(exchange, b"1", key="orders.created"),
            outgoing(exchange, b"2", key="invoices.created"),
            outgoing(exchange, b"3"),
        )
        assert answers == [None, Unroutable, Unroutable]
        (delivery,) = await taker.take(1)
        assert (delivery.body, delivery.key, delivery.name) == (b"1", "orders.created", queue.name)
        await taker.acknowledge([delivery])


async def test_what_cannot_travel_is_rejected_alone(connection: RabbitConnection) -> None:
    name = new_name()
    async with member(connection, name) as taker:
        bad = [
            outgoing(name, message_id="x" * 256),
            outgoing(name, headers=[("a", b"1"), ("a", b"2")]),
            outgoing(name, headers={"CC": "elsewhere"}),
            outgoing(name, headers={"x-streamfw-attempt": "9"}),
            outgoing(name, headers={"n" * 256: "v"}),
            outgoing(name, headers={"x-streamfw-left": "9"}),
            outgoing(name, key="\ud800"),
            outgoing("no such!name"),
            outgoing("x" * 200),
        ]
        messages = [outgoing(name, b"good"), *bad, outgoing(name, b"good")]
        assert await send(connection, *messages) == [None, *[Rejected] * len(bad), None]
        taken = await taker.take(2)
        await taker.acknowledge(taken)


async def test_a_full_queue_takes_nothing_and_says_so(connection: RabbitConnection) -> None:
    source = RabbitQueue(new_name("full"), max_length=5, overflow="reject-publish", prefetch=1)
    async with member(connection, source.name, source=source):

        async def answered() -> object:
            return (await send(connection, outgoing(source.name)))[0]

        assert await eventually(answered, message="the queue fills up") is Blocked


async def test_a_body_over_the_servers_limit_is_told_as_that(services_directory: Path) -> None:
    with services.own(services_directory, settings={"max_message_size": "100000"}) as own:
        await _too_large(own.facts)


async def _too_large(server: Rabbit) -> None:
    async with connected(server, max_body=200_000) as connection, member(connection, "orders") as taker:
        assert await send(connection, outgoing("orders", bytes(100_001))) == [TooLarge]
        assert await send(connection, outgoing("orders", bytes(100_000))) == [None]
        await taker.acknowledge(await taker.take(1))


async def test_an_exchange_that_is_deleted_meanwhile(connection: RabbitConnection, other: Raw) -> None:
    name = new_name()
    async with member(connection, name) as taker:
        assert await send(connection, outgoing(name)) == [None]
        await taker.acknowledge(await taker.take(1))
        channel = await other.channel()
        await channel.exchange_delete(name)
        assert await send(connection, outgoing(name)) == [OutcomeUnknown]
        assert await send(connection, outgoing(name)) == [Unroutable], "and from then on it is known"


async def test_a_publish_that_is_forbidden_is_rejected(rabbit: Rabbit, transport: TransportName) -> None:
    name = new_name()
    async with connected(rabbit, transport=transport) as connection, member(connection, name):
        rabbit.permit(write="^other$")

        async def answered() -> object:  # the server caches permissions for a moment
            return (await send(connection, outgoing(name)))[0]

        assert await eventually(answered) is Rejected


# ---------------------------------------------------------------------- order, window, priorities


async def test_order_holds_over_the_window(rabbit: Rabbit, transport: TransportName) -> None:
    name = new_name()
    async with (
        connected(rabbit, transport=transport, window=7, window_bytes=2000) as connection,
        member(connection, name) as taker,
    ):
        bodies = [b"%04d" % n + bytes(n % 5 * 300) for n in range(300)]
        assert await send(connection, *(outgoing(name, body, key="one") for body in bodies)) == [None] * 300
        lane = connection.publishing.lane
        assert lane.channel is not None
        assert lane.channel.unconfirmed == 0
        taken = await taker.take(300)
        assert [delivery.body for delivery in taken] == bodies
        await taker.acknowledge(taken)


async def test_never_more_under_way_than_the_window(rabbit: Rabbit, transport: TransportName) -> None:
    name = new_name()
    async with (
        connected(rabbit, transport=transport, window=10, window_bytes=5000) as connection,
        member(connection, name) as taker,
    ):
        lane = connection.publishing.lane
        seen: list[tuple[int, int]] = []
        stop = asyncio.Event()

        async def watch() -> None:
            while not stop.is_set():
                if lane.channel is not None:
                    seen.append((lane.channel.unconfirmed, lane.channel.unconfirmed_bytes))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        calls = (send(connection, outgoing(name, bytes(100 * (n % 9)))) for n in range(200))
        assert await asyncio.gather(*calls) == [[None]] * 200
        assert await send(connection, outgoing(name, bytes(20_000))) == [None], "one alone may be larger"
        stop.set()
        await watching
        assert max(count for count, _ in seen) <= 10
        assert max(size for _, size in seen if size != 20_000) <= 5000
        await taker.acknowledge(await taker.take(201))


async def test_priorities_where_the_queue_has_them(rabbit: Rabbit, transport: TransportName) -> None:
    source = RabbitQueue(new_name("urgent"), type="classic", priorities=10)
    async with connected(rabbit, transport=transport, priorities=10) as connection:
        async with member(connection, source.name, source=source):
            pass
        order = [5, 0, -5, 3, 0, -1, 9, -9]
        assert await send(connection, *(outgoing(source.name, b"%d" % p, priority=p) for p in order)) == [None] * 8
        async with member(connection, source.name, source=source) as taker:
            taken = await taker.take(8)
            got = [int(delivery.body) for delivery in taken]
            assert got[:3] == [-5, -9, -1], "beyond the ends all are alike"
            assert got[3:] == [0, 0, 3, 5, 9]
            await taker.acknowledge(taken)


async def test_priorities_of_a_quorum_queue(rabbit: Rabbit, transport: TransportName) -> None:
    """From 4.3 on each of them has some. What has none is in the middle."""
    source = RabbitQueue(new_name("urgent"), priorities=8)
    async with connected(rabbit, transport=transport, priorities=8) as connection:
        if version_of(connection) < (4, 3):
            with pytest.raises(BrokerRefused, match=r"a quorum queue with priorities needs RabbitMQ 4\.3 or later"):
                await connection.open(Subscription(source.name, source=source))
            return
        async with member(connection, source.name, source=source):
            pass
        order = [5, 0, -5, 3, 0, -1, 9, -9]
        assert await send(connection, *(outgoing(source.name, b"%d" % p, priority=p) for p in order)) == [None] * 8
        async with raw(rabbit) as other:
            await other.publish("", source.name, b"0", message_id="theirs")
        async with member(connection, source.name, source=source) as taker:
            taken = await taker.take(9)
            assert [int(delivery.body) for delivery in taken] == [-5, -9, -1, 0, 0, 0, 3, 5, 9]
            assert taken[5].message_id == "theirs"
            await taker.acknowledge(taken)


async def test_a_publish_that_is_cancelled_holds_up_nobody(rabbit: Rabbit, transport: TransportName) -> None:
    """One that waits for room, or its turn, is cancelled; those behind it go on, in their order."""
    name = new_name()
    async with (
        Proxy.to_tcp(rabbit.host, rabbit.port) as proxy,
        connected(rabbit.at("127.0.0.1", proxy.port), transport=transport, window=1) as connection,
        connected(rabbit) as sound,
        member(sound, name) as taker,
    ):
        assert await send(connection, outgoing(name, b"0")) == [None]
        proxy.black_hole()
        calls = [asyncio.create_task(send(connection, outgoing(name, b"%d" % n))) for n in range(1, 8)]
        lane = connection.publishing.lane
        await eventually(lambda: lane.channel is not None and lane.channel.unconfirmed == 1)
        await asyncio.sleep(0)
        calls[1].cancel()  # waits for room
        calls[3].cancel()  # waits for its turn
        await asyncio.wait({calls[1], calls[3]})
        proxy.resume()
        assert [await call for call in calls if not call.cancelled()] == [[None]] * 5
        taken = await taker.take(6)
        assert [delivery.body for delivery in taken] == [b"0", b"1", b"3", b"5", b"6", b"7"]
        await taker.acknowledge(taken)


async def test_what_is_cancelled_or_late_keeps_nothing_of_what_was_answered(connection: RabbitConnection) -> None:
    """Receipts are watched over until they have their answers, not until those before them have."""
    name, lane = new_name(), connection.publishing.lane
    async with member(connection, name, prefetch=1):
        assert await send(connection, outgoing(name)) == [None]
        calls = [asyncio.create_task(send(connection, *(outgoing(name) for _ in range(n)))) for n in (1, 1, 3, 1)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await eventually(lambda: not lane.watched)
        late = Receipts(1)
        lane.watch(late, asyncio.get_running_loop().time() + 600)
        for _ in range(3):
            await asyncio.gather(*(send(connection, outgoing(name)) for _ in range(1000)))
        await eventually(lambda: lane.watched <= 1000)
        assert late.answers == [OPEN]
        late.answer(0, None)
        await eventually(lambda: not lane.watched)


# ---------------------------------------------------------------------- a server that is away, or takes nothing


async def test_a_connection_that_is_cut_with_answers_out(rabbit: Rabbit, transport: TransportName) -> None:
    """What was sent may be stored, and is told as that; what comes after finds the next connection."""
    name = new_name()
    async with (
        Proxy.to_tcp(rabbit.host, rabbit.port) as proxy,
        connected(rabbit.at("127.0.0.1", proxy.port), transport=transport) as connection,
        connected(rabbit) as sound,
        member(sound, name) as taker,
    ):
        assert await send(connection, outgoing(name, b"before")) == [None]
        proxy.black_hole()
        sending = asyncio.create_task(send(connection, outgoing(name, b"under way")))
        lane = connection.publishing.lane
        await eventually(lambda: lane.channel is not None and lane.channel.unconfirmed == 1)
        proxy.cut()
        assert await sending == [OutcomeUnknown]
        proxy.resume()
        assert await send(connection, outgoing(name, b"after")) == [None]
        bodies = {delivery.body for delivery in await taker.take_all(0.5)}
        assert {b"before", b"after"} <= bodies <= {b"before", b"under way", b"after"}


async def test_a_server_that_is_away_is_unavailable_in_time(own_rabbit: OwnRabbit) -> None:
    async with (
        connected(own_rabbit.facts, publish_timeout=1.0, connect_timeout=1.0) as connection,
        member(connection, "orders"),
    ):
        assert await send(connection, outgoing("orders")) == [None]
        await asyncio.to_thread(own_rabbit.stop)
        began = time.monotonic()
        assert await send(connection, outgoing("orders"), outgoing("unknown")) == [Unavailable, Unavailable]
        assert time.monotonic() - began < 10
        health = await connection.check()
        assert not health.ok
        await asyncio.to_thread(own_rabbit.start)

        async def sent() -> bool:
            return await send(connection, outgoing("orders")) == [None]

        await eventually(sent, 20)

        async def well() -> bool:  # the other connection may take a moment longer
            return (await connection.check()).ok

        await eventually(well, 20)


async def test_an_alarm_is_seen_bounded_and_survived(own_rabbit: OwnRabbit, transport: TransportName) -> None:
    options = {"transport": transport, "blocked_timeout": 0.5, "publish_timeout": 20.0}
    async with connected(own_rabbit.facts, **options) as connection, member(connection, "orders") as taker:
        assert await send(connection, outgoing("orders", b"before")) == [None]
        await asyncio.to_thread(own_rabbit.alarm, True)
        # The server says that it blocks when it gets the next publish, which it keeps.
        first = asyncio.create_task(send(connection, outgoing("orders", b"first")))
        await eventually(lambda: connection.publisher.blocked_since is not None)
        health = await connection.check()
        assert (health.ok, "blocked" in health.detail) == (False, True)
        began = time.monotonic()
        assert await send(connection, outgoing("orders", b"no"), outgoing("orders", b"no")) == [Blocked, Blocked]
        assert time.monotonic() - began < 5
        assert source_is_well(taker)
        await taker.acknowledge(await taker.take(1))
        waiting = asyncio.create_task(send(connection, outgoing("orders", b"in time")))
        await asyncio.to_thread(own_rabbit.alarm, False)
        assert await first == [None]
        assert await waiting in ([None], [Blocked])
        # The library shows the end of a block only to who asks, which is done once a second.
        await eventually(lambda: connection.publisher.blocked_since is None)
        assert await send(connection, outgoing("orders", b"after")) == [None]
        assert (await connection.check()).ok
        taken = await taker.take_all(0.5)
        assert {b"first", b"after"} <= {delivery.body for delivery in taken} <= {b"first", b"in time", b"after"}
        await taker.acknowledge(taken)


def source_is_well(taker: object) -> bool:
    source = getattr(taker, "source")  # noqa: B009 - whatever a member is
    return bool(source.health().ok)


async def test_a_frozen_server_is_an_unknown_outcome_in_time(own_rabbit: OwnRabbit, transport: TransportName) -> None:
    options = {"transport": transport, "publish_timeout": 0.5, "window": 2}
    async with connected(own_rabbit.facts, **options) as connection, member(connection, "orders") as taker:
        assert await send(connection, outgoing("orders", b"before")) == [None]
        own_rabbit.freeze()
        try:
            answers = await send(connection, *(outgoing("orders", b"%d" % n) for n in range(4)))
            assert answers == [OutcomeUnknown, OutcomeUnknown, Unavailable, Unavailable]
            health = await connection.check()
            assert (health.ok, health.detail) == (False, "no answer in 5 s")
        finally:
            own_rabbit.thaw()

        async def sent() -> bool:
            return await send(connection, outgoing("orders", b"after")) == [None]

        await eventually(sent, 20)
        assert len(await taker.take_all(0.5)) >= 2


async def test_publishing_ends_with_the_connection(rabbit: Rabbit, transport: TransportName) -> None:
    name = new_name()
    async with connected(rabbit, transport=transport) as connection, member(connection, name):
        under_way = [asyncio.create_task(connection.publish([outgoing(name)])) for _ in range(200)]
        await asyncio.sleep(0)
    for task in under_way:
        assert not any(await task), "what was under way is answered before the connection closes"
    with pytest.raises(BrokerClosed):
        await connection.publish([outgoing(name)])
