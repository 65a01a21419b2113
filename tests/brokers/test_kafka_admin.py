"""Questions to a Kafka cluster: topics, offsets, groups; and what is changed there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from streamfw.errors import BrokerClosed, BrokerRefused, BrokerUnavailable
from streamfw_kafka.admin import Group, MissingTopic, Topics, topic_name_mistake
from streamfw_kafka.nodes import Nodes
from streamfw_kafka.settings import parsed
from tests.brokers.kafka_kit import Desk, desk, new_name, outgoing
from tests.helpers import eventually
from tests.services._homes import free_port
from tests.services.kafka import Kafka


@pytest.fixture
async def it(kafka: Kafka) -> AsyncIterator[Desk]:
    async with desk(kafka.url) as opened:
        yield opened


@pytest.fixture
async def topics(it: Desk) -> Topics:
    return it.topics


@pytest.fixture
async def topic(kafka: Kafka) -> str:
    return await kafka.create_topic(new_name(), partitions=3)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all requests, as they are sent."""
    made: list[str] = []
    sent = Nodes.sent

    async def noted(connection: Any, request: Any) -> Any:
        made.append(type(request).__name__)
        return await sent(connection, request)

    monkeypatch.setattr(Nodes, "sent", staticmethod(noted))
    return made


# ---------------------------------------------------------------------- which topics there are


async def test_which_topics_there_are(topics: Topics, topic: str) -> None:
    assert topic in await topics.names()
    assert "__consumer_offsets" not in await topics.names()
    assert await topics.leaders(topic) == (1, 1, 1)
    assert await topics.partitions(topic) == range(3)
    missing = new_name()
    assert await topics.leaders(missing) is None
    assert await topics.partitions(missing) == range(0)
    assert await topics.look([topic, missing]) == {topic: (1, 1, 1), missing: None}
    assert missing not in await topics.names(fresh=True)


async def test_answers_are_good_for_a_moment(kafka: Kafka, topics: Topics, topic: str, asked: list[str]) -> None:
    await topics.names()
    asked.clear()
    for _ in range(20):
        await topics.names()
        await topics.leaders(topic)
        await topics.ensure(topic)
        await topics.partitions(topic)
    assert asked == ["MetadataRequest"]
    asked.clear()
    await topics.names(fresh=True)
    await topics.leaders(topic, fresh=True)
    assert asked == ["MetadataRequest"] * 2
    missing = new_name()
    assert await topics.leaders(missing) is None
    await kafka.create_topic(missing)

    async def there() -> bool:
        return await topics.leaders(missing) is not None

    await eventually(there, 5)


async def test_what_is_near(kafka: Kafka, topics: Topics) -> None:
    orders = await kafka.create_topic(new_name("orders"))
    assert await topics.near(orders.replace("orders", "oders")) == f"; near it: {orders!r}"
    assert await topics.near("Zz") == ""
    async with desk(f"kafka://127.0.0.1:{free_port()}") as away:
        assert await away.topics.near("orders") == ""


async def test_all_that_are_missing_are_named_in_one_error(topics: Topics, topic: str) -> None:
    await topics.require([topic], "orders")
    await topics.require([], "orders")
    one, two = new_name("one"), new_name("two")
    with pytest.raises(MissingTopic) as caught:
        await topics.require([one, topic, two], "subscriber 'ship'")
    assert str(caught.value).startswith(f"subscriber 'ship': topic {one!r} does not exist")
    assert f"topic {two!r} does not exist" in str(caught.value)
    assert "create it, or set create_topics=true" in str(caught.value)
    assert isinstance(caught.value, BrokerRefused)


@pytest.mark.parametrize("name", ["a", "A-b_c.9", "x" * 249, "...", "-"])
def test_names_that_a_topic_can_have(name: str) -> None:
    assert topic_name_mistake(name) == ""


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "ä", "a/b", "x" * 250, "a\n", "\ud800"])
async def test_names_that_a_topic_cannot_have(topics: Topics, name: str) -> None:
    assert "a name is 1 to 249 letters, digits, '.', '_' and '-'" in topic_name_mistake(name)
    calls: list[Awaitable[object]] = [topics.create(name), topics.leaders(name), topics.ensure(name)]
    for call in calls:
        with pytest.raises(BrokerRefused, match="cannot exist: a name is"):
            await call


# ---------------------------------------------------------------------- making them


