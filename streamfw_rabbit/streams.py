"""`Stream`: a log kept by RabbitMQ, as a subscriber's source object, and the deliveries that come out of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

import msgspec

from streamfw.broker import Capabilities, Position, Route, Subscription
from streamfw.message import ORIGIN_OFFSET, Headers
from streamfw.positions import Watermark

from .channel import FieldValue, Properties, RawDelivery
from .delivery import RabbitDelivery
from .headers import key_of, malformed
from .offsets import OffsetStore
from .queue import QUEUE_NAME, Declare, Exchange, KeyFrom, RabbitQueue, name_mistake, type_mistakes
from .settings import Settings
from .stream_witness import Seen, Trail, Witness
from .topology import Plan, group_queue
from .versions import argument_mistakes

__all__ = [
    "LOCK_TAG",
    "OFFSET",
    "Make",
    "Reading",
    "Start",
    "Stream",
    "StreamDelivery",
    "capabilities_of_stream",
    "lock_name",
    "maker_of",
    "start_of",
    "stream_mistakes",
    "stream_plan",
]

OFFSET: Final = "x-stream-offset"
"""The header that has a message's offset, and the consumer's argument that says where to begin."""
LOCK_TAG: Final = "reader"
"""The consumer that holds the group's lock. What comes by it is not of the stream."""
OPEN_LIMIT: Final = 10_000
WINDOW_LIMIT: Final = 50_000
_PARTITION: Final = 0  # a stream is one
_NOWHERE: Final = -1
_AGE: Final = re.compile(r"[1-9][0-9]*[YMDhms]")
_WORDS: Final = ("first", "last", "next")

Start: TypeAlias = "Literal['first', 'last', 'next'] | datetime | int"


