"""`Topic`: which topics and partitions are read, what is visible of them, and what is refused, and when."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition

from streamfw import App, subscriber
from streamfw.errors import BrokerRefused, TooLarge
from streamfw_kafka import KafkaBroker, Topic
from streamfw_kafka.client import GroupConsumer, fresh_assignor
from tests.brokers.kafka_apps import (
    GROUP,
    all_committed,
    app_of,
    broker_of,
    committed,
    fill,
    filled,
    member,
    numbers,
    offsets,
    source_of,
    topic,
)
from tests.brokers.kafka_kit import desk, new_name, read
from tests.helpers import eventually
from tests.services.kafka import Kafka


def test_a_topic_shows_what_was_said_of_it() -> None:
    assert repr(Topic("orders", retry_topic=True)) == "Topic(name='orders', retry_topic=True)"
    assert repr(Topic("orders")) == "Topic(name='orders')"


# ------------------------------------------------------------------ refused when the app is built


def mistakes_of(source: str | Topic, **options: Any) -> str:
    """What `build` says about a subscriber of it."""

    @subscriber(source, **options)
    async def handle(body: bytes) -> None: ...

    with pytest.raises(ExceptionGroup) as raised:
        App(handle, name="shop", brokers={"default": KafkaBroker("kafka://127.0.0.1:1")}).build()
    return str(raised.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("or ders", "'or ders' cannot be a topic"),
        (Topic("x" * 246), r"'x+\.dead' cannot be a topic"),
        (Topic("orders", pattern="a("), "not a regular expression"),
        (Topic("orders", pattern="(?i)orders"), r"flags.*\(\?i:\.\.\)"),
        (Topic("or ders", pattern="a"), r"'or ders\.dead' cannot be a topic"),
        (Topic("orders", pattern="a", partitions=[1]), "belong to one topic"),
        (Topic("orders", pattern="a", start={0: 1}), "belong to one topic"),
        (Topic("orders", partitions=[1, 1]), "numbers of partitions, each once"),
        (Topic("orders", partitions=[]), "numbers of partitions, each once"),
        (Topic("orders", start="first"), "'earliest', 'latest', a datetime or offsets"),  # type: ignore[arg-type]
        (Topic("orders", start={0: -1}), "'earliest', 'latest', a datetime or offsets"),
        (Topic("orders", retry_topic="a b"), "'a b' cannot be a topic"),
        (Topic("orders", retry_topic="orders"), "is the topic itself"),
        (Topic("orders", retry_topic="orders.dead"), "is its dead letter topic"),
        (Topic("orders", retry_topic=True, retry_after=-1), "seconds, zero or more"),
        (Topic("orders", retry_topic=True, partitions=[0]), "read as a group"),
        (Topic("orders", retry_topic=True, pattern="a"), "read as a group"),
    ],
)
def test_mistakes(source: str | Topic, said: str) -> None:
    text = mistakes_of(source)
    assert re.search(said, text), text


def test_mistakes_with_the_subscriber() -> None:
    assert "later messages would pass" in mistakes_of(Topic("orders", retry_topic=True), ordered_by="key")
    assert "later messages would pass" in mistakes_of(Topic("orders", retry_topic=True), ordered_by="partition")
    assert "group: is an empty name" in mistakes_of("orders", group="")
    assert "dead letters would come back for ever" in mistakes_of("orders", dead_letter="orders")
    assert "'a b' cannot be a topic" in mistakes_of("orders", dead_letter="a b")


def test_nothing_is_wrong_with_these() -> None:
    @subscriber(Topic("orders", retry_topic=True, overtaking=True), ordered_by="key")
    async def one(body: bytes) -> None: ...

    @subscriber(Topic("every one", pattern="orders-.*"), dead_letter="orders.dead")
    async def two(body: bytes) -> None: ...

    @subscriber(Topic("x" * 249), dead_letter=None)
    async def three(body: bytes) -> None: ...

    App(one, two, three, name="shop", brokers={"default": KafkaBroker("kafka://127.0.0.1:1")}).build()


# ------------------------------------------------------------------ topics that do not exist


async def test_a_topic_that_does_not_exist_is_refused_with_what_is_near(kafka: Kafka) -> None:
    name = await topic(kafka)
    wrong = name.replace("topic", "topik")

    @subscriber(wrong)
    async def handle(body: bytes) -> None: ...

    with pytest.raises(BrokerRefused) as raised:
        async with app_of(kafka, handle, create_topics=False).running():
            pytest.fail("it runs")
    text = str(raised.value)
    assert f"topic {wrong!r} does not exist; near it: {name!r}" in text
    assert f"topic '{wrong}.dead' does not exist" in text  # both at once
    assert "create_topics=true" in text


@pytest.mark.parametrize("missing", ["dead letter", "retry topic"])
async def test_its_other_topics_must_exist_as_well(kafka: Kafka, missing: str) -> None:
    name = await topic(kafka)
    there, lacks = (f"{name}.dead", f"{name}.{GROUP}.retry")[:: 1 if missing == "retry topic" else -1]
    await kafka.create_topic(there)
    with pytest.raises(BrokerRefused, match=f"topic '{lacks}' does not exist"):
        async with member(
            kafka,
            Topic(name, retry_topic=True),
            broker=broker_of(kafka, create_topics=False),
            dead_letter=f"{name}.dead",
        ):
            pytest.fail("it opened")


async def test_missing_topics_are_made_where_asked(kafka: Kafka) -> None:
    name = new_name()
    seen: list[int] = []

    @subscriber(Topic(name, retry_topic=True))
    async def handle(number: int) -> None:
        seen.append(number)

    app = app_of(kafka, handle, partitions=3)
    async with app.running():
        await app.publish(name, 1)
        await eventually(lambda: seen == [1])
    async with desk(kafka.url) as asked:
        for each in (name, f"{name}.dead", f"{name}.{GROUP}.retry"):
            assert len(await asked.topics.partitions(each)) == 3, each


# ------------------------------------------------------------------ a pattern


async def test_a_pattern_is_of_whole_names_and_topics_that_come_later(kafka: Kafka) -> None:
    prefix = new_name("p")
    for name in (f"{prefix}-a", f"{prefix}-ab", f"x{prefix}-a"):
        await kafka.create_topic(name, 2)
        await fill(kafka, name, [name.encode()])
    source = Topic(prefix, pattern=f"{prefix}-[a-c]|{prefix}-z")
    async with member(kafka, source, broker=broker_of(kafka, metadata_age=0.3)) as one:
        first = await one.take(1)
        assert [(d.name, d.body) for d in first] == [(f"{prefix}-a", f"{prefix}-a".encode())]
        await one.acknowledge(first)
        await kafka.create_topic(f"{prefix}-c", 2)
        await fill(kafka, f"{prefix}-c", [b"later"])  # before it is noticed
        assert [(d.name, d.body) for d in await one.take(1)] == [(f"{prefix}-c", b"later")]
        await one.expect_nothing(0.3)


async def test_a_pattern_never_reads_its_own_dead_letters(kafka: Kafka) -> None:
    prefix = new_name("p")
    await kafka.create_topic(f"{prefix}.orders", 2)
    await kafka.create_topic(f"{prefix}.dead", 2)
    handled: Counter[str] = Counter()

    @subscriber(Topic(prefix, pattern=f"{prefix}.*"), attempts=1)
    async def handle(number: int) -> None:
        handled["all"] += 1
        raise LookupError(f"no {number}")

    app = app_of(kafka, handle)
    async with app.running():
        await app.publish(f"{prefix}.orders", 1)
        await all_committed(kafka, f"{prefix}.orders")
        assert len(await read(kafka, f"{prefix}.dead")) == 1
        assert {tp.topic for tp in source_of(app).group.parts} == {f"{prefix}.orders"}
    assert handled == {"all": 1}
    letter = (await read(kafka, f"{prefix}.dead"))[0]
    assert dict(letter.headers)["streamfw-origin"] == f"{prefix}.orders".encode()


async def test_a_pattern_that_matches_nothing_yet_waits_for_topics(kafka: Kafka) -> None:
    prefix = new_name("p")
    source = Topic(prefix, pattern=f"{prefix}-.*", start="latest")
    began = asyncio.get_running_loop().time()
    async with member(kafka, source, broker=broker_of(kafka, metadata_age=0.3, connect_timeout=30.0)) as one:
        assert asyncio.get_running_loop().time() - began < 15  # it does not wait for what may never come
        await kafka.create_topic(f"{prefix}-a", 2)
        await fill(kafka, f"{prefix}-a", [b"first"])
        assert [d.body for d in await one.take(1)] == [b"first"]


# ------------------------------------------------------------------ explicit partitions


async def test_explicit_partitions_are_read_alone_and_committed(kafka: Kafka) -> None:
    name, group = await filled(kafka, 12, 3), new_name("group")
    async with member(kafka, Topic(name, partitions=[0, 2]), group) as one:
        taken = await one.take(8)
        assert sorted(offsets(taken)) == [(p, at) for p in (0, 2) for at in range(4)]
        await one.acknowledge(taken)
    assert await committed(kafka, name, group) == {0: 4, 2: 4}
    await fill(kafka, name, [b"new"], partition=2)
    async with member(kafka, Topic(name, partitions=[1, 2]), group) as one:
        assert sorted(offsets(await one.take(5))) == [*((1, at) for at in range(4)), (2, 4)]


async def test_an_explicit_partition_that_is_not_there_is_refused(kafka: Kafka) -> None:
    name = await topic(kafka)
    with pytest.raises(BrokerRefused, match=r"has 2 partitions, and no \[2\]"):
        async with member(kafka, Topic(name, partitions=[1, 2])):
            pytest.fail("it opened")


async def test_explicit_partitions_in_a_group_with_members_are_told_that_they_cannot_commit(kafka: Kafka) -> None:
    """A group that hands out partitions takes commits from its members only."""
    name, group = await filled(kafka, 10), new_name("group")
    async with member(kafka, await topic(kafka), group), member(kafka, Topic(name, partitions=[1]), group) as one:
        with pytest.raises(BrokerRefused, match="give it a group= of its own"):
            await one.take(11)


# ------------------------------------------------------------------ what is visible


async def transaction(kafka: Kafka, name: str, *bodies: bytes, commit: bool) -> None:
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=new_name("tx")) as producer:
        await producer.begin_transaction()
        for body in bodies:
            await producer.send_and_wait(name, body, partition=0)
        await (producer.commit_transaction() if commit else producer.abort_transaction())


async def test_aborted_records_are_seen_only_where_asked(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    await transaction(kafka, name, b"yes", commit=True)
    await transaction(kafka, name, b"no", b"no", commit=False)
    await fill(kafka, name, [b"plain"])
    async with member(kafka, name, new_name("group")) as one:
        assert [d.body for d in await one.take(2)] == [b"yes", b"plain"]
    async with member(kafka, name, new_name("group"), broker=broker_of(kafka, isolation="read_uncommitted")) as one:
        assert [d.body for d in await one.take(4)] == [b"yes", b"no", b"no", b"plain"]


async def test_an_open_transaction_is_waited_for(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=new_name("tx")) as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(name, b"open")
        await fill(kafka, name, [b"behind it"])
        async with member(kafka, name, new_name("group")) as one:
            await one.expect_nothing(0.5)
            await producer.commit_transaction()
            assert [d.body for d in await one.take(2)] == [b"open", b"behind it"]


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
async def test_the_lag_is_0_behind_the_markers_of_transactions(kafka: Kafka, isolation: Any) -> None:
    """Positions of markers are nobody's message: the committed offset gets past them."""
    name, group = await topic(kafka, 1), new_name("group")
    await transaction(kafka, name, b"a", b"b", commit=True)
    await transaction(kafka, name, b"c", commit=False)
    count = 2 if isolation == "read_committed" else 3
    async with member(kafka, name, group, broker=broker_of(kafka, isolation=isolation)) as one:
        await one.acknowledge(await one.take(count))
        pending = asyncio.create_task(one.poll(30.0))  # the client's position moves when somebody asks
        await all_committed(kafka, name, group)
        await fill(kafka, name, [b"end"])
        assert [d.body for d in await pending] == [b"end"]
    assert await committed(kafka, name, group) == {0: 5}


