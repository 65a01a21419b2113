"""The frames of AMQP 0-9-1 that we write, without I/O. `_wire` says what a frame is, and reads them."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

from . import _content, _tables
from .channel import Properties

__all__ = [
    "END",
    "OVERHEAD",
    "DoesNotFit",
    "ack_frame",
    "fits",
    "nack_frame",
    "plain_frames",
    "publish_frames",
    "reject_frame",
]

END: Final = b"\xce"
# A frame has eight bytes beside its payload.
OVERHEAD: Final = 8
# What a content header has beside the properties: class, weight, the body's size.
_FIXED: Final = 12

_FRAME: Final = struct.Struct(">BHI")
_SETTLE: Final = struct.Struct(">BHIHHQBB")
_CONTENT: Final = struct.Struct(">BHIHHQ")


class DoesNotFit(ValueError):
    """Properties and headers that are larger than a frame, by `over` bytes."""

    def __init__(self, size: int, room: int) -> None:
        super().__init__(
            f"properties and headers of {size} bytes: the server takes at most {room} (frame_max of the connection); "
            f"put what is large into the body"
        )
        self.over = size - room


def fits(properties: bytes, frame_max: int) -> bool:
    """Whether encoded properties fit into a frame, which their content header is."""
    return _FIXED + len(properties) <= frame_max - OVERHEAD


def ack_frame(channel: int, tag: int, multiple: bool) -> bytes:
    return _SETTLE.pack(1, channel, 13, 60, 80, _checked(tag), multiple, 0xCE)


def nack_frame(channel: int, tag: int, multiple: bool, requeue: bool) -> bytes:
    return _SETTLE.pack(1, channel, 13, 60, 120, _checked(tag), multiple | requeue << 1, 0xCE)


def reject_frame(channel: int, tag: int, requeue: bool) -> bytes:
    return _SETTLE.pack(1, channel, 13, 60, 90, _checked(tag), requeue, 0xCE)


def _checked(tag: int) -> int:
    if tag < 1:
        raise ValueError(f"delivery tag {tag}: 0 would settle everything that is out")
    return tag


@lru_cache(4096)  # a service publishes to few exchanges and keys
def _publish_method(channel: int, exchange: str, routing_key: str, mandatory: bool) -> bytes:
    names = _tables.short_string(exchange) + _tables.short_string(routing_key)
    payload = b"\0\x3c\0\x28\0\0" + names + (b"\1" if mandatory else b"\0")
    return _FRAME.pack(1, channel, len(payload)) + payload + END


def publish_frames(
    channel: int, exchange: str, routing_key: str, properties: bytes, body: bytes, frame_max: int, mandatory: bool
) -> bytes:
    """A whole message. Raises `ValueError` for names, and `DoesNotFit` for properties, that do not fit."""
    method = _publish_method(channel, exchange, routing_key, mandatory)
    size, room = len(body), frame_max - OVERHEAD
    if not fits(properties, frame_max):
        raise DoesNotFit(len(properties), room - _FIXED)
    head = method + _CONTENT.pack(2, channel, 12 + len(properties), 60, 0, size) + properties
    if not size:
        return head + END  # an empty body has no frame
    if size <= room:
        return head + END + _FRAME.pack(3, channel, size) + body + END
    parts = [head, END]
    for start in range(0, size, room):
        piece = body[start : start + room]
        parts += (_FRAME.pack(3, channel, len(piece)), piece, END)
    return b"".join(parts)


_ENTRY: Final = _tables.sequence_entry
# A content frame of flags (headers, delivery mode, message id, timestamp), the sequence number alone in the table, the
# mode, and the id's length; then what follows the id, up to the body.
_PLAIN: Final = struct.Struct(f">BHIHHQHI{len(_ENTRY)}sQBB")
_PLAIN_END: Final = struct.Struct(">QBBHI")
_PLAIN_FLAGS: Final = 0x2000 | 0x1000 | 0x0080 | 0x0040
_PLAIN_SIZE: Final = _PLAIN.size - 7 + 8  # of the frame's payload, without the id


def plain_frames(
    channel: int, exchange: str, routing_key: str, identity: str, stamp: int, sequence: int, body: bytes, frame_max: int
) -> bytes:
    """What `publish_frames` gives for a mandatory message that is persistent and has an id and a time (in seconds since
    1970, from 0 on), nothing else. Most are of this kind."""
    encoded, size = identity.encode(), len(body)
    length = len(encoded)
    if not 0 < length < 256 or not 0 < size <= frame_max - OVERHEAD:
        properties = Properties(delivery_mode=2, message_id=identity, timestamp=stamp)
        content = _content.encode(properties, sequence)
        return publish_frames(channel, exchange, routing_key, content, body, frame_max, True)
    return b"".join(
        (
            _publish_method(channel, exchange, routing_key, True),
            _PLAIN.pack(
                2, channel, _PLAIN_SIZE + length, 60, 0, size,
                _PLAIN_FLAGS, _tables.ENTRY_SIZE, _ENTRY, sequence, 2, length,
            ),
            encoded,
            _PLAIN_END.pack(stamp, 0xCE, 3, channel, size),
            body,
            END,
        )
    )  # fmt: skip
