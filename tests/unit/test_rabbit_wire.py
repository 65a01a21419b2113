"""The frames that the fast lane reads and writes, compared with what the library makes of the same bytes."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, TypeAlias, cast

import pamqp.decode
import pamqp.encode
import pamqp.frame
import pytest
from aiormq.connection import FrameReceiver
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pamqp import commands as amqp
from pamqp.base import Frame
from pamqp.body import ContentBody
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from streamfw_rabbit import _content, _frames, _tables, _wire
from streamfw_rabbit.channel import SEQUENCE_HEADER, Closed, Properties, RawDelivery, Returned
from streamfw_rabbit.library import LibraryChannel, LibraryDelivery, _Frames

FRAME_MAX = 256
ROOM = FRAME_MAX - 8
OURS = (1, 2, 7)

Event: TypeAlias = "tuple[object, ...]"
"""What happened on a channel, in order: deliveries, confirms, returns."""


def seen(delivery: RawDelivery) -> Event:
    properties = delivery.properties
    headers = properties.headers
    properties.raw_headers = None
    return (
        "delivery",
        delivery.tag,
        delivery.body,
        delivery.consumer_tag,
        delivery.redelivered,
        delivery.exchange,
        delivery.routing_key,
        properties,
        headers,
    )


# ---------------------------------------------------------------------- the library's reader


class Recorder:
    """Takes the place of a `LibraryChannel`: what its frame table tells it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.on_cancelled = self.was_cancelled

    def was_delivered(self, delivery: LibraryDelivery) -> None:
        self.events.append(seen(delivery))

    def was_confirmed(self, tag: int, multiple: bool, ok: bool) -> None:
        self.events.append(("confirm", tag, multiple, ok))

    def _was_returned(self, returned: Returned, sequence: int | None) -> None:
        self.events.append(("return", returned, sequence))

    def was_cancelled(self, consumer_tag: str) -> None: ...

    def _ended(self, closed: Closed) -> None: ...


async def frames_of(stream: bytes) -> list[tuple[int, Any]]:
    """The channel and the frame of each, as aiormq's reader has them."""
    reader = asyncio.StreamReader()
    reader.feed_data(stream)
    reader.feed_eof()
    receiver = FrameReceiver(reader)
    frames = []
    while not reader.at_eof():
        _, channel, frame = await receiver.get_frame()
        frames.append((channel, frame))
    return frames


async def by_the_library(stream: bytes) -> tuple[dict[int, list[Event]], list[str]]:
    """What happened on our channels, and all other frames as text."""
    recorders = {number: Recorder() for number in OURS}
    tables = {number: _Frames(cast("LibraryChannel", recorder)) for number, recorder in recorders.items()}
    others = []
    for channel, frame in await frames_of(stream):
        if channel not in tables:
            others.append(shown(channel, frame))
            continue
        table = tables[channel]
        await table.put((0, frame))
        if not table.empty():
            others.append(shown(channel, table.get_nowait()[1]))
    return {number: recorder.events for number, recorder in recorders.items()}, others


def shown(channel: int, frame: Any) -> str:
    held: dict[str, Any] = (
        {name: getattr(frame, name) for name in frame.attributes()} if isinstance(frame, Frame) else {}
    )
    if isinstance(frame, ContentHeader):
        held = {name: getattr(frame.properties, name) for name in frame.properties.attributes()}
    elif isinstance(frame, ContentBody):
        held = {"value": frame.value}
    return f"{channel} {frame.name} {held}"


# ---------------------------------------------------------------------- our parser


