"""Migrations: from nothing, twice at once, beside running releases; and what a release accepts."""

from __future__ import annotations

import asyncio

import pytest

from streamfw.broker import Subscription
from streamfw.errors import BrokerRefused
from streamfw_postgres import PostgresBroker, migrate
from streamfw_postgres import migrations as book
from streamfw_postgres.migrations import MIGRATIONS, Migration, check_version
from tests.services.postgres import Postgres

from .postgres_kit import ack, fetch, kit

NEXT = MIGRATIONS[-1].version + 1
EXPAND = Migration(NEXT, "it's more", MIGRATIONS[-1].version, "alter table {schema}.message add column more int;")
CONTRACT = Migration(NEXT + 1, "less", NEXT, "alter table {schema}.message drop column more;")


def test_versions_are_in_order_and_never_skip() -> None:
    assert [m.version for m in MIGRATIONS] == list(range(1, len(MIGRATIONS) + 1))
    assert all(m.compatible_from <= m.version for m in MIGRATIONS)


async def test_the_plan_is_the_sql_and_changes_nothing(database: Postgres) -> None:
    broker = PostgresBroker(database.dsn, schema="my_own")
    plan = await migrate(broker, plan=True)
    connection = await database.connect()
    try:
        assert not await connection.fetchval("select to_regnamespace('my_own') is not null")
        for sql in plan:  # a person may run it by hand
            await connection.execute(sql)
        assert await migrate(broker) == []
        assert await migrate(broker, plan=True) == []
        async with broker.connect() as open_connection:
            assert (await open_connection.check()).ok
    finally:
        await connection.close()


async def test_many_at_once_apply_each_step_once(database: Postgres) -> None:
    applied = await asyncio.gather(*(migrate(PostgresBroker(database.dsn)) for _ in range(5)))
    steps = [step for one in applied for step in one]
    assert sorted(steps) == [f"{m.version}: {m.title}" for m in MIGRATIONS]


async def test_two_releases_during_a_migration(database: Postgres) -> None:
    """The old release runs before, during and after an expanding step; a contracting one sends it away."""
    async with kit(database, poll=0.1) as on:
        source = await on.open("q", dead_letter="d")

        async def work(name: bytes) -> None:
            await on.publish("q", name)
            batch = await fetch(source)
            assert [d.body for d in batch] == [name]
            assert await ack(source, batch) == ()

        for _ in range(7):  # beyond the custom plans of prepared statements
            await work(b"before")
        assert await book.apply(on.sql, "streamfw", [*MIGRATIONS, EXPAND]) == [EXPAND]
        for _ in range(7):
            await work(b"after")
        async with PostgresBroker(database.dsn).connect() as connection:
            assert (await connection.check()).ok
        await book.apply(on.sql, "streamfw", [*MIGRATIONS, EXPAND, CONTRACT])
        with pytest.raises(BrokerRefused, match="upgrade streamfw"):
            async with PostgresBroker(database.dsn).connect():
                pass
        await work(b"still")  # what runs already goes on


async def test_a_migration_waits_for_a_lock_without_blocking_everybody_behind_it(
    database: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "_PATIENCE", "set local lock_timeout = '100ms';")
    async with kit(database) as on:
        other = await database.connect()
        try:
            async with on.sql.transaction():
                await on.sql.execute("select * from streamfw.message")
                migrating = asyncio.create_task(book.apply(other, "streamfw", [*MIGRATIONS, EXPAND]))
                assert await asyncio.wait_for(on.publish("q", b"1"), 10) == ()
                assert not migrating.done()
            assert await migrating == [EXPAND]
        finally:
            await other.close()


async def test_without_auto_migrate_an_old_schema_is_refused(database: Postgres) -> None:
    with pytest.raises(BrokerRefused, match=r"does not exist.*run `streamfw postgres migrate`"):
        async with PostgresBroker(database.dsn).connect():
            pass
    async with PostgresBroker(database.dsn, auto_migrate=True).connect() as connection:
        await connection.open(Subscription("q"))


def test_what_a_release_accepts() -> None:
    check_version(3, 1, "s", known=3)
    check_version(5, 3, "s", known=3)
    for version, compatible, said in ((2, 1, "migrate"), (0, 0, "does not exist"), (5, 4, "upgrade")):
        with pytest.raises(BrokerRefused, match=said):
            check_version(version, compatible, "s", known=3)


async def test_an_embedded_server_migrates_by_itself(tmp_path: object) -> None:
    broker = PostgresBroker(f"postgres+embedded://{tmp_path}/db")
    async with broker.connect() as connection:
        assert (await connection.check()).ok
    assert "password" not in repr(broker)
