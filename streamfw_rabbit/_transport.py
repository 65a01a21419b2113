"""The socket under an aiormq connection, made by us: so we know when data came, why it ended, and can abort it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, cast

from aiormq.connection import TransportFactory
from yarl import URL

from . import _wire
from ._base import told

__all__ = ["SocketFactory", "SocketProtocol"]


class SocketProtocol(asyncio.StreamReaderProtocol):
    """asyncio's own, with an eye on it.

    It stays a `StreamReaderProtocol`: the private half that `StreamWriter.drain` and `wait_closed` need is there.
    """

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, loop=loop)
        self.reader = reader  # the parent keeps it weakly
        self.loop = loop
        self.transport: asyncio.Transport | None = None
        self.last_data = loop.time()
        self.greeting = True
        """The handshake goes on."""
        self.refusal: tuple[int, str] | None = None
        """Code and text, when the server answered the handshake with a close. The library does not always tell."""
        self.on_lost: Callable[[str], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport = cast("asyncio.Transport", transport)
        # A drain waits until all has left, not until little is left. Not high=0: asyncio's TLS would never resume.
        self.transport.set_write_buffer_limits(high=1, low=0)

    def data_received(self, data: bytes) -> None:
        self.last_data = self.loop.time()
        if self.greeting:
            self.refusal = _wire.connection_close(data) or self.refusal
        self.received(data)

    def received(self, data: bytes) -> None:
        super().data_received(data)

    def eof_received(self) -> bool | None:
        told(self.on_lost, "the server closed the socket")
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        told(self.on_lost, f"{type(exc).__name__}: {exc}" if exc else "the socket was closed")
        super().connection_lost(exc)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class SocketFactory(TransportFactory):
    """One for each connection. `open` makes the socket, and aiormq gets it when it asks.

    Before, not within: aiormq logs an error for each attempt that fails, and tells of it by another exception.
    """

    def __init__(self) -> None:
        self.protocol: SocketProtocol | None = None
        self.writer: asyncio.StreamWriter | None = None

    def make_protocol(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> SocketProtocol:
        return SocketProtocol(reader, loop)

    def make_writer(
        self, transport: asyncio.Transport, protocol: Any, reader: asyncio.StreamReader
    ) -> asyncio.StreamWriter:
        return asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())

    async def open(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        """Raises `OSError`, of which `ssl.SSLError` is one."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        transport, protocol = await loop.create_connection(
            lambda: self.make_protocol(reader, loop), host, port, ssl=tls
        )
        self.protocol = protocol
        self.writer = self.make_writer(transport, protocol, reader)

    async def create(self, url: URL, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert self.protocol is not None
        assert self.writer is not None
        return self.protocol.reader, self.writer