class Run:
    """A parser that is fed piece by piece, as the lane does it."""

    def __init__(self) -> None:
        self.watched: list[_wire.Watched] = []
        self.parser = _wire.Parser(self.watched.append)
        self.parser.frame_max = FRAME_MAX
        self.events: dict[int, list[Event]] = {}
        for number in OURS:
            self.parser.sinks[number] = self._sink(number)
        self.others = b""

    def _sink(self, number: int) -> _wire.Sink:
        events: list[Event] = []
        self.events[number] = events

        def confirmed(tag: int, multiple: bool, ok: bool) -> None:
            self.drain(number)
            events.append(("confirm", tag, multiple, ok))

        def returned(returned: Returned, sequence: int | None) -> None:
            self.drain(number)
            events.append(("return", returned, sequence))

        return _wire.Sink(number, confirmed, returned)

    def drain(self, number: int) -> None:
        sink = self.parser.sinks[number]
        self.events[number] += [seen(delivery) for delivery in sink.inbox]
        sink.inbox = []

    def feed(self, pieces: Iterable[bytes]) -> Run:
        for piece in pieces:
            self.others += self.parser.feed(piece)
            self.parser.touched.clear()
        for number in OURS:
            self.drain(number)
        return self


# ---------------------------------------------------------------------- streams of frames

short = st.text(max_size=40)
# pamqp refuses to make a frame with other names of exchanges and queues; the server does not, and reading neither does.
entities = st.from_regex(r"[a-zA-Z0-9_.:-]{0,20}", fullmatch=True)
timestamps = st.integers(0, 2**32 - 1).map(lambda seconds: datetime.fromtimestamp(seconds, tz=UTC))
decimals = st.builds(lambda number, scale: Decimal(number).scaleb(-scale), st.integers(0, 2**31 - 1), st.integers(0, 9))
plain = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.text(max_size=30), timestamps, decimals,
    st.binary(max_size=20).map(bytearray),
)  # fmt: skip
names = st.text(min_size=1, max_size=30).filter(lambda name: name != SEQUENCE_HEADER)