async def test_making_a_topic(kafka: Kafka) -> None:
    async with desk(kafka.url, create_topics=True, partitions=5, replication=1) as it:
        name = new_name("made")
        assert await it.topics.ensure(name) == (1,) * 5
        assert await it.topics.ensure(name) == (1,) * 5
        other = new_name("made")
        config = {"max.message.bytes": "2000", "cleanup.policy": "compact"}
        assert await it.topics.create(other, partitions=2, config=config) == (1, 1)
        assert await it.topics.create(other) == (1, 1)  # it is there already
        assert await it.topics.config(other, "max.message.bytes") == "2000"
        assert await it.topics.config(other, "cleanup.policy") == "compact"
        await it.topics.require([name, new_name("made")], "ours")


async def test_many_make_the_same_topic_at_once(kafka: Kafka) -> None:
    name = new_name("made")
    async with desk(kafka.url, create_topics=True) as one, desk(kafka.url, create_topics=True) as two:
        made = await asyncio.gather(*(it.topics.ensure(name) for it in (one, two) for _ in range(5)))
    assert set(made) == {(1, 1, 1, 1)}  # the server's default


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"replication": 3}, "INVALID_REPLICATION_FACTOR, error 38); set replication="),
        ({"partitions": 0}, "INVALID_PARTITIONS, error 37); set partitions="),
        ({"config": {"max.message.bytes": "many"}}, "INVALID_CONFIG, error 40); check the topic's configuration"),
    ],
)
async def test_a_topic_that_cannot_be_made(topics: Topics, wrong: dict[str, Any], said: str) -> None:
    name = new_name()
    with pytest.raises(BrokerRefused) as caught:
        await topics.create(name, **wrong)
    assert str(caught.value).startswith(f"Kafka: creating topic {name!r}: ")
    assert said in str(caught.value)


# ---------------------------------------------------------------------- offsets


async def test_offsets(it: Desk, topic: str) -> None:
    first, second, third = (TopicPartition(topic, number) for number in range(3))
    async with AIOKafkaProducer(bootstrap_servers=it.settings.bootstrap[0]) as producer:
        for number in range(5):
            await producer.send_and_wait(topic, b"x", partition=1, timestamp_ms=1_000_000 + number * 1000)
    everything = [first, second, third]
    assert await it.topics.earliest(everything) == {first: 0, second: 0, third: 0}
    assert await it.topics.latest(everything) == {first: 0, second: 5, third: 0}
    assert await it.topics.ends(topic) == {first: 0, second: 5, third: 0}
    assert await it.topics.at(everything, 1002.5) == {first: None, second: 3, third: None}
    assert await it.topics.at([second], 0) == {second: 0}
    assert await it.topics.at([second], time.time()) == {second: None}
    assert await it.topics.earliest([]) == {}
    assert await it.topics.delete_records({second: 2, first: 0}) == {second: 2, first: 0}
    assert await it.topics.earliest([second]) == {second: 2}
    assert await it.topics.delete_records({second: -1}) == {second: 5}
    with pytest.raises(BrokerRefused, match=f"there is no partition {topic}-3"):
        await it.topics.earliest([first, TopicPartition(topic, 3)])
    with pytest.raises(BrokerRefused, match="there is no partition"):
        await it.topics.delete_records({TopicPartition(new_name(), 0): 1})


async def test_the_end_is_before_what_may_not_be_read_yet(kafka: Kafka, it: Desk, topic: str) -> None:
    partition = TopicPartition(topic, 0)
    async with (
        AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=new_name()) as producer,
        desk(kafka.url, isolation="read_uncommitted") as other,
    ):
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"1", partition=0)
        assert await it.topics.latest([partition]) == {partition: 0}
        assert await other.topics.latest([partition]) == {partition: 1}
        await producer.commit_transaction()
        await eventually(_end_is(it.topics, partition, 2))  # and the marker


def _end_is(topics: Topics, partition: TopicPartition, offset: int) -> Callable[[], Awaitable[bool]]:
    async def is_it() -> bool:
        return await topics.latest([partition]) == {partition: offset}

    return is_it


# ---------------------------------------------------------------------- groups


