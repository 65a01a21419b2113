"""The fast lane: the library keeps handshake, authentication, calls and closes; what is many goes past it.

Theory of operation
    aiormq lets one make its socket (`TransportFactory`). `_LaneProtocol` is that socket's protocol: each read runs
    through `_wire.Parser`, which takes deliveries, returns and confirms of our channels, and everything else is fed on
    to the library's reader. Settlements and publishes are written to the socket directly, once a turn of the loop.

    Three things follow from sharing a socket with somebody else:

    - The library counts its own frames as signs of life. On a busy connection it may see none for long, so a
      heartbeat frame is put in for it, at most one a second, at a border between frames.
    - A frame of ours behind a Channel.Close or CloseOk is an error of the *connection* (504). The library closes
      channels by itself, and shows it late. So `_LaneWriter` reads what the library writes, and the channel ends at
      that very place in the stream. What we have buffered goes out before anything the library writes.
    - A channel's `Sink` is there before its Channel.Open and goes with its CloseOk: then a number can be used again.
"""

from __future__ import annotations

import asyncio
import inspect
import struct
from typing import Any, ClassVar, Final

import aiormq

from . import _wire
from ._base import BaseChannel, told
from ._epoch import Epoch
from ._transport import SocketFactory, SocketProtocol
from .channel import Closed, RawDelivery, Transport

__all__ = ["FastChannel", "FastEpoch", "LaneFactory", "is_available"]

_HEARTBEAT_EVERY: Final = 1.0


def is_available() -> bool:
    """Whether this aiormq lets us make its socket."""
    return "transport_factory" in inspect.signature(aiormq.Connection.__init__).parameters


class _LaneProtocol(SocketProtocol):
    """The reading half. `lane` is set when the handshake is over; until then nothing is ours."""

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, loop)
        self.lane: FastEpoch | None = None
        self.parser = _wire.Parser(self._saw)
        self._fed_at = self.last_data
        self.heartbeats = 0
        """How many were put in for the library."""

    def _saw(self, frame: _wire.Watched) -> None:
        if self.lane is not None:
            self.lane.saw(frame)

    def received(self, data: bytes) -> None:
        parser = self.parser
        try:
            others = parser.feed(data)
        except (IndexError, struct.error, UnicodeDecodeError) as error:
            parser.damage = f"a malformed frame: {error}"
            others = b""
        if others:
            self._fed_at = self.last_data
            self.reader.feed_data(others)
        elif self.last_data - self._fed_at > _HEARTBEAT_EVERY and not (parser.damage or self.greeting):
            self._fed_at = self.last_data
            self.heartbeats += 1
            self.reader.feed_data(_wire.HEARTBEAT)
        if self.lane is not None:
            self.lane.was_read(parser)


class _LaneWriter(asyncio.StreamWriter):
    """The writing half, for the library. Each of its writes is whole frames."""

    lane: FastEpoch | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.lane is not None:
            self.lane.library_writes(bytes(data))
        super().write(data)


