"""Handlers that break the transaction they were given: a failure of their message, and of no other."""

from __future__ import annotations

from typing import Any

import pytest

from streamfw import App, Backoff, Batch, DeadLetter, subscriber
from streamfw_postgres import PostgresBroker, Transaction
from tests.helpers import eventually
from tests.services.postgres import Postgres

AT_ONCE = Backoff(first=0.01, factor=1, max=0.01)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("form", ["lease", "rowlock"])
async def test_a_handler_that_closes_its_connection_comes_to_an_end(database: Postgres, form: Any) -> None:
    seen: list[int] = []

    @subscriber("orders", transactional=True, attempts=2, backoff=AT_ONCE)
    async def handle(number: int, db: Transaction) -> None:
        seen.append(number)
        if number == 1:
            db.terminate()

    broker = PostgresBroker(database.dsn, auto_migrate=True, form=form, poll=0.1, lease=2.0)
    async with App(handle, brokers={"default": broker}).running() as app:
        await app.publish("orders", 1)
        await app.publish("orders", 2)
        await eventually(lambda: app.pumps[0].counters.dead == 1 and 2 in seen, deadline=60)
    assert seen.count(2) == 1
    assert 2 <= seen.count(1) <= 8, "at most three broken transactions an attempt, and one more delivery"


@pytest.mark.parametrize("outcome", [DeadLetter, DeadLetter("no")])
async def test_a_transactional_batch_may_return_an_outcomes_class(database: Postgres, outcome: Any) -> None:
    @subscriber("orders", transactional=True, batch=Batch(10))
    async def handle(numbers: list[int], db: Transaction) -> Any:
        return outcome

    broker = PostgresBroker(database.dsn, auto_migrate=True)
    async with App(handle, brokers={"default": broker}).running() as app:
        await app.publish("orders", 1)
        await eventually(lambda: app.pumps[0].counters.dead == 1)
        assert app.health().ok
