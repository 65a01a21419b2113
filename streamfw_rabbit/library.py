"""The library channel: aiormq's connection and reader, with a frame table of our own.

aiormq's reader of the *connection* awaits ``channel.frames.put`` for every frame of a channel. `_Frames` stands in for
that queue: it takes deliveries, returns and confirms there and then, and passes on what answers calls and closes. So
no task is made a delivery, and none wakes up for one.

It is what ``transport="aiormq"`` asks for: the fallback for the fast lane, and in the tests what that is compared with.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, cast

import aiormq
from aiormq.abc import ChannelFrame
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from ._base import BaseChannel, told
from ._epoch import Epoch, WriteQueue
from ._reading import DamagedHeader, properties_of
from ._tables import SEQUENCE_HEADER
from .channel import Closed, Properties, RawDelivery, Returned, Transport
from .errors import reason

__all__ = ["LibraryChannel", "LibraryDelivery", "LibraryEpoch"]


class LibraryDelivery(RawDelivery):
    """pamqp's decoded frames, read as we name things."""

    __slots__ = ("_frame", "_header", "body", "tag")
    tag: int
    body: bytes

    def __init__(self, tag: int, frame: commands.Basic.Deliver, header: ContentHeader, body: bytes) -> None:
        self.tag = tag
        self.body = body
        self._frame = frame
        self._header = header

    @property
    def consumer_tag(self) -> str:
        return self._frame.consumer_tag or ""

    @property
    def redelivered(self) -> bool:
        return bool(self._frame.redelivered)

    @property
    def exchange(self) -> str:
        return self._frame.exchange or ""

    @property
    def routing_key(self) -> str:
        return self._frame.routing_key or ""

    @property
    def properties(self) -> Properties:
        return properties_of(self._header)

    def __repr__(self) -> str:
        return f"LibraryDelivery(tag={self.tag}, {len(self.body)} bytes)"


class _Frames(asyncio.Queue[Any]):
    """See the head of the module. It stays a queue, unbounded, because the library's channel takes the rest from it.

    The connection's reader awaits `put`: what blocks or raises here would stop, or end, the connection.
    """

    def __init__(self, channel: LibraryChannel) -> None:
        super().__init__()
        self._channel = channel
        self._want: commands.Basic.Deliver | commands.Basic.Return | None = None
        self._header: ContentHeader | None = None
        self._parts: list[bytes] = []
        self._got = 0

    async def put(self, item: tuple[int, Any]) -> None:
        frame = item[1]
        kind = type(frame)
        if kind is ContentBody and self._want is not None:
            self._body(frame.value or b"")
        elif (kind is ContentHeader or kind is DamagedHeader) and self._want is not None:
            self._head(frame)
        elif kind is commands.Basic.Deliver or kind is commands.Basic.Return:
            self._want = frame
        elif kind is commands.Basic.Ack or kind is commands.Basic.Nack:
            self._channel.was_confirmed(frame.delivery_tag, bool(frame.multiple), kind is commands.Basic.Ack)
        else:
            self._pass(frame, item)

    def _pass(self, frame: Any, item: tuple[int, Any]) -> None:
        if type(frame) is commands.Channel.Close:
            self._channel._ended(Closed("channel", frame.reply_code or 0, frame.reply_text or ""))
        elif type(frame) is commands.Basic.Cancel:
            told(self._channel.on_cancelled, frame.consumer_tag or "")
        self.put_nowait(item)

    def _head(self, header: ContentHeader) -> None:
        self._header = header
        self._parts = []
        self._got = 0
        if not header.body_size:
            self._complete(b"")

    def _body(self, part: bytes) -> None:
        header = self._header
        assert header is not None
        self._parts.append(part)
        self._got += len(part)
        if self._got >= header.body_size:
            self._complete(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))

    def _complete(self, body: bytes) -> None:
        frame, header, self._want, self._header = self._want, self._header, None, None
        assert header is not None
        if isinstance(frame, commands.Basic.Deliver):
            self._channel.was_delivered(LibraryDelivery(frame.delivery_tag or 0, frame, header, body))
        elif frame is not None:
            sequence = (header.properties.headers or {}).get(SEQUENCE_HEADER)
            returned = Returned(frame.reply_code or 0, frame.reply_text or "")
            self._channel._was_returned(returned, sequence if isinstance(sequence, int) else None)


