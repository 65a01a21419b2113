"""What a record is to a handler, and what of it survives: headers, keys, ids, times, tombstones, compression."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.structs import ConsumerRecord

from streamfw import TOMBSTONE, Batch, Message, subscriber
from streamfw.errors import BrokerUnavailable
from streamfw.message import CONTENT_TYPE, CORRELATION_ID, ERROR, ERROR_TYPE, ORIGIN, ORIGIN_OFFSET, ORIGIN_PARTITION
from streamfw_kafka import Offset, Partition
from streamfw_kafka.wire import MESSAGE_ID
from tests.brokers.kafka_apps import (
    all_committed,
    app_of,
    broker_of,
    committed,
    fill,
    fill_bare,
    member,
    offsets,
    topic,
)
from tests.brokers.kafka_kit import desk, new_name, outgoing, read
from tests.helpers import eventually
from tests.services.kafka import Kafka


class Order(msgspec.Struct):
    id: int


async def handled(kafka: Kafka, name: str, count: int = 1, **options: Any) -> list[Message]:
    """The first messages of a topic, as a handler gets them."""
    seen: list[Message] = []

    @subscriber(name)
    async def handle(message: Message) -> None:
        message.headers  # noqa: B018 - decoded while it is ours
        seen.append(message)

    async with app_of(kafka, handle, name=new_name("app"), **options).running():
        await eventually(lambda: len(seen) >= count)
    return seen


async def letters(kafka: Kafka, name: str) -> list[tuple[ConsumerRecord[Any, Any], dict[str, bytes | None]]]:
    """Its dead letters, each with its headers."""
    return [(record, dict(record.headers)) for record in await read(kafka, f"{name}.dead")]


# ------------------------------------------------------------------ headers

HEADERS: list[tuple[str, bytes | None]] = [
    ("tenant", b"one"),
    ("empty", b""),
    ("null", None),
    ("tenant", b"two"),
    ("bytes", b"\xff\x00\xfe"),
    ("größe", "groß".encode()),
]


async def test_headers_survive_both_ways(kafka: Kafka) -> None:
    """Nulls, repeated names, their order, values that are not UTF-8, empty ones."""
    name = await topic(kafka, 1)
    async with app_of(kafka).running() as app:
        await app.publish(name, 1, headers=HEADERS)
    record = (await read(kafka, name))[0]
    assert [pair for pair in record.headers if pair[0] not in (MESSAGE_ID, CONTENT_TYPE)] == HEADERS
    await fill(kafka, name, [b"foreign"], headers=HEADERS)
    ours, foreign = await handled(kafka, name, 2)
    for message in (ours, foreign):
        pairs = [pair for pair in message.headers.pairs if pair[0] != CONTENT_TYPE]
        assert pairs == HEADERS
        assert message.headers["tenant"] == "two" and message.headers.all("tenant") == [b"one", b"two"]
        assert message.headers.raw("null") is None and "null" in message.headers
        assert message.headers.raw("bytes") == b"\xff\x00\xfe"


async def test_a_name_of_a_header_that_is_no_utf8_stops_nobody(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """aiokafka raises out of ``getmany``, which forgets what it had taken of other partitions."""
    monkeypatch.setattr(fetcher, "MemoryRecords", MemoryRecords)  # also where another test has met one
    name, strange = await topic(kafka, 2), b"\xff\xfe".decode("utf-8", "surrogateescape")
    async with desk(kafka.url) as it:
        for partition in range(2):
            await fill(kafka, name, [b"before"], partition=partition)
        assert not any(await it.send(outgoing(name, b"strange", headers=[(strange, b"x")])))
        for partition in range(2):
            await fill(kafka, name, [b"behind"], partition=partition)
    seen = await handled(kafka, name, 5)
    assert sorted(message.body for message in seen) == [b"before"] * 2 + [b"behind"] * 2 + [b"strange"]
    found = next(message for message in seen if message.body == b"strange")
    assert found.headers.raw(strange) == b"x"


async def test_what_a_message_says_of_itself_travels(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    async with app_of(kafka).running() as app:
        message_id = await app.publish(name, 1, key="k", correlation_id="order-7")
    message = (await handled(kafka, name))[0]
    assert (message.message_id, message.key, message.correlation_id) == (message_id, "k", "order-7")
    assert CORRELATION_ID in message.headers and MESSAGE_ID not in message.headers


# ------------------------------------------------------------------ ids, keys, times


async def test_a_foreign_record_has_an_id_made_of_its_place(kafka: Kafka) -> None:
    name = await topic(kafka, 2)
    await fill(kafka, name, [b"a", b"b"], partition=1, key=b"k")
    assert [message.message_id for message in await handled(kafka, name, 2)] == [f"{name}-1-0", f"{name}-1-1"]


async def test_a_key_that_is_no_utf8_is_kept(kafka: Kafka) -> None:
    """As text with escapes; a dead letter has the bytes it was."""
    name, key = await topic(kafka, 1), b"\xff\x80key"
    seen: list[str | None] = []

    @subscriber(name, attempts=1)
    async def handle(message: Message) -> None:
        seen.append(message.key)
        raise LookupError("no")

    await fill(kafka, name, [b"1"], key=key)
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert seen == [key.decode("utf-8", "surrogateescape")]
    assert [letter.key for letter, _ in await letters(kafka, name)] == [key]


async def test_no_key_and_an_empty_key_are_different(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    await fill(kafka, name, [b"1"], key=None)
    await fill(kafka, name, [b"2"], key=b"")
    assert [message.key for message in await handled(kafka, name, 2)] == [None, ""]


async def test_the_time_is_when_it_was_published(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    await fill(kafka, name, [b"1"], timestamp_ms=1_700_000_000_123)
    assert (await handled(kafka, name))[0].timestamp == 1_700_000_000.123


async def test_or_when_it_was_appended_where_the_topic_says_so(kafka: Kafka) -> None:
    name, before = await topic(kafka, 1, message_timestamp_type="LogAppendTime"), time.time()
    await fill(kafka, name, [b"1"], timestamp_ms=1_700_000_000_123)
    assert before - 1 < (await handled(kafka, name))[0].timestamp < time.time() + 1


async def test_a_handler_may_take_its_place(kafka: Kafka) -> None:
    name = await topic(kafka, 3)
    seen: list[tuple[bytes, int, int]] = []

    @subscriber(name)
    async def handle(body: bytes, partition: Partition, offset: Offset) -> None:
        seen.append((body, partition, offset))

    await fill(kafka, name, [b"a", b"b"], partition=2)
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert seen == [(b"a", 2, 0), (b"b", 2, 1)]


# ------------------------------------------------------------------ tombstones


async def test_a_tombstone_is_none_to_who_takes_none(kafka: Kafka) -> None:
    name = await topic(kafka, 1, cleanup_policy="compact")
    seen: list[Order | None] = []

    @subscriber(name)
    async def handle(order: Order | None) -> None:
        seen.append(order)

    app = app_of(kafka, handle)
    async with app.running():
        await app.publish(name, Order(1), key="k")
        await app.publish(name, TOMBSTONE, key="k")
        await all_committed(kafka, name)
    assert seen == [Order(1), None]
    assert [record.value for record in await read(kafka, name)] == [b'{"id":1}', None]


async def test_a_tombstone_is_none_in_a_batch_as_well(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    seen: list[Order | None] = []

    @subscriber(name, batch=Batch(10, wait=0.05))
    async def handle(orders: list[Order | None]) -> None:
        seen.extend(orders)

    await fill(kafka, name, [b'{"id":1}', None], key=b"k")
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert seen == [Order(1), None]


async def test_a_tombstone_is_itself_in_a_message_and_no_bytes_to_who_takes_bytes(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    seen: list[bytes | None] = []

    @subscriber(name)
    async def handle(body: bytes) -> None:
        seen.append(body)

    @subscriber(name, group="other")
    async def handle_none(body: bytes | None) -> None:
        seen.append(body)

    await fill(kafka, name, [None, b""], key=b"k")
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    async with app_of(kafka, handle_none).running():
        await all_committed(kafka, name, "other")
    assert seen == [b"", b"", None, b""]
    assert [message.body is TOMBSTONE for message in await handled(kafka, name, 2)] == [True, False]


@pytest.mark.parametrize("batch", [None, Batch(5)], ids=["one by one", "batches"])
@pytest.mark.parametrize("key", [b"k", None])
async def test_a_tombstone_for_who_takes_no_none_is_a_dead_letter_that_says_so(
    kafka: Kafka, key: bytes | None, batch: Batch | None
) -> None:
    """With a key, as it should be, and without one, which Kafka takes as well."""
    name = await topic(kafka, 1)
    seen: list[Order] = []

    @subscriber(name)
    async def handle(order: Order) -> None:
        seen.append(order)

    @subscriber(name, batch=batch)
    async def handle_batch(orders: list[Order]) -> None:
        seen.extend(orders)

    await fill_bare(kafka, name, key, None)
    await fill(kafka, name, [b'{"id":2}'])
    async with app_of(kafka, handle_batch if batch else handle).running():
        await all_committed(kafka, name)
    assert seen == [Order(2)]
    ((letter, headers),) = await letters(kafka, name)
    assert (letter.key, letter.value) == (key, None)
    assert headers[ERROR_TYPE] == b"DecodeError"
    assert b"it is a tombstone, and the handler's annotation has no None" in (headers[ERROR] or b"")


# ------------------------------------------------------------------ what cannot be decoded


async def test_a_poison_record_goes_aside_as_it_was(kafka: Kafka) -> None:
    name, poison = await topic(kafka, 2), b'{"id": "\xff'
    seen: list[Order] = []

    @subscriber(name, attempts=5)
    async def handle(order: Order) -> None:
        seen.append(order)

    await fill(kafka, name, [b'{"id":1}', poison, b'{"id":3}'], partition=1, key=b"k", headers=HEADERS)
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert seen == [Order(1), Order(3)]
    ((letter, headers),) = await letters(kafka, name)
    assert (letter.key, letter.value) == (b"k", poison)
    assert [pair for pair in letter.headers if not pair[0].startswith("streamfw-")] == HEADERS
    assert headers[MESSAGE_ID] == f"{name}-1-1".encode()
    assert (headers[ORIGIN], headers[ORIGIN_PARTITION], headers[ORIGIN_OFFSET]) == (name.encode(), b"1", b"1")
    assert headers[ERROR_TYPE] == b"DecodeError" and b"cannot be decoded" in (headers[ERROR] or b"")


async def test_a_poison_record_larger_than_what_we_publish_goes_aside_as_well(kafka: Kafka) -> None:
    """`max_body` limits what handlers publish: not what the server has taken from others."""
    name, poison = await topic(kafka, 1), bytes(1_040_000)

    @subscriber(name)
    async def handle(order: Order) -> None: ...

    await fill(kafka, name, [poison], max_request_size=2_000_000)
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert [letter.value for letter, _ in await letters(kafka, name)] == [poison]


async def test_a_batch_that_is_broken_loses_nothing_of_others(kafka: Kafka) -> None:
    """aiokafka raises, and forgets what it had taken of other partitions in the same call, but not that it had: its
    position is past them, and must not be committed."""
    name, group = await topic(kafka, 2), new_name("group")
    for partition in range(2):
        await fill(kafka, name, [b"%d" % partition] * 5, partition=partition)

    def broken(most: int | None = None) -> Any:
        raise CorruptRecordException(f"Invalid CRC - {last}")

    async with member(kafka, name, group, broker=broker_of(kafka, commit_every=0.01)) as one:
        source: Any = one.source
        client = source.group.consumer
        await eventually(lambda: all(client.buffered(tp) for tp in source.group.parts))
        *_, last = client._fetcher._records
        client._fetcher._records[last].getall = broken
        with pytest.raises(BrokerUnavailable, match="Invalid CRC"):
            await source.fetch(100, 2**20)
        ticks = client.heartbeats
        await eventually(lambda: client.heartbeats > ticks + 1)  # with commits between them
        assert set((await committed(kafka, name, group)).values()) == {0}
        await one.reopen()
        assert sorted(offsets(await one.take(10))) == [(p, at) for p in (0, 1) for at in range(5)]


# ------------------------------------------------------------------ compression


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("by", ["aiokafka", "java"])
async def test_compressed_records(kafka: Kafka, codec: str, by: str) -> None:
    """By who publishes, and by the server, which is Java, and stores them as its topic says."""
    bodies = [b"%d" % number * 50 for number in range(200)]
    if by == "java":
        name = await topic(kafka, 1, compression_type=codec)
        await fill(kafka, name, bodies, linger_ms=20)
    else:
        name = await topic(kafka, 1)
        await fill(kafka, name, bodies, linger_ms=20, compression_type=codec)
    async with member(kafka, name, new_name("group")) as one:
        taken = await one.take(200)
        assert [d.body for d in taken] == bodies and offsets(taken) == [(0, at) for at in range(200)]
