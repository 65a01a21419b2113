"""Handlers' own transactions that hold their row by its lock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import asyncpg
import pytest

from streamfw import App, Attempt, Batch, Message, subscriber
from streamfw.errors import BrokerError, BrokerRefused, LeaseLost
from streamfw.outcome import ACK, RELEASE, Backoff, DeadLetter, Retry
from streamfw_postgres import PostgresBroker, Transaction
from streamfw_postgres.deliveries import PostgresDelivery
from streamfw_postgres.holding import HeldClaim, UnitHolder
from streamfw_postgres.lock_unit import LeasedUnit, LockedUnit
from streamfw_postgres.rowlock import RowLockSource
from tests.helpers import eventually
from tests.services.postgres import Postgres

from .postgres_kit import Kit, ack, bodies, fetch, kit, settle


@pytest.fixture
async def on(database: Postgres) -> AsyncIterator[Kit]:
    async with kit(database, form="rowlock", poll=0.1) as made:
        await made.sql.execute("create table effect (id int, unique (id) deferrable initially deferred)")
        yield made


async def opened(on: Kit, **options: Any) -> RowLockSource:
    source = await on.open("q", transactional=True, dead_letter="q.dead", **{"workers": 3, **options})
    assert isinstance(source, RowLockSource)
    return source


async def effects(on: Kit) -> list[int]:
    return [r[0] for r in await on.sql.fetch("select id from effect order by id")]


async def _empty(on: Kit) -> bool:
    return await on.count() == 0 and await on.sql.fetchval("select count(*) from streamfw.claim_journal") == 0


async def _unlocked(on: Kit) -> bool:
    return await on.locked() == []


@pytest.mark.parametrize("attempts", [None, 3])
async def test_the_row_and_the_writes_end_together(on: Kit, attempts: int | None) -> None:
    source = await opened(on, attempts=attempts)
    await on.publish("q", b"1", b"2")
    (delivery,) = await fetch(source, 1)
    assert await on.locked() == [b"1"]
    async with source.transaction([delivery]) as unit:
        assert isinstance(unit, LockedUnit)
        await unit.connection.execute("insert into effect values (1)")
        assert await effects(on) == []
        await unit.finish(ACK)
    assert await effects(on) == [1]
    assert [bytes(r[0]) for r in await on.rows("body")] == [b"2"]
    assert await on.sql.fetchval("select count(*) from streamfw.claim_journal") == 0


async def test_one_row_and_one_connection_a_worker(on: Kit) -> None:
    source = await opened(on)
    await on.publish("q", *(b"%d" % n for n in range(9)))
    got: list[PostgresDelivery] = []
    while len(got) < 3:
        got += await fetch(source)
    holders = [d.claim.holder for d in got if isinstance(d.claim, HeldClaim)]
    pids = {h.connection.get_server_pid() for h in holders if isinstance(h, UnitHolder)}
    assert len(pids) == 3
    waiting = asyncio.create_task(fetch(source))
    assert await on.locked() == [b"0", b"1", b"2"]
    async with source.transaction(got[:1]) as unit:
        await unit.finish(ACK)
    assert bodies(await asyncio.wait_for(waiting, 5)) == [b"3"]
    assert await on.locked() == [b"1", b"2", b"3"]


@pytest.mark.parametrize(
    ("outcome", "left"),
    [(Retry(0), (1, False)), (Retry(60), (1, True)), (RELEASE, (0, False)), (DeadLetter("x"), None)],
    ids=repr,
)
async def test_any_other_outcome_rolls_the_writes_back_and_settles(
    on: Kit, outcome: Retry, left: tuple[int, bool] | None
) -> None:
    source = await opened(on, attempts=3)
    await on.publish("q", b"1")
    got = await fetch(source)
    async with source.transaction(got) as unit:
        await unit.connection.execute("insert into effect values (1)")
        await unit.finish(outcome)
    await eventually(lambda: _unlocked(on))
    assert await effects(on) == []
    rows = await on.sql.fetch(
        "select attempt, run_at is not null from streamfw.message m join streamfw.consumer c on c.id = m.consumer "
        "where c.queue = 'q'"
    )
    assert [tuple(r) for r in rows] == ([left] if left else [])
    assert await on.sql.fetchval("select count(*) from streamfw.claim_journal") == 0


async def test_left_without_an_end_it_is_still_ours(on: Kit) -> None:
    source = await opened(on)
    await on.publish("q", b"1")
    got = await fetch(source)

    async def fail() -> None:
        async with source.transaction(got) as unit:
            await unit.connection.execute("insert into effect values (1)")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert await on.locked() == [b"1"]
    async with source.transaction(got) as unit:  # as after a cancelled handler
        await unit.connection.execute("insert into effect values (2)")
    assert await ack(source, got) == ()
    await eventually(lambda: _empty(on))
    assert await effects(on) == []


async def test_a_handler_may_take_longer_than_a_second(on: Kit) -> None:
    source = await opened(on)
    await on.publish("q", b"1")
    got = await fetch(source)
    async with source.transaction(got) as unit:
        await unit.connection.execute("select pg_sleep(1.3)")
        assert await on.locked() == [b"1"]
        await unit.finish(ACK)
    assert await on.count() == 0


async def test_a_constraint_that_fails_at_the_commit_is_the_handlers_failure(on: Kit) -> None:
    """The row is still locked after it, so that a retry or a dead letter can be settled."""
    source = await opened(on, attempts=3)
    await on.sql.execute("insert into effect values (1)")
    await on.publish("q", b"1")
    got = await fetch(source)

    async def handle() -> None:
        async with source.transaction(got) as unit:
            await unit.connection.execute("insert into effect values (1)")
            await unit.finish(ACK)

    with pytest.raises(BrokerError) as caught:
        await handle()
    assert not caught.value.transient
    assert await on.locked() == [b"1"]
    assert not await settle(source, (got[0], DeadLetter("twice")))
    await eventually(lambda: _unlocked(on))
    assert bodies(await (await on.connection.dead_letters("q.dead")).list()) == [b"1"]  # type: ignore[arg-type]


@pytest.mark.parametrize("statement", ["rollback", "commit"])
async def test_a_message_whose_handler_ended_the_transaction_is_not_acknowledged(on: Kit, statement: str) -> None:
    """With it went the lock: others may have the row by now."""
    source = await opened(on)
    await on.publish("q", b"1")
    (delivery,) = await fetch(source)
    async with source.transaction([delivery]) as unit:
        await unit.connection.execute("insert into effect values (1)")
        await unit.connection.execute(statement)
        with pytest.raises(BrokerRefused, match="said commit or rollback itself"):
            await unit.finish(ACK)
    assert delivery.lost
    assert await on.count() == 1


async def test_a_handler_whose_connection_is_lost_has_lost_its_row(on: Kit) -> None:
    source = await opened(on, attempts=5)
    await on.publish("q", b"1")
    (delivery,) = await fetch(source)

    async def handle() -> None:
        async with source.transaction([delivery]) as unit:
            await on.sql.execute("select pg_terminate_backend($1)", unit.connection.get_server_pid())
            await eventually(lambda: delivery.lost)
            await unit.finish(ACK)

    with pytest.raises(BrokerError):
        await handle()
    (error,) = await ack(source, [delivery])
    assert isinstance(error, LeaseLost)
    with pytest.raises(LeaseLost):
        async with source.transaction([delivery]):
            pytest.fail("it is another's by now")
    (again,) = await asyncio.wait_for(fetch(source), 5)
    assert again.attempt == 2
    assert not await ack(source, [again])
    await eventually(lambda: _empty(on))


async def test_a_serialization_failure_frees_the_row(database: Postgres) -> None:
    async with kit(database, form="rowlock", poll=0.1, isolation="serializable") as on:
        await on.sql.execute("create table counter (n int); insert into counter values (0)")
        source = await opened(on)
        await on.publish("q", b"1")
        (delivery,) = await fetch(source)

        async def handle() -> None:
            async with source.transaction([delivery]) as unit:
                await unit.connection.fetch("select n from counter")
                await on.sql.execute("update counter set n = n + 1")
                await unit.connection.execute("update counter set n = n + 10")

        with pytest.raises(asyncpg.SerializationError):
            await handle()
        await ack(source, [delivery])
        await source.flush(asyncio.get_running_loop().time() + 5)
        assert await on.sql.fetchval("select n from counter") == 1


async def test_rows_of_a_shared_claim_are_leased_first(on: Kit) -> None:
    """A batch is one transaction over rows of several claims."""
    source = await opened(on, batch=10)
    await on.publish("q", b"1", b"2", b"3")
    got = [*await fetch(source, 2), *await fetch(source, 1)]
    async with source.transaction(got) as unit:
        assert isinstance(unit, LeasedUnit)
        await unit.connection.execute("insert into effect values (1)")
        await unit.finish(ACK)
    assert await effects(on) == [1]
    assert await on.count() == 0


async def test_close_rolls_back_a_handler_that_did_not_end(on: Kit) -> None:
    source = await opened(on)
    await on.publish("q", b"1")
    got = await fetch(source)
    unit = source.transaction(got)
    entered = await unit.__aenter__()
    await entered.connection.execute("insert into effect values (1)")
    await source.close()
    await eventually(lambda: _unlocked(on))
    assert (await effects(on), await on.count()) == ([], 1)
    await unit.__aexit__(None, None, None)


async def test_an_app_of_transactional_handlers(database: Postgres) -> None:
    failed: set[int] = set()

    @subscriber("q", group="g", transactional=True, workers=4, attempts=3, backoff=Backoff(first=0.01, jitter=False))
    async def handle(number: int, db: Transaction, attempt: Annotated[int, Attempt]) -> None:
        await db.execute("insert into effect values ($1)", number)
        async with db.transaction():
            await db.execute("insert into effect values ($1)", 1000 + number)
        if number % 10 == 3 and number not in failed:
            failed.add(number)
            raise ValueError("once")
        assert attempt == (2 if number in failed else 1)
        if number == 50:
            raise DeadLetter("no")

    @subscriber("batches", group="g", transactional=True, batch=Batch(10, wait=0.01), workers=2)
    async def handle_batch(numbers: list[int], db: Transaction) -> None:
        await db.executemany("insert into effect values ($1)", [(2000 + number,) for number in numbers])

    async with kit(database) as on:
        await on.sql.execute("create table effect (id int unique)")
        app = App(handle, handle_batch, brokers={"default": PostgresBroker(database.dsn, form="rowlock")})
        async with app.running():
            await asyncio.gather(
                *(app.publish("q", number) for number in range(100)),
                *(app.publish("batches", number) for number in range(50)),
            )
            await eventually(lambda: _left(on, 1), 20)
        done = [number for number in range(100) if number != 50]
        assert await effects(on) == [*done, *(1000 + n for n in done), *range(2000, 2050)]


async def _left(on: Kit, count: int) -> bool:
    return await on.count() == count


async def test_a_message_whose_handler_breaks_its_connection_ends_and_holds_up_nobody(database: Postgres) -> None:
    """Its failures are lost with the transaction that held it; a lease, beyond its attempts, survives them."""
    handled: list[bytes] = []
    dead: list[bytes] = []

    @subscriber("q", group="g", transactional=True, attempts=2, backoff=Backoff(first=0.01, jitter=False))
    async def handle(message: Message, db: Transaction) -> None:
        handled.append(message.body)
        if message.body == b"bad":
            async with kit(database) as on:
                await on.sql.execute("select pg_terminate_backend($1)", db.get_server_pid())
            await db.execute("select 1")

    @subscriber("q.dead", group="g")
    async def bury(message: Message) -> None:
        dead.append(message.body)

    async with kit(database) as on:
        await on.publish("q", b"bad", b"good")
        broker = PostgresBroker(database.dsn, form="rowlock")
        async with App(handle, bury, brokers={"default": broker}).running():
            await eventually(lambda: dead == [b"bad"] and b"good" in handled)
        assert await on.count() == 0
    assert handled.count(b"bad") <= 4