async def test_groups_and_what_they_committed(kafka: Kafka, it: Desk, topic: str) -> None:
    name = new_name("group")
    assert await it.topics.committed(name) == {}
    assert await it.topics.group(name) == Group(name, "Dead", "", ())
    assert name not in await it.topics.groups()
    assert await it.send(*(outgoing(topic, key=f"{number}") for number in range(30))) == ()
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=kafka.bootstrap, group_id=name, client_id="me", enable_auto_commit=False
    )
    async with consumer:
        partition = TopicPartition(topic, 1)
        await eventually(lambda: len(consumer.assignment()) == 3)
        await consumer.commit({partition: 7})
        assert await it.topics.committed(name) == {partition: 7}
        assert await it.topics.committed(name, [partition, TopicPartition(topic, 0)]) == {partition: 7}
        assert await it.topics.committed(name, []) == {}
        assert name in await it.topics.groups()
        group = await it.topics.group(name)
        assert (group.name, group.state, group.assignor) == (name, "Stable", "roundrobin")
        (member,) = group.members
        assert member.client_id == "me"
        assert member.member_id.startswith("me-")
        assert member.host == "/127.0.0.1"
        assert set(member.partitions) == {TopicPartition(topic, number) for number in range(3)}
    assert await it.topics.group(name) == Group(name, "Empty", "", ())


# ---------------------------------------------------------------------- configuration


async def test_a_value_of_a_topics_configuration(kafka: Kafka, topics: Topics) -> None:
    topic = await kafka.create_topic(new_name(), max_message_bytes=5000)
    assert await topics.config(topic, "max.message.bytes") == "5000"
    assert await topics.config(topic, "segment.bytes") == str(16 << 20)  # the server's
    assert await topics.config(topic, "no.such.thing") is None
    with pytest.raises(BrokerUnavailable, match=r"asking for max\.message\.bytes of topic"):
        await topics.config(new_name(), "max.message.bytes")  # it may be about to be made


# ---------------------------------------------------------------------- servers that go and come


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that never answers."""
    await reader.read()
    writer.close()


async def test_every_question_ends_in_time_without_a_server() -> None:
    """Nobody listens; and somebody who never answers."""
    partition = TopicPartition("t", 0)
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        for port in (free_port(), server.sockets[0].getsockname()[1]):
            url = f"kafka://127.0.0.1:{port}"
            async with desk(url, create_topics=True, connect_timeout=0.2, request_timeout=0.2) as it:
                topics = it.topics
                questions: list[Awaitable[object]] = [
                    topics.names(),
                    topics.leaders("t"),
                    topics.ensure("t"),
                    topics.require(["t"], "we"),
                    topics.create("t"),
                    topics.earliest([partition]),
                    topics.at([partition], 0.0),
                    topics.ends("t"),
                    topics.committed("g"),
                    topics.groups(),
                    topics.group("g"),
                    topics.config("t", "max.message.bytes"),
                    topics.delete_records({partition: 1}),
                ]
                began = time.monotonic()
                answers = await asyncio.gather(*questions, return_exceptions=True)
                assert {type(answer) for answer in answers} == {BrokerUnavailable}
                assert time.monotonic() - began < 5


async def test_a_closed_one_says_so(kafka: Kafka) -> None:
    topics = Topics(parsed(kafka.url))
    await topics.names()
    await topics.close()
    await topics.close()
    for question in (topics.names(fresh=True), topics.groups(), topics.committed("g")):
        with pytest.raises(BrokerClosed):
            await question
    never = Topics(parsed(kafka.url))
    await never.close()


async def test_closing_ends_a_question_that_is_under_way() -> None:
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        topics = Topics(parsed(f"kafka://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        before = asyncio.all_tasks()
        question = asyncio.create_task(topics.names())
        await eventually(lambda: topics.nodes._learning is not None)
        await topics.close()
        with pytest.raises(BrokerClosed):
            await question
        await eventually(lambda: asyncio.all_tasks() == before)


async def test_it_finds_the_cluster_again_wherever_it_moved(kafka: Kafka, topic: str) -> None:
    """The only node that was known is gone for good; the servers of the URL are asked again."""
    async with desk(kafka.url) as it:
        nodes = it.topics.nodes
        assert await it.topics.leaders(topic) is not None
        for connection in nodes._connections.values():
            connection.close()
        nodes._addresses = {7: ("127.0.0.1", free_port())}
        await eventually(_there(it.topics, topic))
        assert list(nodes.numbers) == [1]


def _there(topics: Topics, topic: str) -> Callable[[], Awaitable[bool]]:
    async def there() -> bool:
        try:
            return await topics.leaders(topic, fresh=True) is not None
        except BrokerUnavailable:
            return False

    return there
