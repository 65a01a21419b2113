"""Faults: cuts of each connection, restarts, black holes, refusals; errors say what to do and hold no password."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import asyncpg
import pytest

from streamfw.broker import Subscription
from streamfw.errors import BrokerError, BrokerRefused, BrokerUnavailable, OutcomeUnknown, Unavailable
from streamfw.outcome import ACK
from streamfw_postgres import PostgresBroker
from streamfw_postgres.migrations import MIGRATIONS
from tests.helpers import eventually
from tests.services.postgres import OwnPostgres, Postgres
from tests.services.proxy import Proxy

from .postgres_kit import BIG, Kit, ack, bodies, fetch, kit, settle


async def _again(source: Any, call: Callable[[], Awaitable[Any]]) -> Any:
    """As the runtime does: reopen after a transient error, and call again."""
    for _ in range(200):
        try:
            return await call()
        except BrokerError as error:
            if not error.transient:
                raise
            await asyncio.sleep(0.05)
            try:
                await source.reopen()
            except BrokerUnavailable:
                continue
    raise AssertionError("it does not come back")


@pytest.mark.parametrize("role", ["claims", "settles", "publishes", "listener", "handler"])
async def test_each_connection_heals_after_it_was_ended(database: Postgres, role: str) -> None:
    async with kit(database, poll=0.2) as on:
        source = await on.open("q")
        await on.publish("q", b"1")
        got = await fetch(source)
        async with source.transaction(got):
            pass  # a pooled connection exists
        assert on.connection._listener is not None
        await on.connection._listener.listening.wait()
        pid = {
            "claims": source._claims.pid,
            "settles": source._settles.pid,
            "publishes": on.connection._publishes.pid,
            "listener": on.connection._listener._role.pid,
        }.get(role)
        if pid is None:
            pid = await on.sql.fetchval("select pid from pg_stat_activity where application_name = 'streamfw handler'")
        assert await on.sql.fetchval("select pg_terminate_backend($1, 5000)", pid)
        assert await _again(source, lambda: ack(source, got)) == ()
        await eventually(lambda: _published(on))
        more = await _again(source, lambda: fetch(source))
        async with source.transaction(more[:1]) as unit:
            await unit.finish(ACK)
        await eventually(lambda: on.connection._listener and on.connection._listener.listening.is_set())
        assert on.connection._listener._role.pid != (pid if role == "listener" else 0)


async def _published(on: Kit) -> bool:
    answers = await on.publish("q", b"more")
    assert answers == () or isinstance(answers[0], Unavailable | OutcomeUnknown)
    return answers == ()


async def test_a_restart_in_the_middle_loses_nothing(own_postgres: OwnPostgres) -> None:
    async with kit(own_postgres.facts, poll=0.2) as on:
        source = await on.open("q")
        await on.publish("q", b"1", b"2")
        got = await fetch(source, 1)
        pending = asyncio.create_task(_again(source, lambda: fetch(source)))
        await asyncio.to_thread(own_postgres.restart)
        second = await pending
        assert bodies(second) == [b"2"]
        # What was out before is still ours: the lease is in the table.
        assert await _again(source, lambda: ack(source, [*got, *second])) == ()
        assert await eventually(lambda: _published(on))
        assert bodies(await _again(source, lambda: fetch(source)))[0] == b"more"


async def test_a_crash_of_the_server_in_the_middle_loses_nothing(own_postgres: OwnPostgres) -> None:
    async with kit(own_postgres.facts, poll=0.2) as on:
        source = await on.open("q")
        await on.publish("q", b"1")
        got = await fetch(source)
        await asyncio.to_thread(own_postgres.stop)
        (answer,) = await on.publish("q", b"away")
        assert isinstance(answer, Unavailable | OutcomeUnknown)
        with pytest.raises(BrokerUnavailable):
            await source.fetch(1, BIG)
        with pytest.raises(BrokerUnavailable):
            await source.reopen()
        assert not (await on.connection.check()).ok
        began = time.monotonic()
        await source.close()  # with the server away: soon, and silently
        assert time.monotonic() - began < 10
        await asyncio.to_thread(own_postgres.start)
        source = await on.open("q")
        await on.connection.publish([])
        assert not got[0].lost


async def test_a_black_hole_is_noticed_by_the_deadline_and_survived(database: Postgres) -> None:
    direct = database.over_tcp()
    async with Proxy.to_tcp(direct.host, direct.port) as proxy:
        far = direct.at(proxy.host, proxy.port)
        async with kit(database, url=far.dsn, command_timeout=0.5, connect_timeout=0.5, poll=0.2, lease=60) as on:
            source = await on.open("q")
            await on.publish("q", b"1")
            got = await fetch(source)
            proxy.black_hole()
            with pytest.raises(BrokerUnavailable, match=r"no answer for 0\.5 s"):
                await source.fetch(1, BIG)
            with pytest.raises(BrokerUnavailable, match="no answer"):
                await ack(source, got)
            (answer,) = await on.publish("q", b"2")
            assert isinstance(answer, OutcomeUnknown)
            with pytest.raises(BrokerUnavailable):
                await source.reopen()
            proxy.resume()
            assert await _again(source, lambda: ack(source, got)) == ()
            await eventually(lambda: _published(on))
            assert b"more" in bodies(await _again(source, lambda: fetch(source)))


async def test_closing_through_a_black_hole_takes_seconds(database: Postgres) -> None:
    direct = database.over_tcp()
    async with Proxy.to_tcp(direct.host, direct.port) as proxy:
        far = direct.at(proxy.host, proxy.port)
        async with kit(database, url=far.dsn) as on:
            source = await on.open("q")
            await on.publish("q", b"1")
            await fetch(source)
            proxy.black_hole()
            began = time.monotonic()
            await on.connection.close()
            assert time.monotonic() - began < 15


# ---------------------------------------------------------------------- refusals


async def _connects(broker: PostgresBroker) -> None:
    async with broker.connect() as connection:
        await connection.open(Subscription("q"))


async def _refusal(url: str, **options: Any) -> str:
    broker = PostgresBroker(url, **options)
    with pytest.raises(BrokerRefused) as caught:
        await _connects(broker)
    chain: list[str] = []
    error: BaseException | None = caught.value
    while error is not None:
        chain.append(str(error))
        error = error.__cause__
    return " | ".join([*chain, repr(broker), broker.describe()])


async def test_wrong_password(database: Postgres) -> None:
    secret = "hunter2-not-it"
    url = database.dsn.replace(quote(database.password), secret)
    assert secret in url
    said = await _refusal(url, auto_migrate=True)
    assert "check user and password" in said
    assert secret not in said and database.password not in said


async def test_no_such_database(database: Postgres) -> None:
    said = await _refusal(database.named("nowhere").dsn)
    assert "no such database" in said and database.password not in said


async def test_no_tables(database: Postgres) -> None:
    assert "streamfw postgres migrate" in await _refusal(database.dsn)


async def test_no_rights(database: Postgres) -> None:
    async with kit(database) as on:
        name = f"weak_{database.database}"
        await on.sql.execute(f"create role {name} login password 'weak'")
        try:
            weak = f"postgresql://{name}:weak@/{database.database}?host={quote(database.host)}&port={database.port}"
            assert "lacks a right" in await _refusal(weak)
            await on.sql.execute(f"grant usage on schema streamfw to {name}")
            assert "lacks a right" in await _refusal(weak)
        finally:
            await on.sql.execute(f"drop owned by {name}; drop role {name}")


async def test_tls_that_is_wrong(database15: Postgres) -> None:
    url = database15.over_tcp().dsn if hasattr(database15, "over_tcp") else database15.dsn
    async with PostgresBroker(url, auto_migrate=True).connect() as connection:
        assert (await connection.check()).ok
    broken = url.split("?")[0] + "?sslmode=verify-full"
    said = await _refusal(broken, connect_timeout=5.0)
    assert database15.password not in said


async def test_nobody_listens() -> None:
    broker = PostgresBroker("postgres://me:s3cret@127.0.0.1:1/x")
    with pytest.raises(BrokerUnavailable) as caught:
        await _connects(broker)
    assert "s3cret" not in str(caught.value)


async def test_too_many_connections_is_transient(own_postgres: OwnPostgres) -> None:
    facts = own_postgres.facts
    async with kit(facts) as on:
        limit = f'alter database "{facts.database}" connection limit 0'
        name = "plain"
        await on.sql.execute(f"create role {name} login password 'p'; {limit}")
        plain = f"postgresql://{name}:p@/{facts.database}?host={quote(facts.host)}&port={facts.port}"
        with pytest.raises(BrokerUnavailable, match="too many connections"):
            await _connects(PostgresBroker(plain))


@pytest.mark.parametrize(
    "url",
    ["postgres://u:p/w@host/db", "postgres://u:pw@host:port/db", "mysql://x", "postgres", "postgres+embedded://"],
)
def test_a_malformed_url_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ValueError, match="url") as caught:
        PostgresBroker(url)
    assert "p/w" not in str(caught.value) and "pw" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"schema": ""},
        {"schema": "a$b"},
        {"schema": "x" * 64},
        {"lease": 0.5},
        {"lease": "30"},
        {"pool_size": 0},
        {"pool_size": 2.5},
        {"max_body": 2**40},
        {"poll": 0},
        {"isolation": "none"},
        {"command_timeout": True},
        {"connect_timeout": -1},
    ],
    ids=lambda o: next(iter(o)),
)
def test_a_wrong_option_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        PostgresBroker("postgres://localhost/x", **options)


async def test_an_odd_schema_name_works(database: Postgres) -> None:
    async with kit(database, schema="sch\"ema; drop 'x'") as on:
        source = await on.open("q", dead_letter="d")
        await on.publish("q", b"1")
        assert await settle(source, *[(d, ACK) for d in await fetch(source)]) == ()
        assert (await on.connection.status()).table.version == MIGRATIONS[-1].version


async def test_a_statement_timeout_of_the_server_does_not_hurt(database: Postgres) -> None:
    async with kit(database) as on:
        await on.sql.execute(
            f'alter database "{database.database}" set statement_timeout = 20; '
            f'alter database "{database.database}" set default_transaction_read_only = on; '
            f"alter database \"{database.database}\" set default_transaction_isolation = 'serializable'"
        )
        async with PostgresBroker(database.dsn).connect() as connection:
            source = await connection.open(Subscription("q"))
            await on.publish("q", b"1")
            assert len(await source.fetch(1, BIG)) == 1


def test_a_driver_error_of_each_kind_is_translated() -> None:
    from streamfw_postgres.errors import translated

    transient = [
        asyncpg.AdminShutdownError(""),
        asyncpg.CannotConnectNowError(""),
        asyncpg.ConnectionDoesNotExistError(""),
        asyncpg.TooManyConnectionsError(""),
        asyncpg.DiskFullError(""),
        asyncpg.DeadlockDetectedError(""),
        asyncpg.SerializationError(""),
        asyncpg.ReadOnlySQLTransactionError(""),
        asyncpg.InterfaceError("connection is closed"),
        ConnectionRefusedError(),
        TimeoutError(),
    ]
    terminal = [
        asyncpg.InvalidPasswordError(""),
        asyncpg.InvalidAuthorizationSpecificationError(""),
        asyncpg.InvalidCatalogNameError(""),
        asyncpg.UndefinedTableError(""),
        asyncpg.InsufficientPrivilegeError(""),
        asyncpg.PostgresSyntaxError(""),
    ]
    assert [e for e in transient if not translated(e, "x").transient] == []
    assert [e for e in terminal if translated(e, "x").transient] == []
