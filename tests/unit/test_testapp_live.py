"""TestApp with ``live=True`` on Postgres: the same test body as on memory."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import pytest

from streamfw import App, Attempt, Backoff, Batch, subscriber
from streamfw.testing import TestApp
from streamfw_postgres import PostgresBroker, Queue
from tests.services.postgres import Postgres


class Order(msgspec.Struct):
    id: int


class Boom(Exception):
    pass


@subscriber(Queue("orders", lease=20), publishes="receipts", workers=4, attempts=3, backoff=Backoff(first=0.2))
async def ship(order: Order, attempt: Annotated[int, Attempt]) -> Order:
    await asyncio.sleep(0.001)
    if order.id % 10 == 3 and attempt == 1:
        raise Boom
    if order.id == 4:
        raise ValueError("never")
    return order


@subscriber("receipts", batch=Batch(100, wait=30))
async def archive(receipts: list[Order]) -> None: ...


@subscriber("receipts", group="audit", ordered_by="key", workers=4)
async def audit(receipt: Order) -> None: ...


@subscriber("orders.dead", group="undertakers")
async def mourn(order: Order) -> None: ...


@pytest.mark.parametrize("live", [True, False], ids=["live", "memory"])
async def test_the_same_body_live_and_on_memory(database: Postgres, live: bool, request: pytest.FixtureRequest) -> None:
    if not live and request.config.getoption("--loop") != "asyncio":
        live = True  # there is no advance on another loop
    app = App(
        ship, archive, audit, mourn, brokers={"default": PostgresBroker(database.dsn, auto_migrate=True)}, name="shop"
    )
    for _ in range(2):
        async with TestApp(app, live=live) as tb:
            with tb.expect((Boom, ValueError)) as errors:
                for number in range(20):
                    await tb.publish("orders", Order(number), key=str(number % 3), delay=0.3 if number == 7 else 0)
                await tb.settle()
                tb.assert_acked("orders")
                for _ in range(3):
                    await tb.advance(0.4)
                await tb.settle()  # a batch that waits for more
            assert [type(error) for error in errors].count(Boom) == 2
            tb.assert_retried(ship, times=4)
            tb.assert_acked(ship, times=19)
            assert len(tb.published("receipts", Order)) == 19
            assert sorted(one.value.id for one in tb.assert_acked(archive, times=19)) == sorted({*range(20)} - {4})
            tb.assert_acked(audit, times=19)
            [dead] = tb.dead_letters(ship)
            assert dead.value == Order(4) and dead.message.attempt == 3
            tb.assert_acked(mourn, times=1)
