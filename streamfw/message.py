"""What travels: headers, the message a handler may ask for, and the message a publisher sends."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from .errors import ArgumentError

if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

__all__ = [
    "CONTENT_TYPE",
    "CORRELATION_ID",
    "DEAD_LETTER_HEADERS",
    "ERROR",
    "ERROR_TYPE",
    "LEFT_OUT",
    "NO_HEADERS",
    "ORIGIN",
    "ORIGIN_ATTEMPT",
    "ORIGIN_GROUP",
    "ORIGIN_OFFSET",
    "ORIGIN_PARTITION",
    "REPLY_TO",
    "TOMBSTONE",
    "HeaderValues",
    "Headers",
    "Message",
    "Outgoing",
    "Tombstone",
    "dead_letter_headers",
    "lightened",
    "new_message_id",
    "original_headers",
]

HeaderValues: TypeAlias = "Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes | None]]"

# Names that mean something to us. Brokers with a native place for one of them put it there and back.
CONTENT_TYPE: Final = "content-type"
CORRELATION_ID: Final = "correlation-id"
REPLY_TO: Final = "reply-to"
# What a dead letter tells besides the original's own headers.
ERROR: Final = "streamfw-error"
ERROR_TYPE: Final = "streamfw-error-type"
ORIGIN: Final = "streamfw-origin"
ORIGIN_GROUP: Final = "streamfw-origin-group"
ORIGIN_ATTEMPT: Final = "streamfw-origin-attempt"


class Headers(Mapping[str, str]):
    """The headers of a message: ordered pairs of a name and bytes, read as text by default.

    ``headers["tenant"]`` is the last value of that name as text; `raw` gives its bytes, `all` every value, `pairs`
    all of it in order. Values survive byte for byte on every broker, or the publish is refused. A value of None
    exists on Kafka only (a null header); as text it reads like a missing one.
    """

    __slots__ = ("pairs",)
    pairs: tuple[tuple[str, bytes | None], ...]

    def __init__(self, values: HeaderValues | Headers = ()) -> None:
        """Take a mapping or pairs; text is encoded as UTF-8. Raises `TypeError` on any other value."""
        if isinstance(values, Headers):
            self.pairs = values.pairs
            return
        items = values.items() if isinstance(values, Mapping) else values
        self.pairs = tuple((_name(name), _value(name, value)) for name, value in items)

    @classmethod
    def of(cls, pairs: tuple[tuple[str, bytes | None], ...]) -> Headers:
        """Headers of pairs that a broker has decoded: no checks, no copies."""
        headers = cls.__new__(cls)
        headers.pairs = pairs
        return headers

    def raw(self, name: str) -> bytes | None:
        """The last value of `name` as bytes; None when there is none."""
        for key, value in reversed(self.pairs):
            if key == name:
                return value
        return None

    def all(self, name: str) -> list[bytes | None]:
        """Every value of `name`, in order."""
        return [value for key, value in self.pairs if key == name]

    def merged(self, more: HeaderValues | Headers) -> Headers:
        """These headers with those of `more` in place of any of the same name."""
        added = Headers(more)
        names = {name for name, _ in added.pairs}
        return Headers.of((*(pair for pair in self.pairs if pair[0] not in names), *added.pairs))

    def __getitem__(self, name: str) -> str:
        """The last value as text. Raises `KeyError`, or `ArgumentError` when it is not UTF-8."""
        value = self.raw(name)
        if value is None:
            raise KeyError(name)
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ArgumentError(f"header {name!r} is not UTF-8: {value[:40]!r}; read it with headers.raw()") from None

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for name, _ in self.pairs))

    def __len__(self) -> int:
        return len({name for name, _ in self.pairs})

    def __contains__(self, name: object) -> bool:
        return any(key == name for key, _ in self.pairs)

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def __eq__(self, other: object) -> bool:
        return self.pairs == other.pairs if isinstance(other, Headers) else Mapping.__eq__(self, other)

    def __hash__(self) -> int:
        return hash(self.pairs)

    def __repr__(self) -> str:
        return f"Headers({list(self.pairs)!r})"


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"a header's name is text and not empty, not {name!r}")
    return name


def _value(name: str, value: object) -> bytes | None:
    if isinstance(value, str):
        return value.encode()
    if value is None or isinstance(value, bytes):
        return value
    raise TypeError(f"header {name!r}: a value is text or bytes, not {type(value).__name__}")


NO_HEADERS: Final = Headers()
ORIGIN_PARTITION: Final = "streamfw-origin-partition"
ORIGIN_OFFSET: Final = "streamfw-origin-offset"
DEAD_LETTER_HEADERS: Final = frozenset(
    {ERROR, ERROR_TYPE, ORIGIN, ORIGIN_GROUP, ORIGIN_ATTEMPT, ORIGIN_PARTITION, ORIGIN_OFFSET}
)


LEFT_OUT: Final = "streamfw-headers-left-out"
"""The names of the headers that were too large to be published again with a dead letter."""


class Tombstone(bytes):
    """A body that is not there, which in a compacted log deletes the key. As bytes it is empty."""

    def __repr__(self) -> str:
        return "TOMBSTONE"

    def __reduce__(self) -> str:
        return "TOMBSTONE"  # there is one, also in another process


TOMBSTONE: Final = Tombstone()
"""What to publish, with a key, to delete that key in a compacted log: ``publish("prices", TOMBSTONE, key="42")``. A
handler whose body may be None (``price: Price | None``) gets None for one; others find it in `Message.body`."""


def dead_letter_headers(
    original: Headers,
    reason: str,
    error_type: str,
    origin: str,
    group: str,
    attempt: int,
    place: Mapping[str, str] | None = None,
) -> Headers:
    """The headers of a dead letter: the original's own, the error, and where it comes from (`place`: more exactly)."""
    told = {ERROR: reason, ERROR_TYPE: error_type, ORIGIN: origin, ORIGIN_GROUP: group, ORIGIN_ATTEMPT: str(attempt)}
    told |= place or {}
    # An error's text may hold what is not text (a surrogate from somebody's file name): it must not fail here.
    return original_headers(original).merged({name: value.encode("utf-8", "replace") for name, value in told.items()})


