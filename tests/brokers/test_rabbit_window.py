"""How many messages are on their way to a consumer: few at first, more for who is quick, never more than fit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamfw import App, Batch, subscriber
from streamfw.broker import Subscription
from streamfw_rabbit import RabbitBroker, RabbitQueue
from streamfw_rabbit.connection import RabbitConnection
from streamfw_rabbit.consumer import Window
from streamfw_rabbit.delivery import RabbitDelivery
from streamfw_rabbit.settings import parsed
from streamfw_rabbit.topology import plan_of
from tests.brokers.rabbit_broker_kit import Raw, member, new_name, outgoing, send, source_of
from tests.brokers.rabbit_kit import TransportName
from tests.helpers import eventually
from tests.services.rabbit import Rabbit


def window(source: RabbitQueue | None = None, **options: Any) -> Window:
    subscription = Subscription("q", source=source, **options)
    return Window(plan_of(subscription, parsed("amqp://h")), subscription)


def wanted(w: Window, *, empty: bool = True, out: int = 0, came: int = 0, now: float = 100.0) -> int:
    return w.wanted(empty, out, came, now)


def test_it_begins_small_and_grows_while_everything_is_taken() -> None:
    w = window()
    sizes = []
    while (size := wanted(w, out=w.size)) != w.size:
        w.size = size
        sizes.append(size)
    assert sizes == [128, 512, 1000]
    assert wanted(w, empty=False, out=1000) == 1000


def test_who_leaves_some_or_has_little_out_gets_no_more() -> None:
    w = window()
    assert wanted(w, empty=False, out=32) == 32
    assert wanted(w, out=15) == 32, "the queue is empty, not the window small"


def test_who_is_quick_gets_more_and_who_is_slow_does_not() -> None:
    w = window()
    assert wanted(w, came=1, now=1.0) == 32
    assert wanted(w, came=33, now=1.2) == 32, "the first look only begins to count"
    assert wanted(w, came=65, now=1.4) == 128
    w.size = 128
    assert wanted(w, came=100, now=1.5) == 128
    assert wanted(w, came=200, now=2.5) == 128, "128 in more than half a second"
    assert wanted(w, empty=False, came=330, now=2.6) == 128, "quick, but it has something to do"
    assert wanted(w, came=331, now=2.7) == 512
    assert wanted(w, came=5, now=2.8) == 128, "another channel counts anew"


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({}, 32),
        ({"prefetch": 5}, 5),
        ({"workers": 100}, 200),
        ({"workers": 2, "batch": 50}, 200),
        ({"source": RabbitQueue("q", prefetch=700)}, 700),
        ({"ordered_by": "key"}, 1000),
        ({"source": RabbitQueue("q", exclusive_consumer=True)}, 1000),
        ({"source": RabbitQueue("q", single_active=True)}, 1000),
        ({"source": RabbitQueue("q", type="classic", auto_delete=True)}, 1000),
        ({"prefetch": 100_000, "ordered_by": "key"}, 65535),
    ],
)
def test_what_it_begins_with(options: dict[str, Any], first: int) -> None:
    assert window(**options).size == first


def test_what_is_fixed_stays() -> None:
    for w in (window(RabbitQueue("q", prefetch=10)), window(ordered_by="key")):
        w.saw(10**9)
        assert wanted(w, out=w.size) == w.size


def test_large_bodies_bound_it() -> None:
    w = window(max_bytes=1_000_000)
    w.size = 1000
    w.saw(10_000)
    assert wanted(w, empty=False) == 100
    w.size = 100
    assert wanted(w, out=100) == 100
    for _ in range(100):
        w.saw(10_000_000)
    assert wanted(w, empty=False) == 2, "two at least, so that one can be fetched while one is handled"
    for _ in range(200):
        w.saw(100)
    w.size = 2
    assert wanted(w, out=2) == 8


# ---------------------------------------------------------------------- on a server


async def test_a_quick_consumer_grows_and_loses_nothing(connection: RabbitConnection, other: Raw) -> None:
    name = new_name()
    async with member(connection, name) as taker:
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


async def test_who_takes_all_there_is_gets_all_there_may_be(connection: RabbitConnection, other: Raw) -> None:
    name = new_name()
    async with member(connection, name) as taker:
        assert await send(connection, *(outgoing(name, b"%d" % n) for n in range(2000))) == [None] * 2000
        taken = await taker.take(1000)
        assert source_of(taker)._window.size == 1000
        await other.left(f"{name}.shop", 2000 - 32 - 128 - 512 - 1000)
        await taker.acknowledge(taken)
        taken += (rest := await taker.take(1000))
        assert [int(delivery.body) for delivery in taken] == list(range(2000))
        assert not any(delivery.redelivered for delivery in taken if isinstance(delivery, RabbitDelivery))
        await taker.acknowledge(rest)


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
            return await other.depth(f"{name}.shop") >= 300

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
    async with member(connection, name) as taker:
        await send(connection, *(outgoing(name) for _ in range(300)))
        taken = await taker.take(32)
        taken += await taker.poll(0.05)  # asks for more, so the prefetch begins to change
        await taker.stop()
        await taker.acknowledge(taken)
        await other.left(f"{name}.shop", 300 - len(taken))
