"""A program as a user writes it, for type checkers: what each thing is to them. It also runs (see `test_typing`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any, assert_type

import asyncpg
import msgspec

from streamfw import (
    Ack,
    App,
    AppHealth,
    Attempt,
    Backoff,
    Batch,
    Broker,
    DeadLetter,
    Drop,
    Header,
    Headers,
    Message,
    MsgpackCodec,
    Next,
    NextPublish,
    Outcome,
    Outgoing,
    PartialFailure,
    Publisher,
    Retry,
    Router,
    State,
    SyncPublisher,
    subscriber,
)
from streamfw.observe import Metric
from streamfw.testing import Received, TestApp
from streamfw_postgres import Queue, Transaction


class Order(msgspec.Struct):
    id: int
    item: str


class Receipt(msgspec.Struct):
    order: int


class Pool:
    async def execute(self, statement: str) -> int:
        return len(statement)


# -- handlers keep their own type


@subscriber(
    "orders",
    workers=8,
    ordered_by="key",
    attempts=5,
    backoff=Backoff(first=1, factor=2, max=300, jitter=True),
    on_error={ValueError: DeadLetter, KeyError: Retry(after=3), LookupError: lambda error: Drop()},
    timeout=30,
)
async def ship(
    order: Order,
    tenant: Annotated[str, Header("tenant")],
    attempt: Annotated[int, Attempt],
    pool: Annotated[Pool, State],
    receipts: Annotated[Publisher[Receipt], "receipts"],
    message: Message,
) -> Outcome | None:
    assert_type(order, Order)
    assert_type(tenant, str)
    assert_type(attempt, int)
    assert_type(pool, Pool)
    assert_type(receipts, Publisher[Receipt])
    assert_type(message.headers, Headers)
    assert_type(message.headers["tenant"], str)
    assert_type(message.headers.raw("tenant"), bytes | None)
    assert_type(message.key, str | None)
    assert_type(message.attempt, int)
    if attempt > 3:
        raise Retry(after=30)
    if tenant == "nobody":
        return DeadLetter("no tenant")
    assert_type(await receipts.publish(Receipt(order.id), key=message.key, delay=5), str)
    return Ack()


@subscriber("receipts", publishes="mails")
async def mail(receipt: Receipt) -> str:
    return f"order {receipt.order} is on its way"


@subscriber("events", batch=Batch(100, wait=0.2), dead_letter=None)
async def store(events: list[Order]) -> list[Outcome | None]:
    if len(events) == 1:
        raise PartialFailure({0: ValueError("alone")})
    return [None for _ in events]


async def types_of_handlers() -> None:
    assert_type(await mail(Receipt(1)), str)
    assert_type(await store([]), list[Outcome | None])
    unit_test: Callable[[Receipt], Coroutine[Any, Any, str]] = mail
    assert_type(await unit_test(Receipt(1)), str)


async def a_wrong_argument() -> None:
    await mail(Order(1, "a"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# -- the app


async def around(message: Any, call_next: Next) -> object:
    return await call_next(message)


def plain(message: Any, call_next: Next) -> Awaitable[object]:
    return call_next(message)


async def lifespan(app: App) -> AsyncIterator[Pool]:
    yield Pool()


@asynccontextmanager
async def manager() -> AsyncGenerator[tuple[Pool, str], None]:
    yield Pool(), "text"


receipts = Publisher[Receipt]("receipts")
app = App(
    ship,
    mail,
    store,
    name="shop",
    brokers={"default": "memory://"},
    lifespan=lifespan,
    middleware=[around, plain],
    publishers=[receipts],
    drain_timeout=10,
)
other = App(lifespan=manager)


@app.subscriber("audit", group="audit", workers=2, middleware=[around])
async def audit(body: bytes) -> None: ...


async def types_of_the_app() -> None:
    assert_type(app, App)
    async with app.running() as running:
        assert_type(running, App)
        assert_type(await running.publish("orders", Order(1, "a"), key="k", headers={"tenant": "acme"}), str)
        assert_type(await receipts.publish(Receipt(1)), str)
        assert_type(running.health(), AppHealth)
        await receipts.publish(Order(1, "a"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(await audit(b""), None)


# -- work that blocks


@subscriber("reports", workers=4)
def report(order: Order, receipts: Annotated[SyncPublisher[Receipt], "receipts"]) -> int:
    assert_type(receipts, SyncPublisher[Receipt])
    assert_type(receipts.publish(Receipt(order.id)), str)
    return order.id


@subscriber("sums", run_in="process")
def add_up(order: Order) -> int:
    return order.id + len(order.item)


# -- routers, requests, codecs, publish middleware

billing = Router("billing.", attempts=3, middleware=[around], codec=MsgpackCodec())


@billing.subscriber("price", replies_to=["answers.*"])
async def price(order: Order) -> float:
    return 1.5 * order.id


async def stamp(message: Outgoing, call_next: NextPublish) -> None:
    assert_type(message.headers, Headers)
    message.headers = message.headers.merged({"tenant": "acme"})
    await call_next(message)


class ReversedCodec:
    content_type = "application/reversed"

    def decoder(self, annotation: Any) -> Callable[[bytes], Any]:
        return lambda body: msgspec.json.decode(body[::-1], type=annotation)

    def encode(self, value: Any) -> bytes:
        return msgspec.json.encode(value)[::-1]


shop = App(billing, report, add_up, name="shop", publish_middleware=[stamp], codec=ReversedCodec(), durations=True)


async def types_of_requests() -> None:
    assert_type(await price(Order(1, "a")), float)
    assert_type(report(Order(1, "a"), SyncPublisher(Publisher[Receipt]("receipts"))), int)
    assert_type(await shop.request("billing.price", Order(1, "a"), float, timeout=5), float)
    assert_type(await receipts.request(Receipt(1), Order, timeout=5), Order)
    assert_type(shop.metrics(), list[Metric])
    assert_type(shop.broker("default"), Broker)


# -- a handler's own transaction


@subscriber(Queue("ledger", lease=60), transactional=True)
async def book(order: Order, db: Transaction) -> None:
    assert_type(db, asyncpg.Connection[asyncpg.Record])
    await db.execute("insert into ledger values ($1)", order.id)


# -- tests


async def types_of_tests() -> None:
    async with TestApp(app, state=(Pool(),)) as tb:
        assert_type(tb, TestApp)
        assert_type(await tb.publish("orders", Order(1, "a"), key="k"), str)
        await tb.settle()
        await tb.advance(60)
        tb.assert_acked(ship, times=1)
        assert_type(tb.received(mail), list[Received[Any]])


# -- what is wrong is told before it runs


def mistakes() -> None:
    subscriber("a", wrkers=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    app.subscriber("a", wrkers=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    subscriber("a", workers="8")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    subscriber("a", ordered_by="keys")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    subscriber("a", run_in="fork")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    subscriber("a", batch=10)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    App(brokers="memory://")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Retry(after="soon")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