# ------------------------------------------------------------------ gaps


async def test_a_compacted_topic_has_gaps_and_they_are_nobodys(kafka: Kafka) -> None:
    """Positions in gaps are never handled, and do not hold the committed one up."""
    name, group = await topic(kafka, 1, **COMPACTED_AT_ONCE), new_name("group")
    async with member(kafka, name, group) as one:
        for round_ in range(4):
            for key in (b"a", b"b", b"c"):
                await fill(kafka, name, numbers(range(10 * round_, 10 * round_ + 10)), key=key)
        kept = await eventually(lambda: compacted(kafka, name, 4 * 30), 30.0)
        await one.source.seek("earliest")
        taken = await one.take(1)
        while offsets(taken)[-1] != (0, kept[-1]):
            taken += await one.poll(20.0)
        left = [record.offset for record in await read(kafka, name)]  # the server may have gone on meanwhile
        assert {*left} <= {offset for _, offset in offsets(taken)} <= {*kept}
        assert offsets(taken) == sorted({*offsets(taken)})
        await one.acknowledge(reversed(taken))
        pending = asyncio.create_task(one.poll(30.0))
        await all_committed(kafka, name, group)
        source: Any = one.source
        assert sum(part.gaps for part in source.group.parts.values()) >= 120 - len(kept)
        await fill(kafka, name, [b"end"], key=b"end")
        assert [d.body for d in await pending] == [b"end"]