def tables(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    nested = st.recursive(
        values,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
        max_leaves=6,
    )
    return st.dictionaries(names, nested, max_size=4)


@st.composite
def library_properties(draw: st.DrawFn, headers: st.SearchStrategy[dict[str, Any]]) -> amqp.Basic.Properties:
    optional = st.none() | short
    texts = ("content_type", "content_encoding", "correlation_id", "reply_to", "expiration", "message_id")
    values: dict[str, Any] = {name: draw(optional) for name in (*texts, "message_type", "user_id", "app_id")}
    return amqp.Basic.Properties(
        **values,
        headers=draw(st.none() | headers),
        delivery_mode=draw(st.sampled_from((None, 1, 2))),
        priority=draw(st.none() | st.integers(0, 255)),
        timestamp=draw(st.none() | timestamps),
    )


few_headers = st.dictionaries(names, st.text(max_size=5) | st.integers(-9, 9), max_size=2) | st.builds(
    lambda number: {"a": "b", SEQUENCE_HEADER: number}, st.integers(2**31, 2**62)
)
bodies = st.one_of(
    st.sampled_from(
        (b"", b"{}", b"x" * ROOM, b"y" * (ROOM + 1), b"z" * (3 * ROOM), b"\xce" * 40, b"\1\0\1\0\0\0\5" * 9)
    ),
    st.binary(max_size=3 * ROOM),
)


def marshalled(frame: Any, channel: int) -> bytes:
    return pamqp.frame.marshal(frame, channel)


def content(channel: int, body: bytes, properties: amqp.Basic.Properties) -> list[bytes]:
    frames = [marshalled(ContentHeader(0, len(body), properties), channel)]
    return frames + [marshalled(ContentBody(body[at : at + ROOM]), channel) for at in range(0, len(body), ROOM)]


@st.composite
def happenings(draw: st.DrawFn, channel: int) -> list[bytes]:
    """The frames of one thing that happens on a channel."""
    kind = draw(st.sampled_from(("deliver",) * 5 + ("return", "ack", "nack", "get", "declared", "cancel", "qos")))
    tag = draw(st.integers(1, 2**63 - 1))
    flag = draw(st.booleans())
    if kind == "ack":
        return [marshalled(amqp.Basic.Ack(tag, flag), channel)]
    if kind == "nack":
        return [marshalled(amqp.Basic.Nack(tag, flag, draw(st.booleans())), channel)]
    if kind == "declared":
        return [marshalled(amqp.Queue.DeclareOk(draw(entities), 1, 2), channel)]
    if kind == "qos":
        return [marshalled(amqp.Basic.QosOk(), channel)]
    if kind == "cancel":
        return [marshalled(amqp.Basic.Cancel(draw(short), True), channel)]
    exchange, key = draw(entities), draw(short)
    method: Any = amqp.Basic.Return(312, "NO_ROUTE", exchange, key)
    if kind == "deliver":
        method = amqp.Basic.Deliver(draw(short), tag, flag, exchange, key)
    elif kind == "get":
        method = amqp.Basic.GetOk(tag, flag, exchange, key, 3)
    properties = draw(library_properties(few_headers))
    if kind == "get":  # read as text by the comparison, which does not hide our header
        properties.headers = None
    return [marshalled(method, channel), *content(channel, draw(bodies), properties)]


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Frames of our channels, of one that is the library's, and of the connection, interleaved frame by frame."""
    queues = []
    for channel in (*OURS, 9):
        things = draw(st.lists(happenings(channel), max_size=4))
        queues.append([frame for thing in things for frame in thing])
    connection: list[Any] = [Heartbeat(), amqp.Connection.Blocked("low on memory"), amqp.Connection.Unblocked()]
    queues.append([marshalled(frame, 0) for frame in connection[: draw(st.integers(0, 3))]])
    stream = []
    while queues := [queue for queue in queues if queue]:
        queue = queues[draw(st.integers(0, len(queues) - 1))]
        count = draw(st.integers(1, len(queue)))
        stream += queue[:count]
        del queue[:count]
    return b"".join(stream)


def cut(stream: bytes, places: Iterable[int]) -> list[bytes]:
    borders = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    return [stream[a:b] for a, b in itertools.pairwise(borders)]


@settings(deadline=None, max_examples=100)
@given(stream=streams(), places=st.lists(st.integers(0, 2**16), max_size=12))
def test_any_stream_in_any_pieces_parses_as_by_the_library(stream: bytes, places: list[int]) -> None:
    events, others = asyncio.run(by_the_library(stream))
    run = Run().feed(cut(stream, places))
    assert run.events == events
    assert [shown(*frame) for frame in asyncio.run(frames_of(run.others))] == others
    assert not run.parser.damage


def long_stream() -> bytes:
    """Everything once, on interleaved channels: empty, whole, maximal and split bodies."""
    properties = amqp.Basic.Properties(headers={"t": "é", SEQUENCE_HEADER: 2**40}, message_id="m", delivery_mode=2)
    stream: list[bytes] = []
    for tag, body in enumerate((b"", b"{}", b"x" * ROOM, b"y" * (ROOM + 1)), 1):
        deliver = amqp.Basic.Deliver("c", tag, tag % 2 == 0, "e", "k")
        frames = [[marshalled(deliver, n), *content(n, body, properties)] for n in (1, 2)]
        stream += [frame for pair in zip(*frames, strict=True) for frame in pair]  # frame by frame in turn
        stream += [marshalled(amqp.Basic.Ack(tag, True), 7), marshalled(amqp.Queue.DeclareOk("q", 0, 0), 1)]
    stream += [marshalled(amqp.Basic.Return(312, "NO_ROUTE", "", "k"), 7), *content(7, b"back", properties)]
    stream += [marshalled(amqp.Basic.Cancel("c", True), 1), marshalled(Heartbeat(), 0)]
    return b"".join(stream)


async def test_a_stream_cut_at_every_byte() -> None:
    stream = long_stream()
    events, others = await by_the_library(stream)
    whole = Run().feed([stream])
    assert whole.events == events
    assert [shown(*frame) for frame in await frames_of(whole.others)] == others
    for place in range(len(stream) + 1):
        run = Run().feed([stream[:place], stream[place:]])
        assert (run.events, run.others, run.watched) == (whole.events, whole.others, whole.watched), place


def test_a_stream_byte_by_byte() -> None:
    stream = long_stream()
    whole, run = Run().feed([stream]), Run().feed(stream[i : i + 1] for i in range(len(stream)))
    assert (run.events, run.others, run.watched) == (whole.events, whole.others, whole.watched)


def test_a_large_frame_is_joined_once_it_is_complete() -> None:
    """Also where the server has no limit for frames: the pieces are kept apart until then."""
    run = Run()
    run.parser.frame_max = 0
    body = bytes(range(256)) * 4096
    frames = [marshalled(amqp.Basic.Deliver("c", 1, False, "", "k"), 1)]
    frames += [marshalled(ContentHeader(0, len(body), amqp.Basic.Properties()), 1), marshalled(ContentBody(body), 1)]
    stream = b"".join(frames)
    pieces = [stream[at : at + 1000] for at in range(0, len(stream), 1000)]
    run.feed(pieces[:500])
    assert len(run.parser._held) > 400
    run.feed(pieces[500:])
    assert [event[2] for event in run.events[1]] == [body]


def test_who_got_deliveries_is_told_once_a_read() -> None:
    """And not again before the inbox was taken."""
    parser = Run().parser
    one = b"".join(
        [marshalled(amqp.Basic.Deliver("c", 1, False, "", "k"), 1), *content(1, b"x", amqp.Basic.Properties())]
    )
    empty = b"".join(
        [marshalled(amqp.Basic.Deliver("c", 1, False, "", "k"), 2), *content(2, b"", amqp.Basic.Properties())]
    )
    parser.feed(one + empty + one + empty)
    assert parser.touched == [parser.sinks[1], parser.sinks[2]]
    parser.touched.clear()
    parser.feed(one[:-9])
    parser.feed(one[-9:] + empty)
    assert parser.touched == []
    parser.sinks[1].inbox = []
    parser.feed(one + empty)
    assert parser.touched == [parser.sinks[1]]


def test_what_is_watched_is_told_and_handed_on() -> None:
    run = Run()
    frames = [
        (1, amqp.Basic.Cancel("a consumer", True)),
        (2, amqp.Channel.Close(406, "PRECONDITION_FAILED - why", 60, 80)),
        (7, amqp.Channel.CloseOk()),
        (0, amqp.Connection.Blocked("low on memory")),
        (0, amqp.Connection.Unblocked()),
        (0, amqp.Connection.Close(320, "CONNECTION_FORCED - why", 0, 0)),
    ]
    stream = b"".join(marshalled(frame, number) for number, frame in frames)
    run.feed([stream])
    assert run.others == stream
    assert run.watched == [
        _wire.Watched(_wire.CANCEL, 1, 0, "a consumer"),
        _wire.Watched(_wire.CHANNEL_CLOSE, 2, 406, "PRECONDITION_FAILED - why"),
        _wire.Watched(_wire.CHANNEL_CLOSE_OK, 7),
        _wire.Watched(_wire.BLOCKED, 0, 0, "low on memory"),
        _wire.Watched(_wire.UNBLOCKED, 0),
        _wire.Watched(_wire.CONNECTION_CLOSE, 0, 320, "CONNECTION_FORCED - why"),
    ]


@pytest.mark.parametrize(
    ("damaged", "told"),
    [
        (b"AMQP\0\0\x09\x01", "unknown type 65"),
        (marshalled(amqp.Basic.QosOk(), 1)[:-1] + b"\0", "without its end"),
        (struct.pack(">BHI", 1, 1, 2**31) + b"12345678", f"a frame of {2**31} bytes"),
        (b"HTTP/1.1 400 Bad Request\r\n", "unknown type 72"),
    ],
)
def test_damage_ends_all_guessing(damaged: bytes, told: str) -> None:
    """From there on everything is the library's, as it came; it raises."""
    good = marshalled(amqp.Basic.Ack(1, False), 1)
    run = Run().feed([good + damaged, good, b"more"])
    assert told in run.parser.damage
    assert run.events[1] == [("confirm", 1, False, True)]
    assert run.others == damaged + good + b"more"


def test_a_handshake_refused_is_read() -> None:
    close = marshalled(amqp.Connection.Close(530, "NOT_ALLOWED - vhost x not found", 10, 40), 0)
    assert _wire.connection_close(close) == (530, "NOT_ALLOWED - vhost x not found")
    assert _wire.connection_close(marshalled(amqp.Connection.Tune(1, 2, 3), 0)) is None
    assert _wire.connection_close(b"") is None


# ---------------------------------------------------------------------- properties and tables


@settings(deadline=None, max_examples=100)
@given(table=tables(plain | st.floats(width=32, allow_nan=False)))
def test_a_table_reads_as_by_the_library(table: dict[str, Any]) -> None:
    data = pamqp.encode.field_table(table)
    assert _tables.decode_table(data[4:]) == pamqp.decode.field_table(data)[1] == table


@settings(deadline=None, max_examples=100)
@given(table=tables(plain))
def test_a_table_is_written_as_by_the_library(table: dict[str, Any]) -> None:
    ordered = _sorted(table)  # the library sorts, we keep the order
    assert struct.pack(">I", len(_tables.encode_table(ordered))) + _tables.encode_table(ordered) == (
        pamqp.encode.field_table(table)
    )


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


@settings(deadline=None, max_examples=100)
@given(table=tables(plain | st.floats(allow_nan=False) | st.binary(max_size=30)))
@example(table={"bytes that are text": b"text", "others": b"\xff\xfe", "float": 0.1})
def test_what_is_written_is_read_by_both(table: dict[str, Any]) -> None:
    """Also what the library would not write, or not without loss: a float's 64 bits, and bytes. A long string is bytes
    where it is no text, and text else."""
    data = _tables.encode_table(table)
    expected = _as_read(table)
    assert _tables.decode_table(data) == expected
    assert list(_tables.decode_table(data)) == list(table)
    assert pamqp.decode.field_table(struct.pack(">I", len(data)) + data)[1] == expected
    assert _tables.encode_table(_tables.decode_table(data)) == data


def _as_read(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_read(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_as_read(item) for item in value]
    if type(value) is bytes:
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return value


@pytest.mark.parametrize("letter", [b"b", b"B", b"s", b"u", b"I", b"i", b"l", b"L", b"f", b"d", b"t", b"V", b"\0"])
def test_every_type_of_fixed_size_reads_as_by_the_library(letter: bytes) -> None:
    for filling in (b"\0" * 8, b"\xff" * 8, b"\x80" + b"\0" * 7, b"\x01\x02\x03\x04\x05\x06\x07\x08"):
        size = {b"b": 1, b"B": 1, b"t": 1, b"s": 2, b"u": 2, b"I": 4, b"i": 4, b"f": 4, b"V": 0, b"\0": 0}.get(
            letter, 8
        )
        data = b"\4name" + letter + filling[:size]
        ours, theirs = _tables.decode_table(data), pamqp.decode.field_table(struct.pack(">I", len(data)) + data)[1]
        assert repr(ours) == repr(theirs)  # NaN is not equal to itself


def test_a_time_beyond_2106_is_milliseconds() -> None:
    data = b"\1tT" + struct.pack(">Q", 1_700_000_000_123)
    ours = _tables.decode_table(data)
    assert ours == pamqp.decode.field_table(struct.pack(">I", len(data)) + data)[1]
    assert ours["t"].year == 2023
    assert _content.decode(b"\0\x40" + data[3:]).timestamp == 1_700_000_000.123


@settings(deadline=None, max_examples=100)
@given(properties=library_properties(tables(plain)))
def test_properties_read_and_are_written_as_by_the_library(properties: amqp.Basic.Properties) -> None:
    properties.headers = _sorted(properties.headers) if properties.headers else None
    data = properties.marshal()
    theirs = ContentHeader()
    theirs.unmarshal(b"\0\x3c\0\0" + b"\0" * 8 + data)
    ours, wanted = _content.decode(data), _content.from_library(theirs.properties)
    assert ours.headers == wanted.headers
    ours.raw_headers = wanted.raw_headers = None
    assert ours == wanted
    assert _content.encode(_content.decode(data)) == data
    assert _content.encode(_content.from_library(theirs.properties)) == data


@settings(deadline=None, max_examples=100)
@given(table=tables(plain), sequence=st.integers(1, 2**63 - 1))
def test_our_sequence_header_is_hidden_and_replaced(table: dict[str, Any], sequence: int) -> None:
    data = _content.encode(Properties(raw_headers=table, message_id="m"), sequence)
    read = _content.decode(data)
    assert _tables.sequence(_content.header_table(data)) == sequence
    assert read.headers == table
    # A copy that was never decoded, and one whose table somebody else has put together anew.
    for raw in (_content.header_table(data), _tables.encode_table({SEQUENCE_HEADER: 2**33, **table})):
        copy = _content.encode(Properties(raw_headers=raw, message_id="m"), 77)
        assert copy == _content.encode(Properties(raw_headers=table, message_id="m"), 77)
        assert _content.decode(copy).headers == table


def test_more_flags_than_there_are_properties() -> None:
    """The last bit says that more flags follow; nobody has defined any."""
    data = struct.pack(">HHH", 0x8081, 1, 0) + b"\1a" + b"\1m"
    theirs = ContentHeader()
    theirs.unmarshal(b"\0\x3c\0\0" + b"\0" * 8 + data)
    ours = _content.decode(data)
    assert ours == _content.from_library(theirs.properties)
    assert (ours.content_type, ours.message_id) == ("a", "m")


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=60))
@example(data=b"\1a" + b"A\0\0\0\x06" * 1000)
@example(data=b"\1aF\0\0\xff\xff")
@example(data=b"\1aT" + b"\xff" * 8)
def test_malformed_input_is_a_value_error(data: bytes) -> None:
    for read in (_tables.decode_table, lambda data: _content.decode(data).headers):
        try:
            assert isinstance(read(data), dict)
        except ValueError:
            pass
    assert _tables.sequence(data) is None
    assert isinstance(_content.header_table(data), bytes)


