"""What the broker asks of a transport: `Channel`, and the values that pass between the two.

There are two implementations: `library.LibraryChannel` on aiormq's own reader, and `fastlane.FastChannel`, which takes
the frames that are many out of the byte stream itself. Everything above sees this protocol only, and the same tests run
over both.

Theory of operation
    A channel is opened once and closes once. It never comes back: what follows it is another channel, with another
    `Channel.epoch`. Delivery tags begin again at 1 on each, so a tag means nothing without the epoch it came from.

    Nothing here waits but what says ``async``. Deliveries are appended to `Channel.inbox` and confirms to the
    `Receipts` they belong to, from within the read that brought them; then, at most once a read, the two wake-ups are
    called. They must be short and must not raise.

    What is written (settlements, publishes) is kept until the end of the present turn of the event loop and then goes
    out in one write, in the order of the calls. On a channel that is closed nothing is written: `Channel.ack` and its
    like answer False, `Channel.publish` raises.

    An end is told in the very call that saw it, in this order: `Channel.closed` is set, every open receipt gets it as
    its answer, the settlements not written are forgotten, `Channel.on_closed` is called. The inbox keeps what it has;
    none of it is ours any more.

    The methods that do wait run to their end even when their caller is cancelled: an AMQP call that is broken off
    takes its channel along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Final, Literal, Protocol, TypeAlias

import msgspec

from . import _tables

__all__ = [
    "NACKED",
    "OPEN",
    "SEQUENCE_HEADER",
    "Answer",
    "Channel",
    "ChannelCounters",
    "Closed",
    "FieldTable",
    "FieldValue",
    "Nacked",
    "Open",
    "Properties",
    "RawDelivery",
    "Receipts",
    "Returned",
    "Transport",
]

Transport: TypeAlias = Literal["aiormq", "fast"]

_Scalar: TypeAlias = "bool | int | float | Decimal | str | bytes | bytearray | datetime | None"
FieldValue: TypeAlias = "_Scalar | list[FieldValue] | dict[str, FieldValue]"
"""A value of a header table or of arguments. `str` and `bytes` are the long string, which is text or not; `bytearray`
is the byte array; a `datetime` has whole seconds. What was read can be written again with the same value."""
FieldTable: TypeAlias = Mapping[str, FieldValue]

SEQUENCE_HEADER: Final = _tables.SEQUENCE_HEADER
"""Our header on every mandatory publish, by which a return finds it. Readers never see it: `Properties.headers` has it
removed, and so a copy does not carry a stale one."""


class Closed(msgspec.Struct, frozen=True):
    """Why a channel or a connection ended.

    - ``channel``: the server closed the channel, with AMQP's `code` and `text`; others on the connection live on.
    - ``connection``: the server closed the connection, likewise.
    - ``lost``: the socket ended without a word, or the peer fell silent; `code` is 0.
    - ``local``: we closed it; `code` is 0.
    """

    kind: Literal["channel", "connection", "lost", "local"]
    code: int = 0
    text: str = ""

    def __str__(self) -> str:
        who = {"channel": "the server closed the channel", "connection": "the server closed the connection"}
        what = who.get(self.kind, "the connection was lost" if self.kind == "lost" else "closed by us")
        return f"{what}: {self.code} {self.text}" if self.code else f"{what}: {self.text}" if self.text else what


class Properties(msgspec.Struct, gc=False, kw_only=True):
    """The properties of a message, as AMQP 0-9-1 has them (Basic, "content properties").

    `raw_headers` is the header table: a dict, or its bytes as they came; read it with `headers`. `timestamp` is in
    seconds since 1970 (AMQP has whole seconds; what is beyond 2106 is read as milliseconds, as some clients write
    them). `expiration` is text of milliseconds. `message_type` is AMQP's ``type``. Text of a property is at most 255
    bytes of UTF-8. An empty text is the same as none.
    """

    raw_headers: bytes | dict[str, FieldValue] | None = None
    content_type: str | None = None
    content_encoding: str | None = None
    delivery_mode: int | None = None
    priority: int | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    expiration: str | None = None
    message_id: str | None = None
    timestamp: float | None = None
    message_type: str | None = None
    user_id: str | None = None
    app_id: str | None = None

    @property
    def headers(self) -> dict[str, FieldValue]:
        """The header table, decoded when first asked for, without `SEQUENCE_HEADER`; empty when there is none.

        Raises `ValueError` when the sender's table is malformed.
        """
        raw = self.raw_headers
        if not isinstance(raw, dict):
            raw = self.raw_headers = _tables.decode_table(raw) if raw else {}
        return raw


class RawDelivery(Protocol):
    """A message as it came. All but `tag` and `body` may be decoded when asked for, and not kept: ask once.

    `routing_key`, `exchange` and `properties` raise `ValueError` when the sender put something malformed there
    (text that is no UTF-8, a table that ends early): that message is bad, not the channel.
    """

    __slots__ = ()

    @property
    def tag(self) -> int: ...
    @property
    def body(self) -> bytes: ...
    @property
    def consumer_tag(self) -> str: ...
    @property
    def redelivered(self) -> bool: ...
    @property
    def exchange(self) -> str: ...
    @property
    def routing_key(self) -> str: ...
    @property
    def properties(self) -> Properties: ...


class Returned(msgspec.Struct, frozen=True):
    """No queue took a mandatory message (`code` 312, ``NO_ROUTE``): it is stored nowhere."""

    code: int
    text: str


class Nacked(msgspec.Struct, frozen=True):
    """The server did not take the message: a queue is full and rejects, or has lost its leader."""


class Open(msgspec.Struct, frozen=True):
    """There is no answer yet. Whoever gives up on one knows as much as this: it may be stored."""


NACKED: Final = Nacked()
OPEN: Final = Open()

Answer: TypeAlias = "Returned | Nacked | Closed | Open | None"
"""What became of a publish. None: confirmed, so it is stored. `Closed`: it may be stored, nobody can tell."""


_ABANDONED: Final = Closed("local", 0, "its caller has given up")


class Receipts:
    """The answers to a group of publishes, by place. One future a group, not a message.

    `Channel.publish` takes it with a place in it. It is complete when every place has its answer; a place is answered
    once, and later answers to it are ignored. Who makes many may give the running `loop`: to ask for it costs a system
    call (before Python 3.12).
    """

    __slots__ = ("_loop", "_waiter", "answers", "left")

    def __init__(self, count: int = 1, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self.answers: list[Answer] = [OPEN] * count
        self.left = count
        """How many places have no answer yet."""
        self._waiter: asyncio.Future[None] | None = None

    def answer(self, place: int, answer: Answer) -> None:
        """Give a place its answer; also for those that were never sent (then with what stopped them)."""
        if self.answers[place] is not OPEN:
            return
        self.answers[place] = answer
        self.left -= 1
        if not self.left and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abandon(self) -> None:
        """Nobody waits for the rest any more: whoever watches over it may let go of it."""
        for place, answer in enumerate(self.answers):
            if answer is OPEN:
                self.answer(place, _ABANDONED)

    async def wait(self) -> list[Answer]:
        """Wait for all of them, by one task at a time. It may be cancelled or timed out: the answers that are there
        stay, and it can wait again."""
        while self.left:
            await self.waiting()
        return self.answers

    def waiting(self) -> asyncio.Future[None]:
        """What resolves when all are there, for one who finds that some are missing; of several calls the last."""
        self._waiter = waiter = (self._loop or asyncio.get_running_loop()).create_future()
        return waiter


class ChannelCounters(msgspec.Struct):
    """What a channel did. `writes` are those of settlements and publishes: turns of the loop that had any."""

    deliveries: int = 0
    acks: int = 0
    """Ack, nack and reject frames; a multiple one counts once."""
    publishes: int = 0
    confirms: int = 0
    """Confirm frames that came; a multiple one counts once."""
    returns: int = 0
    late: int = 0
    """Settlements that came when the channel was closed, and were not sent."""
    writes: int = 0


class Channel(Protocol):
    """One AMQP channel. See the head of this module for what holds of all of it."""

    number: int
    """Its number on the wire; used again by later channels."""
    epoch: int
    """Unlike any other channel's in this process."""
    closed: Closed | None
    """Why it ended; None while it is open."""
    on_closed: Callable[[Closed], None] | None
    """Called once, when it ends. Set it right after opening; when `closed` is set by then, it will not be called."""
    counters: ChannelCounters

    @property
    def transport(self) -> Transport:
        """Which of the two it is."""
        ...

    # Consuming

    @property
    def inbox(self) -> list[RawDelivery]:
        """What was delivered and not taken yet, in order. For looking; see `take`."""
        ...

    on_delivery: Callable[[], None] | None
    """Called after a read that brought deliveries, once, when the inbox was empty before it."""
    on_cancelled: Callable[[str], None] | None
    """Called with the consumer tag when the *server* ends a consumer: its queue was deleted, or lost its leader. The
    channel stays open, and what was delivered can still be settled."""

    def take(self) -> list[RawDelivery]:
        """All that was delivered since the last call, in order."""
        ...

    async def qos(self, prefetch: int) -> None:
        """How many deliveries each *later* consumer may have unsettled. 0 is no limit."""
        ...

    async def consume(
        self,
        queue: str,
        consumer_tag: str,
        *,
        arguments: FieldTable | None = None,
        no_ack: bool = False,
        exclusive: bool = False,
    ) -> None:
        """Start a consumer under a tag of the caller's choice; it returns with the server's ConsumeOk. Deliveries may
        be in the inbox before that. A consumer priority is the argument ``x-priority``, a stream's start
        ``x-stream-offset``.

        Raises `BrokerError`: a refusal also closes the channel.
        """
        ...

    async def cancel(self, consumer_tag: str) -> None:
        """End a consumer; returns when no more deliveries come. Those that are out stay ours until the channel ends."""
        ...

    # Settling

    def ack(self, tag: int, multiple: bool = False) -> bool:
        """Acknowledge `tag`, with `multiple` also every unsettled one before it. False: closed, nothing was sent.

        AMQP: a tag that is unknown or settled closes the channel (406). `tag` is at least 1: 0 would be "everything".
        """
        ...

    def nack(self, tag: int, multiple: bool = False, requeue: bool = True) -> bool:
        """Give back (`requeue`) or drop to the queue's dead letter exchange; else as `ack`."""
        ...

    def reject(self, tag: int, requeue: bool = True) -> bool:
        """AMQP's older form of a single `nack`. Like it, but quorum queues count it towards the delivery limit on
        every server; from 4.3 on they do not count a `nack` that requeues."""
        ...

    # Publishing: on a channel opened with ``confirms=True``

    @property
    def unconfirmed(self) -> int:
        """How many publishes have no answer from the server yet, also those that their caller gave up on."""
        ...

    unconfirmed_bytes: int
    """The bytes of their bodies."""
    on_answers: Callable[[], None] | None
    """Called after a read that brought confirms, once."""

    @property
    def blocked(self) -> bool:
        """The server has said that it takes no publishes (an alarm). What is published now waits in the socket."""
        ...

    def publish(
        self,
        exchange: str,
        routing_key: str,
        properties: Properties,
        body: bytes,
        receipts: Receipts,
        place: int = 0,
        *,
        mandatory: bool = True,
    ) -> int:
        """Publish; the answer goes to `place` of `receipts`. Returns the sequence number on this channel.

        Raises `ChannelGone` when the channel is closed, and `ValueError` or `TypeError`, with nothing sent, for what
        AMQP cannot carry: a name of more than 255 bytes, a header's value of another type.
        """
        ...

    def publish_plain(
        self, exchange: str, routing_key: str, identity: str, stamp: int, body: bytes, receipts: Receipts
    ) -> int:
        """The same for what most messages are, in fewer steps: mandatory, persistent, with an id, a time in whole
        seconds, and no other property or header; the answer goes to place 0."""
        ...

    # The end

    async def flush(self) -> None:
        """Wait until all that was written so far has left for the server (not: has been read there). Returns at once
        on a closed channel."""
        ...

    async def close(self) -> None:
        """Write out what is buffered, close the channel and wait for the server's CloseOk: then it has also read every
        settlement. What is unsettled goes back to its queue. Never raises; a second call waits for the first."""
        ...
