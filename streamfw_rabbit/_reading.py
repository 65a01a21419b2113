"""How the library's connection reads frames: all of them, also those that it cannot decode.

Most servers do not look whether the text in a message is UTF-8, and whoever may publish can put anything there. aiormq
decodes the properties of every message, and ends its connection over one that it cannot: with all that others had at
hand, and again as soon as the message comes back. Here such a message is bad alone. Its properties stay as they came
(`DamagedHeader`), and names that are no text become empty.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, Final

import pamqp.frame
from aiormq.exceptions import AMQPConnectionError
from pamqp import commands
from pamqp.exceptions import PAMQPException
from pamqp.header import ContentHeader

from . import _content
from .channel import Properties

__all__ = ["DamagedHeader", "FrameReader", "properties_of"]

_START: Final = struct.Struct(">BHI")
_HEADER: Final = struct.Struct(">HHQ")
_METHOD: Final = struct.Struct(">HH")
_METHODS: Final = 1
_HEADERS: Final = 2
# Of the methods that carry what a publisher wrote: how many bytes (None: a short string) come in turn, as arguments.
_NAMES: Final[dict[tuple[int, int], tuple[int | None, ...]]] = {
    (60, 60): (None, 9, None, None),  # Deliver: consumer tag; delivery tag, redelivered; exchange, routing key
    (60, 71): (9, None, None),  # GetOk
    (60, 50): (2, None, None, None),  # Return: code; text, exchange, routing key
}


class DamagedHeader(ContentHeader):
    """The header of a message whose properties cannot be decoded; `raw` is what came of them."""

    def __init__(self, body_size: int, raw: bytes) -> None:
        super().__init__(0, body_size, commands.Basic.Properties())
        self.raw = raw


def properties_of(header: ContentHeader) -> Properties:
    """The properties of a message. Raises `ValueError` where they are malformed."""
    if isinstance(header, DamagedHeader):
        return _content.decode(header.raw)
    return _content.from_library(header.properties)


class FrameReader:
    """Stands in for aiormq's `FrameReceiver` once the connection is open."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    def __aiter__(self) -> FrameReader:
        return self

    async def __anext__(self) -> tuple[int, int, Any]:
        if self._reader.at_eof():
            raise StopAsyncIteration
        try:
            start = await self._reader.readexactly(_START.size)
            kind, channel, size = _START.unpack(start)
            payload = await self._reader.readexactly(size + 1)
        except asyncio.IncompleteReadError as error:
            raise AMQPConnectionError(f"Server connection unexpectedly closed: {error}") from error
        except OSError as error:
            raise AMQPConnectionError(f"Server connection reset: {error!r}") from error
        try:
            return pamqp.frame.unmarshal(start + payload)
        except (PAMQPException, ValueError, OverflowError, OSError, struct.error, IndexError) as error:
            frame = _damaged(kind, payload)
            if frame is None:
                raise AMQPConnectionError(f"a malformed frame: {error!r}") from error
            return len(start) + len(payload), channel, frame


def _damaged(kind: int, payload: bytes) -> Any:
    """What is left of a frame that cannot be decoded; None where that is of no use."""
    if kind == _HEADERS and len(payload) > _HEADER.size:
        return DamagedHeader(_HEADER.unpack_from(payload)[2], payload[_HEADER.size : -1])
    names = _NAMES.get(_METHOD.unpack_from(payload)) if kind == _METHODS and len(payload) > _METHOD.size else None
    if names is None:
        return None
    cleaned = b"\1\0\0" + struct.pack(">I", len(mended := _mended(payload, names)) - 1) + mended
    try:
        return pamqp.frame.unmarshal(cleaned)[2]
    except (PAMQPException, ValueError):
        return None


def _mended(payload: bytes, parts: tuple[int | None, ...]) -> bytes:
    """The method, with an empty string for each that is no text."""
    at = _METHOD.size
    found = [payload[:at]]
    for size in parts:
        if size is not None:
            found.append(payload[at : at + size])
            at += size
            continue
        end = at + 1 + payload[at]
        try:
            payload[at + 1 : end].decode()
            found.append(payload[at:end])
        except UnicodeDecodeError:
            found.append(b"\0")
        at = end
    return b"".join((*found, payload[at:]))