def test_a_table_that_is_nested_without_end_is_a_value_error() -> None:
    table = b""
    for _ in range(10_000):
        table = b"\1aF" + struct.pack(">I", len(table)) + table
    with pytest.raises(ValueError, match="malformed header table"):
        _tables.decode_table(table)


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ({"n" * 256: 1}, ValueError),
        ({"a": {"b": [1, {2}]}}, TypeError),
        ({"a": 2**63}, ValueError),
        ({"a": -(2**63) - 1}, ValueError),
        ({"a": Decimal("NaN")}, ValueError),
        ({"a": Decimal(2**40)}, ValueError),
        ({"a": Decimal(-1)}, ValueError),
        ({"a": datetime(1950, 1, 1, tzinfo=UTC)}, ValueError),
        ({"a": (1, 2)}, TypeError),
        ({"a": "\ud800"}, ValueError),
    ],
)
def test_what_amqp_cannot_hold_is_refused(table: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"header or argument '[an]+'"):
        _tables.encode_table(table)


@pytest.mark.parametrize(
    "properties",
    [
        Properties(message_id="x" * 256),
        Properties(content_type="é" * 128),
        Properties(priority=256),
        Properties(delivery_mode=-1),
        Properties(timestamp=-1),
        Properties(timestamp=float("inf")),
    ],
)
def test_properties_that_amqp_cannot_hold_are_refused(properties: Properties) -> None:
    with pytest.raises(ValueError):
        _content.encode(properties)


