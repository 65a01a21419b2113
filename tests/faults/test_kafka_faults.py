"""What may happen to a Kafka topic, a group or a member of it, each once, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener

from streamfw.broker import Subscription
from streamfw.errors import BrokerClosed, BrokerRefused
from streamfw_kafka import KafkaBroker
from streamfw_kafka.connection import KafkaConnection
from tests.brokers.kafka_kit import new_name
from tests.helpers import eventually
from tests.services.kafka import Kafka

QUICK: dict[str, Any] = {"session_timeout": 2.0, "heartbeat": 0.2, "commit_every": 0.05, "metadata_age": 0.5}


def broker(kafka: Kafka, **options: Any) -> KafkaBroker:
    """With short times, so that what is waited for comes soon."""
    return KafkaBroker(kafka.url, **QUICK | options)


@asynccontextmanager
async def connected(kafka: Kafka, **options: Any) -> AsyncIterator[KafkaConnection]:
    async with broker(kafka, **options).connect() as connection:
        assert isinstance(connection, KafkaConnection)
        yield connection


@asynccontextmanager
async def busy_group(kafka: Kafka, topic: str, group: str) -> AsyncIterator[None]:
    """A member that does not give its partitions up while the context lasts, so that nobody can join."""
    done = asyncio.Event()

    class Stubborn(ConsumerRebalanceListener):  # type: ignore[misc, unused-ignore]
        async def on_partitions_revoked(self, revoked: Sequence[Any]) -> None:
            if revoked:
                await done.wait()

        async def on_partitions_assigned(self, assigned: Sequence[Any]) -> None: ...

    consumer = AIOKafkaConsumer(
        bootstrap_servers=kafka.bootstrap, group_id=group, heartbeat_interval_ms=100, rebalance_timeout_ms=60_000
    )
    consumer.subscribe([topic], listener=Stubborn())
    await consumer.start()
    try:
        yield
    finally:
        done.set()
        await consumer.stop()


# ---------------------------------------------------------------------- opening


async def joining(connection: KafkaConnection) -> None:
    """Wait until its only source has asked to join the group."""
    await eventually(lambda: connection._sources and hasattr(connection._sources[0]._opening, "_consumer"))
    consumer = connection._sources[0]._opening._consumer
    await eventually(lambda: consumer._coordinator is not None and consumer._subscription.subscription is not None)


async def test_a_connection_closes_while_its_source_still_waits_for_the_group(kafka: Kafka) -> None:
    topic, group = await kafka.create_topic(new_name()), new_name("group")
    async with busy_group(kafka, topic, group), connected(kafka, connect_timeout=1.0) as connection:
        opening = asyncio.create_task(connection.open(Subscription(topic, group)))
        await joining(connection)
        await connection.close()
        with pytest.raises(BrokerClosed):
            await opening


async def test_a_connection_closes_after_an_opening_that_failed_and_one_that_was_cancelled(kafka: Kafka) -> None:
    topic, group = await kafka.create_topic(new_name()), new_name("group")
    async with busy_group(kafka, topic, group), connected(kafka) as connection:
        with pytest.raises(BrokerRefused):
            await connection.open(Subscription(f"no-{topic}", group))
        opening = asyncio.create_task(connection.open(Subscription(topic, group)))
        await joining(connection)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
