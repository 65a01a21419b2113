"""Frames of AMQP 0-9-1, without I/O: a parser that takes out those that are many. (`_frames` has those we write.)

A frame is its type (1 method, 2 content header, 3 body, 8 heartbeat), the channel's number in 16 bits, the size of its
payload in 32, the payload, and 0xCE. A method's payload begins with its class and number, 16 bits each. A message is a
method frame (deliver, return), a header frame, and as many body frames as it takes; frames of other channels may
stand in between.

Theory of operation
    `Parser.feed` gets the bytes as they come. Of the channels that have a `Sink` it takes deliveries, returns and
    confirms. Every other frame is handed back whole, in order, for the library's own reader; a few of them are looked
    at in passing (`Watched`), because whoever supervises wants to know in this very call.

    Damage (a frame that does not end as it should, an unknown type, a size beyond `frame_max`) ends all guessing: from
    there on everything is handed back as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

from . import _content, _tables
from ._frames import OVERHEAD
from .channel import Properties, RawDelivery, Returned

__all__ = [
    "HEARTBEAT",
    "FastDelivery",
    "Parser",
    "Sink",
    "Watched",
    "connection_close",
    "methods",
]

HEARTBEAT: Final = b"\x08\0\0\0\0\0\0\xce"

CONNECTION_CLOSE, CONNECTION_CLOSE_OK, BLOCKED, UNBLOCKED = (bytes((0, 10, 0, n)) for n in (50, 51, 60, 61))
CHANNEL_CLOSE, CHANNEL_CLOSE_OK = bytes((0, 20, 0, 40)), bytes((0, 20, 0, 41))
CANCEL, RETURN, DELIVER, ACK, NACK = (bytes((0, 60, 0, n)) for n in (30, 50, 60, 80, 120))

_FRAME: Final = struct.Struct(">BHI")
_HEADER: Final = struct.Struct(">BHIIQ")  # a content header frame: class and weight, then the body's size
_TAG: Final = struct.Struct(">Q")
_frame_at = _FRAME.unpack_from
_header_at = _HEADER.unpack_from
_tag_at = _TAG.unpack_from


# Reading what the library writes, and what a handshake is answered with


def methods(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The channel and the method of each whole method frame in `data`, which begins with a frame."""
    at, end = 0, len(data)
    while end - at >= OVERHEAD:
        kind, channel, size = _frame_at(data, at)
        if kind == 1:
            yield channel, data[at + 7 : at + 11]
        at += OVERHEAD + size


def connection_close(data: bytes) -> tuple[int, str] | None:
    """Code and text, when a read begins with the server's Connection.Close."""
    if len(data) > 14 and data.startswith(b"\1\0\0") and data[7:11] == CONNECTION_CLOSE:
        return _code_and_text(data[11:])
    return None


def _code_and_text(arguments: bytes) -> tuple[int, str]:
    return arguments[0] << 8 | arguments[1], _text(arguments, 2)


def _text(data: bytes, at: int) -> str:
    return data[at + 1 : at + 1 + data[at]].decode("utf-8", "replace")


# Parsing


class FastDelivery(RawDelivery):
    """Slices of the frames, read when asked for: the method from the consumer tag on, and the properties."""

    __slots__ = ("_method", "_properties", "body", "tag")
    tag: int
    body: bytes

    def __init__(self, tag: int, method: bytes, properties: bytes, body: bytes) -> None:
        self.tag = tag
        self.body = body
        self._method = method
        self._properties = properties

    # The method: consumer tag, delivery tag in 64 bits, redelivered in 8, exchange, routing key.

    @property
    def consumer_tag(self) -> str:
        method = self._method
        return method[1 : 1 + method[0]].decode()

    @property
    def redelivered(self) -> bool:
        method = self._method
        return method[9 + method[0]] & 1 != 0

    @property
    def exchange(self) -> str:
        method = self._method
        at = 10 + method[0]
        return method[at + 1 : at + 1 + method[at]].decode()

    @property
    def routing_key(self) -> str:
        method = self._method
        at = 10 + method[0]
        at += 1 + method[at]
        return method[at + 1 : at + 1 + method[at]].decode()

    @property
    def properties(self) -> Properties:
        return _content.decode(self._properties)

    def __repr__(self) -> str:
        return f"FastDelivery(tag={self.tag}, {len(self.body)} bytes)"


class Sink:
    """One channel's place in the parser: what is half read, and where the rest goes.

    `confirmed` is called with tag, multiple, and whether it is an ack; `returned` with the return and the sequence
    number that the message carries (None: none of ours).
    """

    __slots__ = ("confirmed", "got", "inbox", "method", "number", "parts", "properties", "returned", "size", "want")

    def __init__(
        self,
        number: int,
        confirmed: Callable[[int, bool, bool], None],
        returned: Callable[[Returned, int | None], None],
    ) -> None:
        self.number = number
        self.inbox: list[RawDelivery] = []
        self.confirmed = confirmed
        self.returned = returned
        self.want: bytes = b""  # the method whose content is being read; empty: none
        self.method = b""
        self.properties = b""
        self.size = self.got = 0
        self.parts: list[bytes] = []


class Watched(NamedTuple):
    """A frame that was seen in passing, and handed back. `text` is a close's, a cancel's consumer tag, or a reason."""

    method: bytes
    channel: int
    code: int = 0
    text: str = ""


Watch: TypeAlias = Callable[[Watched], None]
_WATCHED: Final = frozenset({CHANNEL_CLOSE, CHANNEL_CLOSE_OK, CANCEL, CONNECTION_CLOSE, BLOCKED, UNBLOCKED})


