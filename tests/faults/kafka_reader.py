"""A small app over one Kafka topic that notes what it handles, and plain clients beside it: for tests of one fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from streamfw import App, Message, subscriber
from streamfw_kafka import KafkaBroker, Topic
from streamfw_kafka.assignment import KafkaDelivery
from streamfw_kafka.client import fresh_assignor
from streamfw_kafka.group import Membership
from streamfw_kafka.source import KafkaSource
from tests.helpers import eventually
from tests.services.kafka import Kafka

__all__ = ["Reader", "admin", "broker", "lag", "member", "publish", "reading"]

QUICK: dict[str, Any] = {"session_timeout": 2.0, "heartbeat": 0.2, "commit_every": 0.05, "metadata_age": 0.5}


def broker(kafka: Kafka, **options: Any) -> KafkaBroker:
    """With short times, so that what is waited for comes soon."""
    return KafkaBroker(kafka.url, **QUICK | options)


class Reader:
    """A running app. `seen` are the bodies it has handled, in order, with partition and offset."""

    def __init__(self) -> None:
        self.app: App
        self.seen: list[tuple[int, int, bytes]] = []

    @property
    def source(self) -> KafkaSource:
        source = self.app.pumps[0].source
        assert isinstance(source, KafkaSource)
        return source

    @property
    def group(self) -> Membership:
        return self.source.group

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, _, body in self.seen]

    @property
    def places(self) -> list[tuple[int, int]]:
        return [(partition, offset) for partition, offset, _ in self.seen]

    async def has_seen(self, *bodies: bytes) -> None:
        """Wait until it has handled these, each at least once."""
        await eventually(lambda: set(bodies) <= set(self.bodies), 20, f"{len(bodies)} messages are handled")


async def _nothing(message: Message) -> None: ...


@asynccontextmanager
async def reading(
    kafka: Kafka,
    source: str | Topic,
    group: str,
    handle: Callable[[Message], Awaitable[None]] = _nothing,
    *,
    workers: int = 1,
    prefetch: int | None = None,
    **options: Any,
) -> AsyncIterator[Reader]:
    """An app that handles messages by `handle`; `options` are the broker's."""
    reader = Reader()

    @subscriber(source, group=group, workers=workers, prefetch=prefetch, attempts=1000, dead_letter=None)
    async def note(message: Message) -> None:
        await handle(message)
        assert isinstance(message, KafkaDelivery)
        reader.seen.append((message.partition, message.offset, bytes(message.body)))

    reader.app = App(note, name=group, brokers={"default": broker(kafka, **options)}, drain_timeout=5, watchdog=None)
    async with reader.app.running():
        yield reader


# ---------------------------------------------------------------------- plain clients


async def publish(kafka: Kafka, topic: str, bodies: Sequence[bytes], partition: int | None = 0, **options: Any) -> None:
    """Publish one after another, and wait for the last."""
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, linger_ms=5, **options)
    async with producer:
        await asyncio.gather(*[await producer.send(topic, body, partition=partition) for body in bodies])


@asynccontextmanager
async def admin(kafka: Kafka) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def lag(kafka: Kafka, topic: str, group: str) -> dict[int, int]:
    """By partition, as everybody else computes it: from the committed offset to the end. (-1: nothing is committed.)"""
    async with (
        admin(kafka) as client,
        AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, isolation_level="read_committed") as consumer,
    ):
        await consumer._client.force_metadata_update()
        partitions = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic) or ()]
        ends = await consumer.end_offsets(partitions)
        committed = await client.list_consumer_group_offsets(group)
    found = {}
    for tp in partitions:
        offset = committed[tp].offset if tp in committed else -1
        found[tp.partition] = ends[tp] - offset if offset >= 0 else -1
    return found


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc, unused-ignore]
    def __init__(self, until: asyncio.Event) -> None:
        self._until = until

    async def on_partitions_revoked(self, revoked: Sequence[TopicPartition]) -> None:
        if revoked:
            await self._until.wait()

    async def on_partitions_assigned(self, assigned: Sequence[TopicPartition]) -> None: ...


@asynccontextmanager
async def member(
    kafka: Kafka, topic: str, group: str, *, gives_up: asyncio.Event | None = None
) -> AsyncIterator[AIOKafkaConsumer]:
    """A plain member of a group, by the same assignor. With `gives_up` it keeps its partitions until that is set."""
    until = gives_up or asyncio.Event()
    if gives_up is None:
        until.set()
    consumer = AIOKafkaConsumer(
        bootstrap_servers=kafka.bootstrap,
        group_id=group,
        heartbeat_interval_ms=100,
        rebalance_timeout_ms=60_000,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        partition_assignment_strategy=(fresh_assignor(),),
    )
    consumer.subscribe([topic], listener=_Listener(until))
    await consumer.start()
    try:
        yield consumer
    finally:
        until.set()
        await consumer.stop()
