"""Field tables of AMQP 0-9-1: bytes to dicts and back, in RabbitMQ's dialect.

The type letters are those of https://www.rabbitmq.com/amqp-0-9-1-errata.html, section 3. Reading gives what pamqp gives
(the library under aiormq), so that both transports tell the same of a message. Writing differs from pamqp where that
would lose something: a float is written in 64 bits, not 32; names keep their order and are refused beyond 255 bytes,
not cut at 128; `bytes` can be written.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

__all__ = [
    "ENTRY_SIZE",
    "SEQUENCE_HEADER",
    "decode_table",
    "encode_table",
    "seconds",
    "sequence",
    "sequence_entry",
    "short_string",
    "without_sequence",
]

SEQUENCE_HEADER: Final = "x-streamfw-seq"

# AMQP's fixed-size types: how each is unpacked, and its size.
_FIXED: Final = {
    ord(letter): (struct.Struct(">" + code).unpack_from, struct.calcsize(">" + code))
    for letter, code in {
        "b": "b", "B": "B", "s": "h", "u": "H", "I": "i", "i": "I", "l": "q", "L": "q", "f": "f", "d": "d",
    }.items()
}  # fmt: skip
_LENGTH: Final = struct.Struct(">I")
_DECIMAL: Final = struct.Struct(">BI")
_SECONDS: Final = struct.Struct(">Q")
_DOUBLE: Final = struct.Struct(">d")
# Integers: the smallest type that holds the value, as pamqp chooses.
_INTEGERS: Final = (
    (-(2**7), 2**7 - 1, b"b", struct.Struct(">b")),
    (-(2**15), 2**15 - 1, b"s", struct.Struct(">h")),
    (0, 2**16 - 1, b"u", struct.Struct(">H")),
    (-(2**31), 2**31 - 1, b"I", struct.Struct(">i")),
    (0, 2**32 - 1, b"i", struct.Struct(">I")),
    (-(2**63), 2**63 - 1, b"l", struct.Struct(">q")),
)
_BROKEN: Final = (IndexError, struct.error, ValueError, OverflowError, OSError, RecursionError)


def short_string(text: str) -> bytes:
    """A short string with its length. Raises `ValueError` beyond 255 bytes of UTF-8."""
    data = text.encode()
    if len(data) > 255:
        raise ValueError(f"{text[:40]!r}... is {len(data)} bytes long; AMQP has at most 255 for such text")
    return bytes((len(data),)) + data


_ENTRY: Final = short_string(SEQUENCE_HEADER) + b"l"
ENTRY_SIZE: Final = len(_ENTRY) + 8
sequence_entry: Final = _ENTRY
"""The entry of `SEQUENCE_HEADER` up to its value, which is always 8 bytes: tables can be made beforehand."""


def sequence(table: bytes) -> int | None:
    """The value of `SEQUENCE_HEADER` in an encoded table; None when it is not there, or the table is malformed."""
    if table[-ENTRY_SIZE:-8] == _ENTRY:  # where we put it
        return int.from_bytes(table[-8:], "big", signed=True)
    try:
        value = _table(table, 0, len(table)).get(SEQUENCE_HEADER)
    except _BROKEN:
        return None
    return value if type(value) is int else None


def without_sequence(table: bytes) -> bytes:
    """An encoded table without `SEQUENCE_HEADER`; all else byte for byte, where that header stands where we put it."""
    if table[-ENTRY_SIZE:-8] == _ENTRY:
        table = table[:-ENTRY_SIZE]
    if _ENTRY in table:
        return encode_table(decode_table(table))
    return table


def decode_table(table: bytes) -> dict[str, Any]:
    """A table without its length, as a dict, without `SEQUENCE_HEADER`. Raises `ValueError` when it is malformed."""
    try:
        decoded = _table(table, 0, len(table))
    except _BROKEN as error:
        raise ValueError(f"malformed header table ({error}): {table[:60]!r}") from None
    decoded.pop(SEQUENCE_HEADER, None)
    return decoded


def _table(data: bytes, at: int, end: int) -> dict[str, Any]:
    decoded: dict[str, Any] = {}
    while at < end:
        start = at + 1
        at = _within(start + data[at], end)
        name = data[start:at].decode()
        decoded[name], at = _value(data, at, end)
    return decoded


def _value(data: bytes, at: int, end: int) -> tuple[Any, int]:
    """The value at `at`, which begins with its type, and where the next one begins."""
    letter = data[_within(at + 1, end) - 1]
    at += 1
    if letter == 0x53:  # "S" long string, by far the most frequent
        start = at + 4
        at = _within(start + _LENGTH.unpack_from(data, at)[0], end)
        raw = data[start:at]
        try:
            return raw.decode(), at
        except UnicodeDecodeError:
            return raw, at
    fixed = _FIXED.get(letter)
    if fixed is not None:
        unpack, size = fixed
        _within(at + size, end)
        return unpack(data, at)[0], at + size
    other = _OTHERS.get(letter)
    if other is None:
        raise ValueError(f"unknown type {bytes((letter,))!r}")
    return other(data, at, end)


def _within(at: int, end: int) -> int:
    if at > end:
        raise ValueError("it ends early")
    return at


def _boolean(data: bytes, at: int, end: int) -> tuple[bool, int]:
    return data[_within(at + 1, end) - 1] != 0, at + 1


def _void(data: bytes, at: int, end: int) -> tuple[None, int]:
    return None, at


def _decimal(data: bytes, at: int, end: int) -> tuple[Decimal, int]:
    _within(at + 5, end)
    scale, number = _DECIMAL.unpack_from(data, at)
    return Decimal(number) * (Decimal(10) ** -scale), at + 5


def _time(data: bytes, at: int, end: int) -> tuple[datetime, int]:
    _within(at + 8, end)
    return datetime.fromtimestamp(seconds(_SECONDS.unpack_from(data, at)[0]), tz=UTC), at + 8


def seconds(value: int) -> float:
    """A timestamp in seconds. Beyond 2106 it is taken for milliseconds, as pamqp does: some clients write those."""
    return value / 1000.0 if value > 0xFFFFFFFF else value


def _bytes(data: bytes, at: int, end: int) -> tuple[bytearray, int]:
    start = at + 4
    at = _within(start + _LENGTH.unpack_from(data, at)[0], end)
    return bytearray(data[start:at]), at


def _array(data: bytes, at: int, end: int) -> tuple[list[Any], int]:
    last = _within(at + 4 + _LENGTH.unpack_from(data, at)[0], end)
    at += 4
    values = []
    while at < last:
        value, at = _value(data, at, last)
        values.append(value)
    return values, at


def _inner_table(data: bytes, at: int, end: int) -> tuple[dict[str, Any], int]:
    last = _within(at + 4 + _LENGTH.unpack_from(data, at)[0], end)
    return _table(data, at + 4, last), last


_OTHERS: Final[dict[int, Callable[[bytes, int, int], tuple[Any, int]]]] = {
    ord("t"): _boolean,
    ord("V"): _void,
    0: _void,  # in no specification, but in the wild
    ord("D"): _decimal,
    ord("T"): _time,
    ord("x"): _bytes,
    ord("A"): _array,
    ord("F"): _inner_table,
}


def encode_table(table: Mapping[str, Any]) -> bytes:
    """A table without its length. Raises `TypeError` or `ValueError`, naming the entry, for what AMQP cannot hold."""
    parts: list[bytes] = []
    for name, value in table.items():
        try:
            parts += (short_string(name), _encoded(value))
        except (TypeError, ValueError, struct.error, OverflowError, RecursionError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"header or argument {name!r}: {error}") from None
    return b"".join(parts)


def _encoded(value: Any) -> bytes:
    """A value, its type first."""
    kind = type(value)
    if kind is str:
        return _long(b"S", value.encode())
    if kind is bytes:
        return _long(b"S", value)  # a long string is any bytes, on the wire and in RabbitMQ
    if value is None:
        return b"V"
    if kind is bool:
        return b"t\1" if value else b"t\0"
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return b"d" + _DOUBLE.pack(value)
    if isinstance(value, datetime):
        aware = value if value.utcoffset() is not None else value.replace(tzinfo=UTC)
        return b"T" + _SECONDS.pack(int(aware.timestamp()))
    return _encoded_rare(value)


def _encoded_rare(value: Any) -> bytes:
    if isinstance(value, dict):
        return _long(b"F", encode_table(value))
    if isinstance(value, list):
        return _long(b"A", b"".join([_encoded(item) for item in value]))
    if isinstance(value, Decimal):
        return _encoded_decimal(value)
    if isinstance(value, bytearray):
        return _long(b"x", value)
    if isinstance(value, str):  # a subclass
        return _long(b"S", value.encode())
    raise TypeError(f"AMQP has no type for {type(value).__name__}")


def _long(letter: bytes, data: bytes | bytearray) -> bytes:
    return letter + _LENGTH.pack(len(data)) + data


def _integer(value: int) -> bytes:
    for least, most, letter, form in _INTEGERS:
        if least <= value <= most:
            return letter + form.pack(value)
    raise ValueError(f"{value} is beyond 64 bits")


def _encoded_decimal(value: Decimal) -> bytes:
    exponent = value.as_tuple().exponent
    if not isinstance(exponent, int):
        raise ValueError(f"{value} is no number")
    scale = max(0, -exponent)
    number = int(value.scaleb(scale))
    # The specification reads the number without a sign, and so do RabbitMQ and pamqp.
    if scale > 255 or not 0 <= number < 2**32 or (number == 0 and value != 0):
        raise ValueError(f"{value} is beyond AMQP's decimal: 32 bits without a sign, and a scale up to 255")
    return b"D" + _DECIMAL.pack(scale, number)