class LaneFactory(SocketFactory):
    """Makes the socket of a connection with a lane."""

    def make_protocol(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> SocketProtocol:
        return _LaneProtocol(reader, loop)

    def make_writer(
        self, transport: asyncio.Transport, protocol: Any, reader: asyncio.StreamReader
    ) -> asyncio.StreamWriter:
        return _LaneWriter(transport, protocol, reader, asyncio.get_running_loop())


class FastChannel(BaseChannel):
    transport: ClassVar[Transport] = "fast"

    def __init__(self, connection: FastEpoch, number: int, confirms: bool) -> None:
        super().__init__(connection, connection.library_channel(number, confirms), confirms)
        self._lane = connection
        self.sink = _wire.Sink(number, self._was_confirmed, self._was_returned)

    @property
    def inbox(self) -> list[RawDelivery]:
        return self.sink.inbox

    def take(self) -> list[RawDelivery]:
        sink = self.sink
        taken = sink.inbox
        sink.inbox = []
        self.counters.deliveries += len(taken)
        return taken

    def arrived(self) -> None:
        if self.closed is None:
            told(self.on_delivery)

    def _was_confirmed(self, tag: int, multiple: bool, ok: bool) -> None:
        self._confirmed(tag, multiple, ok)
        if self.on_answers is not None:
            self._lane.answered.add(self)

    def _send(self, data: bytes) -> None:
        self._lane.write(data, self)

    async def _flushed(self) -> None:
        await self._lane.flush()


class FastEpoch(Epoch):
    transport: ClassVar[Transport] = "fast"

    def __init__(self, connection: aiormq.Connection, factory: SocketFactory, **options: Any) -> None:
        super().__init__(connection, factory, **options)
        protocol, writer = self._protocol, self.writer
        assert isinstance(protocol, _LaneProtocol)
        assert isinstance(writer, _LaneWriter)
        self.answered: set[FastChannel] = set()
        """Channels that got confirms in this read."""
        self._parser = protocol.parser
        self._parser.frame_max = self.frame_max
        self._out: list[bytes] = []
        self._writing: set[BaseChannel] = set()
        self._scheduled = False
        protocol.on_lost = self.lost
        protocol.lane = self
        writer.lane = self
        connection.closing.add_done_callback(self._library_closed)

    def make_channel(self, number: int, confirms: bool) -> FastChannel:
        channel = FastChannel(self, number, confirms)
        self._parser.sinks[number] = channel.sink
        return channel

    def is_free(self, number: int) -> bool:
        return super().is_free(number) and number not in self._parser.sinks

    # What comes

    def was_read(self, parser: _wire.Parser) -> None:
        """A read has been parsed."""
        if parser.touched:
            touched, parser.touched = parser.touched, []
            for sink in touched:
                channel = self.channels.get(sink.number)
                if isinstance(channel, FastChannel):
                    channel.arrived()
        if self.answered:
            answered, self.answered = self.answered, set()
            for channel in answered:
                told(channel.on_answers)
        if parser.damage and self.closed is None:
            self.damaged = True
            self.end(Closed("lost", 0, f"the server's stream is damaged: {parser.damage}"))
            self._protocol.abort()

    def saw(self, frame: _wire.Watched) -> None:
        """A frame on its way to the library."""
        channel = self.channels.get(frame.channel)
        if frame.method == _wire.CONNECTION_CLOSE:
            self.end(Closed("connection", frame.code, frame.text))
        elif frame.method == _wire.BLOCKED:
            self.set_blocked(True, frame.text)
        elif frame.method == _wire.UNBLOCKED:
            self.set_blocked(False)
        elif frame.method == _wire.CHANNEL_CLOSE_OK:
            self._parser.sinks.pop(frame.channel, None)
            self._channel_ended(frame.channel, Closed("local"))
        elif frame.method == _wire.CHANNEL_CLOSE:
            self._channel_ended(frame.channel, Closed("channel", frame.code, frame.text))
        elif frame.method == _wire.CANCEL and channel is not None:
            told(channel.on_cancelled, frame.text)

    def _channel_ended(self, number: int, closed: Closed) -> None:
        channel = self.channels.pop(number, None)
        if channel is not None:
            self._flush()  # what stands in `_out` of it is before its end, and nothing of it may be written behind
            channel._ended(closed)

    # What goes

    def write(self, data: bytes, channel: BaseChannel) -> None:
        self._out.append(data)
        self._writing.add(channel)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        # Never put off beyond this turn, however full the socket is: what stays here could end up behind a close.
        # Prefetch and the publishers' window bound it.
        self._scheduled = False
        if not self._out:
            return
        out, self._out = self._out, []
        if self.closed is None:
            asyncio.StreamWriter.write(self.writer, out[0] if len(out) == 1 else b"".join(out))
            for channel in self._writing:
                channel.counters.writes += 1
        self._writing.clear()

    def library_writes(self, data: bytes) -> None:
        """What the library is about to write, see the head of the module."""
        if self.closed is not None:
            return
        self._flush()
        for number, method in _wire.methods(data):
            if method in (_wire.CHANNEL_CLOSE, _wire.CHANNEL_CLOSE_OK):
                self._channel_ended(number, Closed("local"))
                if method == _wire.CHANNEL_CLOSE_OK:
                    self._parser.sinks.pop(number, None)
            elif method in (_wire.CONNECTION_CLOSE, _wire.CONNECTION_CLOSE_OK):
                self.lost("the library closed the connection")

    async def flush(self) -> None:
        self._flush()
        draining = self._loop.create_task(self.writer.drain())
        try:
            await asyncio.wait((draining, self.ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()
            draining.add_done_callback(lambda task: task.cancelled() or task.exception())

    # The end

    def _library_closed(self, closing: asyncio.Future[Any]) -> None:
        """Only for an end that nothing on the wire has told of."""
        if not closing.cancelled():
            closing.exception()
        self.lost("the library closed the connection")

    def end(self, closed: Closed) -> None:
        super().end(closed)
        self._out.clear()

    def look(self) -> None:
        """All is told as it comes."""
