"""How the library's connection reads frames, without a server: as the library does, and past what it cannot decode."""

from __future__ import annotations

import asyncio
import struct
from datetime import UTC, datetime

import pamqp.frame
import pytest
from aiormq.connection import FrameReceiver
from aiormq.exceptions import AMQPConnectionError
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from streamfw_rabbit._reading import DamagedHeader, FrameReader, properties_of

DELIVER = commands.Basic.Deliver("tag", 7, True, "events", "user.created")
GET = commands.Basic.GetOk(8, False, "events", "user.created", 3)
RETURN = commands.Basic.Return(312, "NO_ROUTE", "events", "user.created")
STAMP = datetime(2026, 1, 1, tzinfo=UTC)
FRAMES = [
    DELIVER,
    ContentHeader(0, 4, commands.Basic.Properties(message_id="id-1", headers={"a": 1}, timestamp=STAMP)),
    ContentBody(b"body"),
    GET,
    RETURN,
    Heartbeat(),
    commands.Channel.CloseOk(),
]


def fed(*data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    for part in data:
        reader.feed_data(part)
    reader.feed_eof()
    return reader


def marshalled(frame: object, channel: int = 3) -> bytes:
    return pamqp.frame.marshal(frame, channel)  # type: ignore[arg-type]


def shown(frame: object) -> object:
    return [type(frame), marshalled(frame)]


async def test_it_reads_what_the_library_reads() -> None:
    data = [marshalled(frame) for frame in FRAMES]
    ours = [(size, channel, shown(frame)) async for size, channel, frame in FrameReader(fed(*data))]
    theirs = [(size, channel, shown(frame)) async for size, channel, frame in FrameReceiver(fed(*data))]
    assert ours == theirs
    assert len(ours) == len(FRAMES)


@pytest.mark.parametrize("cut", [1, 6, 7, 20])
async def test_a_stream_that_ends_in_a_frame(cut: int) -> None:
    with pytest.raises(AMQPConnectionError, match="unexpectedly closed"):
        await anext(FrameReader(fed(marshalled(DELIVER)[:cut])))


@pytest.mark.parametrize("frame", [DELIVER, GET, RETURN])
@pytest.mark.parametrize("bad", [b"user.created", b"events"])
async def test_a_name_that_is_no_text_is_empty(frame: commands.Basic.Deliver, bad: bytes) -> None:
    data = marshalled(frame).replace(bad, b"\xff" * len(bad))
    _, channel, found = await anext(FrameReader(fed(data, marshalled(Heartbeat()))))
    assert channel == 3
    assert type(found) is type(frame)
    name = "exchange" if bad == b"events" else "routing_key"
    assert getattr(found, name) == ""
    others = [each for each in type(frame).__slots__ if each != name]
    assert [getattr(found, each) for each in others] == [getattr(frame, each) for each in others]


def damaged(good: bytes, bad: bytes) -> FrameReader:
    data = marshalled(FRAMES[1])
    assert good in data
    return FrameReader(fed(data.replace(good, bad), marshalled(FRAMES[2])))


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [(b"id-1", b"id\xff1", "malformed message properties"), (b"\x01a", b"\x01\xff", "malformed header table")],
)
async def test_properties_that_cannot_be_decoded_are_kept_as_they_came(good: bytes, bad: bytes, said: str) -> None:
    reader = damaged(good, bad)
    _, channel, header = await anext(reader)
    assert isinstance(header, DamagedHeader)
    assert (channel, header.body_size) == (3, 4)
    with pytest.raises(ValueError, match=said):
        _ = properties_of(header).headers
    assert type((await anext(reader))[2]) is ContentBody


async def test_a_time_that_no_calendar_has_costs_nothing_else() -> None:
    reader = damaged(struct.pack(">Q", int(STAMP.timestamp())), struct.pack(">Q", 2**63))
    _, _, header = await anext(reader)
    properties = properties_of(header)
    assert (properties.message_id, properties.headers) == ("id-1", {"a": 1})


@pytest.mark.parametrize(
    "data",
    [
        marshalled(commands.Queue.DeclareOk("name", 1, 2)).replace(b"name", b"\xff\xff\xff\xff"),
        b"\x09\0\1\0\0\0\1x\xce",
        marshalled(ContentBody(b"body"))[:-1] + b"\0",
    ],
)
async def test_a_frame_of_no_use_ends_the_connection(data: bytes) -> None:
    with pytest.raises(AMQPConnectionError, match="malformed frame"):
        await anext(FrameReader(fed(data)))