# ---------------------------------------------------------------------- what we write


@settings(deadline=None, max_examples=100)
@given(
    body=bodies,
    exchange=entities,
    key=short,
    mandatory=st.booleans(),
    properties=library_properties(st.just({})),
    channel=st.integers(1, 65535),
)
def test_a_publish_is_written_as_by_the_library(
    body: bytes, exchange: str, key: str, mandatory: bool, properties: amqp.Basic.Properties, channel: int
) -> None:
    properties.headers = None
    method = amqp.Basic.Publish(exchange=exchange, routing_key=key, mandatory=mandatory)
    expected = b"".join([marshalled(method, channel), *content(channel, body, properties)])
    encoded = _content.encode(_content.from_library(properties))
    assert _frames.publish_frames(channel, exchange, key, encoded, body, FRAME_MAX, mandatory) == expected


@settings(deadline=None)
@given(
    identity=st.text(max_size=255).filter(lambda text: len(text.encode()) < 256),
    sequence=st.integers(1, 2**63 - 1),
    stamp=st.integers(0, 2**32),
    body=st.one_of(st.binary(max_size=9), st.sampled_from((ROOM, ROOM + 1)).map(bytes)),
)
def test_a_plain_message_is_written_as_any_other(identity: str, sequence: int, stamp: int, body: bytes) -> None:
    encoded = _content.encode(Properties(delivery_mode=2, message_id=identity, timestamp=stamp), sequence)
    expected = _frames.publish_frames(7, "e", "k", encoded, body, FRAME_MAX, True)
    assert _frames.plain_frames(7, "e", "k", identity, stamp, sequence, body, FRAME_MAX) == expected


