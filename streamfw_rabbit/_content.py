"""The properties of a message: bytes to `Properties` and back.

Layout (AMQP 0-9-1, 4.2.6.1): 16 bits of flags, then the values of those that are set, from the top bit down. A content
header frame has it behind the body's size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias, cast

from . import _tables
from .channel import Properties

__all__ = ["LibraryProperties", "decode", "encode", "from_library", "header_table"]

# Flag, name, and how it is written: short string, octet, timestamp, table.
_BITS: Final = (
    (0x8000, "content_type", "s"),
    (0x4000, "content_encoding", "s"),
    (0x2000, "raw_headers", "F"),
    (0x1000, "delivery_mode", "o"),
    (0x0800, "priority", "o"),
    (0x0400, "correlation_id", "s"),
    (0x0200, "reply_to", "s"),
    (0x0100, "expiration", "s"),
    (0x0080, "message_id", "s"),
    (0x0040, "timestamp", "T"),
    (0x0020, "message_type", "s"),
    (0x0010, "user_id", "s"),
    (0x0008, "app_id", "s"),
)
_CLUSTER_ID: Final = 0x0004  # reserved since 0-9-1; the last one, so it need not even be skipped
_Plan: TypeAlias = "tuple[int, tuple[tuple[str, str], ...]]"
_plans: dict[int, _Plan] = {}
_FLAGS: Final = struct.Struct(">H")
_LENGTH: Final = struct.Struct(">I")
_SECONDS: Final = struct.Struct(">Q")
# Few different ones in a process; message ids are not among them.
_common: Callable[[str], bytes] = lru_cache(1024)(_tables.short_string)


def decode(data: bytes, *, hide: bool = True) -> Properties:
    """`data` from the flags on. The header table stays encoded (see `Properties.headers`), but for `SEQUENCE_HEADER` at
    its end (where `hide`): most tables have nothing else. Raises `ValueError`."""
    try:
        flags = data[0] << 8 | data[1]
        at, plan = _plans.get(flags) or _planned(flags, data)
        values: dict[str, Any] = {}
        for name, kind in plan:
            if kind == "s":
                end = at + 1 + data[at]
                values[name] = data[at + 1 : end].decode()
            elif kind == "o":
                end = at + 1
                values[name] = data[at]
            elif kind == "F":
                end = at + 4 + _LENGTH.unpack_from(data, at)[0]
                table = data[at + 4 : end]
                if hide and table.endswith(_tables.sequence_entry, 0, -8):
                    table = table[: -_tables.ENTRY_SIZE]
                values[name] = table or None
            else:
                end = at + 8
                values[name] = _tables.seconds(_SECONDS.unpack_from(data, at)[0])
            at = end
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"malformed message properties ({error}): {data[:60]!r}") from None
    if at > len(data):
        raise ValueError(f"malformed message properties (they end early): {data[:60]!r}")
    return Properties(**values)


def _planned(flags: int, data: bytes) -> _Plan:
    plan = tuple((name, kind) for bit, name, kind in _BITS if flags & bit)
    at = 2
    if flags & 1:  # more flags follow, which stand for nothing in 0-9-1
        while data[at + 1] & 1:
            at += 2
        return at + 2, plan
    _plans[flags] = at, plan
    return at, plan


def header_table(data: bytes) -> bytes:
    """Only the header table, without its length; empty when there is none, or the properties are malformed."""
    try:
        raw = decode(data, hide=False).raw_headers
    except ValueError:
        return b""
    return raw if isinstance(raw, bytes) else b""


def encode(properties: Properties, sequence: int | None = None) -> bytes:
    """From the flags on. `sequence` goes into the header table, in place of any that a copied table has.

    Raises `ValueError` or `TypeError` for what AMQP cannot hold.
    """
    p = properties
    flags = 0
    parts = [b""]
    if p.content_type:
        flags |= 0x8000
        parts.append(_common(p.content_type))
    if p.content_encoding:
        flags |= 0x4000
        parts.append(_common(p.content_encoding))
    table = _table(p.raw_headers) if p.raw_headers else b""
    if sequence is not None:
        table += _tables.sequence_entry + _SECONDS.pack(sequence)
    if table:
        flags |= 0x2000
        parts += (_LENGTH.pack(len(table)), table)
    if p.delivery_mode is not None:
        flags |= 0x1000
        parts.append(_octet("delivery_mode", p.delivery_mode))
    if p.priority is not None:
        flags |= 0x0800
        parts.append(_octet("priority", p.priority))
    if p.correlation_id:
        flags |= 0x0400
        parts.append(_tables.short_string(p.correlation_id))
    if p.reply_to:
        flags |= 0x0200
        parts.append(_common(p.reply_to))
    if p.expiration:
        flags |= 0x0100
        parts.append(_tables.short_string(p.expiration))
    if p.message_id:
        flags |= 0x0080
        parts.append(_tables.short_string(p.message_id))
    if p.timestamp is not None:
        flags |= 0x0040
        parts.append(_timestamp(p.timestamp))
    if p.message_type or p.user_id or p.app_id:
        flags |= _rare(p, parts)
    parts[0] = _FLAGS.pack(flags)
    return b"".join(parts)


def _rare(p: Properties, parts: list[bytes]) -> int:
    flags = 0
    for bit, value in ((0x0020, p.message_type), (0x0010, p.user_id), (0x0008, p.app_id)):
        if value:
            flags |= bit
            parts.append(_common(value))
    return flags


def _table(raw: bytes | dict[str, Any]) -> bytes:
    if not isinstance(raw, bytes):
        if _tables.SEQUENCE_HEADER in raw:  # of two of one name the server (4.0) keeps the first
            raw = {name: value for name, value in raw.items() if name != _tables.SEQUENCE_HEADER}
        return _tables.encode_table(raw)
    return _tables.without_sequence(raw)


def _octet(name: str, value: int) -> bytes:
    if not 0 <= value <= 255:
        raise ValueError(f"{name}={value} is beyond 8 bits")
    return bytes((value,))


def _timestamp(value: float) -> bytes:
    try:
        return _SECONDS.pack(int(value))
    except (struct.error, OverflowError, ValueError):
        raise ValueError(f"timestamp={value!r} is not a number of seconds since 1970") from None


class LibraryProperties(Protocol):
    """Those of pamqp, as far as we read them."""

    headers: Any
    timestamp: Any


_SAME: Final = tuple(name for _, name, kind in _BITS if kind in "so")


def from_library(theirs: object) -> Properties:
    """pamqp's decoded properties as ours."""
    known = cast("LibraryProperties", theirs)
    headers = dict(known.headers or ())
    headers.pop(_tables.SEQUENCE_HEADER, None)
    stamp = known.timestamp
    properties = Properties(raw_headers=headers or None, timestamp=None if stamp is None else stamp.timestamp())
    for name in _SAME:
        setattr(properties, name, getattr(theirs, name))
    return properties
