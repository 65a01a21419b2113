"""A Kafka topic to read and to fill: the server, the records, and what a person would write by hand with aiokafka."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from tests.services._kafka_java import programs
from tests.services.kafka import ONE, OwnKafka, own, run_directory

from .process import CUSTOMERS, Order, body

__all__ = [
    "FILLED",
    "NAME",
    "OUT",
    "PARTITIONS",
    "RECORDS",
    "all_buffered",
    "committed",
    "consumer",
    "ends",
    "fill",
    "key",
    "producer",
    "read_by_hand",
    "read_lists_by_hand",
    "server",
    "version",
]

NAME, OUT = "bench-orders", "bench-receipts"
RECORDS, PARTITIONS = 200_000, 4
FILLED = 64 * 1024  # bytes of the batches that the topic is filled with
AT_ONCE, POLL = 500, 200  # records and milliseconds of one getmany


Handler = Callable[[Order], Awaitable[None]]
ListHandler = Callable[[list[Order]], Awaitable[None]]


def key(number: int) -> bytes:
    return b"k%d" % (number % CUSTOMERS)


# -- the server


@contextmanager
def server() -> Iterator[OwnKafka]:
    """One node in KRaft mode with the topics, of which the one to read is filled."""
    with own(ONE, run_directory(f"bench-{os.getpid()}")) as running:
        asyncio.run(_prepare(running))
        yield running


async def _prepare(running: OwnKafka) -> None:
    for name in (NAME, f"{NAME}.dead", OUT):
        await running.facts.create_topic(name, PARTITIONS)
    await fill(running.facts.bootstrap)


def version() -> str:
    """Of the server."""
    (jar,) = (programs().directory / "lib").glob("kafka-clients-*.jar")
    return jar.stem.rpartition("-")[2]


async def fill(bootstrap: str) -> None:
    """Put `RECORDS` records into the topic, those of one key into one partition."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, max_batch_size=FILLED) as producing:
        for partition in range(PARTITIONS):
            numbers = iter(range(partition, RECORDS, PARTITIONS))
            number = next(numbers, None)
            while number is not None:
                batch = producing.create_batch()
                while number is not None and batch.append(key=key(number), value=body(number), timestamp=None):
                    number = next(numbers, None)
                await producing.send_batch(batch, NAME, partition=partition)
        await producing.flush()
    if (found := sum((await ends(bootstrap, NAME)).values())) != RECORDS:
        raise AssertionError(f"{NAME!r} holds {found} records of {RECORDS}")


async def ends(bootstrap: str, topic: str) -> Mapping[TopicPartition, int]:
    """One past the last offset of each partition."""
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap) as asking:
        found: dict[TopicPartition, int] = await asking.end_offsets(_partitions(topic))
        return found


async def committed(bootstrap: str, group: str) -> int:
    """How many records of the topic the group has committed, over all partitions, as the server says."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        found = await admin.list_consumer_group_offsets(group, partitions=_partitions(NAME))
        return sum(max(0, meta.offset) for meta in found.values())
    finally:
        await admin.close()


def _partitions(topic: str) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in range(PARTITIONS)]


# -- by hand


def consumer(bootstrap: str, group: str) -> AIOKafkaConsumer:
    """A consumer with the options that the broker gives its own."""
    return AIOKafkaConsumer(
        NAME,
        bootstrap_servers=bootstrap,
        group_id=group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        fetch_max_wait_ms=100,
        isolation_level="read_committed",
    )


def producer(bootstrap: str) -> AIOKafkaProducer:
    """A producer with the options that the broker gives its own."""
    return AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True)


async def all_buffered(reading: Any) -> None:
    """Wait until a consumer has fetched something of each partition: no window holds the start of its fetching."""
    async with asyncio.timeout(30):
        while len(reading._fetcher._records) < PARTITIONS:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.002)


class _Commits:
    """Commits once a second."""

    def __init__(self, reading: AIOKafkaConsumer) -> None:
        self._reading = reading
        self._at: dict[TopicPartition, int] = {}
        self._last = time.monotonic()
        self.count = 0

    def note(self, tp: TopicPartition, offset: int) -> None:
        self._at[tp] = offset + 1

    async def if_due(self) -> None:
        if time.monotonic() - self._last > 1.0:
            await self.now()

    async def now(self) -> None:
        await self._reading.commit(self._at)
        self._last = time.monotonic()
        self.count += 1


async def read_by_hand(reading: AIOKafkaConsumer, count: int, handler: Handler) -> int:
    """Decode and await the handler, one by one; return the number of commits."""
    decode = msgspec.json.Decoder(Order).decode
    commits, done = _Commits(reading), 0
    while done < count:
        found = await reading.getmany(timeout_ms=POLL, max_records=AT_ONCE)
        for tp, records in found.items():
            for record in records:
                await handler(decode(record.value))
            done += len(records)
            commits.note(tp, records[-1].offset)
        await commits.if_due()
    await commits.now()
    return commits.count


async def read_lists_by_hand(reading: AIOKafkaConsumer, count: int, handler: ListHandler, size: int) -> int:
    """The same with lists of `size`."""
    decode = msgspec.json.Decoder(Order).decode
    commits, done = _Commits(reading), 0
    while done < count:
        found = await reading.getmany(timeout_ms=POLL, max_records=AT_ONCE)
        for tp, records in found.items():
            for start in range(0, len(records), size):
                await handler([decode(record.value) for record in records[start : start + size]])
            done += len(records)
            commits.note(tp, records[-1].offset)
        await commits.if_due()
    await commits.now()
    return commits.count
