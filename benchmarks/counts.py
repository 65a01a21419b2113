"""Counted, not timed: what the code of the framework does for one message, on the memory broker, for a record of Kafka
that is at hand, and on RabbitMQ's fast lane with a server that answers from memory.

Every count is a slope: the difference between a run of 2,000 messages and one of 1,000, a message. So neither the start
nor the end of an app is in it. The pump's clock stands still, for it decides by time when to let the loop turn: the
same code gives the same count on every machine, and a test compares it with `baseline.json`.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec

from streamfw import App, Batch, subscriber
from streamfw.memory import MemoryBroker
from streamfw.message import Headers, Outgoing, _endings, new_message_id
from streamfw_rabbit import RabbitQueue

from .apps import all_settled
from .jobs import BODY, Order, around, four, fresh, lifespan, noop
from .prepared_rabbit import PreparedRabbit
from .prepared_topic import PreparedConsumer, prepared
from .process import spread
from .stats import median

__all__ = [
    "BASELINE",
    "JOBS",
    "Baseline",
    "Calls",
    "block_slope",
    "count_calls",
    "fill",
    "load_baseline",
    "requests_to_read",
    "store_baseline",
]

LOW, HIGH = 1000, 2000
BASELINE: Final = Path(__file__).with_name("baseline.json")
Job = Callable[
    [int, AbstractContextManager[object]], Coroutine[Any, Any, object]
]  # enters the context for what is counted


class Calls(msgspec.Struct, frozen=True):
    """Calls a message: of Python functions, and of functions written in C."""

    python: float
    c: float


Baseline = dict[str, dict[str, Calls]]  # Python's version, then the job


def count_calls(job: Job) -> Calls:
    """What `job` calls for one message more."""
    _counted(job, 10)  # what is done once in a process is done
    low, high = _counted(job, LOW), _counted(job, HIGH)
    return Calls(*(round((more - less) / (HIGH - LOW), 3) for less, more in zip(low, high, strict=True)))


def _counted(job: Job, count: int) -> tuple[int, int]:
    python = c = 0

    def count_one(frame: FrameType, event: str, argument: object) -> None:
        nonlocal python, c
        if event == "call":
            python += 1
        elif event == "c_call":
            c += 1

    @contextmanager
    def profiled() -> Iterator[None]:
        gc.collect()
        gc.disable()  # what is collected, and so called back, depends on what ran before
        sys.setprofile(count_one)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()

    asyncio.run(job(count, profiled()))
    return python, c


async def _consume(
    count: int, counted: AbstractContextManager[object], handler: Any, middleware: int = 0, **options: Any
) -> None:
    broker = MemoryBroker()
    async with broker.connect():
        await fill(broker, count)
        app = App(
            subscriber("orders", prefetch=100, **options)(fresh(handler)),
            brokers={"default": broker},
            lifespan=lifespan,
            middleware=[around] * middleware,
        )
        _stop_the_clock(app)
        with counted:
            async with app.running():
                await all_settled(app, count)


async def fill(broker: MemoryBroker, count: int) -> None:
    """Publish `count` messages at once."""
    async with broker.connect() as connection:
        await connection.publish([_message(number) for number in range(count)])


def _message(number: int) -> Outgoing:
    return Outgoing(
        name="orders",
        body=BODY,
        message_id=new_message_id(0),
        key=f"key-{number % 1000}",
        headers=Headers.of((("tenant", b"acme"),)),
    )


def _stop_the_clock(app: App) -> None:
    for one in app.build().subscribers:
        made = one.make_plan

        def make_plan(source: Any, made: Any = made) -> Any:
            plan = made(source)
            plan.clock = itertools.repeat(0.0).__next__
            return plan

        one.make_plan = make_plan


async def noop_batch(orders: list[Order]) -> None: ...


async def _read(
    count: int, counted: AbstractContextManager[object], handler: Any = noop, **options: Any
) -> PreparedConsumer:
    broker = prepared("orders", count, BODY)
    app = App(subscriber("orders", **options)(fresh(handler)), brokers={"default": broker})
    _stop_the_clock(app)
    with counted:
        async with app.running():
            await all_settled(app, count)
    return broker.consumer


def requests_to_read(count: int, **options: Any) -> tuple[int, int]:
    """How often an app calls ``getmany``, and how often it commits, for `count` records."""
    consumer = asyncio.run(_read(count, nullcontext(), **options))
    return consumer.calls, consumer.commits


async def _publish(count: int, counted: AbstractContextManager[object]) -> None:
    _endings.clear()  # message ids are drawn for 256 at once
    async with App(brokers={"default": MemoryBroker()}).running() as app:
        with counted:
            for _ in itertools.repeat(None, count):
                await app.publish("orders", BODY)


async def _rabbit(count: int, counted: AbstractContextManager[object], handler: Any = noop, **options: Any) -> None:
    app = App(
        subscriber(RabbitQueue("orders", prefetch=1000), **options)(fresh(handler)),
        brokers={"default": PreparedRabbit(count, BODY)},
    )
    _stop_the_clock(app)
    with counted:
        async with app.running():
            await all_settled(app, count)


async def _publish_to_rabbit(count: int, counted: AbstractContextManager[object]) -> None:
    async def publish(bodies: Sequence[bytes]) -> None:
        for body in bodies:
            await app.publish("orders", body)

    _endings.clear()
    async with App(brokers={"default": PreparedRabbit(0, b"")}).running() as app:
        with counted:
            await spread(publish, [BODY] * count)


JOBS: dict[str, Job] = {
    "consume, workers=1": partial(_consume, handler=noop, workers=1),
    "consume, workers=8": partial(_consume, handler=noop, workers=8),
    "consume, keyed lanes, workers=8": partial(_consume, handler=noop, workers=8, ordered_by="key"),
    "consume, one middleware": partial(_consume, handler=noop, middleware=1, workers=1),
    "consume, everything": partial(_consume, handler=four, middleware=1, workers=8, ordered_by="key", timeout=30.0),
    "publish": _publish,
    "Kafka, workers=1": partial(_read, workers=1),
    "Kafka, workers=8": partial(_read, workers=8),
    "Kafka, keyed lanes, workers=8": partial(_read, workers=8, ordered_by="key"),
    "Kafka, batches of 100": partial(_read, handler=noop_batch, batch=Batch(100)),
    "RabbitMQ, workers=1": partial(_rabbit, workers=1),
    "RabbitMQ, workers=8": partial(_rabbit, workers=8),
    "RabbitMQ, batches of 100": partial(_rabbit, handler=noop_batch, batch=Batch(100)),
    "RabbitMQ, publishes by 100 tasks": _publish_to_rabbit,
}


def block_slope(waves: int = 40, size: int = 500) -> float:
    """Blocks of memory that stay behind a message that was published and handled.

    The median after the last quarter of the waves less that after the second, a message. Fetches are of one size and
    the clock stands still, so that as many messages are always still referred to when all is done: the last group's.
    """

    async def run() -> list[int]:
        broker, blocks = MemoryBroker(), []
        app = App(
            subscriber("orders", workers=8, ordered_by="key", prefetch=100)(fresh(four)),
            brokers={"default": broker},
            lifespan=lifespan,
            middleware=[around],
        )
        _stop_the_clock(app)
        async with app.running():
            connection = app.connection()
            for _ in range(waves):
                settled = asyncio.ensure_future(all_settled(app, size))
                await asyncio.sleep(0)
                await connection.publish([_message(number) for number in range(size)])
                await settled
                await asyncio.sleep(0)  # the last group's list is let go
                gc.collect()
                blocks.append(sys.getallocatedblocks())
        return blocks

    blocks = asyncio.run(run())
    quarter = waves // 4
    return (median(blocks[-quarter:]) - median(blocks[quarter : 2 * quarter])) / (2 * quarter * size)


def load_baseline() -> Baseline:
    """The stored counts."""
    return msgspec.json.decode(BASELINE.read_bytes(), type=Baseline) if BASELINE.exists() else {}


def store_baseline(counts: dict[str, Calls]) -> None:
    """Let the counts of this Python be these."""
    baseline = load_baseline() | {_minor(): counts}
    BASELINE.write_bytes(msgspec.json.format(msgspec.json.encode(dict(sorted(baseline.items()))), indent=2) + b"\n")


def _minor() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def stored() -> dict[str, Calls]:
    """The stored counts of this Python. Raises `LookupError` with what to do when there are none."""
    counts = load_baseline().get(_minor())
    if counts is None:
        raise LookupError(f"no counts are stored for Python {_minor()}: run `python -m benchmarks --baseline`")
    return counts
