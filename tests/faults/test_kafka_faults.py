"""What may befall a Kafka topic, a group or a member of it, each once, against a real server."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewPartitions, NewTopic, RecordsToDelete
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata

from streamfw import App, Message, subscriber
from streamfw.broker import Subscription
from streamfw.errors import BrokerClosed, BrokerRefused
from streamfw_kafka import Topic
from streamfw_kafka.assignment import KafkaDelivery
from streamfw_kafka.connection import KafkaConnection
from tests.brokers.kafka_kit import new_name
from tests.faults.kafka_reader import admin, broker, lag, member, publish, reading
from tests.helpers import eventually
from tests.services.kafka import Kafka

pytestmark = pytest.mark.xdist_group("kafka-faults")


def numbered(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last)]


# ---------------------------------------------------------------------- opening


@asynccontextmanager
async def connected(kafka: Kafka, **options: Any) -> AsyncIterator[KafkaConnection]:
    async with broker(kafka, **options).connect() as connection:
        assert isinstance(connection, KafkaConnection)
        yield connection


async def asked_to_move(kafka: Kafka, group: str) -> bool:
    """Whether the group waits for its members to give their partitions up: somebody joins."""
    async with admin(kafka) as client:
        (response,) = await client.describe_consumer_groups([group])
    state: str = response.to_object()["groups"][0]["state"]
    return state == "PreparingRebalance"


async def test_a_connection_closes_while_its_source_still_waits_for_the_group(kafka: Kafka) -> None:
    topic, group = await kafka.create_topic(new_name()), new_name("group")
    async with (
        member(kafka, topic, group, gives_up=asyncio.Event()),
        connected(kafka, connect_timeout=1.0) as connection,
    ):
        opening = asyncio.create_task(connection.open(Subscription(topic, group)))
        await eventually(lambda: asked_to_move(kafka, group))
        await connection.close()
        with pytest.raises(BrokerClosed):
            await opening


async def test_a_connection_closes_after_an_opening_that_failed_and_one_that_was_cancelled(kafka: Kafka) -> None:
    topic, group = await kafka.create_topic(new_name()), new_name("group")
    async with member(kafka, topic, group, gives_up=asyncio.Event()), connected(kafka) as connection:
        with pytest.raises(BrokerRefused):
            await connection.open(Subscription(f"no-{topic}", group))
        opening = asyncio.create_task(connection.open(Subscription(topic, group)))
        await eventually(lambda: asked_to_move(kafka, group))
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening


# ---------------------------------------------------------------------- the log


async def test_a_compacted_topic_with_gaps_is_read_to_its_end(kafka: Kafka) -> None:
    topic = await kafka.create_topic(
        new_name(), 1, cleanup_policy="compact", segment_bytes=1 << 20, segment_ms=100, min_cleanable_dirty_ratio="0.01"
    )
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, linger_ms=0) as producer:
        for number in range(60):
            await producer.send_and_wait(topic, b"%d" % number, key=b"%d" % (number % 7), partition=0)
            if number % 20 == 19:
                await asyncio.sleep(0.15)  # the segment is closed when it is older than that, and written to again
    left = await eventually(lambda: compacted(kafka, topic, 60), 30, "the server has compacted it")
    group = new_name("group")
    async with reading(kafka, topic, group) as reader:
        await reader.has_seen(b"59")
        await eventually(lambda: lag(kafka, topic, group), 10)
        await eventually(lambda: reader.group.parts[TopicPartition(topic, 0)].committed == 60)
        # It may have gone on compacting meanwhile: what is handled is among what was left, without repeats.
        assert set(reader.places) <= set(left)
        assert len(set(reader.places)) == len(reader.places)
        assert reader.group.parts[TopicPartition(topic, 0)].gaps == 60 - len(reader.places) > 0


async def compacted(kafka: Kafka, topic: str, end: int) -> list[tuple[int, int]]:
    """What is left of partition 0; nothing, before the server has taken anything away."""
    found: list[tuple[int, int]] = []
    async with AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap) as consumer:
        consumer.assign([tp := TopicPartition(topic, 0)])
        await consumer.seek_to_beginning(tp)
        while not found or found[-1][1] < end - 1:
            record = await consumer.getone()
            found.append((0, record.offset))
    return found if len(found) < end else []


async def test_markers_of_transactions_and_what_was_aborted_leave_no_lag(kafka: Kafka) -> None:
    topic, group = await kafka.create_topic(new_name(), 1), new_name("group")
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=new_name("transaction"))
    async with producer, reading(kafka, topic, group, workers=4) as reader:
        for number in range(6):
            await producer.begin_transaction()
            for each in range(5):
                await producer.send_and_wait(topic, b"%d.%d" % (number, each), partition=0)
            await (producer.abort_transaction() if number % 2 else producer.commit_transaction())
        wanted = [b"%d.%d" % (number, each) for number in (0, 2, 4) for each in range(5)]
        await reader.has_seen(*wanted)
        await eventually(lambda: no_lag(kafka, topic, group), 10, "the lag is 0")
        # The last transaction was aborted: nothing follows its marker, and its end is committed all the same.
        assert sorted(reader.bodies) == sorted(wanted)
        assert reader.group.parts[TopicPartition(topic, 0)].committed == 36
        assert reader.group.parts[TopicPartition(topic, 0)].gaps == 36 - 15
        await an_open_transaction_is_waited_for(kafka, topic, producer, reader)


async def an_open_transaction_is_waited_for(kafka: Kafka, topic: str, producer: Any, reader: Any) -> None:
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"open", partition=0)
    await publish(kafka, topic, [b"behind"])  # not in a transaction, but not before its end either
    before = reader.group.commits
    committed = reader.group.parts[TopicPartition(topic, 0)].committed
    assert committed == 36 and b"behind" not in reader.bodies
    await producer.commit_transaction()
    await reader.has_seen(b"open", b"behind")
    await eventually(lambda: reader.group.parts[TopicPartition(topic, 0)].committed == 39)
    assert reader.group.commits > before


async def no_lag(kafka: Kafka, topic: str, group: str) -> bool:
    found = await lag(kafka, topic, group)
    return bool(found) and not any(found.values())


@pytest.mark.parametrize("start", ["earliest", "latest"])
async def test_partitions_that_are_added_are_read_from_their_beginning(kafka: Kafka, start: Any) -> None:
    topic, group = await kafka.create_topic(new_name(), 2), new_name("group")
    await publish(kafka, topic, [b"old"], 1)
    async with reading(kafka, Topic(topic, start=start), group) as reader:
        await publish(kafka, topic, [b"new"], 0)
        await reader.has_seen(b"new")
        await eventually(lambda: no_lag(kafka, topic, group))
        async with admin(kafka) as client:
            await client.create_partitions({topic: NewPartitions(5)})
        async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
            await eventually(lambda: led(producer, topic, 5))
            for partition in range(2, 5):  # most likely before the reader knows of them
                for number in range(3):
                    await producer.send_and_wait(topic, b"%d.%d" % (partition, number), partition=partition)
        wanted = {b"%d.%d" % (partition, number) for partition in range(2, 5) for number in range(3)}
        await reader.has_seen(*wanted)
        assert len(reader.group.parts) == 5
        await eventually(lambda: no_lag(kafka, topic, group))
        assert sorted(reader.bodies) == sorted(wanted | {b"new"} | ({b"old"} if start == "earliest" else set()))


async def led(producer: Any, topic: str, partitions: int) -> bool:
    await producer.client.force_metadata_update()
    cluster = producer.client.cluster
    return all(
        cluster.leader_for_partition(TopicPartition(topic, number)) not in (None, -1) for number in range(partitions)
    )


@pytest.mark.parametrize("start", ["earliest", "latest"])
async def test_a_topic_that_is_deleted_and_made_anew_is_read_from_its_beginning(kafka: Kafka, start: Any) -> None:
    topic, group = await kafka.create_topic(new_name(), 2), new_name("group")
    async with reading(kafka, Topic(topic, start=start), group) as reader:
        old = numbered(0, 50)
        for partition in range(2):
            await publish(kafka, topic, old, partition)
        await eventually(lambda: len(reader.seen) == 100)
        await eventually(lambda: no_lag(kafka, topic, group))
        async with admin(kafka) as client:
            await client.delete_topics([topic])
            await eventually(lambda: made_anew(client, topic, 2), 20, "the name can be used again")
        await eventually(lambda: publishes(kafka, topic), 20, "it can be published to")
        await publish(kafka, topic, numbered(100, 110), 1)
        await reader.has_seen(b"probe", *numbered(100, 110))
        await eventually(lambda: no_lag(kafka, topic, group), 20)
        times = Counter(reader.bodies)
        assert [times[body] for body in numbered(100, 110)] == [1] * 10
        await eventually(lambda: reader.app.health().ok)


async def made_anew(client: Any, topic: str, partitions: int) -> bool:
    answer = await client.create_topics([NewTopic(topic, partitions, 1)])
    return all(not code for _, code, _ in answer.topic_errors)


async def publishes(kafka: Kafka, topic: str) -> bool:
    try:
        await publish(kafka, topic, [b"probe"], request_timeout_ms=2000)
    except KafkaError:
        return False
    return True


async def test_what_retention_took_while_we_were_away_is_said_and_passed_over(
    kafka: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    topic, group = await kafka.create_topic(new_name(), 1), new_name("group")
    await publish(kafka, topic, numbered(0, 10))
    async with reading(kafka, topic, group) as reader:
        await reader.has_seen(*numbered(0, 10))
    await publish(kafka, topic, numbered(10, 50))
    async with admin(kafka) as client:
        await client.delete_records({TopicPartition(topic, 0): RecordsToDelete(30)})
    async with reading(kafka, topic, group) as reader:
        await reader.has_seen(*numbered(30, 50))
        await eventually(lambda: no_lag(kafka, topic, group))
        assert reader.bodies == numbered(30, 50)
        assert reader.source.jumps == 1
        assert reader.app.health().ok
    assert f"offsets 10 to 29 of {topic}-0 are gone" in caplog.text


# ---------------------------------------------------------------------- members


async def test_a_member_whose_loop_stood_still_past_its_session_begins_nothing_that_others_may_have(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, group = await kafka.create_topic(new_name(), 3), new_name("group")
    begun: list[bytes] = []
    told: list[int] = []

    async def handle(message: Message) -> None:
        begun.append(bytes(message.body))
        if begun.count(b"20") == 1 and begun[-1] == b"20":
            time.sleep(3.5)  # noqa: ASYNC251, it is meant: no heartbeat is sent, and the session is 2 s
        await asyncio.sleep(0.005)

    async with reading(kafka, topic, group, handle, workers=4) as reader:
        for name in ("_refused", "drop_all"):
            monkeypatch.setattr(
                reader.group, name, noting(getattr(reader.group, name), lambda: told.append(len(begun)))
            )
        for partition in range(3):
            await publish(kafka, topic, numbered(partition * 100, partition * 100 + 60), partition)
        wanted = [body for partition in range(3) for body in numbered(partition * 100, partition * 100 + 60)]
        await reader.has_seen(*wanted)
        await eventually(lambda: no_lag(kafka, topic, group))
        assert reader.group.fenced == 1
        assert reader.app.pumps[0].counters.reopened == 0  # the client joins again by itself
        assert begun.count(b"20") == 2, "its settlement came too late"
        assert max(Counter(begun).values()) == 2
        # Whether a commit or a heartbeat is the first to be told depends; from a refused commit on nothing is begun.
        assert len(set(told)) == 1, told
        await eventually(lambda: reader.app.health().ok)


def noting(call: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        note()
        return call(*arguments)

    return noted


async def test_a_commit_that_never_comes_back_does_not_hold_a_rebalance_up(kafka: Kafka) -> None:
    topic, group = await kafka.create_topic(new_name(), 4), new_name("group")
    async with reading(kafka, topic, group, workers=4, commit_timeout=0.3) as reader:
        coordinator = reader.group.consumer._coordinator
        send, hung, back = coordinator._send_req, [], asyncio.Event()

        async def hanging(request: Any) -> Any:
            if type(request).__name__ == "OffsetCommitRequest" and not back.is_set():
                hung.append(request)
                await back.wait()
            return await send(request)

        coordinator._send_req = hanging
        for partition in range(4):
            await publish(kafka, topic, numbered(0, 25), partition)
        await eventually(lambda: len(reader.seen) == 100 and hung)
        async with member(kafka, topic, group) as other:
            await eventually(
                lambda: len(other.assignment()) == len(reader.group.parts) == 2, 10, "both have partitions"
            )
            back.set()
        await eventually(lambda: len(reader.group.parts) == 4 and reader.group.gate)
        await eventually(lambda: no_lag(kafka, topic, group))
        # Two partitions stayed, with their marks; two left uncommitted, and came back to be handled again.
        assert reader.group.refused >= 1
        assert max(Counter(reader.places).values()) <= 2
        assert len(set(reader.places)) == 100
        assert len(reader.places) <= 150


async def test_a_partition_that_comes_back_with_the_commit_of_another_begins_there(kafka: Kafka) -> None:
    topic, group = await kafka.create_topic(new_name(), 2), new_name("group")
    stays = TopicPartition(topic, 0)
    go_on = asyncio.Event()

    async def handle(message: Message) -> None:
        if message.body == b"5":
            await go_on.wait()

    async with reading(kafka, topic, group, handle, workers=4) as reader:
        async with member(kafka, topic, group) as other:
            await eventually(lambda: len(reader.group.parts) == 1 and reader.group.gate)
            (stays,) = reader.group.parts
            before = reader.group.parts[stays]
            await publish(kafka, topic, numbered(0, 20), stays.partition)
            await eventually(lambda: before.committed == 5)
            # Nobody but us may say so of our partition; but the server takes it from any member of the group.
            await other._coordinator._do_commit_offsets(None, {stays: OffsetAndMetadata(12, "")})
        await eventually(lambda: len(reader.group.parts) == 2 and reader.group.gate)
        after = reader.group.parts[stays]
        assert after is not before and not before.live
        assert after.start == 12
        go_on.set()
        await eventually(lambda: no_lag(kafka, topic, group))
        assert max(Counter(reader.places).values()) <= 2


async def test_two_subscribers_of_one_process_share_a_group_by_topic(kafka: Kafka) -> None:
    topics = [await kafka.create_topic(new_name(), 3) for _ in range(2)]
    group = new_name("group")
    seen: dict[str, list[tuple[str, bytes]]] = {topic: [] for topic in topics}

    def handler(topic: str) -> Any:
        @subscriber(topic, group=group, workers=2, attempts=1000, dead_letter=None)
        async def note(message: Message) -> None:
            assert isinstance(message, KafkaDelivery)
            seen[topic].append((message.part.tp.topic, bytes(message.body)))

        return note

    app = App(*map(handler, topics), brokers={"default": broker(kafka)}, watchdog=None)

    def parts(number: int) -> int:
        source: Any = app.pumps[number].source
        return len(source.group.parts)

    async with app.running():
        await eventually(lambda: parts(0) == parts(1) == 3, 20)
        for topic in topics:
            for partition in range(3):
                await publish(kafka, topic, numbered(partition * 10, partition * 10 + 10), partition)
        await eventually(lambda: all(len(some) == 30 for some in seen.values()))
        async with member(kafka, topics[0], group) as other:  # the group id is exactly the group's name
            await eventually(lambda: len(other.assignment()) + parts(0) == 3 > parts(0))
            assert {tp.topic for tp in other.assignment()} == {topics[0]}
        for topic in topics:
            await eventually(partial(no_lag, kafka, topic, group))
    for topic, some in seen.items():
        assert sorted(some) == sorted((topic, body) for body in numbered(0, 30))


async def test_an_error_while_partitions_are_taken_over_is_told_and_the_source_opened_again(kafka: Kafka) -> None:
    topic, group = await kafka.create_topic(new_name(), 2), new_name("group")
    async with reading(kafka, topic, group) as reader:
        first = reader.group

        async def fails(partitions: Any, *, stable: bool = False) -> Any:
            raise KafkaError("from the listener")

        first.consumer.committed_offsets = fails  # type: ignore[method-assign]
        async with member(kafka, topic, group):
            await eventually(lambda: reader.app.pumps[0].counters.reopened == 1, 20)
        assert reader.group is not first
        assert first.failure is not None and "from the listener" in str(first.failure)
        await publish(kafka, topic, [b"after"])
        await reader.has_seen(b"after")
        await eventually(lambda: reader.app.health().ok)


# ---------------------------------------------------------------------- one message that does not finish


async def test_a_message_that_never_finishes_does_not_stop_its_partition_until_the_limit(kafka: Kafka) -> None:
    topic, group = await kafka.create_topic(new_name(), 1), new_name("group")
    partition, finishes = TopicPartition(topic, 0), asyncio.Event()

    async def handle(message: Message) -> None:
        if message.body == b"10":
            await finishes.wait()

    limits = {"open_limit": 100, "window_limit": 400}
    async with reading(kafka, topic, group, handle, workers=4, **limits) as reader:
        await publish(kafka, topic, numbered(0, 2000))
        part = reader.group.parts[partition]
        await eventually(lambda: part.mark.open == 1 and part.full(**limits), 20, "it is not read further")
        assert part.mark.position == 10
        # The window is looked at before a fetch, so it overshoots by at most one.
        assert 400 <= part.mark.window <= 400 + 500
        assert len(reader.seen) == part.mark.end - 1
        await eventually(lambda: part.committed == 10)
        handled = len(reader.seen)
        beats = reader.group.consumer.heartbeats
        await eventually(lambda: reader.group.consumer.heartbeats > beats + 3)
        assert len(reader.seen) == handled, "it is left alone, and we stay in the group"
        finishes.set()
        await reader.has_seen(*numbered(0, 2000))
        await eventually(lambda: no_lag(kafka, topic, group))
        assert max(Counter(reader.places).values()) == 1
