"""Consuming from RabbitMQ: acknowledgements in groups, channels that end, and what is left when a source does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import msgspec
import pytest

from streamfw import App, Message, subscriber
from streamfw.broker import Delivery, Settlement, Subscription
from streamfw.errors import BrokerRefused, BrokerUnavailable, StaleDelivery
from streamfw.outcome import ACK
from streamfw.testing.conformance import Member
from streamfw_rabbit import Exchange, MessageProperties, RabbitBroker, RabbitQueue, RoutingKey
from streamfw_rabbit.channel import Channel, Properties
from streamfw_rabbit.connection import RabbitConnection
from streamfw_rabbit.delivery import RabbitDelivery
from streamfw_rabbit.errors import NotFound
from tests.brokers.rabbit_broker_kit import (
    HANDS,
    Raw,
    connected,
    member,
    new_name,
    outgoing,
    raw,
    send,
    source_of,
    version_of,
)
from tests.brokers.rabbit_kit import TransportName
from tests.helpers import eventually
from tests.services.proxy import Proxy
from tests.services.rabbit import OwnRabbit, Rabbit


async def fill(connection: RabbitConnection, name: str, count: int) -> None:
    assert await send(connection, *(outgoing(name, b"%d" % n, key="one") for n in range(count))) == [None] * count


def channel_of(one: object) -> Channel:
    held = source_of(one)._held  # type: ignore[arg-type]
    assert held is not None
    return held.channel


# ---------------------------------------------------------------------- settling


async def test_a_group_is_acknowledged_by_one_frame(connection: RabbitConnection, other: Raw) -> None:
    name = new_name()
    async with member(connection, name) as taker:
        await fill(connection, name, 500)
        for _ in range(5):
            await taker.acknowledge(await taker.take(100))
        await taker.flush()
        assert channel_of(taker).counters.acks <= 5, "fewer where the prefetch changed meanwhile"
        await other.left(f"{name}.shop", 0)


async def test_a_gap_holds_up_nobody_for_long(connection: RabbitConnection) -> None:
    """A message that takes long is stepped over; what comes later is settled all the same, and so is it in the end."""
    source = RabbitQueue(new_name("gap"), prefetch=10)
    async with member(connection, source.name, source=source) as taker:
        await fill(connection, source.name, 100)
        slow = (await taker.take(1))[0]
        for _ in range(11):
            await taker.acknowledge(await taker.take(9))  # more only come when these are seen to be settled
        channel = channel_of(taker)
        assert channel.counters.acks >= 90, "singly: a multiple would take the slow one along"
        await taker.acknowledge([slow])
        await taker.flush()
        assert channel.closed is None
        await taker.expect_nothing(0.3)
    async with member(connection, source.name, source=source) as successor:
        await successor.expect_nothing(0.3)


async def test_after_a_gap_one_frame_is_enough_again(connection: RabbitConnection) -> None:
    name = new_name()
    async with member(connection, name) as taker:
        await fill(connection, name, 30)
        taken = await taker.take(30)
        await taker.acknowledge(taken[5:10])
        channel = channel_of(taker)
        assert channel.counters.acks == 0, "they are held back for a moment"
        await eventually(lambda: channel.counters.acks == 5)
        await taker.acknowledge(taken[:5])
        before = channel.counters.acks
        await taker.acknowledge(taken[10:])
        assert channel.counters.acks == before + 1


async def test_what_is_settled_twice_ends_no_channel(connection: RabbitConnection) -> None:
    name = new_name()
    async with member(connection, name) as taker:
        await fill(connection, name, 3)
        taken = await taker.take(3)
        await taker.acknowledge(taken)
        errors = await taker.settle(taken)
        assert [type(error) for error in errors] == [StaleDelivery] * 3
        assert source_of(taker).late == 3
        await taker.flush()
        assert channel_of(taker).closed is None


async def test_a_stale_settlement_settles_no_other_message(rabbit: Rabbit, connection: RabbitConnection) -> None:
    """Tags begin again at 1: those of a lost channel would name other messages of the next one."""
    name = new_name()
    async with member(connection, name) as taker:
        await fill(connection, name, 5)
        stale = await taker.take(5)
        await asyncio.to_thread(rabbit.close_connections)
        again = await taker.take(5)
        assert [d.tag for d in stale if isinstance(d, RabbitDelivery)] == [1, 2, 3, 4, 5]
        errors = await taker.settle(stale)
        assert [type(error) for error in errors] == [StaleDelivery] * 5
        await taker.flush()
        await taker.close()
        async with member(connection, name) as successor:
            assert len(await successor.take(5)) == 5, "nothing was settled by it"
            assert len(again) == 5


async def test_at_most_the_prefetch_is_out(connection: RabbitConnection, other: Raw) -> None:
    source = RabbitQueue(new_name("window"), prefetch=7)
    async with member(connection, source.name, source=source):
        await fill(connection, source.name, 20)
        await other.left(source.name, 13)


# ---------------------------------------------------------------------- what a delivery carries


async def test_gauges(connection: RabbitConnection) -> None:
    source = RabbitQueue(new_name("gauges"), prefetch=10)
    async with member(connection, source.name, source=source) as taker:
        assert taker.source.gauges() == {"open": 0, "buffered": 0, "prefetch": 10}
        await fill(connection, source.name, 20)
        taken = await taker.take(4)
        await eventually(lambda: taker.source.gauges() == {"open": 10, "buffered": 6, "prefetch": 10})
        await taker.acknowledge(taken)
        await eventually(lambda: taker.source.gauges() == {"open": 10, "buffered": 10, "prefetch": 10})
    assert taker.source.gauges()["open"] == 0


async def test_foreign_messages(connection: RabbitConnection, other: Raw) -> None:
    exchange = new_name("events")
    source = RabbitQueue(new_name("foreign"), exchange=Exchange(exchange, "topic"), bind="#", key="routing_key")
    async with member(connection, source.name, source=source) as taker:
        bare = Properties(raw_headers={"n": 42, "nested": {"a": [1]}}, app_id="billing")
        assert await connection.publishing.send(exchange, "orders.created", outgoing(exchange, b"1"), bare) is None
        await other.publish(exchange, "", b"2", message_id="theirs", content_type="text/plain")
        first, second = await taker.take(2)
        assert isinstance(first, RabbitDelivery)
        assert (first.key, first.message_id, first.timestamp) == ("orders.created", "", 0.0)
        assert (first.exchange, first.routing_key, first.redelivered) == (exchange, "orders.created", False)
        assert dict(first.headers.pairs) == {"n": b"42", "nested": b'{"a":[1]}'}
        assert (first.properties.app_id, first.properties.headers["n"]) == ("billing", 42)
        assert (second.message_id, second.content_type) == ("theirs", "text/plain")
        await taker.acknowledge([first, second])


async def test_a_handler_takes_the_routing_key_and_the_properties(rabbit: Rabbit, other: Raw) -> None:
    exchange = new_name("events")
    seen: list[tuple[int, str, str | None]] = []

    @subscriber(RabbitQueue(new_name("handled"), exchange=Exchange(exchange), bind="orders.*"))
    async def handle(number: int, key: RoutingKey, properties: MessageProperties) -> None:
        seen.append((number, key, properties.message_type))

    async with App(handle, brokers={"default": RabbitBroker(rabbit.url)}).running():
        await other.publish(exchange, "orders.created", b"1", message_type="created")
        await eventually(lambda: seen)
    assert seen == [(1, "orders.created", "created")]


# ---------------------------------------------------------------------- ends


async def test_the_pump_drops_what_was_lost_at_once(rabbit: Rabbit, transport: TransportName) -> None:
    """Nothing of a lost channel is begun any more; what runs is marked, and its settlement is counted."""
    name = new_name()
    begun: list[int] = []
    marked: list[bool] = []
    go = asyncio.Event()

    @subscriber(name, workers=2)
    async def handle(number: int, message: Message) -> None:
        begun.append(number)
        if len(begun) <= 2:
            await go.wait()
            assert isinstance(message, Delivery)
            marked.append(message.lost)

    app = App(handle, name="shop", brokers={"default": RabbitBroker(rabbit.url, transport=transport)})
    async with app.running():
        for number in range(10):
            await app.publish(name, number)
        await eventually(lambda: len(begun) == 2)
        assert app.health().ok
        await asyncio.to_thread(rabbit.close_connections)
        pump = app.pumps[0]
        await eventually(lambda: pump.counters.reopened == 1)
        assert begun == [0, 1], "no worker was free, and what waited here was dropped"
        go.set()
        await eventually(lambda: len(begun) >= 12)
        await eventually(lambda: pump.counters.settled >= 10)
        assert marked == [True, True]
        assert pump.counters.lost >= 4, "those for which two workers are sent them"
        await eventually(lambda: app.health().ok)
    assert sorted(begun[2:]) == list(range(10))


async def test_a_consumer_whose_queue_is_deleted_declares_it_again(
    connection: RabbitConnection, other: Raw, transport: TransportName
) -> None:
    name = new_name()
    async with member(connection, name) as taker:
        await fill(connection, name, 3)
        before = await taker.take(3)
        await other.delete(f"{name}.shop")
        await eventually(lambda: not taker.source.health().ok)
        assert "was deleted" in taker.source.health().detail

        async def comes() -> list[Delivery]:  # reopened by the fetch that failed
            await send(connection, outgoing(name, b"after"))
            return await taker.poll(0.2)

        taken = await eventually(comes)
        assert {delivery.body for delivery in taken} == {b"after"}
        assert taker.source.health().ok
        assert len(await taker.settle(before)) == 3
        await taker.acknowledge(taken)


async def test_a_queue_that_is_broken_on_the_server_stops_nobody_else(rabbit: Rabbit, transport: TransportName) -> None:
    """To consume from it ends the whole connection (541)."""
    handled: list[bytes] = []

    @subscriber("broken")
    async def one(message: Message) -> None:
        handled.append(b"broken " + message.body)

    @subscriber("well")
    async def another(message: Message) -> None:
        handled.append(message.body)

    app = App(one, another, name="shop", brokers={"default": RabbitBroker(rabbit.url, transport=transport)})
    async with app.running():
        lose_the_data(rabbit, "broken.shop")
        await asyncio.to_thread(rabbit.close_connections)
        connection = app.connection()
        assert isinstance(connection, RabbitConnection)
        pumps = {pump.plan.subscription.name: pump for pump in app.pumps}

        def tried_apart() -> bool:
            return "INTERNAL_ERROR" in pumps["broken"].health().detail and pumps["well"].health().ok

        await eventually(tried_apart, 20)
        connects = connection.consuming.connects
        await send(connection, outgoing("well", b"1"))
        await eventually(lambda: handled == [b"1"])
        troubles = id(pumps["broken"].troubles["fetching"])
        await eventually(lambda: id(pumps["broken"].troubles["fetching"]) != troubles, 20)
        assert connection.consuming.connects == connects, "trying again costs nobody a connection"
        assert not app.health().ok
        async with raw(rabbit) as other:
            await other.delete("broken.shop")
        await eventually(lambda: app.health().ok, 30)
        await send(connection, outgoing("broken", b"2"))
        await eventually(lambda: handled == [b"1", b"broken 2"])


def lose_the_data(server: Rabbit, queue: str) -> None:
    """What a quorum queue holds, and itself but for its name, as in a crash right after it was made."""
    resource = f'rabbit_misc:r(<<"{server.vhost}">>, queue, <<"{queue}">>)'
    removed = "ra:force_delete_server(quorum_queues, amqqueue:get_pid(Queue))"
    server.evaluate(f"{{ok, Queue}} = rabbit_amqqueue:lookup({resource}), ok = {removed}")


@pytest.mark.parametrize("mode", ["passive", "off"])
async def test_a_queue_that_we_may_not_declare_is_missed_for_good(
    connection: RabbitConnection, other: Raw, mode: str
) -> None:
    source = RabbitQueue(await other.declare(new_name("there")), declare=mode)  # type: ignore[arg-type]
    async with member(connection, source.name, source=source) as taker:
        await other.delete(source.name)
        await eventually(lambda: not taker.source.health().ok)
        with pytest.raises(BrokerUnavailable, match="it was deleted"):
            await taker.source.fetch(1, 1000)
        with pytest.raises(NotFound, match=source.name):
            await taker.source.reopen()
        assert not await other.exists(source.name), "and nothing was declared"


async def test_an_app_ends_with_a_clear_error_when_its_queue_is_gone(rabbit: Rabbit, other: Raw) -> None:
    queue = await other.declare(new_name("there"))

    @subscriber(RabbitQueue(queue, declare="passive"), dead_letter=None)
    async def handle(number: int) -> None: ...

    async def lives() -> None:
        async with asyncio.timeout(20), App(handle, brokers={"default": RabbitBroker(rabbit.url)}).running():
            await other.delete(queue)
            await asyncio.Event().wait()

    with pytest.raises(NotFound, match=f"no queue '{queue}'"):
        await lives()


async def test_every_subscriber_consumes_again_after_a_restart(own_rabbit: OwnRabbit, transport: TransportName) -> None:
    """Red while the server is away, green when there is a ConsumeOk again, and nothing lost."""
    handled: dict[str, set[int]] = {"a": set(), "b": set()}

    @subscriber("a", workers=4)
    async def first(number: int) -> None:
        handled["a"].add(number)

    @subscriber("b")
    async def second(number: int) -> None:
        handled["b"].add(number)

    app = App(first, second, brokers={"default": RabbitBroker(own_rabbit.facts.url, transport=transport)})
    async with app.running():
        for number in range(50):
            await app.publish("a", number)
            await app.publish("b", number)
        await asyncio.to_thread(own_rabbit.stop)
        await eventually(lambda: not app.health().ok)
        await asyncio.to_thread(own_rabbit.start)
        back = time.monotonic()
        await eventually(lambda: app.health().ok, 20)
        assert time.monotonic() - back < 10

        async def sent() -> bool:
            try:
                await app.publish("a", 50)
                await app.publish("b", 50)
            except Exception:
                return False
            return True

        await eventually(sent, 20)
        await eventually(lambda: all(numbers == set(range(51)) for numbers in handled.values()), 20)


async def test_one_consumer_of_an_order_at_a_time(connection: RabbitConnection, rabbit: Rabbit) -> None:
    """Two members of an ordered group; the one that has the queue is cut off, and the other goes on, in order."""
    name = new_name()
    async with (
        connected(rabbit) as second_connection,
        member(connection, name, ordered_by="key") as first,
        member(second_connection, name, ordered_by="key") as second,
    ):
        await fill(connection, name, 600)
        taken = await first.take(400)
        await second.expect_nothing(0.3)
        await first.acknowledge(taken[:100])
        await first.close()
        rest = await second.take(500)
        assert [int(delivery.body) for delivery in rest] == list(range(100, 600))
        await second.acknowledge(rest)


async def test_an_ordered_subscriber_of_an_unordered_group_is_refused(connection: RabbitConnection) -> None:
    name = new_name()
    async with member(connection, name):
        pass
    with pytest.raises(Exception, match="x-single-active-consumer is none, declared was"):
        await connection.open(Subscription(name, "shop", ordered_by="key"))


async def test_who_stops_gives_back_at_once_what_nobody_has_fetched(connection: RabbitConnection, other: Raw) -> None:
    source = RabbitQueue(new_name("back"), prefetch=100)
    async with member(connection, source.name, source=source) as taker:
        await fill(connection, source.name, 50)
        taken = await taker.take(10)
        await other.left(source.name, 0)
        await taker.stop()
        await other.left(source.name, 40)
        await taker.acknowledge(taken)
    await other.left(source.name, 40)


@pytest.mark.parametrize("in_order", [True, False], ids=["multiples", "singles"])
async def test_a_shutdown_loses_no_acknowledgement(
    rabbit: Rabbit, transport: TransportName, other: Raw, in_order: bool
) -> None:
    name = new_name()
    async with connected(rabbit, transport=transport) as connection:
        taker = Member(connection, await connection.open(Subscription(name, "shop", workers=HANDS)), 20.0)
        await fill(connection, name, 1000)
        taken: Sequence[Delivery] = await taker.take(1000)
        if not in_order:
            taken = [*taken[1:], taken[0]][::-1]
        await taker.settle(taken)
        # No flush: closing must be enough.
        await taker.source.close()
        await other.left(f"{name}.shop", 0)


async def test_a_connection_that_closes_closes_its_sources_first(rabbit: Rabbit, transport: TransportName) -> None:
    name = new_name()
    async with connected(rabbit, transport=transport) as connection:
        source = await connection.open(Subscription(name, "shop", workers=HANDS))
        await fill(connection, name, 300)
        taken = [*await source.fetch(300, 10**9)]
        while len(taken) < 300:
            taken += await source.fetch(300, 10**9)
        assert list(await source.settle([Settlement(delivery, ACK) for delivery in taken])) == []
    async with raw(rabbit) as other:
        await other.left(f"{name}.shop", 0)


async def test_who_takes_too_long_is_told_at_half_the_time(
    rabbit: Rabbit, transport: TransportName, caplog: pytest.LogCaptureFixture
) -> None:
    name = new_name()
    async with (
        connected(rabbit, transport=transport, consumer_timeout=1.0) as connection,
        member(connection, name) as taker,
    ):
        await fill(connection, name, 5)
        taken = await taker.take(5)
        await taker.acknowledge(taken[:2])

        def warnings() -> list[str]:
            return [r.getMessage() for r in caplog.records if "consumer_timeout" in r.getMessage()]

        with caplog.at_level(logging.WARNING, "streamfw.rabbit"):
            await eventually(warnings)
            await taker.acknowledge(taken[2:])
            assert len(warnings()) == 1, "once"
            assert "consumer_timeout, 1 s" in warnings()[0]


async def test_what_takes_longer_than_the_server_allows_comes_again(
    own_rabbit: OwnRabbit, transport: TransportName
) -> None:
    """Before 4.3 it ends the channel, from then on the consumer."""
    # By default it looks once a minute.
    ticks = "channel_tick_interval", "quorum_tick_interval"
    own_rabbit.facts.evaluate(", ".join(f"application:set_env(rabbit, {tick}, 200)" for tick in ticks))
    own_rabbit.facts.evaluate("application:set_env(rabbit, consumer_timeout, 1000)")
    name = new_name()
    async with connected(own_rabbit.facts, transport=transport) as connection, member(connection, name) as taker:
        await fill(connection, name, 3)
        slow, *others = await taker.take(3)
        await taker.acknowledge(others)
        (again,) = await taker.take(1)
        assert (again.body, again.epoch != slow.epoch) == (slow.body, True)  # type: ignore[attr-defined]
        (late,) = await taker.source.settle([Settlement(slow, ACK)])
        assert isinstance(late, StaleDelivery)
        await taker.acknowledge([again])
        await taker.flush()
        async with raw(own_rabbit.facts) as other:
            await other.left(f"{name}.shop", 0)


async def test_what_counts_for_the_delivery_limit(connection: RabbitConnection, rabbit: Rabbit, other: Raw) -> None:
    """What was at hand when a channel or a connection ends; what is given back by who stops only before 4.3."""
    source = RabbitQueue(new_name("counted"))

    async def counts() -> list[object]:
        await other.left(source.name, 3)
        found = [await other.get(source.name) for _ in range(3)]
        assert all(found)
        return [(one.header.properties.headers or {}).get("x-delivery-count", 0) for one in found if one is not None]

    async with member(connection, source.name, source=source) as taker:
        await fill(connection, source.name, 3)
        await eventually(lambda: taker.source.gauges()["open"] == 3)
    assert await counts() == [0 if version_of(connection) >= (4, 3) else 1] * 3
    async with (
        Proxy.to_tcp(rabbit.host, rabbit.port) as proxy,
        connected(rabbit.at(proxy.host, proxy.port)) as lost,
        member(lost, source.name, source=source) as taker,
    ):
        await fill(connection, source.name, 3)
        await taker.take(1)
        await eventually(lambda: taker.source.gauges()["open"] == 3)
        proxy.cut()
        await eventually(lambda: not taker.source.health().ok)
        assert await counts() == [1] * 3, "also what nobody had begun"


async def test_the_active_one_is_that_of_the_highest_priority(rabbit: Rabbit, transport: TransportName) -> None:
    """From 4.0 on. It waits for what the other one has at hand, so the order stays."""
    low = RabbitQueue(new_name("active"), single_active=True, consumer_priority=1)
    high = msgspec.structs.replace(low, consumer_priority=5)
    async with connected(rabbit, transport=transport) as first, connected(rabbit, transport=transport) as second:
        classic = msgspec.structs.replace(low, name=new_name("classic"), type="classic", single_active=False)
        with pytest.raises(BrokerRefused, match="a classic queue with a single active consumer has no"):
            await first.open(Subscription(classic.name, source=classic, ordered_by="key"))
        if version_of(first) < (4,):
            with pytest.raises(BrokerRefused, match=r"with a single active consumer needs RabbitMQ 4\.0"):
                await first.open(Subscription(low.name, source=low))
            return
        async with member(first, low.name, source=low) as before:
            await fill(first, low.name, 1)
            taken = await before.take(1)
            async with member(second, low.name, source=high) as after:
                await fill(second, low.name, 2)
                await after.expect_nothing(0.3)
                await before.acknowledge(taken)
                await after.acknowledge(await after.take(2))
                await before.expect_nothing(0.3)


async def test_two_sources_of_an_exclusive_queue(connection: RabbitConnection, rabbit: Rabbit) -> None:
    """It is the connection's; another gets it when that is gone."""
    source = RabbitQueue(new_name("mine"), type="classic", exclusive=True, auto_delete=True)
    async with member(connection, source.name, source=source), connected(rabbit) as second:
        with pytest.raises(BrokerUnavailable, match="405"):
            await second.open(Subscription(source.name, source=source))
