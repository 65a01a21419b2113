"""What a message is besides its body, as RabbitMQ keeps it: properties and a header table, both ways.

A `Headers` pair becomes an entry of the table, a long string, which holds any bytes; None becomes AMQP's void. The
content type, correlation id and reply address stand in the properties of these names, where they fit (text of 1 to 255
bytes), and come back as headers. Message id and timestamp (in whole seconds) are properties as well.

- A table has each name once, so a name that comes twice is refused. It has no order that lasts either: the server
  sorts it when it adds to it. So an order that is another than that is kept in a header of ours.
- Entries of other types, from other publishers, are read as text: numbers as they are written, booleans as ``true`` and
  ``false``, times in ISO 8601, lists and tables as JSON. `Properties.headers` has them as they are.
- Hidden are our own headers (``x-streamfw-..``), what the server adds (``x-death`` and its like), and ``CC`` and
  ``BCC``, which are orders to the server: whoever passed them on would have it route once more. Nobody can publish
  these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Final

import msgspec

from streamfw.message import (
    CONTENT_TYPE,
    CORRELATION_ID,
    ERROR,
    ERROR_TYPE,
    NO_HEADERS,
    ORIGIN,
    REPLY_TO,
    Headers,
    Outgoing,
)

from .channel import FieldValue, Properties

__all__ = [
    "ATTEMPT",
    "FROM",
    "KEY",
    "LEFT",
    "copied",
    "is_reserved",
    "key_of",
    "malformed",
    "properties_of",
    "put_aside_by",
    "told_by_server",
    "visible_headers",
]

KEY: Final = "x-streamfw-key"
"""The message's key."""
ATTEMPT: Final = "x-streamfw-attempt"
"""Which delivery the next one will be. Counts only on what comes from our own retry queues."""
LEFT: Final = "x-streamfw-left"
"""Seconds that are to be waited still, of a pause that is longer than the retry queues can do at once."""
FROM: Final = "x-streamfw-from"
"""Exchange and routing key of a message that was published again."""
ORDER: Final = "x-streamfw-order"
"""The names of all headers, in their order: a list in JSON, because streams keep no lists."""

_RESERVED: Final = re.compile(
    r"x-streamfw-.*|x-death|x-(first|last)-death-.*|x-delivery-count|x-acquired-count|x-stream-offset|B?CC", re.DOTALL
)
_NATIVE: Final = (CONTENT_TYPE, CORRELATION_ID, REPLY_TO)
_LONGEST: Final = 255
_PERSISTENT: Final = 2


def is_reserved(name: str) -> bool:
    """Whether a header of that name is ours, or the server's."""
    return name[:1] in "xBC" and _RESERVED.fullmatch(name) is not None


def properties_of(message: Outgoing, stamp: int, priority: int | None) -> Properties:
    """The properties of a message to publish. `stamp`: in seconds since 1970.

    Raises `ValueError` for what cannot travel.
    """
    properties = Properties(
        delivery_mode=_PERSISTENT, message_id=message.message_id, timestamp=stamp, priority=priority
    )
    table: dict[str, FieldValue] = {}
    if message.headers is not NO_HEADERS:
        _fill(properties, table, message.headers.pairs)
    if message.key is not None:
        table[KEY] = message.key if message.key.isascii() else _bytes_of(message.key)
    if table:
        properties.raw_headers = table
    return properties


def _fill(properties: Properties, table: dict[str, FieldValue], pairs: Iterable[tuple[str, bytes | None]]) -> None:
    expected = 0  # which native header may come next without being out of order
    last = ""
    ordered = True
    seen = set()
    for name, value in pairs:
        if name in seen:
            raise ValueError(f"header {name!r} comes twice: RabbitMQ has each name once")
        seen.add(name)
        if name in _NATIVE and (text := _native_text(value)) is not None:
            place = _NATIVE.index(name)
            ordered = ordered and place >= expected
            expected = place + 1
            setattr(properties, name.replace("-", "_"), text)
            continue
        if is_reserved(name):
            raise ValueError(f"header {name!r}: this name is the server's or ours, and is not carried for others")
        ordered = ordered and not expected and last <= name
        last = name
        table[name] = value
    if not ordered:
        table[ORDER] = msgspec.json.encode([name for name, _ in pairs])


def _native_text(value: bytes | None) -> str | None:
    """The text that a property can hold of a header's value."""
    if not value or len(value) > _LONGEST:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _bytes_of(key: str) -> bytes:
    """A key that came with surrogate escapes goes out as the bytes it was."""
    try:
        return key.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ValueError(f"the key {key!r} has lone surrogates, which are no text") from None


def key_of(table: Mapping[str, FieldValue]) -> str | None:
    """The key of a message, as its publisher gave it; what is not UTF-8 becomes surrogate escapes."""
    value = table.get(KEY)
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return value if isinstance(value, str) else None


# Reading


