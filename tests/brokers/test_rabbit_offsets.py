"""Where offsets of streams are kept: in memory, in Postgres, in the streams themselves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
import rstream

from streamfw.errors import BrokerClosed, BrokerRefused, BrokerUnavailable
from streamfw_rabbit import MemoryOffsets, PostgresOffsets, ServerOffsets
from streamfw_rabbit.offsets import Bookmark, OffsetStore, Place
from streamfw_rabbit.offsets_postgres import _STORE
from tests.brokers.rabbit_broker_kit import raw
from tests.helpers import eventually
from tests.services.postgres import Postgres
from tests.services.proxy import Proxy
from tests.services.rabbit import Rabbit

PLACE = Place("/", "events", "shop")


@asynccontextmanager
async def opened(store: OffsetStore, place: Place = PLACE) -> AsyncIterator[Bookmark]:
    bookmark = store.open(place)
    try:
        yield bookmark
    finally:
        await bookmark.close()


# ------------------------------------------------------------------ what all of them hold


@pytest.fixture(params=["memory", "postgres", "server"])
async def kept(request: pytest.FixtureRequest) -> tuple[OffsetStore, Place]:
    """A store, and a place in it that is there."""
    if request.param == "memory":
        return MemoryOffsets(), PLACE
    if request.param == "postgres":
        return PostgresOffsets(request.getfixturevalue("database").dsn), PLACE
    server: Rabbit = request.getfixturevalue("rabbit")
    await make_stream(server)
    return ServerOffsets(server.stream_url), Place(server.vhost, "events", "shop")


async def make_stream(server: Rabbit, name: str = "events") -> None:
    async with raw(server) as other:
        await other.declare(name, queue_type="stream")


async def test_nothing_is_stored_at_first(kept: tuple[OffsetStore, Place]) -> None:
    store, place = kept
    async with opened(store, place) as bookmark:
        assert await bookmark.take() is None
        assert await bookmark.is_ours()
        assert await bookmark.take() is None


@pytest.mark.parametrize("offset", [0, 1, 2**40])
async def test_what_is_stored_is_there_for_the_next(kept: tuple[OffsetStore, Place], offset: int) -> None:
    store, place = kept
    async with opened(store, place) as bookmark:
        await bookmark.take()
        assert await bookmark.store(offset)
    async with opened(store, place) as another:
        assert await another.take() == offset


async def test_a_lower_one_is_stored_as_well(kept: tuple[OffsetStore, Place]) -> None:
    store, place = kept
    async with opened(store, place) as bookmark:
        await bookmark.take()
        for offset in (5, 9, 0, 3):
            assert await bookmark.store(offset)
        assert await bookmark.take() == 3


async def test_groups_are_apart(kept: tuple[OffsetStore, Place]) -> None:
    store, place = kept
    async with opened(store, place) as bookmark, opened(store, place._replace(group="other")) as other:
        await bookmark.take()
        assert await bookmark.store(7)
        assert await other.take() is None
        assert await other.store(2)
        assert await bookmark.take() == 7


async def test_who_reads_on_meanwhile_is_noticed(kept: tuple[OffsetStore, Place]) -> None:
    store, place = kept
    async with opened(store, place) as first, opened(store, place) as second:
        await first.take()
        assert await first.store(10)
        assert await second.take() == 10
        assert await second.store(20)
        assert not await first.is_ours()
        assert not await first.store(11)
        assert await second.is_ours()
        assert await second.take() == 20


async def test_a_bookmark_closes_twice_and_unused(kept: tuple[OffsetStore, Place]) -> None:
    store, place = kept
    bookmark = store.open(place)
    await bookmark.close()
    await bookmark.close()


# ------------------------------------------------------------------ taken by another


@pytest.fixture(params=["memory", "postgres"])
def fenced(request: pytest.FixtureRequest) -> OffsetStore:
    return MemoryOffsets() if request.param == "memory" else PostgresOffsets(request.getfixturevalue("database").dsn)


async def test_who_lost_it_cannot_move_it(fenced: OffsetStore) -> None:
    async with opened(fenced) as first, opened(fenced) as second:
        await first.take()
        assert await first.store(10)
        assert await second.take() == 10
        assert not await first.is_ours()
        assert not await first.store(3)
        assert not await first.store(99)
        assert await second.is_ours()
        assert await second.store(11)
        assert await first.take() == 11
        assert await first.store(12)
        assert not await second.store(13)


async def test_vhosts_and_streams_are_apart(fenced: OffsetStore) -> None:
    places = [PLACE, PLACE._replace(vhost="other"), PLACE._replace(stream="other")]
    for number, place in enumerate(places):
        async with opened(fenced, place) as bookmark:
            assert await bookmark.take() is None
            assert await bookmark.store(number)
    for number, place in enumerate(places):
        async with opened(fenced, place) as bookmark:
            assert await bookmark.take() == number


async def test_a_witness_is_kept_beside_the_offset(fenced: OffsetStore) -> None:
    async with opened(fenced) as bookmark, opened(fenced) as other:
        await bookmark.take()
        assert bookmark.witness is None
        for witness in ("9:abc", None, "11:" + "f" * 32):
            bookmark.witness = witness
            assert await bookmark.store(12)
            bookmark.witness = "not stored"
            assert await bookmark.take() == 12
            assert bookmark.witness == witness
        assert await other.take() == 12
        assert other.witness == witness


async def test_who_never_took_it_cannot_store(fenced: OffsetStore) -> None:
    async with opened(fenced) as bookmark, opened(fenced) as other:
        assert not await bookmark.is_ours()
        assert not await bookmark.store(1)
        assert await other.take() is None
        assert not await bookmark.store(1)


# ------------------------------------------------------------------ Postgres


@pytest.fixture
def places(database: Postgres) -> PostgresOffsets:
    return PostgresOffsets(database.dsn, timeout=2.0)


@asynccontextmanager
async def sql(database: Postgres) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database.dsn)
    try:
        yield connection
    finally:
        await connection.close()


def backends(application: str) -> str:
    """Of this database alone: other tests run on the same server."""
    mine = f"application_name = '{application}' and datname = current_database()"
    return f"select pg_terminate_backend(pid) from pg_stat_activity where {mine}"


async def test_it_connects_again_when_its_connection_was_ended(database: Postgres, places: PostgresOffsets) -> None:
    async with opened(places) as bookmark, sql(database) as admin:
        await bookmark.take()
        await admin.execute(backends("streamfw stream offsets"))

        async def stored() -> bool:
            try:
                return await bookmark.store(5)
            except BrokerUnavailable:
                return False

        await eventually(stored)
        assert await bookmark.is_ours(), "the connection is not what holds it"


async def test_a_statement_that_arrives_late_changes_nothing(database: Postgres, places: PostgresOffsets) -> None:
    """Its connection broke, and it is executed all the same, behind later ones."""
    async with opened(places) as bookmark, sql(database) as late:
        await bookmark.take()
        for offset in (10, 20):
            assert await bookmark.store(offset)
        token: int = bookmark._token  # type: ignore[attr-defined]
        assert await late.fetch(places.sql(_STORE), *PLACE, token, 1, 10, None) == []
        assert await late.fetch(places.sql(_STORE), *PLACE, token, 2, 99, None) == []
        assert await bookmark.take() == 20


async def test_a_server_that_does_not_answer_is_given_up_on(database: Postgres) -> None:
    there = database.over_tcp()
    async with Proxy.to_tcp(there.host, there.port) as proxy:
        places = PostgresOffsets(there.at(proxy.host, proxy.port).dsn, timeout=0.3)
        async with opened(places) as bookmark:
            await bookmark.take()
            proxy.black_hole()
            with pytest.raises(BrokerUnavailable):
                await bookmark.store(1)
            proxy.cut()
            proxy.resume()
            assert await bookmark.store(2)
            assert await bookmark.take() == 2


async def test_a_call_that_is_cancelled_leaves_nothing_behind(database: Postgres, places: PostgresOffsets) -> None:
    async with opened(places) as bookmark, sql(database) as admin:
        await bookmark.take()
        async with admin.transaction():
            await admin.execute("lock table streamfw.stream_offset in access exclusive mode")
            storing = asyncio.create_task(bookmark.store(1))
            waits = (
                "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
            )

            async def is_waiting() -> bool:
                return bool(await admin.fetchval(waits))

            await eventually(is_waiting)
            storing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await storing
        assert await bookmark.store(2)
        assert await bookmark.take() == 2


async def test_many_make_the_table_at_once(database: Postgres) -> None:
    stores = [PostgresOffsets(database.dsn, schema='odd "name"') for _ in range(6)]
    made = await asyncio.gather(*(store.migrate() for store in stores))
    assert sorted(made) == [False] * 5 + [True]
    async with opened(stores[0]) as bookmark:
        await bookmark.take()
        assert await bookmark.store(1)


async def test_a_table_without_a_column_for_witnesses_gets_it(database: Postgres, places: PostgresOffsets) -> None:
    async with opened(places) as bookmark, sql(database) as admin:
        await bookmark.take()
        assert await bookmark.store(7)
        await admin.execute("alter table streamfw.stream_offset drop column witness")
    async with opened(PostgresOffsets(database.dsn, migrate=False)) as bookmark:
        with pytest.raises(BrokerRefused, match="witness"):
            await bookmark.take()
    async with opened(places) as bookmark:
        assert await bookmark.take() == 7
        bookmark.witness = "6:abc"
        assert await bookmark.store(8)
    assert not await places.migrate()


async def test_without_the_table_and_the_right_to_make_it(database: Postgres) -> None:
    places = PostgresOffsets(database.dsn, migrate=False)
    async with opened(places) as bookmark:
        with pytest.raises(BrokerRefused, match=r"stream_offset.*does not exist|SQLSTATE (3F000|42P01)"):
            await bookmark.take()
    assert await places.migrate()
    assert not await places.migrate()
    async with opened(places) as bookmark:
        assert await bookmark.take() is None


async def test_wrong_credentials_are_final_and_show_no_password(database: Postgres) -> None:
    where = database.over_tcp().dsn.partition("@")[2]
    places = PostgresOffsets(f"postgres://nobody:s3cr3t@{where}")
    async with opened(places) as bookmark:
        with pytest.raises(BrokerRefused) as caught:
            await bookmark.take()
    assert "s3cr3t" not in f"{caught.value} {places!r}"


async def test_a_closed_bookmark_says_so(places: PostgresOffsets) -> None:
    async with opened(places) as bookmark:
        await bookmark.take()
    with pytest.raises(BrokerClosed):
        await bookmark.store(1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PostgresOffsets("mysql://localhost/x"),
        lambda: PostgresOffsets("postgres+embedded:///tmp/x"),
        lambda: PostgresOffsets("postgres://localhost/x", schema=""),
        lambda: PostgresOffsets("postgres://localhost/x", schema="é" * 40),
        lambda: ServerOffsets("amqp://guest:guest@localhost"),
        lambda: ServerOffsets("rabbitmq-stream://localhost"),
        lambda: ServerOffsets("rabbitmq-stream://guest:guest@localhost:notaport"),
        lambda: ServerOffsets("rabbitmq-stream://guest:guest@"),
    ],
)
def test_what_is_no_url_is_refused(make: Callable[[], OffsetStore]) -> None:
    with pytest.raises(ValueError, match=r"PostgresOffsets|ServerOffsets"):
        make()


@pytest.mark.parametrize(
    ("store", "module", "extra"),
    [
        (PostgresOffsets("postgres://localhost/x"), "asyncpg", "postgres"),
        (ServerOffsets("rabbitmq-stream://a:b@localhost"), "rstream.client", "rabbit-stream"),
    ],
    ids=["postgres", "server"],
)
async def test_a_driver_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, store: OffsetStore, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    async with opened(store) as bookmark:
        with pytest.raises(BrokerRefused, match=rf"streamfw\[{extra}\]"):
            await bookmark.take()
        monkeypatch.undo()


# ------------------------------------------------------------------ in the streams themselves


@asynccontextmanager
async def other_client(server: Rabbit) -> AsyncIterator[rstream.Consumer]:
    consumer = rstream.Consumer(
        server.host, server.stream_port, username=server.user, password=server.password, vhost=server.vhost
    )
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.close()


def in_stream(server: Rabbit) -> Place:
    return Place(server.vhost, "events", "shop")


async def test_other_clients_and_we_understand_each_other(rabbit: Rabbit) -> None:
    """To them, an offset is that of the last message that is done."""
    await make_stream(rabbit)
    async with opened(ServerOffsets(rabbit.stream_url), in_stream(rabbit)) as bookmark, other_client(rabbit) as other:
        await other.store_offset("events", "shop", 41)
        assert await bookmark.take() == 42
        assert await bookmark.store(100)
        assert await other.query_offset("events", "shop") == 99


def end_stream_connections(server: Rabbit) -> int:
    killing = "[exit(Pid, kill) || Pid <- Pids], length(Pids)"
    return int(server.evaluate(f"Pids = pg_local:get_members(rabbit_stream_connections), {killing}"))


async def test_a_connection_that_ended_is_made_again(rabbit: Rabbit) -> None:
    await make_stream(rabbit)
    async with opened(ServerOffsets(rabbit.stream_url, timeout=2.0), in_stream(rabbit)) as bookmark:
        await bookmark.take()
        assert await bookmark.store(5)
        assert await asyncio.to_thread(end_stream_connections, rabbit) >= 1
        await eventually(lambda: stored(bookmark, 6))
        assert await bookmark.take() == 6


async def test_a_connection_to_a_stream_server_that_ends_is_noticed_at_once(rabbit: Rabbit) -> None:
    """Not after the time that an answer may take: meanwhile nobody would read the stream."""
    await make_stream(rabbit)
    async with Proxy.to_tcp(rabbit.host, rabbit.stream_port) as proxy:
        url = rabbit.stream_url.replace(f":{rabbit.stream_port}/", f":{proxy.port}/")
        async with opened(ServerOffsets(url, timeout=600), in_stream(rabbit)) as bookmark, asyncio.timeout(20):
            await bookmark.take()
            proxy.black_hole()
            storing = asyncio.create_task(bookmark.store(1))
            client: Any = bookmark._client  # type: ignore[attr-defined]
            await eventually(lambda: client._waiters, message="an answer is waited for")
            proxy.cut()
            with pytest.raises(BrokerUnavailable, match="the connection was lost"):
                await storing
            proxy.resume()
            assert await bookmark.store(2)
            proxy.cut()
            await eventually(lambda: not proxy.connections)
            while not await stored(bookmark, 3):
                pass
            assert await bookmark.take() == 3


async def stored(bookmark: Bookmark, offset: int) -> bool:
    try:
        return await bookmark.store(offset)
    except BrokerUnavailable:
        return False


async def test_a_stream_server_that_does_not_answer(rabbit: Rabbit) -> None:
    await make_stream(rabbit)
    async with Proxy.to_tcp(rabbit.host, rabbit.stream_port) as proxy:
        url = rabbit.stream_url.replace(f":{rabbit.stream_port}/", f":{proxy.port}/")
        async with opened(ServerOffsets(url, timeout=0.3), in_stream(rabbit)) as bookmark:
            await bookmark.take()
            proxy.black_hole()
            with pytest.raises(BrokerUnavailable, match="no answer"):
                await bookmark.store(1)
            proxy.cut()
            proxy.resume()
            assert await bookmark.store(2)
    async with opened(ServerOffsets(url, timeout=0.3), in_stream(rabbit)) as bookmark:
        with pytest.raises(BrokerUnavailable):
            await bookmark.take()


async def test_a_stream_that_is_not_there_may_come(rabbit: Rabbit) -> None:
    async with opened(ServerOffsets(rabbit.stream_url), in_stream(rabbit)) as bookmark:
        with pytest.raises(BrokerUnavailable, match="StreamDoesNotExist"):
            await bookmark.take()
        await make_stream(rabbit)
        assert await bookmark.take() is None


async def test_what_a_person_must_change_is_final(rabbit: Rabbit) -> None:
    await make_stream(rabbit)
    where = rabbit.stream_url.partition("@")[2]
    wrong: list[tuple[ServerOffsets, Place]] = [
        (ServerOffsets(f"rabbitmq-stream://nobody:s3cr3t@{where}"), in_stream(rabbit)),
        (ServerOffsets(rabbit.stream_url), in_stream(rabbit)._replace(vhost="another")),
        (ServerOffsets(rabbit.stream_url), in_stream(rabbit)._replace(group="g" * 256)),
    ]
    for store, place in wrong:
        async with opened(store, place) as bookmark:
            with pytest.raises(BrokerRefused) as caught:
                await bookmark.take()
            assert "s3cr3t" not in f"{caught.value} {store!r}"


async def test_somebody_else_who_stores_under_this_name_shows(rabbit: Rabbit, monkeypatch: pytest.MonkeyPatch) -> None:
    await make_stream(rabbit)
    async with opened(ServerOffsets(rabbit.stream_url), in_stream(rabbit)) as bookmark, other_client(rabbit) as other:
        await bookmark.take()
        store: Any = bookmark._client.store_offset  # type: ignore[attr-defined]

        async def and_another(stream: str, reference: str, offset: int) -> None:
            await store(stream, reference, offset)
            await bookmark._client.query_offset(stream, reference)  # type: ignore[attr-defined] # ours has arrived
            await other.store_offset(stream, reference, 1000)
            await other.query_offset(stream, reference)

        monkeypatch.setattr(bookmark._client, "store_offset", and_another)  # type: ignore[attr-defined]
        with pytest.raises(BrokerUnavailable, match="somebody else"):
            await bookmark.store(5)
