"""Handlers' own transactions: the writes and the end of the message are one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import asyncpg
import pytest

from streamfw.errors import BrokerRefused, BrokerUnavailable, LeaseLost
from streamfw.outcome import ACK, DeadLetter, Retry
from tests.services.postgres import Postgres

from .postgres_kit import Kit, ack, fetch, kit


@pytest.fixture
async def on(database: Postgres) -> AsyncIterator[Kit]:
    async with kit(database, pool_size=2, command_timeout=1.0) as made:
        await made.sql.execute("create table done (body bytea primary key)")
        yield made


async def _done(on: Kit) -> list[bytes]:
    return [r[0] for r in await on.sql.fetch("select body from done order by body")]


async def test_an_ack_commits_both(on: Kit) -> None:
    source = await on.open("q")
    await on.publish("q", b"1", b"2")
    batch = await fetch(source)
    async with source.transaction(batch) as unit:
        await unit.connection.executemany("insert into done values ($1)", [(d.body,) for d in batch])
        async with unit.connection.transaction():  # a savepoint, as handlers expect
            await unit.connection.fetchval("select 1")
        assert await _done(on) == []
        await unit.finish(ACK)
    assert await _done(on) == [b"1", b"2"]
    assert await on.count() == 0
    assert not source.out.rows and not source.out.held


@pytest.mark.parametrize("outcome", [Retry(60), DeadLetter("x")], ids=repr)
async def test_anything_else_rolls_back_and_settles(on: Kit, outcome: Retry | DeadLetter) -> None:
    source = await on.open("q", dead_letter="q.dead")
    await on.publish("q", b"1")
    batch = await fetch(source)
    async with source.transaction(batch) as unit:
        await unit.connection.execute("insert into done values ('1')")
        await unit.finish(outcome)
    assert await _done(on) == []
    assert not source.out.rows
    assert await on.count() == 1


async def test_leaving_without_finish_rolls_back_and_it_stays_ours(on: Kit) -> None:
    source = await on.open("q")
    await on.publish("q", b"1")
    batch = await fetch(source)

    async def handle() -> None:
        async with source.transaction(batch) as unit:
            await unit.connection.execute("insert into done values ('1')")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await handle()
    assert await _done(on) == []
    assert await ack(source, batch) == ()


@pytest.mark.parametrize("statement", ["insert into nowhere values (1)", "rollback"])
async def test_what_was_rolled_back_within_the_handler_is_not_acknowledged(on: Kit, statement: str) -> None:
    """The server takes a commit of it without a word, and the message would count as handled."""
    source = await on.open("q")
    await on.publish("q", b"1")
    batch = await fetch(source)
    async with source.transaction(batch) as unit:
        await unit.connection.execute("insert into done values ('1')")
        with suppress(asyncpg.UndefinedTableError):
            await unit.connection.execute(statement)
        with pytest.raises(BrokerRefused, match="was rolled back, or ended, within the handler"):
            await unit.finish(ACK)
    assert await _done(on) == []
    assert list(source.out.rows.values()) == batch
    assert await ack(source, batch) == ()


async def test_a_handler_that_broke_its_transaction_rolls_back(on: Kit) -> None:
    source = await on.open("q")
    await on.publish("q", b"1")
    batch = await fetch(source)
    with pytest.raises(asyncpg.UndefinedTableError):
        async with source.transaction(batch) as unit:
            await unit.connection.execute("insert into nowhere values ('1')")
    assert await ack(source, batch) == ()


async def test_a_row_that_is_not_ours_starts_nothing(on: Kit) -> None:
    source, other = await on.open("q"), await on.open("q")
    await on.publish("q", b"1", b"2")
    batch = await fetch(source)
    await on.sql.execute("update streamfw.message set lease_until = '-infinity' where id = $1", batch[1].id)
    stolen = await fetch(other)
    with pytest.raises(LeaseLost):
        async with source.transaction(batch):
            raise AssertionError("never here")
    assert [d.lost for d in batch] == [False, True]
    assert await ack(other, stolen) == ()
    assert await ack(source, batch[:1]) == ()


async def test_an_open_transaction_is_its_own_lease(on: Kit) -> None:
    source, other = await on.open("q"), await on.open("q")
    await on.publish("q", b"1")
    batch = await fetch(source)
    async with source.transaction(batch) as unit:
        # The lease has ended by the clock; nobody can take the row, and the renewal does not wait for it.
        batch[0].claim.until = 0.0
        assert await source._renewer.renew()
        assert not source.out.overdue(asyncio.get_running_loop().time())
        await on.publish("q", b"2")
        assert [d.body for d in await fetch(other)] == [b"2"]
        await unit.finish(ACK)
    assert not batch[0].lost


async def test_a_pool_that_is_too_small_says_which_size_it_needs(on: Kit) -> None:
    source = await on.open("q")
    await on.publish("q", b"1", b"2", b"3")
    batch = await fetch(source)
    async with source.transaction(batch[:1]), source.transaction(batch[1:2]):
        with pytest.raises(BrokerUnavailable, match="pool_size=2"):
            await source.transaction(batch[2:]).__aenter__()
    async with source.transaction(batch[2:]) as unit:
        await unit.finish(ACK)


async def test_a_connection_that_breaks_in_the_handler_rolls_back_and_is_replaced(on: Kit) -> None:
    source = await on.open("q")
    await on.publish("q", b"1")
    batch = await fetch(source)

    async def handle() -> None:
        async with source.transaction(batch) as unit:
            await unit.connection.execute("insert into done values ('1')")
            await on.sql.fetchval("select pg_terminate_backend($1, 5000)", unit.connection.get_server_pid())
            await unit.finish(ACK)

    with pytest.raises(BrokerUnavailable):
        await handle()
    assert await _done(on) == []
    async with source.transaction(batch) as unit:
        await unit.finish(ACK)
    assert await on.count() == 0


async def test_a_serialization_failure_is_transient_and_changes_nothing(database: Postgres) -> None:
    async with kit(database, isolation="serializable") as on:
        await on.sql.execute("create table stock (id int primary key, n int); insert into stock values (1, 0), (2, 0)")
        source = await on.open("q")
        await on.publish("q", b"1", b"2")
        first, second = await fetch(source)

        async def handle() -> None:
            async with source.transaction([first]) as one, source.transaction([second]) as two:
                assert await one.connection.fetchval("show transaction_isolation") == "serializable"
                for unit, read, write in ((one, 1, 2), (two, 2, 1)):
                    await unit.connection.fetchval("select sum(n) from stock where id = $1", read)
                    await unit.connection.execute("update stock set n = n + 1 where id = $1", write)
                await two.finish(ACK)
                await one.finish(ACK)

        with pytest.raises((BrokerUnavailable, asyncpg.SerializationError)):
            await handle()
        assert await on.count() == 1


async def test_closing_ends_what_is_open(on: Kit) -> None:
    source = await on.open("q")
    await on.publish("q", b"1")
    batch = await fetch(source)
    entered = source.transaction(batch)
    unit = await entered.__aenter__()
    await unit.connection.execute("insert into done values ('1')")
    await on.connection.close()
    assert await _done(on) == []
    await entered.__aexit__(None, None, None)
    assert await on.count() == 1
