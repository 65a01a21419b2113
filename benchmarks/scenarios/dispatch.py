"""What the framework itself costs a message: no server, full batches of prepared messages.

A hand-written loop decodes and awaits the handler, and settles a batch at once. Everything else does the same job and
costs more; how much more is told in units of ``await h()``, measured in the same round, for machines differ.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec

from benchmarks.harness import Case, Goal, Sample, Scenario, Window
from benchmarks.loops import run
from benchmarks.prepared import PreparedBroker, PreparedSource
from streamfw import App, Header, Headers, Message, State, subscriber
from streamfw.broker import Delivery, Settlement
from streamfw.middleware import Next
from streamfw.outcome import ACK

__all__ = ["scenario"]

BATCH = 100
BODY = (
    b'{"id": 123456, "customer": "customer-000017", "item": "espresso machine", "qty": 3, "price": 129.95, '
    b'"note": "leave at the back door, ring twice, thanks"}'
)
HAND = "by hand: decode, await, one settle a batch"
UNIT = "await h()"


class Order(msgspec.Struct):
    id: int
    customer: str
    item: str
    qty: int
    price: float
    note: str


class Pool:
    """Stands for what a lifespan yields."""


async def noop(order: Order) -> None: ...


async def suspends(order: Order) -> None:
    await asyncio.sleep(0)


async def four(
    order: Order, tenant: Annotated[str, Header("tenant")], message: Message, pool: Annotated[Pool, State]
) -> None: ...


async def around(message: Message, call_next: Next) -> object:
    return await call_next(message)


async def lifespan() -> AsyncIterator[Pool]:
    yield Pool()


def deliveries(count: int, keyed: bool) -> list[Delivery]:
    """Each an object of its own, as a broker makes them, with a header and one of a thousand keys.

    The headers are decoded already: how that is done is each broker's own matter.
    """
    pairs = (("tenant", b"acme"),)
    keys = [f"key-{number}" for number in range(1000)]
    return [
        Delivery(name="orders", body=BODY, key=key, raw_headers=Headers.of(pairs), lane=key if keyed else None)
        for key in itertools.islice(itertools.cycle(keys), count)
    ]


def scenario(loop: str) -> Scenario:
    """The scenario on one loop."""

    @contextmanager
    def cases() -> Iterator[Sequence[Case]]:
        yield _cases(loop)

    return Scenario(
        name="dispatch",
        title="What dispatching a message costs",
        about=(
            "CPU of this process a message, full batches of 100 prepared messages, no server. The goals are in units "
            "of `await h()`, above the hand-written loop."
        ),
        cases=cases,
        unit=UNIT,
        seconds=4.0,
        facts={"batch": str(BATCH), "body": f"{len(BODY)} bytes of JSON"},
    )


def _cases(loop: str) -> list[Case]:
    def app(name: str, handler: Any, goals: Sequence[Goal], middleware: int = 0, **options: Any) -> Case:
        return Case(name=name, run=lambda n: run(_app(n, handler, middleware, options), loop), goals=goals)

    def over(at_most: float, reference: str = HAND, per: int = 1) -> list[Goal]:
        return [Goal(measure="over", reference=reference, at_most=at_most, per=per)]

    shown = [Goal(measure="over", reference=HAND)]
    one = "app, workers=1"
    return [
        Case(name=UNIT, run=lambda n: run(_unit(n), loop)),
        Case(name=HAND, run=lambda n: run(_by_hand(n, noop), loop)),
        app(one, noop, over(8), workers=1),
        app("app, workers=8", noop, over(8), workers=8),
        app("app, keyed lanes, workers=8", noop, over(10), workers=8, ordered_by="key"),
        app("app, one middleware", noop, over(3, one), middleware=1, workers=1),
        app("app, three middlewares (each)", noop, over(3, one, per=3), middleware=3, workers=1),
        app("app, timeout=30", noop, shown, workers=1, timeout=30.0),
        app("app, four arguments", four, shown, workers=1),
        app(
            "app, everything: lanes, timeout, a middleware, four arguments, workers=8",
            four, over(14), middleware=1, workers=8, ordered_by="key", timeout=30.0,
        ),
        Case(name="FastStream's consume path", run=lambda n: run(_faststream(n), loop), goals=shown),
    ]  # fmt: skip


async def _unit(count: int) -> Sample:
    h = noop
    order = msgspec.json.decode(BODY, type=Order)
    with Window() as window:
        for _ in itertools.repeat(None, count):
            await h(order)
    return window.sample(count)


async def _by_hand(count: int, handler: Callable[[Order], Any]) -> Sample:
    source = PreparedSource(deliveries(count, keyed=False))
    source.begin()
    decode = msgspec.json.Decoder(Order).decode
    with Window() as window:
        while source.left:
            batch = await source.fetch(BATCH, 1 << 20)
            for delivery in batch:
                await handler(decode(delivery.body))
            await source.settle([Settlement(delivery, ACK) for delivery in batch])
    return window.sample(count)


async def _app(count: int, handler: Any, middleware: int, options: dict[str, Any]) -> Sample:
    source = PreparedSource(deliveries(count, keyed="ordered_by" in options))
    app = App(
        subscriber("orders", prefetch=BATCH, **options)(_fresh(handler)),
        brokers={"default": PreparedBroker(source)},
        lifespan=lifespan,
        middleware=[around] * middleware,
    )
    async with app.running():
        with Window() as window:
            source.begin()
            await source.finished.wait()
    return window.sample(count)


def _fresh(handler: Any) -> Any:
    """The same function without the marks of other cases."""
    handler.__dict__.clear()
    return handler


async def _faststream(count: int) -> Sample:
    from faststream.rabbit import RabbitBroker, TestRabbitBroker
    from faststream.rabbit.testing import build_message
    from pydantic import create_model

    logging.disable(logging.CRITICAL)
    order: Any = create_model("Order", id=int, customer=str, item=str, qty=int, price=float, note=str)
    broker = RabbitBroker(logger=None)

    async def handle(body: Any) -> None: ...

    handle.__annotations__["body"] = order
    consumer = broker.subscriber("orders")(handle)
    try:
        async with TestRabbitBroker(broker):
            messages = [await build_message(BODY, "orders", content_type="application/json") for _ in range(count)]
            (one,) = broker.subscribers
            with Window() as window:
                for message in messages:
                    await one.consume(message)
    finally:
        logging.disable(logging.NOTSET)
    del consumer
    return window.sample(count)