class Parser:
    """See the head of this module. `sinks` are by channel number; `touched` are those whose inbox was empty before
    deliveries came, for whoever feeds to look at and clear."""

    def __init__(self, watch: Watch) -> None:
        self.sinks: dict[int, Sink] = {}
        self.touched: list[Sink] = []
        self.damage = ""
        """What is wrong with the stream; empty: nothing."""
        self.frame_max = 0
        """The largest frame agreed on, in bytes; 0: not known, or not limited. Sizes far beyond it are damage."""
        self._watch = watch
        self._held: list[bytes] = []  # the pieces of an unfinished frame
        self._held_size = 0
        self._needed = 0

    def feed(self, data: bytes) -> bytes:
        """Parse; answers what is for the library, whole frames in order."""
        if self.damage:
            return data
        if self._held:
            # Joined once, when the frame is complete: a large one comes in many pieces.
            self._held.append(data)
            self._held_size += len(data)
            if self._held_size < self._needed:
                return b""
            data = b"".join(self._held)
            self._held.clear()
        return self._parsed(data)

    def _parsed(self, data: bytes) -> bytes:
        at, end = 0, len(data)
        sinks = self.sinks
        others: list[bytes] = []
        while end - at >= OVERHEAD:
            kind, channel, size = _frame_at(data, at)
            last = at + 7 + size  # where 0xCE stands
            if last >= end or data[last] != 0xCE:
                if self._is_damaged(data, at, kind, size):
                    return b"".join(others) + data[at:]
                break
            sink = sinks.get(channel)
            if sink is not None:
                if kind == 1 and data[at + 7 : at + 11] == DELIVER:
                    after = self._delivered(sink, data, at, last, end)
                    if after:
                        at = after
                        continue
                if self._took(sink, kind, data, at, last):
                    at = last + 1
                    continue
            if kind == 1 and data[at + 7 : at + 11] in _WATCHED:
                self._look(channel, data[at + 7 : at + 11], data[at + 11 : last])
            others.append(data[at : last + 1])
            at = last + 1
        if at < end:
            self._hold(data[at:] if at else data)
        return others[0] if len(others) == 1 else b"".join(others)

    def _delivered(self, sink: Sink, data: bytes, at: int, last: int, end: int) -> int:
        """The common case in a straight line: a message whose frames are all here, with its body in one. Answers where
        the next frame begins, or 0 when it is not so."""
        head = last + 1
        if end - head < 23:
            return 0
        kind, channel, size, _, total = _header_at(data, head)
        head_last = head + 7 + size
        if kind != 2 or channel != sink.number or end - head_last <= OVERHEAD or data[head_last] != 0xCE or size < 14:
            return 0
        kind, channel, size = _frame_at(data, head_last + 1)
        start = head_last + OVERHEAD
        body_last = start + size
        if kind != 3 or channel != sink.number or size != total or body_last >= end or data[body_last] != 0xCE:
            return 0
        method = data[at + 11 : last]
        inbox = sink.inbox
        if not inbox:
            self.touched.append(sink)
        tag = _tag_at(method, 1 + method[0])[0]
        inbox.append(FastDelivery(tag, method, data[head + 19 : head_last], data[start:body_last]))
        sink.want = b""
        return int(body_last + 1)

    def _took(self, sink: Sink, kind: int, data: bytes, at: int, last: int) -> bool:
        """Whether the frame was one of ours."""
        if kind == 1:
            method = data[at + 7 : at + 11]
            if method in (ACK, NACK):
                sink.confirmed(_tag_at(data, at + 11)[0], data[at + 19] & 1 != 0, method == ACK)
                return True
            if method in (DELIVER, RETURN):
                sink.want = method
                sink.method = data[at + 11 : last]
                sink.parts = []
                sink.got = sink.size = 0
                return True
            return False
        if not sink.want:
            return False
        if kind == 2:
            sink.size = _tag_at(data, at + 11)[0]
            sink.properties = data[at + 19 : last]
        elif kind == 3:
            sink.parts.append(data[at + 7 : last])
            sink.got += last - at - 7
        else:
            return False
        if sink.got >= sink.size:
            self._complete(sink)
        return True

    def _complete(self, sink: Sink) -> None:
        body = sink.parts[0] if len(sink.parts) == 1 else b"".join(sink.parts)
        method, sink.method = sink.method, b""
        want, sink.want = sink.want, b""
        sink.parts = []
        if want == DELIVER:
            if not sink.inbox:
                self.touched.append(sink)
            sink.inbox.append(FastDelivery(_tag_at(method, 1 + method[0])[0], method, sink.properties, body))
        else:
            sequence = _tables.sequence(_content.header_table(sink.properties))
            sink.returned(Returned(*_code_and_text(method)), sequence)

    def _look(self, channel: int, method: bytes, arguments: bytes) -> None:
        if method in (CHANNEL_CLOSE, CONNECTION_CLOSE):
            self._watch(Watched(method, channel, *_code_and_text(arguments)))
        elif method in (CANCEL, BLOCKED):
            self._watch(Watched(method, channel, 0, _text(arguments, 0)))
        else:
            self._watch(Watched(method, channel))

    def _is_damaged(self, data: bytes, at: int, kind: int, size: int) -> bool:
        if kind not in (1, 2, 3, 8):
            self.damage = f"a frame of unknown type {kind}"
        elif self.frame_max and size > 16 * self.frame_max:
            self.damage = f"a frame of {size} bytes, where {self.frame_max} were agreed on"
        elif at + 7 + size < len(data):
            self.damage = "a frame without its end"
        return bool(self.damage)

    def _hold(self, rest: bytes) -> None:
        self._held.append(rest)
        self._held_size = len(rest)
        self._needed = OVERHEAD
        if len(rest) >= OVERHEAD:
            self._needed = OVERHEAD + _frame_at(rest, 0)[2]
