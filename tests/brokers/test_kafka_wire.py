"""Keys, headers and ids of records, and records of producers that do not keep to the protocol."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record._crc32c import crc as crc32c
from aiokafka.record.default_records import DefaultRecordBatchBuilder, _DefaultRecordBatchPy
from aiokafka.record.memory_records import MemoryRecords
from hypothesis import given
from hypothesis import strategies as st

from streamfw.message import TOMBSTONE, Headers
from streamfw_kafka import foreign
from streamfw_kafka.foreign import TolerantRecords, tolerate
from streamfw_kafka.wire import MESSAGE_ID, encoded, key_of, message_id_of, value_of, visible_headers
from tests.brokers.kafka_kit import Desk, desk, new_name, outgoing, read
from tests.services.kafka import Kafka

Pairs = list[tuple[str, bytes | None]]

texts = st.text(st.characters(codec="utf-8"))
escaped = st.binary().map(lambda raw: raw.decode("utf-8", "surrogateescape"))
names = st.one_of(texts, escaped, st.just(MESSAGE_ID)).filter(bool)
pairs = st.lists(st.tuples(names, st.one_of(st.none(), st.binary())))


@given(key=st.one_of(st.none(), st.binary()), headers=pairs, message_id=texts.filter(bool))
def test_what_goes_out_comes_back(key: bytes | None, headers: Pairs, message_id: str) -> None:
    message = outgoing("t", key=key_of(key), message_id=message_id)
    message.headers = Headers.of(tuple(headers))
    wire_key, wire_pairs = encoded(message)
    record = SimpleNamespace(headers=tuple(wire_pairs), topic="t", partition=3, offset=14)
    assert wire_key == key
    assert message_id_of(record) == message_id
    assert list(visible_headers(record.headers).pairs) == headers


@pytest.mark.parametrize(
    ("headers", "message_id", "visible"),
    [
        ((), "t-3-14", ()),
        ((("a", b"1"), (MESSAGE_ID, b"theirs"), ("b", None)), "theirs", (("a", b"1"), ("b", None))),
        (((MESSAGE_ID, None), ("a", b"1")), "t-3-14", (("a", b"1"),)),
        (((MESSAGE_ID, b""),), "t-3-14", ()),
        (((MESSAGE_ID, b"\xff"),), "\udcff", ()),
        (((MESSAGE_ID, b"1"), (MESSAGE_ID, b"2")), "1", ((MESSAGE_ID, b"2"),)),
    ],
)
def test_the_message_id_of_a_foreign_record(headers: Any, message_id: str, visible: Any) -> None:
    record = SimpleNamespace(headers=headers, topic="t", partition=3, offset=14)
    assert message_id_of(record) == message_id
    assert visible_headers(headers).pairs == visible


def test_values() -> None:
    assert value_of(None) is None
    assert value_of(TOMBSTONE) is None
    assert value_of(b"") == b""


# ---------------------------------------------------------------------- names that are not UTF-8


@pytest.fixture
async def it(kafka: Kafka) -> AsyncIterator[Desk]:
    async with desk(kafka.url) as opened:
        yield opened


@pytest.fixture
def strict() -> Iterator[None]:
    """As a process begins, and ends."""
    fetcher.MemoryRecords = MemoryRecords
    yield
    fetcher.MemoryRecords = MemoryRecords


def batch_of(first: int, odd: bool, codec: int = 0) -> bytearray:
    """Three records, of which the second has an odd name."""
    builder = DefaultRecordBatchBuilder(2, codec, 0, -1, -1, 0, 1 << 20)
    builder.append(0, 1_000_000, b"k", b"%d" % first, [("a", b"1"), ("null", None)])
    builder.append(1, 1_000_007, None, b"%d" % (first + 1), [("first", b""), ("ODD!", b"v" * 200), ("last", None)])
    builder.append(2, 999_999, b"k" * 100, None, [])
    data: bytearray = builder.build()
    if odd:
        at = data.index(b"ODD!")
        data[at : at + 4] = b"\xff\xfe\xfdx"
        struct.pack_into(">I", data, 17, crc32c(bytes(data[21:])))
    return data


async def write(it: Desk, topic: str, data: bytearray) -> None:
    request = ProduceRequest(None, -1, 5000, [(topic, [(0, data)])])
    leader = (await it.topics.ensure(topic))[0]
    ((_, (answer,)),) = (await it.topics.nodes.ask(request, "writing", node=leader)).topics
    assert answer[1] == 0


async def test_aiokafka_stops_at_a_name_that_is_not_utf8_until_it_is_told_to_tolerate_it(
    kafka: Kafka, it: Desk, strict: None
) -> None:
    topic = await kafka.create_topic(new_name(), partitions=1)
    partition = TopicPartition(topic, 0)
    for odd in (False, True, False):
        await write(it, topic, batch_of(0, odd))
    async with AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, fetch_max_wait_ms=10) as consumer:
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        for _ in range(2):  # if this does not raise any more, `foreign` has had its day
            with pytest.raises(UnicodeDecodeError):
                await consumer.getmany(partition, timeout_ms=1000)
            assert await consumer.position(partition) == 0
        tolerate()
        found: list[Any] = []
        while len(found) < 9:
            found += (await consumer.getmany(partition, timeout_ms=1000)).get(partition, [])
        assert await consumer.position(partition) == 9
    assert [record.offset for record in found] == list(range(9))
    assert [record.value for record in found] == [b"0", b"1", None] * 3
    assert [record.key for record in found] == [b"k", None, b"k" * 100] * 3
    assert [record.timestamp for record in found] == [1_000_000, 1_000_007, 999_999] * 3
    names = [record.headers[1][0] for record in found[1::3]]
    assert names == ["ODD!", "\udcff\udcfe\udcfdx", "ODD!"]
    assert found[4].headers == (("first", b""), ("\udcff\udcfe\udcfdx", b"v" * 200), ("last", None))
    await publish_on(kafka, it, found[4].headers)


async def publish_on(kafka: Kafka, it: Desk, headers: Any) -> None:
    """What was read goes on as it came (to a dead letter, for example), in order between others."""
    topic = await kafka.create_topic(new_name(), partitions=1)
    odd = outgoing(topic, b"2", key="k", message_id="")
    odd.headers = visible_headers(headers)
    assert await it.send(outgoing(topic, b"1", key="k"), odd, outgoing(topic, b"3", key="k")) == ()
    records = await read(kafka, topic)
    assert [record.value for record in records] == [b"1", b"2", b"3"]
    assert records[1].headers == headers


async def test_markers_of_transactions_are_read_as_ever(kafka: Kafka, strict: None) -> None:
    tolerate()
    topic = await kafka.create_topic(new_name(), partitions=1)
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=new_name()) as producer:
        for keep in (True, False, True):
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"%d" % keep)
            await (producer.commit_transaction() if keep else producer.abort_transaction())
    assert [record.value for record in await read(kafka, topic)] == [b"1", b"1"]
    assert len(await read(kafka, topic, isolation="read_uncommitted")) == 3


@pytest.mark.parametrize("codec", range(5))
def test_records_of_all_codecs_are_read_alike(codec: int) -> None:
    """With and without the odd name (which can only be put in where nothing is compressed)."""
    data = bytes(batch_of(0, False, codec) + batch_of(5, codec == 0, codec) + b"half a batch that was cut off"[:11])
    records = TolerantRecords(data)
    assert records.size_in_bytes() == len(data)
    found = []
    while records.has_next():
        batch = records.next_batch()
        assert batch.validate_crc()
        found.append([(r.offset, r.timestamp, r.timestamp_type, r.key, r.value, r.headers, r.checksum) for r in batch])
    assert records.next_batch() is None
    expected = MemoryRecords(bytes(batch_of(0, False, codec)))
    assert found[0] == [
        (r.offset, r.timestamp, r.timestamp_type, r.key, r.value, r.headers, r.checksum) for r in expected.next_batch()
    ]
    assert [row[4] for row in found[1]] == [b"5", b"6", None]
    assert list(foreign._read(memoryview(batch_of(0, False, codec)))) == [foreign.Record(*row[:6]) for row in found[0]]


def test_what_is_corrupt_stays_an_error() -> None:
    data = batch_of(0, False)
    data[61] = 0x70  # the length of the first record

    class Python:
        """aiokafka without its extension."""

        def __init__(self) -> None:
            self.batch: Any = _DefaultRecordBatchPy(memoryview(data))

        def __iter__(self) -> Any:
            return iter(self.batch)

    with pytest.raises(CorruptRecordException):
        list(foreign._Batch(Python(), memoryview(data)))


def test_without_the_extension_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batch_of(0, True)
    found = list(foreign._Batch(_DefaultRecordBatchPy(memoryview(data)), memoryview(data)))
    assert [record.offset for record in found] == [0, 1, 2]
    assert found[1].headers[1] == ("\udcff\udcfe\udcfdx", b"v" * 200)
