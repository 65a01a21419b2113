"""A RabbitMQ server that answers from memory: no socket, no library at work; the fast lane and all above is the
broker's own.

It knows the little that is asked of it: it delivers what is prepared, within the prefetch, and reads from what is
written to it the last acknowledgement, and that there were publishes, which it confirms all at once.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

from streamfw.broker import Connection
from streamfw_rabbit import RabbitBroker, _content, _frames, _wire
from streamfw_rabbit.channel import Properties
from streamfw_rabbit.connection import RabbitConnection
from streamfw_rabbit.epochs import ConnectionOptions, Epochs
from streamfw_rabbit.fastlane import FastEpoch, LaneFactory
from streamfw_rabbit.publish import Publishing
from streamfw_rabbit.settings import Settings

__all__ = ["PreparedRabbit"]

PUBLISH = bytes((0, 60, 0, 40))
READ = 200  # messages that one read brings: some 64 KiB


class _Socket(asyncio.Transport):
    """The server, at the other end. `deliveries` are the frames of what it delivers."""

    def __init__(self, deliveries: list[bytes]) -> None:
        super().__init__()
        self.deliveries, self.sent, self.allowed = deliveries, 0, 0
        self.prefetch = 0
        self.epoch: FastEpoch | None = None
        self._loop = asyncio.get_running_loop()
        self._scheduled = self._aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data[7:11] == _wire.ACK:
            self.allow(int.from_bytes(data[-10:-2]))
        elif data[7:11] == PUBLISH:
            self._loop.call_soon(self._confirm)

    def allow(self, settled: int) -> None:
        """Deliver what the prefetch allows, with all up to `settled` acknowledged."""
        self.allowed = min(settled + self.prefetch, len(self.deliveries))
        if not self._scheduled and self.sent < self.allowed:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        some = self.deliveries[self.sent : min(self.allowed, self.sent + READ)]
        self.sent += len(some)
        self._feed(b"".join(some))
        self.allow(self.allowed - self.prefetch)

    def _confirm(self) -> None:
        assert self.epoch is not None
        for channel in self.epoch.channels.values():
            if channel.unconfirmed:
                self._feed(_frames.ack_frame(channel.number, channel.counters.publishes, True))

    def _feed(self, data: bytes) -> None:
        assert self.epoch is not None
        cast("asyncio.Protocol", self.epoch._protocol).data_received(data)

    def is_closing(self) -> bool:
        return self._aborted

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def abort(self) -> None:
        self._aborted = True


class _Library(SimpleNamespace):
    """What is asked of aiormq's connections and channels; each call is answered at once."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def basic_qos(self, prefetch_count: int) -> None:
        self.socket.prefetch = prefetch_count

    async def basic_cancel(self, consumer_tag: str) -> None: ...

    async def exchange_declare(self, name: str, **options: Any) -> None: ...

    async def basic_consume(self, queue: str, callback: object, **options: Any) -> None:
        self.socket.allow(0)


class _Epoch(FastEpoch):
    def library_channel(self, number: int, confirms: bool = False, kind: object = None) -> Any:
        return _Library(number=number, socket=self.writer.transport)

    @asynccontextmanager
    async def declarations(self, doing: str = "declaring") -> AsyncIterator[Any]:
        yield _Library()


def _epoch(socket: _Socket) -> _Epoch:
    """A connection to that server."""
    loop, factory, reader = asyncio.get_running_loop(), LaneFactory(), asyncio.StreamReader()
    factory.protocol = factory.make_protocol(reader, loop)
    factory.writer = factory.make_writer(socket, factory.protocol, reader)
    factory.protocol.connection_made(socket)
    library = _Library(
        connection_tune=SimpleNamespace(frame_max=131072, channel_max=0),
        server_properties={"version": "3.10.8"},
        closing=loop.create_future(),
        channels={},
    )
    socket.epoch = epoch = _Epoch(cast("Any", library), factory, number=1, where="nowhere", heartbeat=0)
    return epoch


class _Epochs(Epochs):
    def __init__(self, socket: _Socket) -> None:
        super().__init__(ConnectionOptions())
        self._socket = socket

    def start(self) -> None:
        self._current = _epoch(self._socket)


class _Connection(RabbitConnection):
    def __init__(self, settings: Settings, deliveries: list[bytes]) -> None:
        super().__init__(settings)
        consumers = _Socket(deliveries)
        self.consuming, self.publisher = _Epochs(consumers), _Epochs(_Socket([]))
        self.publishing = Publishing(self.publisher, self.consuming, settings)


class PreparedRabbit(RabbitBroker):
    """A broker with such a server, which delivers `count` messages to its one consumer. They are as the broker itself
    publishes them."""

    def __init__(self, count: int, body: bytes) -> None:
        super().__init__("amqp://nowhere", declare="off", heartbeat=0)
        self._deliveries = [_delivery(number, body) for number in range(1, count + 1)]

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Connection]:
        connection = _Connection(self._settings, self._deliveries)
        try:
            await connection.begin()
            yield connection
        finally:
            await connection.close()


def _delivery(tag: int, body: bytes) -> bytes:
    """The frames of a delivery on channel 1: those of a publish, with another method."""
    identity = f"01936b3c-8f52-7abc-9def-{tag:012x}"
    properties = Properties(delivery_mode=2, message_id=identity, timestamp=1_700_000_000)
    published = _frames.publish_frames(1, "", "", _content.encode(properties, tag), body, 131072, True)
    content = published[8 + struct.unpack_from(">I", published, 3)[0] :]
    method = _wire.DELIVER + b"\x03tag" + struct.pack(">QB", tag, False) + b"\x00\x06orders"
    return struct.pack(">BHI", 1, 1, len(method)) + method + b"\xce" + content