def original_headers(letter: Headers) -> Headers:
    """What the headers of a dead letter were before it became one."""
    return Headers.of(tuple(pair for pair in letter.pairs if pair[0] not in DEAD_LETTER_HEADERS))


class Message(msgspec.Struct, gc=False, kw_only=True):
    """One message as its handler and middleware see it.

    It must never come to hold an exception: it is not traversed by the garbage collector (``gc=False``), and an
    exception's traceback holds the frames that hold the message.

    - `name`: what it was published to. `body`: its bytes (or the source's own record), or `TOMBSTONE`.
    - `key`: what orders it, or None. A key that is not UTF-8 (Kafka) is text with surrogate escapes.
    - `message_id`: the publisher's, or the broker's own where the publisher gave none.
    - `attempt`: which delivery this is, 1 the first.
    - `timestamp`: when it was published, in seconds since 1970; 0.0 where the broker does not tell.
    """

    name: str
    body: Any
    message_id: str = ""
    key: str | None = None
    attempt: int = 1
    timestamp: float = 0.0
    raw_headers: Any = NO_HEADERS

    @property
    def headers(self) -> Headers:
        """The message's headers, decoded when first asked for."""
        raw = self.raw_headers
        if type(raw) is not Headers:
            raw = self.raw_headers = self.decode_headers(raw)
        return raw

    @staticmethod
    def decode_headers(raw: Any) -> Headers:
        """How this broker's `raw_headers` become `Headers`; a broker that keeps another form overrides it."""
        return raw if isinstance(raw, Headers) else Headers(raw or ())

    @property
    def correlation_id(self) -> str | None:
        """What this message belongs to, as its publisher said."""
        return self.headers.get(CORRELATION_ID)

    @property
    def reply_to(self) -> str | None:
        """Where its publisher waits for an answer."""
        return self.headers.get(REPLY_TO)

    @property
    def content_type(self) -> str | None:
        """How the body is encoded, where its publisher said so."""
        return self.headers.get(CONTENT_TYPE)


