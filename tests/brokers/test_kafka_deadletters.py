"""What a person does with dead letters on Kafka, and forgetting a group."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer import fetcher
from aiokafka.record.memory_records import MemoryRecords

from streamfw import App, Backoff, Message, subscriber
from streamfw.errors import BrokerClosed, BrokerRefused, BrokerUnavailable
from streamfw.message import (
    ERROR,
    ORIGIN_GROUP,
    ORIGIN_OFFSET,
    ORIGIN_PARTITION,
    TOMBSTONE,
    Headers,
    Outgoing,
    dead_letter_headers,
)
from streamfw_kafka import Topic
from streamfw_kafka.admin import Topics
from streamfw_kafka.connection import KafkaConnection
from streamfw_kafka.deadletters import DEAD_SINCE, KafkaDeadLetters, NotPutBack
from tests.brokers.kafka_apps import app_of, broker_of, committed, fill, filled, member, numbers, topic
from tests.brokers.kafka_kit import new_name, outgoing, read
from tests.helpers import eventually
from tests.services.kafka import Kafka

Change = tuple[str, str | None, bytes, tuple[tuple[str, bytes | None], ...]]


@asynccontextmanager
async def connected(kafka: Kafka, **options: Any) -> AsyncIterator[KafkaConnection]:
    async with broker_of(kafka, **options).connect() as connection:
        assert isinstance(connection, KafkaConnection)
        yield connection


@pytest.fixture
async def on(kafka: Kafka) -> AsyncIterator[KafkaConnection]:
    async with connected(kafka) as connection:
        yield connection


async def bury(
    on: KafkaConnection,
    name: str,
    *bodies: bytes,
    group: str = "shop",
    key: str | None = None,
    headers: Sequence[tuple[str, str | bytes | None]] = (),
    first: int = 0,
) -> list[str]:
    """Put dead letters of `name` where the runtime puts them; return their ids."""
    letters = []
    for offset, body in enumerate(bodies, first):
        place = {ORIGIN_PARTITION: "0", ORIGIN_OFFSET: str(offset)}
        told = dead_letter_headers(Headers(headers), "no stock", "ValueError", name, group, 3, place)
        letters.append(outgoing(f"{name}.dead", body, key=key, headers=told))
    assert not any(await on.publish(letters))
    return [letter.message_id for letter in letters]


def looks(messages: Collection[Message]) -> Counter[Change]:
    """What must not change of a letter that is published again."""
    return Counter((m.message_id, m.key, bytes(m.body), m.headers.pairs) for m in messages)


async def dead(kafka: Kafka, partitions: int = 2) -> str:
    """A topic's name, with its dead letter topic made."""
    name = await topic(kafka, 1)
    await kafka.create_topic(f"{name}.dead", partitions, retention_ms=-1)  # records may look old
    return name


# ------------------------------------------------------------------ looking


async def test_listing_takes_nothing_away(kafka: Kafka, on: KafkaConnection) -> None:
    name = await dead(kafka, 3)
    for stamp, (partition, body) in enumerate([(2, b"first"), (0, b"second"), (2, b"third"), (1, b"fourth")]):
        await fill(kafka, f"{name}.dead", [body], partition=partition, timestamp_ms=1_700_000_000_000 + stamp)
    letters = await on.dead_letters(f"{name}.dead")
    for limit in (2, 4, 100):
        listed = await letters.list(limit)
        assert [m.body for m in listed] == [b"first", b"second", b"third", b"fourth"][:limit]
    assert [m.message_id for m in await letters.list(1)] == [f"{name}.dead-2-0"]
    assert (await letters.list())[1].timestamp == 1_700_000_000.001