class LibraryChannel(BaseChannel):
    transport: ClassVar[Transport] = "aiormq"

    def __init__(self, connection: LibraryEpoch, number: int, confirms: bool) -> None:
        library = connection.library_channel(number, confirms)
        super().__init__(connection, library, confirms)
        # Its reader task is made, but has not run: nobody waits on the old queue yet. Later it would hang.
        library.frames = _Frames(self)
        self._queue = WriteQueue(connection.library.write_queue, self._shut)
        library.write_queue = cast("asyncio.Queue[ChannelFrame]", self._queue)
        self._inbox: list[RawDelivery] = []
        self._out: list[bytes] = []
        self._flushing: asyncio.Task[None] | None = None
        self._scheduled = False
        self._told_answers = False

    @property
    def inbox(self) -> list[RawDelivery]:
        return self._inbox

    def take(self) -> list[RawDelivery]:
        taken, self._inbox = self._inbox, []
        return taken

    # What comes

    def was_delivered(self, delivery: LibraryDelivery) -> None:
        self.counters.deliveries += 1
        inbox = self._inbox
        inbox.append(delivery)
        if len(inbox) == 1 and self.closed is None:
            told(self.on_delivery)

    def was_confirmed(self, tag: int, multiple: bool, ok: bool) -> None:
        self._confirmed(tag, multiple, ok)
        if self.on_answers is not None and not self._told_answers:
            self._told_answers = True
            self._loop.call_soon(self._tell_answers)

    def _tell_answers(self) -> None:
        self._told_answers = False
        told(self.on_answers)

    # What goes: one entry of the library's queue a turn. It holds 10, and an 11th has to wait.

    def _send(self, data: bytes) -> None:
        self._out.append(data)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self.closed is not None or not self._out:
            self._out.clear()
            self._scheduled = False
            return
        if self._confirms:
            self._connection.look()  # the server says that it blocks only after a publish
        try:
            self._queue.put_nowait(ChannelFrame(b"".join(self._out), False))
        except asyncio.QueueFull:
            # Not in the next turn again: the server may not read for long, and this would spin.
            self._flushing = self._loop.create_task(self._flush_slowly())
            return
        self.counters.writes += 1
        self._out.clear()
        self._scheduled = False

    async def _flush_slowly(self) -> None:
        # `_scheduled` stays true, so nobody else writes and the order holds.
        while self._out and self.closed is None:
            data = b"".join(self._out)
            self._out.clear()
            self.counters.writes += 1
            await self._queue.put(ChannelFrame(data, False))
        self._scheduled = False

    async def _flushed(self) -> None:
        if self._flushing is not None and not self._flushing.done():
            await asyncio.wait({self._flushing})
        if self._scheduled:
            self._flush()
        if self._flushing is not None and not self._flushing.done():
            await asyncio.wait({self._flushing})
        draining = self._loop.create_task(self._drained())
        try:
            await asyncio.wait((draining, self._gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()

    async def _drained(self) -> None:
        """Everything before this in the library's queue has left."""
        drained: asyncio.Future[None] = self._loop.create_future()
        await self._queue.put(ChannelFrame(b"", False, drained))
        await drained

    # The end

    def _shut(self) -> None:
        """The library writes a close now."""
        self._ended(Closed("local"))

    def _ended(self, closed: Closed) -> None:
        super()._ended(closed)
        self._out.clear()
        if self._flushing is not None:
            self._flushing.cancel()
        self._connection.forget(self.number, self)


class LibraryEpoch(Epoch):
    transport: ClassVar[Transport] = "aiormq"
    _backstop: asyncio.TimerHandle | None = None

    def __init__(self, connection: aiormq.Connection, *arguments: Any, **options: Any) -> None:
        super().__init__(connection, *arguments, **options)
        self._protocol.on_lost = self._socket_lost
        connection.closing.add_done_callback(self._library_closed)

    def make_channel(self, number: int, confirms: bool) -> LibraryChannel:
        return LibraryChannel(self, number, confirms)

    def _library_closed(self, closing: asyncio.Future[Any]) -> None:
        if closing.cancelled():
            self.lost("the library closed the connection")
            return
        error = closing.exception()
        if error is None or isinstance(error, asyncio.CancelledError):
            self.lost("the library closed the connection")  # also of a peer that fell silent
        else:
            self.end(reason(error))

    def _socket_lost(self, text: str) -> None:
        """The library may still have a close to read, which says more. It does so at once."""
        if self._backstop is None:
            self._backstop = self._loop.call_later(0.5, self.lost, text)

    def end(self, closed: Closed) -> None:
        super().end(closed)
        if self._backstop is not None:
            self._backstop.cancel()

    def look(self) -> None:
        """The library shows a blocked connection only by `ready`, which waits while it is. It returns without waiting
        when it is not, so it can be asked."""
        ready = self.library.ready()
        try:
            ready.send(None)
        except StopIteration:
            self.set_blocked(False)
        else:
            ready.close()
            self.set_blocked(True, "the server blocks publishers")