class Outgoing(msgspec.Struct, gc=False, kw_only=True):
    """One message on its way to a broker, encoded.

    `delay` is in seconds from the broker's acceptance. `priority`: smaller comes first, where the broker has any.
    `kept` False (a reply to an inbox): nobody keeps it for groups that are yet to come; where none has subscribed it is
    `Unroutable`. Sent only where `Capabilities.replies`.

    `stored`: the broker has taken this body before, and it moves to another place (a dead letter, a retry): our own
    limit (`Capabilities.max_body`) does not keep it where it must not stay.
    """

    name: str
    body: bytes
    message_id: str
    key: str | None = None
    headers: Headers = NO_HEADERS
    delay: float = 0.0
    priority: int = 0
    kept: bool = True
    stored: bool = False


_LONGEST: Final = 1000  # bytes of `LEFT_OUT`, and of a key that stays in any case


def lightened(message: Outgoing, over: int) -> Outgoing | None:
    """`message` without the largest of its headers, at least `over` bytes lighter where it can be; last goes a key of
    more than a thousand bytes. What says that it is a dead letter stays, and `LEFT_OUT` names what does not. None:
    there is nothing that could be left out."""
    pairs = message.headers.pairs
    told = message.headers.raw(LEFT_OUT) or b""
    names = [told[:_LONGEST].decode("utf-8", "replace")] if told else []
    may_go = [at for at, (name, _) in enumerate(pairs) if name not in DEAD_LETTER_HEADERS and name != LEFT_OUT]
    gone: set[int] = set()
    freed = len(told)
    for at in sorted(may_go, key=lambda at: _size(*pairs[at]), reverse=True):
        gone.add(at)
        names.append(pairs[at][0])
        freed += _size(*pairs[at])
        if freed - _size(LEFT_OUT, _listed(names)) >= over:
            break
    key = message.key
    if not gone:
        if key is None or len(key) <= _LONGEST:
            return None
        key = None
        names.append("(the key)")
    kept = [pair for at, pair in enumerate(pairs) if at not in gone and pair[0] != LEFT_OUT]
    headers = Headers.of((*kept, (LEFT_OUT, _listed(names))))
    return msgspec.structs.replace(message, key=key, headers=headers)


def _size(name: str, value: bytes | None) -> int:
    return len(name) + len(value or b"")


def _listed(names: Sequence[str]) -> bytes:
    text = ""
    for place, name in enumerate(names):
        more = f"{text}, {name}" if text else name
        if len(more) > _LONGEST:
            return f"{text} and {len(names) - place} more".strip().encode("utf-8", "replace")
        text = more
    return text.encode("utf-8", "replace")


_endings: list[str] = []
_stamp: tuple[int, str] = (-1, "")
_LAST = tuple(f"{number:02x}" for number in reversed(range(256)))


def new_message_id(now_ms: int | None = None) -> str:
    """A UUIDv7 (RFC 9562): 48 bits of milliseconds, 66 random bits, and a counter of 8 (its section 6.2 allows one), so
    that ids sort by time of publishing.

    The random bits are drawn for 256 ids at once, and the time is written once a millisecond: a system call and a
    format an id would cost more than all the rest.
    """
    global _stamp
    if not _endings:
        noise = secrets.token_hex(8)
        shared = f"{noise[:3]}-{'89ab'[int(noise[3], 16) & 3]}{noise[4:7]}-{noise[7:]}{secrets.token_hex(1)[0]}"
        _endings.extend([shared + last for last in _LAST])
    ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    if _stamp[0] != ms:
        text = f"{ms:012x}"
        _stamp = (ms, f"{text[:8]}-{text[8:]}-7")
    return _stamp[1] + _endings.pop()


# A forked child must not draw the ids its parent will draw.
os.register_at_fork(after_in_child=_endings.clear)