class Stream(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A stream: ``@subscriber(Stream("events", store=PostgresOffsets("postgres://..")))``.

    A stream keeps what was published to it, also when it was read. Each group reads all of it, in order, and has an
    offset of its own, in `store`. Of a group one process reads at a time (so an order holds), and the others stand by:
    the reader holds an exclusive queue ``<name>.<group>.reader`` for as long as it is connected.

    - `name`: the queue's name. Publishing to it by name goes into the stream (where no exchange has that name).
    - `store`: where the offset is kept; see `streamfw_rabbit.offsets`. It has to be said: without it a group would
      begin anew in each process.
    - `offset`: where a group without a stored offset begins, and every group of a stream that was deleted and made
      anew: at the ``first`` message that is kept, at the beginning of the ``last`` chunk (a chunk is what the server
      wrote in one go), with what comes ``next``, at a time (with a time zone, in whole seconds; at the beginning of the
      chunk of that time, so a little before), or at an offset or the nearest one.
    - `declare`: as that of `RabbitQueue`.
    - `max_age`, `max_length_bytes`: when the server drops the oldest segments: in seconds, or as the server writes it
      (``7D``), and in bytes.
    - `exchange`, `bind`: what is bound to it, as of `RabbitQueue`.
    - `arguments`: others, by their ``x-`` names (``x-stream-max-segment-size-bytes``).
    - `prefetch`: messages that are on their way to this process (default: the subscriber's, 1,000). The server always
      sends whole chunks, so there may be more.
    - `key`: as of `RabbitQueue`.

    Lists and tables in headers are dropped by the server. Values are checked when the app is built.
    """

    name: str
    offset: Start = "first"
    store: OffsetStore | None = None
    declare: Declare | None = None
    max_age: float | str | None = None
    max_length_bytes: int | None = None
    exchange: Exchange | str | None = None
    bind: str | Sequence[str | tuple[Any, ...]] = ()
    arguments: Mapping[str, Any] = {}
    prefetch: int | None = None
    key: KeyFrom = "header"

    def queue(self) -> RabbitQueue:
        """What it has in common with queues."""
        return RabbitQueue(
            self.name,
            exchange=self.exchange,
            bind=self.bind,
            declare=self.declare,
            prefetch=self.prefetch,
            key=self.key,
        )

    def route(self, name: str) -> Route | None:
        """See `streamfw.broker.Routed`: the exchanges that it is bound to lead to it."""
        return self.queue().route(name)

    def queue_arguments(self) -> dict[str, FieldValue]:
        """The arguments it is declared with."""
        found: dict[str, FieldValue] = {"x-queue-type": "stream"}
        if self.max_age is not None:
            found["x-max-age"] = self.max_age if isinstance(self.max_age, str) else f"{int(self.max_age)}s"
        if self.max_length_bytes is not None:
            found["x-max-length-bytes"] = self.max_length_bytes
        return found | dict(self.arguments)

    def mistakes(self, group: str) -> list[str]:
        """What is wrong with it, as sentences."""
        found = [mistake.replace("RabbitQueue(", "Stream(") for mistake in self.queue().mistakes(False)]
        if not found and (mistake := name_mistake(lock_name(self.name, group), QUEUE_NAME)) is not None:
            found.append(f"Stream({self.name!r}) of group {group!r}: the queue that its reader holds: {mistake}")
        if (wrong := start_mistake(self.offset)) is not None:
            found.append(f"Stream(offset={self.offset!r}): {wrong}")
        store: object = self.store
        if not isinstance(store, OffsetStore):
            found.append(
                f"Stream(store={store!r}): where the group's offset is kept has to be said: PostgresOffsets(dsn), "
                "ServerOffsets(url), or MemoryOffsets() for tests"
            )
        if self.max_age is not None and not _is_age(self.max_age):
            found.append(
                f"Stream(max_age={self.max_age!r}): seconds (1 at least), or text as '12h' or '7D', are needed"
            )
        if self.max_length_bytes is not None and not _is_count(self.max_length_bytes):
            found.append(f"Stream(max_length_bytes={self.max_length_bytes!r}): a number of at least 1 is needed")
        if wrongly := list(type_mistakes(self, ["arguments"])):
            return [*found, *wrongly]
        found += (f"Stream(arguments=..): {told}" for told in argument_mistakes("stream", self.arguments))
        for argument, option in _OPTIONS.items():
            if argument in self.arguments:
                found.append(f"Stream(arguments=..): {argument} is said by {option}")
        return found


_OPTIONS: Final = {
    "x-queue-type": "Stream itself",
    "x-max-age": "max_age=",
    "x-max-length-bytes": "max_length_bytes=",
}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_age(value: object) -> bool:
    if isinstance(value, str):
        return _AGE.fullmatch(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 1


def start_mistake(start: object) -> str | None:
    """What is wrong with a place to begin at."""
    if start in _WORDS or (isinstance(start, int) and not isinstance(start, bool) and 0 <= start < 2**63):
        return None
    if isinstance(start, datetime):
        return "a time without a time zone means another moment on each machine" if start.tzinfo is None else None
    return "'first', 'last', 'next', a datetime or an offset is needed"


def start_of(to: Position) -> Start:
    """The place that a position to seek means. Raises `ValueError` for one that is none."""
    if isinstance(to, Mapping):
        if strange := sorted(map(repr, set(to) - {_PARTITION})):
            raise ValueError(f"a stream is one partition, number {_PARTITION}; there is no {', '.join(strange)}")
        if _PARTITION not in to:
            raise ValueError(f"no offset is given: {{{_PARTITION}: offset}} is needed")
        start: object = to[_PARTITION]
        if not isinstance(start, int) or start_mistake(start) is not None:
            raise ValueError(f"{start!r} is no offset")
        return start
    if isinstance(to, datetime) and (mistake := start_mistake(to)) is not None:
        raise ValueError(mistake)
    if to == "earliest":
        return "first"
    if to == "latest":
        return "next"
    if isinstance(to, datetime):
        return to
    raise ValueError(f"'earliest', 'latest', a datetime or {{{_PARTITION}: offset}} is needed")


def lock_name(stream: str, group: str) -> str:
    """The queue that the reader of a group holds."""
    return f"{group_queue(stream, group)}.reader"


def stream_plan(subscription: Subscription, stream: Stream, settings: Settings) -> Plan:
    """What a subscription to a stream needs on the server."""
    queue = stream.queue()
    return Plan(
        where=f"{subscription!r}",
        queue=stream.name,
        source=queue,
        declare=stream.declare or settings.declare,
        arguments=stream.queue_arguments(),
        bindings=queue.bindings(),
        dead_letter=subscription.dead_letter,
    )


def stream_mistakes(subscription: Subscription, stream: Stream) -> Iterable[str]:
    """What is wrong with a subscription to a stream, besides its name, group and dead letter."""
    if subscription.dead_letter == stream.name:
        yield f"dead_letter={stream.name!r}: this is the stream itself; dead letters would come back for ever"
    yield from stream.mistakes(subscription.group)


def capabilities_of_stream(base: Capabilities) -> Capabilities:
    """A log only moves on: a message is tried again here, and its group has one reader."""
    return msgspec.structs.replace(
        base,
        settlement="positional",
        retry=False,
        ordered_by=frozenset({"key", "partition"}),
        priorities=False,
        seek=True,
        prefetch=500,
    )


# Reading


class Reading:
    """What is read of a stream from one place on, under one hold of the group's offset.

    A delivery refers to the reading it came out of, so a late settlement sees at once that it is over (`live`).

    - `mark`: what of it is open. `committed`: the offset that is stored (None: not known).
    - `low`: the watermark as last looked at.
    - `trail`: what tells whether the stream is still the same.
    """

    __slots__ = ("committed", "live", "low", "mark", "trail")

    def __init__(self, start: int, committed: int | None, witness: Witness | None = None) -> None:
        self.mark = Watermark(start)
        self.trail = Trail(witness)
        self.low = start
        self.committed = committed
        self.live = True

    @property
    def full(self) -> bool:
        """Whether nothing more is to be read for now: too much is open, or a crash would repeat too much."""
        return self.mark.open >= OPEN_LIMIT or self.mark.window >= WINDOW_LIMIT

    def look(self) -> int:
        """What may be stored: where reading goes on after a crash."""
        self.low = self.mark.position
        self.trail.look(self.low)
        return self.low

    def __repr__(self) -> str:
        return f"Reading(from {self.mark.position} to {self.mark.end}{'' if self.live else ', over'})"


class StreamDelivery(RabbitDelivery, gc=False, kw_only=True):
    """A message of a stream. `offset` is its place; `tag` says nothing."""

    offset: int
    reading: Reading

    def origin_place(self) -> Mapping[str, str]:
        """See `Delivery.origin_place`."""
        return {ORIGIN_OFFSET: str(self.offset)}

    def seen(self) -> Seen:
        """What tells it from a message at the same place of another stream."""
        return Seen(self.offset, self.message_id, self.timestamp, self.body)


Make: TypeAlias = Callable[[RawDelivery, Reading, int], StreamDelivery]


def maker_of(subscription: Subscription, stream: Stream) -> Make:
    """What makes deliveries of what came, for a reading. The last argument is the offset of one whose own cannot be
    read: the next one is right, or too low, which repeats a message at worst. What is not of the stream gets -1."""
    name = subscription.name
    by_routing_key, by_key = stream.key == "routing_key", subscription.ordered_by == "key"
    whole: Hashable | None = stream.name if subscription.ordered_by == "partition" else None

    def make(raw: RawDelivery, reading: Reading, following: int) -> StreamDelivery:
        table: Mapping[str, FieldValue] = {}
        headers: Headers | Properties
        try:
            headers = properties = raw.properties
            table = properties.headers
        except ValueError as error:  # the sender's mistake: the message is there all the same
            properties, headers = Properties(), malformed(error)
        offset = table.get(OFFSET)
        if type(offset) is not int:
            offset = _NOWHERE if raw.consumer_tag == LOCK_TAG else following
        key = key_of(table)
        if key is None and by_routing_key:
            key = _routing_key(raw)
        return StreamDelivery(
            name=name,
            body=raw.body,
            message_id=properties.message_id or f"{stream.name}-{offset}",
            key=key,
            timestamp=properties.timestamp or 0.0,
            raw_headers=headers,
            lane=key if by_key else whole,
            epoch=0,
            tag=raw.tag,
            raw=raw,
            properties=properties,
            offset=offset,
            reading=reading,
        )

    return make


def _routing_key(raw: RawDelivery) -> str | None:
    try:
        return raw.routing_key
    except ValueError:
        return None