async def test_listing_shows_all_of_a_letter(kafka: Kafka, on: KafkaConnection) -> None:
    name = await dead(kafka)
    sent: list[tuple[str, str | bytes | None]] = [("z", "1"), ("a", b"\xff"), ("a", None)]
    (one,) = await bury(on, name, b"1", key="k\udcff", headers=sent)
    await bury(on, name, TOMBSTONE, key="gone")
    letters = await (await on.dead_letters(f"{name}.dead")).list()
    (found,) = [m for m in letters if m.message_id == one]
    assert (found.name, found.key, found.attempt, found.headers[ERROR]) == (f"{name}.dead", "k\udcff", 1, "no stock")
    assert found.headers.pairs[:3] == (("z", b"1"), ("a", b"\xff"), ("a", None))
    assert [m.body for m in letters if m.key == "gone"] == [TOMBSTONE]


async def test_a_topic_that_is_not_there_and_one_that_is_empty(kafka: Kafka) -> None:
    name = await dead(kafka)
    async with connected(kafka) as on:
        letters = await on.dead_letters(f"{name}.dead")
        assert (await letters.list(), await letters.purge(), await letters.requeue()) == ([], 0, 0)
        with pytest.raises(BrokerRefused, match=f"'{name}.daed' does not exist; near it: '{name}.dead'"):
            await (await on.dead_letters(f"{name}.daed")).list()


async def test_after_close(kafka: Kafka) -> None:
    name = await dead(kafka)
    async with connected(kafka) as connection:
        letters = await connection.dead_letters(f"{name}.dead")
    for call in (letters.list(), letters.purge(), letters.requeue(), connection.dead_letters(f"{name}.dead")):
        with pytest.raises(BrokerClosed):
            await call
    for ask in (connection.status(), connection.withdraw(name, "g"), connection.seek_group("g", name, "latest")):
        with pytest.raises(BrokerClosed):
            await ask


# ------------------------------------------------------------------ discarding


async def test_those_that_stay_are_as_they_were(kafka: Kafka, on: KafkaConnection) -> None:
    name = await dead(kafka)
    ids = []
    for number in range(10):
        ids += await bury(on, name, b"%d" % number, key=f"k{number}", headers=[("h", b"\x00"), ("n", None)])
    await fill(kafka, f"{name}.dead", [b"nameless"], partition=0)  # its id is its place, which it will lose
    await bury(on, name, TOMBSTONE, key="gone")
    letters = await on.dead_letters(f"{name}.dead")
    before = looks(await letters.list())
    gone = [ids[3], ids[8], "unknown", ids[3]]
    assert await letters.purge(gone) == 2
    after = looks(await letters.list())
    assert after == Counter({look: count for look, count in before.items() if look[0] not in gone})
    assert sum(after.values()) == 10
    assert await letters.purge(gone) == 0
    assert await letters.purge() == 10
    assert await letters.list() == []


async def test_many_letters_in_several_partitions(kafka: Kafka, on: KafkaConnection) -> None:
    name = await dead(kafka, 3)
    ids = await bury(on, name, *numbers(range(1300)))
    letters = await on.dead_letters(f"{name}.dead")
    assert await letters.purge(ids[::2]) == 650
    assert {m.message_id for m in await letters.list(5000)} == {*ids[1::2]}
    assert len(await read(kafka, f"{name}.dead")) == 650


