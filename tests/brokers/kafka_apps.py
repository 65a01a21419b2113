"""What the tests of Kafka's consumer share: quick brokers, topics with records in them, and looking at a group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition

from streamfw import App
from streamfw.broker import Delivery, Subscription
from streamfw.testing.conformance._kit import Member
from streamfw_kafka import KafkaBroker, Topic
from streamfw_kafka.source import KafkaSource
from tests.brokers.kafka_kit import desk, new_name
from tests.helpers import eventually
from tests.services.kafka import Kafka

__all__ = [
    "GROUP",
    "QUICK",
    "all_committed",
    "app_of",
    "broker_of",
    "committed",
    "fill",
    "fill_bare",
    "filled",
    "member",
    "numbers",
    "offsets",
    "source_of",
    "subscription",
    "topic",
]

GROUP = new_name("shop")
"""The group of apps and members unless they say otherwise: another one in each process that runs tests."""

QUICK: dict[str, Any] = {
    "create_topics": True,
    "partitions": 2,
    "heartbeat": 0.1,
    "session_timeout": 6.0,
    "commit_every": 0.05,
    "fetch_wait": 0.05,
    "metadata_age": 1.0,
}


def broker_of(kafka: Kafka, **options: Any) -> KafkaBroker:
    """A broker on the server that is quick to notice, and makes the topics that it misses."""
    return KafkaBroker(kafka.url, **(QUICK | options))


def app_of(kafka: Kafka, *handlers: Any, name: str = GROUP, drain_timeout: float = 5.0, **options: Any) -> App:
    """An app of these subscribers on such a broker; `options` are the broker's."""
    return App(*handlers, name=name, brokers={"default": broker_of(kafka, **options)}, drain_timeout=drain_timeout)


def source_of(app: App, place: int = 0) -> KafkaSource:
    """The open source of a running app's subscriber."""
    source: Any = app.pumps[place].source
    assert isinstance(source, KafkaSource)
    return source


async def topic(kafka: Kafka, partitions: int = 2, **config: str | int) -> str:
    """A new topic."""
    return await kafka.create_topic(new_name(), partitions, **config)


async def fill(
    kafka: Kafka,
    name: str,
    values: Iterable[bytes | None],
    *,
    partition: int | None = None,
    key: bytes | None = None,
    headers: Sequence[tuple[str, bytes | None]] = (),
    timestamp_ms: int | None = None,
    **options: Any,
) -> None:
    """Publish as anybody would, without streamfw; `options` are the producer's."""
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, **options) as producer:
        sent = [
            await producer.send(
                name, value, key=key, partition=partition, headers=[*headers], timestamp_ms=timestamp_ms
            )
            for value in values
        ]
        await asyncio.gather(*sent)


async def fill_bare(kafka: Kafka, name: str, key: bytes | None, value: bytes | None) -> None:
    """A record that may have neither key nor value: aiokafka's ``send`` wants one of them, Kafka does not."""
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
        batch = producer.create_batch()
        batch.append(key=key, value=value, timestamp=None)
        await (await producer.send_batch(batch, name, partition=0))


async def filled(kafka: Kafka, count: int, partitions: int = 2, **config: str | int) -> str:
    """A new topic with the numbers from 0 on in it, dealt out to its partitions in turn."""
    name = await topic(kafka, partitions, **config)
    for partition in range(partitions):
        await fill(kafka, name, numbers(range(partition, count, partitions)), partition=partition)
    return name


def numbers(values: Iterable[int]) -> list[bytes]:
    """Bodies in JSON."""
    return [b"%d" % value for value in values]


def offsets(deliveries: Iterable[Delivery]) -> list[tuple[int, int]]:
    """Partition and offset of each."""
    return [(one.partition, one.offset) for one in deliveries]  # type: ignore[attr-defined]


def subscription(name: str | Topic, group: str = GROUP, **options: Any) -> Subscription:
    """What an app would make of it."""
    if isinstance(name, Topic):
        return Subscription(name.name, group, source=name, **options)
    return Subscription(name, group, **options)


@asynccontextmanager
async def member(
    kafka: Kafka, name: str | Topic, group: str = GROUP, *, broker: KafkaBroker | None = None, **options: Any
) -> AsyncIterator[Member]:
    """A process of the group, driven by hand; closed in good order at the end."""
    async with (broker or broker_of(kafka)).connect() as connection:
        made = Member(connection, await connection.open(subscription(name, group, **options)), 20.0)
        try:
            yield made
        finally:
            await made.close()


async def committed(kafka: Kafka, name: str, group: str = GROUP) -> dict[int, int]:
    """What the group has committed of a topic, by partition."""
    async with desk(kafka.url) as asked:
        partitions = [TopicPartition(name, number) for number in await asked.topics.partitions(name)]
        return {tp.partition: at for tp, at in (await asked.topics.committed(group, partitions)).items()}


async def all_committed(kafka: Kafka, name: str, group: str = GROUP) -> None:
    """Wait until the group's lag is 0 in every partition."""
    async with desk(kafka.url, isolation="read_committed") as asked:
        ends = await asked.topics.ends(name)

        async def none_left() -> bool:
            return await asked.topics.committed(group, ends) == ends

        await eventually(none_left)