COMPACTED_AT_ONCE: dict[str, Any] = {
    "cleanup_policy": "compact",
    "segment_ms": 100,
    "min_cleanable_dirty_ratio": 0.01,
    "min_compaction_lag_ms": 0,
    "max_compaction_lag_ms": 100,
}


async def compacted(kafka: Kafka, name: str, count: int) -> list[int]:
    """The offsets that are left, when the cleaner has been there. What is written last is never compacted: so more is
    written, which rolls the segment."""
    await fill(kafka, name, [b"roll"], key=b"roll")
    kept = [record.offset for record in await read(kafka, name)]
    return kept if len(kept) < count // 2 else []


async def test_what_was_deleted_before_it_was_read_is_told_and_skipped(
    kafka: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    """By retention, while nobody read and while somebody does."""
    name, group = await filled(kafka, 20, 1), new_name("group")
    async with member(kafka, name, group) as one:
        await one.acknowledge(await one.take(2))
    await delete_before(kafka, name, 5)
    async with member(kafka, name, group, broker=broker_of(kafka, window_limit=10, open_limit=10)) as one:
        taken = await one.take(10)
        assert offsets(taken)[0] == (0, 5)
        await one.expect_nothing(0.3)  # it is full; the next are not fetched before there is room
        await fill(kafka, name, [bytes(900_000)] * 3, partition=0)  # nor are they read ahead by the client
        await one.acknowledge(taken)
        source: Any = one.source
        assert source.jumps == 1
    assert "offsets 2 to 4 of" in caplog.text and "are gone" in caplog.text


async def test_a_position_behind_the_end_is_told_and_nothing_is_left_out(
    kafka: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    """The topic was made anew, or its leader lost its end: what comes has offsets that were handled once."""
    name, group = await filled(kafka, 5, 1), new_name("group")
    stranger = GroupConsumer(fresh_assignor(), bootstrap_servers=kafka.bootstrap, group_id=group)
    await stranger.start()
    stranger.assign([TopicPartition(name, 0)])
    await stranger._coordinator.ensure_coordinator_known()
    await stranger.commit_once({TopicPartition(name, 0): 1000}, 5.0)
    await stranger.stop()
    async with member(kafka, name, group) as one:
        assert offsets(await one.take(5)) == [(0, at) for at in range(5)]
        await one.flush()
    assert "ends at 5, before 1000; reading it again" in caplog.text
    assert await committed(kafka, name, group) == {0: 0}


async def delete_before(kafka: Kafka, name: str, offset: int) -> None:
    async with desk(kafka.url) as asked:
        await asked.topics.delete_records(dict.fromkeys(await asked.topics.ends(name), offset))


# ------------------------------------------------------------------ size


async def test_a_record_that_the_topic_does_not_take_is_refused_alone(kafka: Kafka) -> None:
    """5 MB where the server takes 1: the limit is named, and what was published with it is stored."""
    name = await topic(kafka, 1)
    app = app_of(kafka, max_body=10_000_000)
    async with app.running():
        sent = [app.publish(name, "x" * size) for size in (10, 5_000_000, 10)]
        answers = await asyncio.gather(*sent, return_exceptions=True)
    assert [type(answer) for answer in answers] == [str, TooLarge, str]
    assert "max.message.bytes=1048588" in str(answers[1])
    assert [len(record.value) for record in await read(kafka, name)] == [12, 12]


async def test_a_foreign_record_of_5_mb_is_consumed_where_the_topic_takes_it(kafka: Kafka) -> None:
    """Larger than what one fetch asks for, in both partitions, with small ones around it."""
    name = await topic(kafka, 2, max_message_bytes=6_000_000)
    for partition in range(2):
        values = [b"small", bytes(5_000_000), b"small"]
        await fill(kafka, name, values, partition=partition, max_request_size=6_000_000)
    async with member(kafka, name, new_name("group")) as one:
        taken = await one.take(6)
        assert sorted(offsets(taken)) == [(p, at) for p in (0, 1) for at in range(3)]
        assert [len(d.body) for d in taken if d.offset == 1] == [5_000_000] * 2  # type: ignore[attr-defined]


async def test_two_topics_of_an_app_do_not_mix(kafka: Kafka) -> None:
    one, two = await filled(kafka, 20), await filled(kafka, 20)
    seen: dict[str, list[int]] = {one: [], two: []}

    @subscriber(one)
    async def first(number: int) -> None:
        seen[one].append(number)

    @subscriber(two)
    async def second(number: int) -> None:
        seen[two].append(number)

    async with app_of(kafka, first, second).running():
        await all_committed(kafka, one)
        await all_committed(kafka, two)
    assert sorted(seen[one]) == sorted(seen[two]) == list(range(20))
