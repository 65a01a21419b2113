"""What a record holds besides its body: key, headers, message id; and the partition that a key belongs to.

A header on the wire is a name (UTF-8) and bytes or a null; order, repeats and nulls survive. Our message id is the
first header of what we publish; a foreign record may have it anywhere, or not at all.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from streamfw.message import Headers, Outgoing, Tombstone

__all__ = [
    "MESSAGE_ID",
    "Pairs",
    "encoded",
    "key_of",
    "message_id_in",
    "message_id_of",
    "murmur2",
    "value_of",
    "visible_headers",
]

MESSAGE_ID: Final = "streamfw-message-id"

Pairs: TypeAlias = "list[tuple[str, bytes | None]]"


def encoded(message: Outgoing) -> tuple[bytes | None, Pairs]:
    """Key and headers of a record. A key or a header's name that came with surrogate escapes goes out as the bytes it
    was.

    Raises `ValueError`, saying what of it cannot be encoded.
    """
    what, text = "key", message.key
    try:
        key = None if text is None else text.encode("utf-8", "surrogateescape")
        pairs = [*message.headers.pairs]
        what = "header name"
        for place, (text, value) in enumerate(pairs):
            if not text.isascii():
                pairs[place] = (_name(text), value)
        what, text = "message id", message.message_id
        if text:
            pairs.insert(0, (MESSAGE_ID, text.encode("utf-8", "surrogateescape")))
    except UnicodeEncodeError:
        raise ValueError(f"the {what} {text!r} has lone surrogates, which are no text") from None
    return key, pairs


class EscapedName(str):
    """A header's name that is not UTF-8 on the wire. aiokafka's builder in C takes nothing but plain text, and raises
    `TypeError`; the one in Python asks it for its bytes."""

    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "surrogateescape") -> bytes:
        """The bytes it was."""
        return str.encode(self, "utf-8", "surrogateescape")


def _name(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        text.encode("utf-8", "surrogateescape")  # or raises
        return EscapedName(text)
    return text


def value_of(body: bytes | None) -> bytes | None:
    """A record's value: a null for a tombstone, which is another thing than no bytes."""
    return None if body is None or isinstance(body, Tombstone) else bytes(body)


def key_of(key: bytes | None) -> str | None:
    """A record's key as text; what is not UTF-8 becomes surrogate escapes."""
    return None if key is None else key.decode("utf-8", "surrogateescape")


def message_id_of(record: Any) -> str:
    """The publisher's message id, or ``topic-partition-offset`` of a record that has none."""
    return message_id_in(record.headers, (record.topic, record.partition), record.offset)


def message_id_in(pairs: Sequence[tuple[str, bytes | None]], tp: tuple[str, int], offset: int) -> str:
    """The same, of the headers of the record there."""
    for name, value in pairs:
        if name == MESSAGE_ID:
            if value:
                return str(value, "utf-8", "surrogateescape")
            break
    topic, partition = tp
    return f"{topic}-{partition}-{offset}"


def visible_headers(pairs: Sequence[tuple[str, bytes | None]]) -> Headers:
    """A record's headers without our message id."""
    for place, (name, _) in enumerate(pairs):
        if name == MESSAGE_ID:
            return Headers.of((*pairs[:place], *pairs[place + 1 :]))
    return Headers.of(tuple(pairs))


_M: Final = 0x5BD1E995
_32: Final = 0xFFFFFFFF


def murmur2(key: bytes) -> int:
    """The hash whose lower 31 bits, modulo the number of partitions, are where the Java client puts a key
    (``org.apache.kafka.common.utils.Utils.murmur2``). The same as aiokafka's, in half the time: a key of 36 bytes costs
    more than all else of a publish."""
    length = len(key)
    words = length >> 2
    h = 0x9747B28C ^ length
    for k in struct.unpack_from(f"<{words}I", key):
        k = k * _M & _32
        h = (h * _M & _32) ^ ((k ^ k >> 24) * _M & _32)
    if rest := key[words * 4 :]:
        h = (h ^ int.from_bytes(rest, "little")) * _M & _32
    h = (h ^ h >> 13) * _M & _32
    return h ^ h >> 15