def test_a_plain_message_with_an_id_that_is_too_long_is_refused_as_any_other() -> None:
    with pytest.raises(ValueError, match="256 bytes long"):
        _frames.plain_frames(7, "e", "k", "i" * 256, 0, 1, b"x", FRAME_MAX)


@pytest.mark.parametrize("flag", [True, False])
def test_settlements_are_written_as_by_the_library(flag: bool) -> None:
    for channel, tag in ((1, 1), (65535, 2**63 - 1)):
        assert _frames.ack_frame(channel, tag, flag) == marshalled(amqp.Basic.Ack(tag, flag), channel)
        assert _frames.reject_frame(channel, tag, flag) == marshalled(amqp.Basic.Reject(tag, flag), channel)
        for multiple in (True, False):
            expected = marshalled(amqp.Basic.Nack(tag, multiple, flag), channel)
            assert _frames.nack_frame(channel, tag, multiple, flag) == expected


def test_tag_0_is_refused() -> None:
    """It would settle everything that is out."""
    with pytest.raises(ValueError, match="delivery tag 0"):
        _frames.ack_frame(1, 0, True)


def test_properties_beyond_a_frame_are_refused() -> None:
    """A header frame cannot be split; the server would close the connection (501)."""
    fits = _content.encode(Properties(raw_headers={"a": "x" * (ROOM - 12 - 2 - 4 - 7)}))
    assert len(_frames.publish_frames(1, "", "k", fits, b"", FRAME_MAX, False)) > FRAME_MAX
    with pytest.raises(ValueError, match=f"at most {ROOM - 12}"):
        _frames.publish_frames(1, "", "k", fits + b"x", b"", FRAME_MAX, False)


def test_a_long_name_is_refused() -> None:
    with pytest.raises(ValueError, match="256 bytes long"):
        _frames.publish_frames(1, "", "k" * 256, b"\0\0", b"", FRAME_MAX, False)


def test_methods_of_what_the_library_writes() -> None:
    data = marshalled(amqp.Basic.QosOk(), 3) + b"".join(content(3, b"x" * 500, amqp.Basic.Properties()))
    data += marshalled(amqp.Channel.Close(200, "", 0, 0), 4) + marshalled(Heartbeat(), 0)
    assert list(_wire.methods(data)) == [(3, b"\0\x3c\0\x0b"), (4, _wire.CHANNEL_CLOSE)]
