"""The proxy's faults, seen from both its ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from tests.helpers import eventually
from tests.services.postgres import Postgres
from tests.services.proxy import Proxy, Stream


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    """A proxy to a server that sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with Proxy.to_tcp(*server.sockets[0].getsockname()) as made:
        yield made
    server.close()
    await server.wait_closed()


async def connect(proxy: Proxy) -> Stream:
    return await asyncio.open_connection(proxy.host, proxy.port)


async def test_bytes_pass_and_are_counted(proxy: Proxy) -> None:
    reader, writer = await connect(proxy)
    sent = bytes(range(256)) * 4096
    writer.write(sent)
    assert await reader.readexactly(len(sent)) == sent
    assert (proxy.sent, proxy.received, proxy.accepted, proxy.connections) == (len(sent), len(sent), 1, 1)
    writer.write_eof()
    assert await reader.read() == b""
    await eventually(lambda: proxy.connections == 0)
    writer.close()


async def test_a_cut_resets_every_connection_and_new_ones_pass(proxy: Proxy) -> None:
    streams = [await connect(proxy) for _ in range(3)]
    await eventually(lambda: proxy.connections == 3)
    for reader, writer in streams:
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
    proxy.cut()
    for reader, writer in streams:
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
    reader, writer = await connect(proxy)
    writer.write(b"again")
    assert await reader.readexactly(5) == b"again"
    writer.close()


async def test_in_a_black_hole_connections_live_and_nothing_passes(proxy: Proxy) -> None:
    reader, writer = await connect(proxy)
    writer.write(b"before")
    assert await reader.readexactly(6) == b"before"
    proxy.black_hole()
    writer.write(b"during")
    answer = asyncio.create_task(reader.readexactly(6))
    late_reader, late_writer = await connect(proxy)  # is taken
    late_writer.write(b"late")
    late = asyncio.create_task(late_reader.readexactly(4))
    await eventually(lambda: proxy.accepted == 2)
    done, _ = await asyncio.wait({answer, late}, timeout=0.1)
    assert not done
    assert (proxy.sent, proxy.received) == (6, 6)
    proxy.resume()
    assert await answer == b"during"
    assert await late == b"late"
    for each in (writer, late_writer):
        each.close()


async def test_a_black_hole_swallows_the_end_of_a_connection_too(proxy: Proxy) -> None:
    reader, writer = await connect(proxy)
    writer.write(b"x")
    await reader.readexactly(1)
    proxy.black_hole()
    writer.write_eof()
    ending = asyncio.create_task(reader.read())
    done, _ = await asyncio.wait({ending}, timeout=0.1)
    assert not done
    proxy.resume()
    assert await ending == b""
    writer.close()


async def test_a_delay_holds_each_direction(proxy: Proxy) -> None:
    reader, writer = await connect(proxy)
    proxy.delay = 0.05
    clock = asyncio.get_running_loop()
    start = clock.time()
    writer.write(b"x")
    assert await reader.readexactly(1) == b"x"
    assert clock.time() - start > 1.5 * proxy.delay  # there and back; uvloop's clock counts milliseconds
    writer.close()


async def test_refused_and_accepted_again_at_the_same_port(proxy: Proxy) -> None:
    port = proxy.port
    kept_reader, kept_writer = await connect(proxy)
    await proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await connect(proxy)
    kept_writer.write(b"kept")
    assert await kept_reader.readexactly(4) == b"kept"
    await proxy.listen()
    assert proxy.port == port
    _, writer = await connect(proxy)
    for each in (writer, kept_writer):
        each.close()


async def test_a_server_that_is_gone_ends_the_connection(unused_tcp_port: int) -> None:
    async with Proxy.to_tcp("127.0.0.1", unused_tcp_port) as proxy:
        reader, writer = await connect(proxy)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("way", ["tcp", "unix"])
async def test_postgres_behind_it(database: Postgres, way: str) -> None:
    server = database.over_tcp() if way == "tcp" else database.over_socket()
    make = Proxy.to_tcp if way == "tcp" else Proxy.to_unix
    async with make(server.host, server.port) as proxy:
        connection = await server.at(proxy.host, proxy.port).connect()
        assert await connection.fetchval("select 1") == 1
        assert proxy.sent > 0
        query = asyncio.create_task(connection.fetchval("select pg_sleep(30)"))
        await eventually(lambda: _sleeps(database))
        proxy.cut()
        with pytest.raises((asyncpg.ConnectionDoesNotExistError, ConnectionResetError)):
            await query
        await proxy.refuse()
        with pytest.raises(OSError):
            await server.at(proxy.host, proxy.port).connect()
        await proxy.listen()
        again = await server.at(proxy.host, proxy.port).connect()
        assert await again.fetchval("select 2") == 2
        await again.close()


async def _sleeps(database: Postgres) -> bool:
    connection = await database.connect()
    try:
        return bool(
            await connection.fetchval("select exists (select from pg_stat_activity where wait_event = 'PgSleep')")
        )
    finally:
        await connection.close()
