"""What tests ask of a Kafka server apart from the code they test: who answers, topics, who leads what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.metadata import MetadataRequest

__all__ = ["coordinator", "create_topic", "exercise", "known_to", "leader"]


async def known_to(address: str, node: int, cluster: str) -> set[int]:
    """The numbers of the nodes that the node at ``host:port`` knows to be alive; empty while it does not answer.

    What answers there for another cluster has taken the port: that is no answer.
    """
    client = AIOKafkaClient(bootstrap_servers=address, request_timeout_ms=2_000)
    try:
        await client.bootstrap()
        metadata = (await client.send(node, MetadataRequest([]))).to_object()
        return {broker["node_id"] for broker in metadata["brokers"]} if metadata["cluster_id"] == cluster else set()
    except KafkaError:
        return set()
    finally:
        await client.close()


async def create_topic(bootstrap: str, name: str, partitions: int, copies: int, settings: Mapping[str, str]) -> None:
    """Make a topic and wait until every node that answers knows a leader for each of its partitions."""
    topic = NewTopic(name, partitions, copies, topic_configs=settings)
    async with _admin(bootstrap) as admin:
        for _, code, message in (await admin.create_topics([topic])).topic_errors:
            if code:
                raise for_code(code)(message)
    async with _client(bootstrap) as client:
        for node in [broker.nodeId for broker in client.cluster.brokers()]:
            await _wait_for_leaders(client, node, name, partitions)


async def exercise(bootstrap: str) -> None:
    """Use what most clients use of a server once: write a record, read it in a group, commit."""
    await create_topic(bootstrap, "exercise", 1, 1, {})
    await coordinator(bootstrap, "exercise")
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True) as producer:
        await producer.send_and_wait("exercise", b"value", key=b"key")
    consumer = AIOKafkaConsumer(
        "exercise",
        bootstrap_servers=bootstrap,
        group_id="exercise",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    async with consumer:
        await consumer.getone()
        await consumer.commit()


async def leader(bootstrap: str, topic: str, partition: int) -> int:
    """The number of the node that leads a partition; waits while there is none."""
    async with _client(bootstrap) as client:
        while True:
            leaders = await _leaders(client, client.get_random_node(), topic)
            if partition in leaders:
                return leaders[partition]
            await asyncio.sleep(0.02)


async def coordinator(bootstrap: str, group: str) -> int:
    """The number of the node that coordinates a consumer group; waits while there is none."""
    async with _admin(bootstrap) as admin:
        while True:
            try:
                node: int = await admin.find_coordinator(group)
                return node
            except KafkaError as error:
                if not error.retriable:
                    raise
            await asyncio.sleep(0.02)


async def _wait_for_leaders(client: AIOKafkaClient, node: int, topic: str, partitions: int) -> None:
    try:
        while len(await _leaders(client, node, topic)) < partitions:  # noqa: ASYNC110, a server tells nobody
            await asyncio.sleep(0.02)
    except KafkaError:
        pass  # it is down, or frozen: nobody will ask it


async def _leaders(client: AIOKafkaClient, node: int, topic: str) -> dict[int, int]:
    """Who leads which partition, as far as this node knows."""
    response = await client.send(node, MetadataRequest([topic]))
    return {
        each["partition"]: each["leader"]
        for known in response.to_object()["topics"]
        for each in known["partitions"]
        if each["leader"] >= 0
    }


@asynccontextmanager
async def _client(bootstrap: str) -> AsyncIterator[AIOKafkaClient]:
    client = AIOKafkaClient(bootstrap_servers=bootstrap, request_timeout_ms=5_000)
    try:
        await client.bootstrap()
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def _admin(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        await admin.start()
        yield admin
    finally:
        await admin.close()
