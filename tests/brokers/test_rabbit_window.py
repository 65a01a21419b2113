"""How many messages are on their way to a consumer: few at first, more for who is quick, never more than fit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamfw import App, Batch, subscriber
from streamfw.broker import Subscription
from streamfw.testing.conformance import Member
from streamfw_rabbit import RabbitBroker, RabbitQueue
from streamfw_rabbit.connection import RabbitConnection
from streamfw_rabbit.consumer import Consumer, Window
from streamfw_rabbit.delivery import RabbitDelivery
from streamfw_rabbit.settings import parsed
from streamfw_rabbit.topology import plan_of
from tests.brokers.rabbit_broker_kit import Raw, connected, member, new_name, outgoing, send, source_of
from tests.brokers.rabbit_kit import TransportName
from tests.helpers import eventually
from tests.services.rabbit import OwnRabbit, Rabbit


def window(source: RabbitQueue | None = None, timeout: float = 1800.0, **options: Any) -> Window:
    subscription = Subscription("q", source=source, **options)
    return Window(plan_of(subscription, parsed("amqp://h")), subscription, timeout)


def consumer_of(taker: Member) -> Consumer:
    held = source_of(taker)._held
    assert held is not None
    return held.consumer


def grown(w: Window, pace: float, now: float = 100.0) -> list[int]:
    """Its sizes, when so many a second are settled, until it grows no more."""
    sizes, settled = [w.size], 0
    for _ in range(12):
        w.size = w.wanted(True, settled, now)
        if w.size != sizes[-1]:
            sizes.append(w.size)
        settled, now = settled + 1000, now + 1000 / pace
    return sizes


@pytest.mark.parametrize(
    ("pace", "sizes"),
    [
        (1e6, [2, 16, 128, 1000]),
        (512, [2, 16, 128, 512]),
        (64, [2, 16, 64]),
        (5, [2, 5]),
        (3, [2]),
        (0.01, [2]),
    ],
)
def test_it_begins_small_and_grows_by_what_is_settled(pace: float, sizes: list[int]) -> None:
    assert grown(window(), pace) == sizes


def test_no_more_waits_than_can_begin_in_a_quarter_of_the_servers_time() -> None:
    assert grown(window(timeout=2.0), 50) == [2, 16], "25 are no worth the change"
    assert grown(window(timeout=2.0), 64) == [2, 16, 32]


def test_what_is_taken_and_not_settled_is_no_reason_to_grow() -> None:
    w = window()
    for now in range(100):
        assert w.wanted(True, 0, 100.0 + now) == 2


def test_who_has_something_to_do_gets_no_more() -> None:
    w = window()
    assert [w.wanted(False, 1000 * n, 100.0 + n) for n in range(5)] == [2] * 5
    assert w.wanted(True, 5000, 105.0) == 16


def test_another_channel_counts_anew() -> None:
    w = window()
    w.wanted(False, 0, 100.0)
    w.wanted(False, 40, 100.1)
    w.wanted(False, 0, 200.0)
    assert w.wanted(True, 7, 210.0) == 16, "what is known of the pace"
    assert w.wanted(True, 8, 210.0) == 2, "what it is now"


def test_what_cannot_be_changed_now_is_left_for_a_while() -> None:
    w = window()
    w.wanted(True, 0, 100.0)
    assert w.wanted(True, 100, 100.1) == 16
    w.rest(100.1)
    assert w.wanted(True, 200, 100.2) == 2
    assert w.wanted(True, 2000, 101.2) == 16


@pytest.mark.parametrize(
    ("options", "first", "after"),
    [
        ({}, 2, 1),
        ({"prefetch": 5}, 2, 1),
        ({"workers": 100}, 200, 100),
        ({"workers": 2, "batch": 50}, 200, 100),
        ({"workers": 5, "prefetch": 3}, 3, 3),
        ({"source": RabbitQueue("q", prefetch=700)}, 700, 1),
        ({"ordered_by": "key"}, 100, 25),
        ({"ordered_by": "key", "workers": 80}, 160, 80),
        ({"ordered_by": "key", "source": RabbitQueue("q", prefetch=700)}, 700, 175),
        ({"source": RabbitQueue("q", exclusive_consumer=True)}, 100, 25),
        ({"source": RabbitQueue("q", single_active=True)}, 100, 25),
        ({"source": RabbitQueue("q", type="classic", auto_delete=True)}, 100, 25),
        ({"source": RabbitQueue("q", prefetch=65535), "ordered_by": "key"}, 65535, 16383),
    ],
)
def test_what_it_begins_with_and_what_is_left_when_messages_wait_too_long(
    options: dict[str, Any], first: int, after: int
) -> None:
    w = window(**options)
    assert w.size == first
    w.shrink()
    assert w.size == after


def test_what_is_fixed_stays() -> None:
    for w in (window(RabbitQueue("q", prefetch=10)), window(ordered_by="key")):
        first = w.size
        w.saw(10**9)
        assert grown(w, 1e6) == [first]


def test_who_was_too_slow_grows_again_by_the_pace_up_to_what_was_asked_for() -> None:
    w = window(RabbitQueue("q", prefetch=50))
    w.shrink()
    assert grown(w, 1e6) == [1, 8, 50]


def test_large_bodies_bound_it() -> None:
    w = window(max_bytes=1_000_000)
    w.size = 1000
    w.saw(10_000)
    assert w.wanted(False, 0, 100.0) == 100
    w.size = 100
    for _ in range(100):
        w.saw(10_000_000)
    assert w.wanted(False, 0, 100.0) == 2, "two at least, so that one can be fetched while one is handled"
    for _ in range(200):
        w.saw(100)
    w.size = 2
    assert grown(w, 1e6, 200.0)[-1] == 1000


def test_an_order_begins_anew_with_as_many_as_fit() -> None:
    w = window(ordered_by="key", max_bytes=1_000_000)
    w.begin()
    assert (w.size, w.excess) == (100, 0)
    w.saw(50_000)
    assert w.excess == 5
    w.begin()
    assert (w.size, w.excess) == (20, 0)
    for _ in range(100):
        w.saw(10**9)
    w.begin()
    assert (w.size, w.excess) == (2, 0), "fewer than two cannot be"
    for _ in range(400):
        w.saw(10)
    w.begin()
    assert w.size == 100
    w.shrink()
    w.begin()
    assert w.size == 25, "its time is not a matter of bytes"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"source": RabbitQueue("q", exclusive_consumer=True)},
        {"source": RabbitQueue("q", prefetch=100), "ordered_by": "key"},
        {"source": RabbitQueue("q", type="classic", auto_delete=True), "ordered_by": "key"},
    ],
)
def test_where_nothing_is_won_or_something_lost_no_channel_is_begun_anew(options: dict[str, Any]) -> None:
    assert not window(**options).renews


# ---------------------------------------------------------------------- on a server


async def test_a_quick_consumer_grows_and_loses_nothing(connection: RabbitConnection, other: Raw) -> None:
    name = new_name()
    async with member(connection, name, workers=1) as taker:
        assert await send(connection, *(outgoing(name, b"%d" % n) for n in range(3000))) == [None] * 3000
        got: list[int] = []
        while len(got) < 3000:
            chunk = await taker.take(1)
            chunk += await taker.poll(0.2, 500)
            got += [int(delivery.body) for delivery in chunk]
            assert not any(delivery.redelivered for delivery in chunk if isinstance(delivery, RabbitDelivery))
            await taker.acknowledge(chunk)
        assert got == list(range(3000)), "in order, over every change"
        assert source_of(taker)._window.size >= 128
        await taker.flush()
        await other.left(f"{name}.shop", 0)


async def test_a_quick_handler_soon_has_all_it_may(rabbit: Rabbit, transport: TransportName, other: Raw) -> None:
    name, prefetches = new_name(), set()
    handled: list[int] = []

    @subscriber(name, group="shop")
    async def quick(number: int) -> None:
        handled.append(number)
        prefetches.add(app.pumps[0].source.gauges()["prefetch"])

    async with connected(rabbit, transport=transport) as connection:
        async with member(connection, name, dead_letter=f"{name}.dead"):
            pass
        assert await send(connection, *(outgoing(name, b"%d" % n) for n in range(5000))) == [None] * 5000
    app = App(quick, brokers={"default": RabbitBroker(rabbit.url, transport=transport)})
    async with app.running():
        await eventually(lambda: len(handled) == 5000)
    assert handled == list(range(5000))
    assert max(prefetches) >= 128
    assert len(prefetches) <= 6, "in few steps"


async def test_a_slow_handler_does_not_hoard(rabbit: Rabbit, transport: TransportName, other: Raw) -> None:
    name = new_name()
    handled: list[int] = []

    @subscriber(name, group="shop")
    async def slow(number: int) -> None:
        handled.append(number)
        await asyncio.Event().wait()

    app = App(slow, brokers={"default": RabbitBroker(rabbit.url, transport=transport)}, drain_timeout=0.1)
    async with app.running():
        await asyncio.gather(*(app.publish(name, number) for number in range(500)))
        await eventually(lambda: handled)

        async def settled_down() -> bool:
            return await other.depth(f"{name}.shop") == 498

        await eventually(settled_down)
    await other.left(f"{name}.shop", 500)


async def test_a_batch_gets_what_it_asks_for(rabbit: Rabbit, transport: TransportName) -> None:
    name = new_name()
    sizes: list[int] = []

    @subscriber(name, batch=Batch(200, wait=5.0))
    async def handle(numbers: list[int]) -> None:
        sizes.append(len(numbers))

    async with App(handle, brokers={"default": RabbitBroker(rabbit.url, transport=transport)}).running() as app:
        await asyncio.gather(*(app.publish(name, number) for number in range(400)))
        await eventually(lambda: sum(sizes) == 400)
    assert sizes == [200, 200]


async def test_a_change_meets_the_end(connection: RabbitConnection, other: Raw) -> None:
    """Stopping while the prefetch changes leaves no consumer behind."""
    name = new_name()
    async with member(connection, name, workers=1) as taker:
        await send(connection, *(outgoing(name) for _ in range(300)))
        taken = 0
        consumer = consumer_of(taker)
        while not consumer.busy:
            assert taken < 300
            chunk = await taker.poll(0.05, 2)
            taken += len(chunk)
            await taker.acknowledge(chunk)
        await taker.stop()
        await other.left(f"{name}.shop", 300 - taken)


async def test_an_order_of_large_bodies_begins_anew_with_fewer(
    rabbit: Rabbit, transport: TransportName, other: Raw
) -> None:
    name, prefetches = new_name(), list[float]()
    handled: list[int] = []

    @subscriber(name, group="shop", ordered_by="key", max_bytes=100_000)
    async def handle(text: str) -> None:
        handled.append(int(text))
        prefetches.append(app.pumps[0].source.gauges()["prefetch"])

    app = App(handle, brokers={"default": RabbitBroker(rabbit.url, transport=transport)})
    async with app.running():
        for number in range(20):
            await app.publish(name, f"{number:20}", key="small")
        await eventually(lambda: len(handled) == 20)
        assert set(prefetches) == {100}
        for number in range(20, 220):
            await app.publish(name, f"{number:10000}", key="large")
        await eventually(lambda: len(handled) >= 220)
        assert app.health().ok
    assert handled == list(range(220)), "each once, in order: what was at work had ended before"
    assert 2 <= prefetches[-1] <= 80
    await other.left(f"{name}.shop", 0)


# ---------------------------------------------------------------------- the server's time


async def test_what_cannot_begin_in_time_is_given_back_once(
    rabbit: Rabbit, transport: TransportName, other: Raw, caplog: pytest.LogCaptureFixture
) -> None:
    """By our own clock: the server has half an hour. What was never begun must not wait here until it is over."""
    name = new_name()
    begun: list[int] = []
    go_on = asyncio.Event()

    @subscriber(name, group="shop", workers=2)
    async def slow(number: int) -> None:
        begun.append(number)
        if not go_on.is_set():
            await go_on.wait()

    broker = RabbitBroker(rabbit.url, transport=transport, consumer_timeout=4.0)
    app = App(slow, brokers={"default": broker})
    async with app.running():
        for number in range(20):
            await app.publish(name, number)
        await eventually(lambda: len(begun) == 2)
        await other.left(f"{name}.shop", 16)
        await other.left(f"{name}.shop", 18)
        assert [r.message for r in caplog.records if "given back" in r.message] != []
        go_on.set()
        await eventually(lambda: len(begun) == 20)
    assert begun == list(range(20)), "in order, and each once"
    await other.left(f"{name}.shop", 0)


async def test_no_message_waits_for_slow_handlers_until_the_server_takes_it_back(
    own_rabbit: OwnRabbit, caplog: pytest.LogCaptureFixture
) -> None:
    """Each handler alone is in time, and two in a row are not."""
    own_rabbit.facts.evaluate("application:set_env(rabbit, consumer_timeout, 2000)")
    own_rabbit.facts.evaluate("application:set_env(rabbit, channel_tick_interval, 500)")
    name = new_name()
    begun: list[int] = []

    @subscriber(name, group="shop")
    async def slow(number: int) -> None:
        begun.append(number)
        await asyncio.sleep(1.4)

    app = App(slow, brokers={"default": RabbitBroker(own_rabbit.facts.url, consumer_timeout=2.0)})
    async with app.running():
        for number in range(6):
            await app.publish(name, number)
        await eventually(lambda: len(begun) == 6, 30.0)
    assert begun == list(range(6))
    assert not [r.message for r in caplog.records if "the server closed" in r.message]


async def test_a_prefetch_of_ones_own_gives_way_to_the_servers_time(
    rabbit: Rabbit, transport: TransportName, other: Raw
) -> None:
    name = new_name()
    begun: list[int] = []

    @subscriber(RabbitQueue(name, prefetch=10), group="shop")
    async def slow(number: int) -> None:
        begun.append(number)
        await asyncio.Event().wait()

    broker = RabbitBroker(rabbit.url, transport=transport, consumer_timeout=4.0)
    async with App(slow, brokers={"default": broker}, drain_timeout=0.1).running() as app:
        for number in range(20):
            await other.publish("", name, b"%d" % number)
        await other.left(name, 10)
        await other.left(name, 19)
        assert begun == [0]
        assert app.pumps[0].source.gauges()["prefetch"] == 1