def visible_headers(properties: Properties) -> Headers:
    """The headers of a message as its handler sees them."""
    try:
        table = properties.headers
    except ValueError as error:
        return malformed(error)
    pairs = [(name, _text(value)) for name, value in table.items() if not is_reserved(name)]
    # One that is in both places is told once: RabbitMQ could not carry it twice in a dead letter.
    pairs += [native for native in _natives(properties) if native[0] not in table]
    if ORDER in table:
        places = _places(table[ORDER])
        pairs.sort(key=lambda pair: places.get(pair[0], len(places)))
    if not pairs and "x-death" not in table:
        return NO_HEADERS
    return Headers.of((*pairs, *_of_the_limit(table)))


def _places(order: FieldValue) -> dict[str, int]:
    """The place of each name; of what anybody else has written there, none."""
    try:
        names = msgspec.json.decode(order if isinstance(order, str | bytes) else b"", type=list[str])
    except msgspec.MsgspecError:
        return {}
    return {name: place for place, name in enumerate(names)}


def malformed(error: ValueError) -> Headers:
    """The headers of a message whose properties cannot be read: what is wrong with them. Most servers let pass text in
    them that is no UTF-8; the message can be handled, or put aside, all the same."""
    return Headers.of((("malformed-properties", str(error).encode(errors="replace")),))


def _natives(properties: Properties) -> list[tuple[str, bytes | None]]:
    given = (properties.content_type, properties.correlation_id, properties.reply_to)
    return [(name, value.encode()) for name, value in zip(_NATIVE, given, strict=True) if value]


def _text(value: FieldValue) -> bytes | None:
    if isinstance(value, str):
        return value.encode()
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, datetime):
        return value.isoformat().encode()
    if isinstance(value, int | float | Decimal):
        return str(value).encode()
    return msgspec.json.encode(value, enc_hook=_json)


def _json(value: object) -> object:
    return str(value)


def put_aside_by(table: Mapping[str, FieldValue]) -> tuple[str, str] | None:
    """The queue that the server itself has put a message aside from, and why: ``delivery_limit``, ``expired``,
    ``maxlen`` or ``rejected`` (https://www.rabbitmq.com/docs/dlx). None where it has not, as far as it tells.

    Not every such message is a dead letter: retry queues, ours and those of others, put aside what has waited."""
    deaths = table.get("x-death")
    latest = deaths[0] if isinstance(deaths, list) and deaths else None
    if not isinstance(latest, dict):
        return None
    queue, why = latest.get("queue"), latest.get("reason")
    return (queue, why) if isinstance(queue, str) and isinstance(why, str) else None


_LIMIT: Final = "delivery_limit"
_TOLD: Final = {
    _LIMIT: "delivered it as often as its delivery limit allows, and nobody settled it",
    "expired": "held it for as long as it may live",
    "maxlen": "was full",
    "rejected": "had it rejected by a consumer",
}


def told_by_server(table: Mapping[str, FieldValue]) -> list[tuple[str, bytes]]:
    """The headers of a dead letter that the server made one: where it comes from, and what was wrong with it."""
    found = put_aside_by(table)
    if found is None or ERROR in table:
        return []
    queue, why = found
    origin = [] if ORIGIN in table else [(ORIGIN, queue.encode())]
    return [*origin, *_error(queue, why)]


def _error(queue: str, why: str) -> list[tuple[str, bytes]]:
    told = f"queue {queue!r} {_TOLD.get(why, f'put it aside ({why})')}"
    return [(ERROR, told.encode()), (ERROR_TYPE, why.title().replace("_", "").encode())]


def _of_the_limit(table: Mapping[str, FieldValue]) -> list[tuple[str, bytes]]:
    """Of a message that a subscriber may get, only this says for sure that it is a dead letter."""
    found = put_aside_by(table)
    return [] if found is None or found[1] != _LIMIT or ERROR in table else _error(*found)


# Publishing again


def copied(properties: Properties, table: Mapping[str, FieldValue]) -> Properties:
    """The properties of a message to be published again, with `table` for what is ours in its headers.

    The sender's other headers stay as they are, and what the server told of a dead letter becomes headers like others.
    Its time to live and user are not carried: the first would end it in between, the second must be the publisher's.
    """
    try:
        theirs = properties.headers
    except ValueError:
        theirs = {}
    kept = {name: value for name, value in theirs.items() if not is_reserved(name) or name in (KEY, ORDER, FROM)}
    return Properties(
        raw_headers=kept | dict(_of_the_limit(theirs)) | dict(table),
        content_type=properties.content_type,
        content_encoding=properties.content_encoding,
        delivery_mode=_PERSISTENT,
        priority=properties.priority,
        correlation_id=properties.correlation_id,
        reply_to=properties.reply_to,
        message_id=properties.message_id,
        timestamp=properties.timestamp,
        message_type=properties.message_type,
        app_id=properties.app_id,
    )
