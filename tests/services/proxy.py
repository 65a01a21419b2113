"""A proxy in this process between a client and its server, for faults of the network.

    async with Proxy.to_tcp("127.0.0.1", server.port) as proxy:
        connection = await server.at(proxy.host, proxy.port).connect()
        proxy.cut()          # every connection is reset
        proxy.black_hole()   # connections stay open, and new ones are taken, but no byte passes
        proxy.resume()       # what was held passes now, as retransmissions do when a network heals
        proxy.delay = 0.05   # seconds added to each piece that passes, in each direction

All but the entering and leaving is immediate and called from the event loop's thread.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType

from tests.services._homes import free_port

__all__ = ["Proxy"]

_CHUNK = 1 << 16
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with a timeout of 0: closing sends RST instead of FIN."""

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Proxy:
    """Forwards what it accepts at `host`, `port` to a server, over TCP or a Unix socket in a directory of its own.

    `sent` and `received` count the bytes passed on to the server and back, `accepted` the connections taken.
    For a Unix socket `host` is the directory and the file is named as Postgres names it (``.s.PGSQL.<port>``).
    """

    def __init__(self, connect: Callable[[], Awaitable[Stream]], port: int | None) -> None:
        self._connect = connect
        self._unix_port = port
        self._pairs: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self.host = "127.0.0.1"
        self.port = port or 0
        self.delay = 0.0
        self.sent = 0
        self.received = 0
        self.accepted = 0

    @classmethod
    def to_tcp(cls, host: str, port: int) -> Proxy:
        """A proxy on a free port of 127.0.0.1 to a TCP server."""
        return cls(lambda: asyncio.open_connection(host, port), None)

    @classmethod
    def to_unix(cls, directory: Path | str, port: int) -> Proxy:
        """A proxy on a Unix socket to the socket of a Postgres server."""
        return cls(lambda: asyncio.open_unix_connection(_socket_name(directory, port)), port)

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._pairs)

    async def __aenter__(self) -> Proxy:
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.refuse()
        tasks = list(self._pairs)
        self.cut()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._directory is not None:
            self._directory.cleanup()

    async def listen(self) -> None:
        """Accept connections (again), at the same address."""
        if self._server is not None:
            return
        if self._unix_port is None:
            # No port that the system gives to clients: while it refuses, one of them would connect to itself.
            self.port = self.port or free_port()
            self._server = await asyncio.start_server(self._serve, self.host, self.port)
            return
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="streamfw-proxy-")
            self.host = self._directory.name
        self._server = await asyncio.start_unix_server(self._serve, _socket_name(self.host, self._unix_port))

    async def refuse(self) -> None:
        """Refuse new connections, as a server that is down does; those that are open stay."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        if self._directory is not None:
            _unlink(_socket_name(self.host, self.port))
        await asyncio.sleep(0)  # the loop closes the socket at its next turn

    def cut(self) -> None:
        """Reset all connections, on both sides. (A Unix socket knows no reset: its ends see the end of the stream.)"""
        for task, writers in self._pairs.items():
            for writer in writers:
                _reset(writer)
            task.cancel()

    def black_hole(self) -> None:
        """Let no byte pass in either direction until `resume`; connections stay open and new ones are accepted."""
        self._flows.clear()

    def resume(self) -> None:
        """End the black hole."""
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.accepted += 1
        writers = self._pairs[task] = [writer]
        try:
            await self._flows.wait()
            upstream_reader, upstream_writer = await self._connect()
            writers.append(upstream_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(reader, upstream_writer, self._count_sent))
                both.create_task(self._pass_on(upstream_reader, writer, self._count_received))
        except (asyncio.CancelledError, OSError, ExceptionGroup):
            pass  # cut, by us or by an end: the other end sees it below
        finally:
            del self._pairs[task]
            for each in writers:
                each.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Callable[[int], None]
    ) -> None:
        while True:
            data = await reader.read(_CHUNK)
            if self.delay:
                await asyncio.sleep(self.delay)
            await self._flows.wait()
            if not data:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            count(len(data))
            writer.write(data)
            await writer.drain()

    def _count_sent(self, size: int) -> None:
        self.sent += size

    def _count_received(self, size: int) -> None:
        self.received += size


def _socket_name(directory: Path | str, port: int) -> str:
    return f"{directory}/.s.PGSQL.{port}"


def _unlink(name: str) -> None:
    Path(name).unlink(missing_ok=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    if raw is not None and raw.fileno() != -1 and raw.family != socket.AF_UNIX:  # its end may have reset it already
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
