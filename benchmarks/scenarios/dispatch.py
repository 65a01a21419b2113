"""What the framework itself costs a message: no server, full batches of prepared messages.

A hand-written loop decodes and awaits the handler, and settles a batch at once. Everything else does the same job and
costs more; how much more is told in units of ``await h()``, measured in the same round, for machines differ.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from benchmarks.harness import Case, Goal, Sample, Scenario, Window
from benchmarks.jobs import BODY, Order, answers, around, four, fresh, lifespan, noop
from benchmarks.loops import run
from benchmarks.prepared import PreparedBroker, PreparedSource
from streamfw import App, Headers, subscriber
from streamfw.broker import Delivery, Settlement
from streamfw.outcome import ACK

__all__ = ["scenario"]

BATCH = 100
HAND = "by hand: decode, await, one settle a batch"
UNIT = "await h()"


def source(count: int, keyed: bool = False) -> PreparedSource:
    """A thousand messages with a header and a key each. The headers are decoded already: how that is done is each
    broker's own matter."""
    pairs = (("tenant", b"acme"),)
    ring = [
        Delivery(name="orders", body=BODY, key=key, raw_headers=Headers.of(pairs), lane=key if keyed else None)
        for key in [f"key-{number}" for number in range(1000)]
    ]
    return PreparedSource(ring, count)


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
        app("app, may return a reply", answers, shown, workers=1),
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
    prepared = source(count)
    prepared.begin()
    decode = msgspec.json.Decoder(Order).decode
    with Window() as window:
        while prepared.left:
            batch = await prepared.fetch(BATCH, 1 << 20)
            for delivery in batch:
                await handler(decode(delivery.body))
            await prepared.settle([Settlement(delivery, ACK) for delivery in batch])
    return window.sample(count)


async def _app(count: int, handler: Any, middleware: int, options: dict[str, Any]) -> Sample:
    prepared = source(count, keyed="ordered_by" in options)
    app = App(
        subscriber("orders", prefetch=BATCH, **options)(fresh(handler)),
        brokers={"default": PreparedBroker(prepared)},
        lifespan=lifespan,
        middleware=[around] * middleware,
    )
    async with app.running():
        with Window() as window:
            prepared.begin()
            await prepared.finished.wait()
    return window.sample(count)


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