async def test_nothing_is_written_again_behind_what_goes(
    kafka: Kafka, on: KafkaConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what stands before a letter that goes must make room."""
    name = await dead(kafka, 1)
    ids = await bury(on, name, *numbers(range(10)))
    published: list[str] = []
    publish = on.publishing.publish

    async def noted(messages: Sequence[Outgoing]) -> Any:
        published.extend(message.message_id for message in messages)
        return await publish(messages)

    monkeypatch.setattr(on.publishing, "publish", noted)
    letters = await on.dead_letters(f"{name}.dead")
    assert await letters.purge(ids[:3]) == 3
    assert published == []
    assert await letters.purge([ids[5]]) == 1
    assert published == ids[3:5]
    assert [record.value for record in await read(kafka, f"{name}.dead")] == numbers([6, 7, 8, 9, 3, 4])


async def test_what_arrives_meanwhile_stays(kafka: Kafka, on: KafkaConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    name = await dead(kafka, 1)
    ids = await bury(on, name, b"1", b"2")
    delete = Topics.delete_records

    async def late(topics: Topics, before: Any) -> Any:
        ids.extend(await bury(on, name, b"new"))
        return await delete(topics, before)

    monkeypatch.setattr(Topics, "delete_records", late)
    letters = await on.dead_letters(f"{name}.dead")
    assert await letters.purge() == 2
    assert [m.message_id for m in await letters.list()] == [ids[2]]
    assert await letters.purge([ids[2]]) == 1
    assert [m.message_id for m in await letters.list()] == [ids[3]]


async def test_a_crash_in_between_loses_nothing(
    kafka: Kafka, on: KafkaConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = await dead(kafka, 1)
    ids = await bury(on, name, *numbers(range(6)))
    letters = await on.dead_letters(f"{name}.dead")
    delete = Topics.delete_records

    async def crash(topics: Topics, before: Any) -> Any:
        raise BrokerUnavailable("the server went away")

    monkeypatch.setattr(Topics, "delete_records", crash)
    with pytest.raises(BrokerUnavailable, match="went away"):
        await letters.purge([ids[4]])
    monkeypatch.setattr(Topics, "delete_records", delete)
    there = Counter(m.message_id for m in await letters.list())
    assert there == Counter(ids) + Counter(ids[:4])  # those that stay are there twice, and so is nothing else
    assert await letters.purge([ids[4], ids[0]]) == 3
    assert {m.message_id for m in await letters.list()} == {*ids[1:4], ids[5]}


async def test_what_cannot_be_published_again_is_not_taken_away(kafka: Kafka, on: KafkaConnection) -> None:
    name = await topic(kafka, 1, max_message_bytes=1000)  # since a while
    await kafka.create_topic(f"{name}.dead", 1)
    ids = await bury(on, name, b"small", b"large" * 300)
    letters = await on.dead_letters(f"{name}.dead")
    said = r"1 of 2 letters of .* could not be published, so none .* larger than max\.message\.bytes=1000"
    with pytest.raises(BrokerRefused, match=said):
        await letters.requeue()
    assert [m.message_id for m in await letters.list()] == ids
    assert await letters.purge([ids[1]]) == 1
    assert await letters.requeue() == 1


async def test_a_compacted_topic_loses_no_records(kafka: Kafka, on: KafkaConnection) -> None:
    name = await topic(kafka, 1)
    await kafka.create_topic(f"{name}.dead", 1, cleanup_policy="compact")
    (one,) = await bury(on, name, b"1", key="k")
    letters = await on.dead_letters(f"{name}.dead")
    for call in (letters.purge(), letters.purge([one]), letters.requeue()):
        with pytest.raises(BrokerRefused, match=r"cleanup\.policy=compact, and the server deletes no records"):
            await call
    assert [m.message_id for m in await letters.list()] == [one]
    assert await read(kafka, name) == []


async def test_letters_with_header_names_that_are_no_utf8_stay_as_they_were(
    kafka: Kafka, on: KafkaConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiokafka raises at the first of them, and forgets what it had taken of other partitions: that must not go."""
    monkeypatch.setattr(fetcher, "MemoryRecords", MemoryRecords)  # as in a process that has not met one yet
    name = await dead(kafka, 8)
    strange = await bury(on, name, b"1000", b"1001", b"1002", key="all in one", headers=[("\udcff", b"1")])
    for partition in range(8):
        await fill(kafka, f"{name}.dead", numbers(range(partition, 80, 8)), partition=partition)
    letters = await on.dead_letters(f"{name}.dead")
    last = [f"{name}.dead-{partition}-9" for partition in range(8)]  # nearly all of them must make room for these
    assert await letters.purge([strange[1], *last]) == 9
    there = await letters.list()
    assert len(there) == 74 and len({m.message_id for m in there}) == 74
    assert [m.headers.pairs[0] for m in there if m.message_id in strange] == [("\udcff", b"1")] * 2


# ------------------------------------------------------------------ putting back


async def test_the_only_group_of_a_topic_gets_it_there(kafka: Kafka, on: KafkaConnection) -> None:
    name, group = await dead(kafka), new_name("group")
    async with member(kafka, name, group):
        await eventually(lambda: committed(kafka, name, group))
    ids = await bury(on, name, b"1", b"2", b"3", group=group, key="k", headers=[("z", "1"), ("a", b"\xff")])
    letters = await on.dead_letters(f"{name}.dead")
    assert await letters.requeue([ids[1], "unknown"]) == 1
    async with member(kafka, name, group) as one:
        (back,) = await one.take(1)
        assert (back.body, back.key, back.attempt, back.message_id) == (b"2", "k", 1, ids[1])
        assert back.headers.pairs == (("z", b"1"), ("a", b"\xff"))
    assert {m.message_id for m in await letters.list()} == {ids[0], ids[2]}
    assert await letters.requeue() == 2
    assert await letters.list() == []


async def test_other_groups_do_not_get_it(kafka: Kafka, on: KafkaConnection) -> None:
    """Without a retry topic there is no way to one group alone: refused, with who else reads it, and what to do."""
    name, group, other = await dead(kafka), new_name("group"), new_name("other")
    for each in (group, other):
        async with member(kafka, name, each):
            await eventually(partial(committed, kafka, name, each))
    ids = await bury(on, name, b"1", group=group)
    letters = await on.dead_letters(f"{name}.dead")
    said = (
        f"0 of 1 letters of '{name}.dead' were put back. What stays: 1 of group '{group}': .* goes to '{other}' as "
        f"well. .*, retry_topic=True\\), with overtaking=True where it has ordered_by=. No members has '{other}'; .*: "
        f"streamfw kafka forget --group {other} --topic {name}"
    )
    with pytest.raises(NotPutBack, match=said):
        await letters.requeue()
    assert [m.message_id for m in await letters.list()] == ids
    assert await read(kafka, name) == []
    await on.withdraw(name, other)
    assert await letters.requeue() == 1


async def test_those_that_can_be_put_back_are(kafka: Kafka, on: KafkaConnection) -> None:
    """And the others are told by group, with why: who else reads its topic, also one that runs, or that it is gone."""
    name, group, other = await dead(kafka, 1), new_name("group"), new_name("other")
    retry = await kafka.create_topic(f"{name}.{group}.retry", 1)
    await on.seek_group(group, retry, "latest")
    gone = new_name("gone")
    async with member(kafka, name, other):
        await eventually(partial(committed, kafka, name, other))
        first = await bury(on, name, b"1", b"2", group=group)
        stay = await bury(on, name, b"3", group=other)
        last = await bury(on, name, b"4", group=group, first=4)
        lost = [
            outgoing(
                f"{name}.dead", b"5", headers=dead_letter_headers(Headers(()), "no", "ValueError", gone, "shop", 3)
            )
        ]
        assert not any(await on.publish(lost))
        await on.seek_group(group, name, "latest")
        letters = await on.dead_letters(f"{name}.dead")
        with pytest.raises(NotPutBack) as caught:
            await letters.requeue()
    assert caught.value.done == 3
    text = str(caught.value)
    assert f"3 of 5 letters of '{name}.dead' were put back. What stays:\n  1. 1 of group '" in text
    assert f"1 of group '{other}': what is put back into '{name}' goes to '{group}' as well" in text
    assert f"1 of group 'shop': topic '{gone}' does not exist" in text
    assert len(await read(kafka, retry)) == 3 and first and last
    assert {m.message_id for m in await letters.list()} == {*stay, lost[0].message_id}


async def test_letters_of_one_group_only(kafka: Kafka, on: KafkaConnection) -> None:
    """Groups that failed at one message have a letter each, of one id."""
    name, one, two = await dead(kafka, 2), new_name("one"), new_name("two")
    ids = await bury(on, name, b"1", b"2", group=one)
    told = {m.message_id: m.headers for m in await (await on.dead_letters(f"{name}.dead")).list()}
    for each in ids:
        headers = told[each].merged({ORIGIN_GROUP: two})
        assert not any(await on.publish([Outgoing(name=f"{name}.dead", body=b"x", message_id=each, headers=headers)]))
    letters = await on.dead_letters(f"{name}.dead")
    assert isinstance(letters, KafkaDeadLetters)
    ones, twos = letters.of_group(one), letters.of_group(two)
    assert sorted(m.message_id for m in await ones.list(1)) <= sorted(ids) and len(await ones.list(1)) == 1
    assert {m.headers[ORIGIN_GROUP] for m in await twos.list()} == {two}
    assert await twos.purge(ids[:1]) == 1
    assert len(await ones.list()) == 2 and len(await letters.list()) == 3
    assert await letters.of_group("another").purge() == 0
    assert await twos.requeue() == 1
    assert await ones.requeue([ids[1]]) == 1
    assert [m.message_id for m in await letters.list()] == ids[:1]


async def test_letters_that_are_written_again_keep_their_time(kafka: Kafka, on: KafkaConnection) -> None:
    name, group = await dead(kafka, 1), new_name("group")
    ids = await bury(on, name, *numbers(range(4)), group=group)
    letters = await on.dead_letters(f"{name}.dead")
    before = {m.message_id: m.timestamp for m in await letters.list()}
    written = [record.timestamp for record in await read(kafka, f"{name}.dead")]
    for gone in (ids[3], ids[1]):
        await eventually(lambda: time.time() * 1000 > max(written) + 1)
        assert await letters.purge([gone]) == 1
        after = await letters.list()
        assert {m.message_id: m.timestamp for m in after} == {
            key: at for key, at in before.items() if key in {m.message_id for m in after}
        }
    (first, second) = await read(kafka, f"{name}.dead")
    assert min(first.timestamp, second.timestamp) > max(written)
    assert await letters.requeue() == 2
    assert all(key != DEAD_SINCE for record in await read(kafka, name) for key, _ in record.headers)


async def test_by_the_retry_topic_only_the_group_that_failed_gets_it(kafka: Kafka, on: KafkaConnection) -> None:
    name, other = await topic(kafka, 2), new_name("other")
    failing, seen, others = True, list[tuple[int, int, dict[str, str]]](), list[int]()

    @subscriber(Topic(name, retry_topic=True), attempts=2, backoff=Backoff(first=0.01))
    async def handle(number: int, message: Message) -> None:
        if failing and number == 3:
            raise ValueError("no stock")
        seen.append((number, message.attempt, dict(message.headers)))

    @subscriber(name)
    async def watch(number: int) -> None:
        others.append(number)

    app: App = app_of(kafka, handle, name=new_name("group"))
    async with app.running(), app_of(kafka, watch, name=other).running():
        for number in range(6):
            await app.publish(name, number, headers={"n": str(number)})
        letters = await on.dead_letters(f"{name}.dead")
        await eventually(letters.list)
        await eventually(lambda: len(seen) == 5 and len(others) == 6)
        (letter,) = await letters.list()
        failing = False
        assert await letters.requeue() == 1
        await eventually(lambda: len(seen) == 6)
        assert seen[5] == (3, 1, {"n": "3"})
        assert await letters.list() == []
        (record,) = await read(kafka, f"{name}.{app.settings.name}.retry")
        assert (letter.headers[ORIGIN_OFFSET].encode(), letter.headers[ORIGIN_PARTITION].encode()) == (
            dict(record.headers)[ORIGIN_OFFSET],
            dict(record.headers)[ORIGIN_PARTITION],
        )
        # Nobody else has seen it again: what comes after it has come.
        await app.publish(name, 99)
        await eventually(lambda: 99 in others)
        assert sorted(others) == [*range(6), 99]


async def test_a_copy_that_a_crash_has_left_is_put_back_once(kafka: Kafka, on: KafkaConnection) -> None:
    name, group = await dead(kafka, 1), new_name("group")
    (one,) = await bury(on, name, b"1", group=group)
    told = (await (await on.dead_letters(f"{name}.dead")).list())[0].headers
    await on.publish([Outgoing(name=f"{name}.dead", body=b"1", message_id=one, headers=told)])
    other = await bury(on, name, b"another failure", group=group, first=7)
    letters = await on.dead_letters(f"{name}.dead")
    assert len(await letters.list()) == 3
    assert await letters.requeue() == 2
    assert [record.value for record in await read(kafka, name)] == [b"1", b"another failure"]
    assert await letters.list() == []
    assert other


async def test_what_is_no_dead_letter_stays(kafka: Kafka, on: KafkaConnection) -> None:
    name, group = await dead(kafka, 1), new_name("group")
    await fill(kafka, f"{name}.dead", [b"stray"])
    await bury(on, name, b"1", group=group)
    letters = await on.dead_letters(f"{name}.dead")
    assert await letters.requeue() == 1
    assert [m.body for m in await letters.list()] == [b"stray"]
    assert await letters.requeue([f"{name}.dead-0-0"]) == 0


async def test_an_origin_that_is_gone(kafka: Kafka, on: KafkaConnection) -> None:
    name = new_name("gone")
    await kafka.create_topic(f"{name}.dead", 1)
    await bury(on, name, b"1")
    letters = await on.dead_letters(f"{name}.dead")
    with pytest.raises(BrokerRefused, match=f"topic '{name}' does not exist"):
        await letters.requeue()
    assert len(await letters.list()) == 1


# ------------------------------------------------------------------ forgetting a group


async def test_withdrawing_a_group_tells_what_waited_for_it(kafka: Kafka, on: KafkaConnection) -> None:
    name, other, group = await filled(kafka, 10), await filled(kafka, 4), new_name("group")
    retry = await kafka.create_topic(f"{name}.{group}.retry", 1)
    await fill(kafka, retry, numbers(range(3)))
    await on.seek_group(group, name, {0: 2, 1: 5})
    await on.seek_group(group, other, "earliest")
    await on.seek_group(group, retry, {0: 1})
    assert await on.withdraw(name, group) == 3 + 2
    assert {tp.topic for tp in await on.topics.committed(group)} == {other}
    assert await read(kafka, retry) == []
    assert group in await on.topics.groups()
    assert await on.withdraw(name, group) == 0
    assert await on.withdraw(other, group) == 4
    assert group not in await on.topics.groups()
    assert await on.withdraw(name, new_name("never")) == 0
    async with member(kafka, name, group) as one:  # it begins anew
        assert len(await one.take(10)) == 10


async def test_a_group_that_reads_is_not_withdrawn(kafka: Kafka, on: KafkaConnection) -> None:
    name, other, group = await filled(kafka, 10), await filled(kafka, 4), new_name("group")
    await on.seek_group(group, other, "latest")
    async with member(kafka, name, group):
        await eventually(lambda: committed(kafka, name, group))
        with pytest.raises(BrokerRefused, match=f"withdrawing group '{group}': members of it read '{name}'; stop them"):
            await on.withdraw(name, group)
        assert len(await committed(kafka, name, group)) == 2
        assert await on.withdraw(other, group) == 0  # which nobody of it reads
        assert [*await on.topics.committed(group)] == [TopicPartition(name, 0), TopicPartition(name, 1)]
