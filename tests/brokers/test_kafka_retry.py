"""Trying again: in place, by way of a retry topic, until the dead letter; and what ``on_error`` makes of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from streamfw import Ack, App, Backoff, Batch, DeadLetter, Drop, Message, Retry, subscriber
from streamfw.errors import BrokerUnavailable
from streamfw.message import (
    ERROR,
    ERROR_TYPE,
    ORIGIN,
    ORIGIN_ATTEMPT,
    ORIGIN_GROUP,
    ORIGIN_OFFSET,
    ORIGIN_PARTITION,
)
from streamfw_kafka import Topic
from streamfw_kafka.retry import ATTEMPT, NOT_BEFORE, PUBLISHED, Waiting
from streamfw_kafka.wire import MESSAGE_ID
from tests.brokers.kafka_apps import (
    GROUP,
    all_committed,
    app_of,
    committed,
    fill,
    fill_bare,
    member,
    numbers,
    source_of,
    topic,
)
from tests.brokers.kafka_kit import new_name, read
from tests.helpers import eventually
from tests.services.kafka import Kafka, OwnKafka


class Seen:
    """What a handler was given: the message, and when."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.at: list[float] = []
        self.attempts: list[int] = []

    def note(self, message: Message) -> None:
        message.headers  # noqa: B018 - decoded while it is ours
        self.messages.append(message)
        self.at.append(time.time())
        self.attempts.append(message.attempt)


def health_of(app: App) -> str:
    (health,) = app.health().subscribers.values()
    return health.detail


async def headers_of(kafka: Kafka, name: str) -> list[dict[str, bytes | None]]:
    return [dict(record.headers) for record in await read(kafka, name)]


# ------------------------------------------------------------------ in place


async def test_a_short_pause_is_in_place_and_counted(kafka: Kafka) -> None:
    name, seen = await topic(kafka, 1), Seen()

    @subscriber(Topic(name, retry_topic=True, retry_after=5.0), attempts=3, backoff=Backoff(first=0.05, jitter=False))
    async def handle(message: Message) -> None:
        seen.note(message)
        raise LookupError("not yet")

    await fill(kafka, name, [b"1"])
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert seen.attempts == [1, 2, 3]
    assert seen.at[1] - seen.at[0] > 0.045 and seen.at[2] - seen.at[1] > 0.09
    assert await read(kafka, f"{name}.{GROUP}.retry") == []
    assert [headers[ORIGIN_ATTEMPT] for headers in await headers_of(kafka, f"{name}.dead")] == [b"3"]


async def test_what_waits_in_place_is_not_committed_past(kafka: Kafka) -> None:
    name = await topic(kafka, 1)

    @subscriber(name)
    async def handle(number: int) -> None:
        if number == 1:
            raise Retry(after=3600)

    await fill(kafka, name, numbers(range(5)))
    async with app_of(kafka, handle).running() as app:
        await eventually(lambda: app.pumps[0].counters.acked == 4)
        await eventually(
            lambda: source_of(app).group.parts and next(iter(source_of(app).group.parts.values())).low == 1
        )
    assert await committed(kafka, name) == {0: 1}


# ------------------------------------------------------------------ by the retry topic


async def test_a_long_pause_goes_by_the_retry_topic(kafka: Kafka) -> None:
    """The original is settled at once; the message comes back not before its time, as it was, counted."""
    name, seen = await topic(kafka, 2), Seen()

    @subscriber(Topic(name, retry_topic=True, retry_after=0.5))
    async def handle(message: Message) -> None:
        seen.note(message)
        if message.attempt == 1:
            raise Retry(after=1.0)

    given = [("tenant", b"one"), ("tenant", b"two"), ("null", None)]
    await fill(kafka, name, [b"it"], key=b"k\xff", partition=1, headers=given, timestamp_ms=1_700_000_000_000)
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
        assert seen.attempts == [1]
        await all_committed(kafka, f"{name}.{GROUP}.retry")
        await eventually(lambda: len(seen.messages) == 2)
    first, second = seen.messages
    assert seen.attempts == [1, 2] and seen.at[1] - seen.at[0] >= 1.0
    for told in ("name", "body", "key", "message_id", "timestamp"):
        assert getattr(first, told) == getattr(second, told), told
    assert first.headers.pairs == second.headers.pairs == (*given,)
    assert (first.name, first.message_id, first.timestamp) == (name, f"{name}-1-0", 1_700_000_000.0)
    ((record),) = await read(kafka, f"{name}.{GROUP}.retry")
    headers = dict(record.headers)
    assert (headers[ATTEMPT], headers[ORIGIN_PARTITION], headers[ORIGIN_OFFSET]) == (b"2", b"1", b"0")


async def test_a_pause_of_the_backoff_goes_there_as_well_and_survives_a_restart(kafka: Kafka) -> None:
    name, seen = await topic(kafka, 1), Seen()

    @subscriber(Topic(name, retry_topic=True, retry_after=1.0), attempts=2, backoff=Backoff(first=2, jitter=False))
    async def handle(message: Message) -> None:
        seen.note(message)
        raise LookupError("not yet")

    await fill(kafka, name, [b"1"])
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert seen.attempts == [1]
    async with app_of(kafka, handle).running():
        await all_committed(kafka, f"{name}.{GROUP}.retry")
    assert seen.attempts == [1, 2] and seen.at[1] - seen.at[0] >= 2.0
    (letter,) = await headers_of(kafka, f"{name}.dead")
    assert letter[ORIGIN_ATTEMPT] == b"2"


async def test_its_attempts_end_in_the_dead_letter_of_the_original(kafka: Kafka) -> None:
    name, seen = await topic(kafka, 2), Seen()

    @subscriber(Topic(name, retry_topic=True, retry_after=0.0), attempts=4)
    async def handle(message: Message) -> None:
        seen.note(message)
        if message.attempt == 4:
            raise LookupError("never")
        raise Retry(after=0.05)

    await fill(kafka, name, [b"before"] * 3, partition=1)
    async with member(kafka, name, GROUP) as one:  # what is before it is done already
        await one.acknowledge(await one.take(3))
    await fill(kafka, name, [b"it"], partition=1, headers=[("tenant", b"one")])
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
        await eventually(lambda: len(seen.attempts) == 4)
        await all_committed(kafka, f"{name}.{GROUP}.retry")
    assert seen.attempts == [1, 2, 3, 4]
    ((record),) = await read(kafka, f"{name}.dead")
    assert record.value == b"it"
    assert dict(record.headers) == {
        MESSAGE_ID: f"{name}-1-3".encode(),
        "tenant": b"one",
        ERROR: b"LookupError: never",
        ERROR_TYPE: b"LookupError",
        ORIGIN: name.encode(),
        ORIGIN_GROUP: GROUP.encode(),
        ORIGIN_ATTEMPT: b"4",
        ORIGIN_PARTITION: b"1",
        ORIGIN_OFFSET: b"3",
    }


async def test_those_with_shorter_pauses_come_first(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    back: list[int] = []

    @subscriber(Topic(name, retry_topic=True, retry_after=0.0))
    async def handle(number: int, message: Message) -> None:
        if message.attempt == 1:
            raise Retry(after=2.0 - number / 4)
        back.append(number)

    await fill(kafka, name, numbers(range(5)))
    async with app_of(kafka, handle, fetch_wait=0.01).running() as app:
        await eventually(lambda: len(back) == 5)
        assert all(part.due == [] for part in source_of(app).group.parts.values())
    assert back == [4, 3, 2, 1, 0]


async def test_a_retried_message_keeps_its_key_apart_though_others_may_pass(kafka: Kafka) -> None:
    """`overtaking`: later messages of the key go on, and when it comes back, it is one after another again."""
    name = await topic(kafka, 1)
    order: list[str] = []
    running = 0

    @subscriber(Topic(name, retry_topic=True, retry_after=0.0, overtaking=True), ordered_by="key", workers=4)
    async def handle(body: bytes, message: Message) -> None:
        nonlocal running
        assert running == 0, "two of one key at the same time"
        running += 1
        await asyncio.sleep(0.01)
        running -= 1
        order.append(f"{body.decode()} {message.attempt}")
        if body == b"first" and message.attempt == 1:
            raise Retry(after=0.3)

    await fill(kafka, name, [b"first", b"second", b"third"], key=b"k")
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
        assert order == ["first 1", "second 1", "third 1"]
        await fill(kafka, name, [b"more"] * 100, key=b"k")
        await all_committed(kafka, name)
        await all_committed(kafka, f"{name}.{GROUP}.retry")
    assert len(order) == 104 and "first 2" in order


async def test_elements_of_a_batch_go_there_singly(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    seen: list[tuple[bytes, int]] = []

    @subscriber(Topic(name, retry_topic=True, retry_after=0.1), batch=Batch(10, wait=0.05))
    async def handle(batch: list[Message]) -> list[Retry | None]:
        seen.extend((message.body, message.attempt) for message in batch)
        return [Retry(after=0.5) if m.body == b"1" and m.attempt == 1 else None for m in batch]

    await fill(kafka, name, numbers(range(3)))
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
        await eventually(lambda: len(seen) == 4)
    assert seen == [(b"0", 1), (b"1", 1), (b"2", 1), (b"1", 2)]


@pytest.mark.parametrize("value", [None, bytes(1_040_000)], ids=["nothing at all", "larger than max_body"])
async def test_what_kafka_took_once_goes_there(kafka: Kafka, value: bytes | None) -> None:
    name, seen = await topic(kafka, 1), Seen()

    @subscriber(Topic(name, retry_topic=True, retry_after=0.0))
    async def handle(message: Message) -> None:
        seen.note(message)
        if message.attempt == 1:
            raise Retry(after=0.05)

    await fill_bare(kafka, name, None, value)
    async with app_of(kafka, handle).running():
        await eventually(lambda: seen.attempts == [1, 2])
        await all_committed(kafka, f"{name}.{GROUP}.retry")
    assert seen.messages[0].body == seen.messages[1].body


async def test_what_waits_is_bounded_by_bytes(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in memory: what has no room stays in the retry topic, late but not lost."""
    name, bodies = await topic(kafka, 1), [bytes([number]) * 10_000 for number in range(40)]
    done: list[int] = []
    sizes: list[int] = []
    take = Waiting.take

    def measured(waiting: Waiting, *arguments: Any) -> Any:
        due = take(waiting, *arguments)
        sizes.append(waiting.bytes)
        return due

    monkeypatch.setattr(Waiting, "take", measured)

    @subscriber(Topic(name, retry_topic=True, retry_after=0.0), max_bytes=50_000, prefetch=2)
    async def handle(message: Message) -> None:
        if message.attempt == 1:
            raise Retry(after=1.0)
        done.append(message.body[0])

    await fill(kafka, name, bodies)
    async with app_of(kafka, handle).running():
        await eventually(lambda: len(done) == 40, 20.0)
    assert sorted(done) == list(range(40))
    assert 50_000 <= max(sizes) < 50_000 + 2 * 10_000  # one getmany brings two


# ------------------------------------------------------------------ what outsiders say


async def test_retry_headers_on_the_topic_itself_mean_nothing(kafka: Kafka) -> None:
    name, seen = await topic(kafka, 1), Seen()
    told = [(ATTEMPT, b"99"), (NOT_BEFORE, b"99999999999999"), (PUBLISHED, b"1"), (ORIGIN_OFFSET, b"7")]

    @subscriber(Topic(name, retry_topic=True), attempts=2)
    async def handle(message: Message) -> None:
        seen.note(message)

    await fill(kafka, name, [b"1"], headers=told)
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert seen.attempts == [1] and seen.messages[0].timestamp > 1
    assert seen.messages[0].headers.pairs == (*told,)  # they are the sender's own


@pytest.mark.parametrize("strange", [b"", b"-1", b"x", b"\xff", b"9" * 40, None])
async def test_strange_records_on_the_retry_topic_are_due_and_first(kafka: Kafka, strange: bytes | None) -> None:
    name, seen = await topic(kafka, 1), Seen()
    retry = await kafka.create_topic(f"{name}.{GROUP}.retry", 1)
    names = (ATTEMPT, NOT_BEFORE, PUBLISHED, ORIGIN_PARTITION, ORIGIN_OFFSET)

    @subscriber(Topic(name, retry_topic=True))
    async def handle(message: Message) -> None:
        seen.note(message)
        raise DeadLetter("no")

    await fill(kafka, retry, [b"1"], headers=[(each, strange) for each in names])
    async with app_of(kafka, handle).running():
        await all_committed(kafka, retry)
    assert seen.attempts == [1] and seen.messages[0].name == name
    (letter,) = await headers_of(kafka, f"{name}.dead")
    assert letter[ORIGIN] == name.encode() and ORIGIN_OFFSET not in letter


# ------------------------------------------------------------------ when it cannot be published


async def test_a_retry_that_cannot_be_published_keeps_the_original(kafka: Kafka) -> None:
    """The retry topic is deleted while running: nothing is settled, health tells it, and it goes on with a new one."""
    name, seen = await topic(kafka, 1), Seen()
    retry = await kafka.create_topic(f"{name}.{GROUP}.retry", 1)
    await kafka.create_topic(f"{name}.dead", 1)

    @subscriber(Topic(name, retry_topic=True, retry_after=0.0))
    async def handle(message: Message) -> None:
        seen.note(message)
        if message.attempt == 1 and message.body == b"1":
            raise Retry(after=0.05)

    app = app_of(kafka, handle, create_topics=False, publish_timeout=1.0, metadata_age=0.3)
    async with app.running():
        await all_committed(kafka, name)
        await delete_topic(kafka, retry)
        await fill(kafka, name, numbers(range(3)))
        await eventually(lambda: "publishing to its retry topic" in health_of(app), 20.0)
        assert (await committed(kafka, name)).get(0, 0) <= 1
        await kafka.create_topic(retry, 1)
        await all_committed(kafka, name)
        await eventually(lambda: 2 in seen.attempts, 20.0)
    assert [(m.body, a) for m, a in zip(seen.messages, seen.attempts, strict=True) if m.body == b"1"][-1] == (b"1", 2)


async def delete_topic(kafka: Kafka, name: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        await admin.delete_topics([name])
    finally:
        await admin.close()


async def test_a_retry_while_the_server_is_away_is_kept(own_kafka: OwnKafka) -> None:
    """It comes again when the server does, by the retry topic or as it was: nothing of the group is settled before."""
    kafka = own_kafka.facts
    name, seen, again = await topic(kafka, 1), Seen(), asyncio.Event()

    @subscriber(Topic(name, retry_topic=True, retry_after=0.0))
    async def handle(message: Message) -> None:
        seen.note(message)
        if message.body == b"1" and not again.is_set():
            await asyncio.to_thread(own_kafka.kill)
            again.set()
            raise Retry(after=0.1)

    await fill(kafka, name, numbers(range(3)))
    app = app_of(kafka, handle, publish_timeout=2.0, request_timeout=2.0)
    async with app.running():
        await again.wait()
        await eventually(lambda: not app.health().ok, 20.0)
        await asyncio.to_thread(own_kafka.start)
        await eventually(lambda: [m.body for m in seen.messages].count(b"1") >= 2, 30.0)
        await all_committed(kafka, name)
        await all_committed(kafka, f"{name}.{GROUP}.retry")
    assert {m.body for m in seen.messages} == {b"0", b"1", b"2"}
    assert await read(kafka, f"{name}.dead") == []


async def test_a_settlement_that_failed_half_way_is_repeated_without_a_second_retry(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two could not be published: what was is not published again."""
    name = await topic(kafka, 1)
    await fill(kafka, name, numbers(range(3)))
    async with member(kafka, Topic(name, retry_topic=True), new_name("group")) as one:
        source: Any = one.source
        taken = await one.take(3)
        publish, calls = source._opening.publish, 0

        async def fail_once(messages: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                await publish(messages[:1])
                return [None, BrokerUnavailable("the second was not accepted")]
            return await publish(messages)

        monkeypatch.setattr(source._opening, "publish", fail_once)
        assert await one.settle(taken[:2], Retry(3600.0)) == []
        await one.acknowledge(taken[2:])
        retry = source._opening.retry_name
    assert calls == 2
    assert sorted(record.value for record in await read(kafka, retry)) == [b"0", b"1"]


# ------------------------------------------------------------------ on_error, and dead letters


async def test_on_error_decides_and_the_dead_letter_tells(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    seen: list[int] = []

    @subscriber(
        name,
        attempts=2,
        backoff=Backoff(first=0.01),
        on_error={KeyError: Drop, ZeroDivisionError: lambda error: DeadLetter(f"because of {error}"), OSError: Ack()},
    )
    async def handle(number: int) -> None:
        seen.append(number)
        raise [KeyError("k"), ZeroDivisionError("zero"), OSError("o"), LookupError("l")][number]

    await fill(kafka, name, numbers(range(4)))
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert sorted(seen) == [0, 1, 2, 3, 3]
    letters = {headers[ORIGIN_OFFSET]: headers for headers in await headers_of(kafka, f"{name}.dead")}
    assert sorted(letters) == [b"1", b"3"]  # type: ignore[type-var]
    assert (letters[b"1"][ERROR], letters[b"1"][ORIGIN_ATTEMPT]) == (b"because of zero", b"1")
    assert (letters[b"3"][ERROR], letters[b"3"][ORIGIN_ATTEMPT]) == (b"LookupError: l", b"2")
    assert letters[b"3"][ERROR_TYPE] == b"LookupError"


async def test_without_a_dead_letter_they_are_discarded(kafka: Kafka) -> None:
    name = await topic(kafka, 1)

    @subscriber(name, attempts=1, dead_letter=None)
    async def handle(number: int) -> None:
        raise LookupError("no")

    await fill(kafka, name, numbers(range(4)))
    async with app_of(kafka, handle, create_topics=False).running() as app:
        await all_committed(kafka, name)
        assert app.pumps[0].counters.dropped == 4


async def test_a_dead_letter_that_cannot_be_published_keeps_the_original(kafka: Kafka) -> None:
    """Until it can."""
    name = await topic(kafka, 1)
    dead = await kafka.create_topic(f"{name}.dead", 1, max_message_bytes=2000)

    @subscriber(name)
    async def handle(message: Message) -> None:
        raise DeadLetter("no")

    async def is_committed() -> bool:
        return await committed(kafka, name) == {0: 1}

    await fill(kafka, name, [b"small", bytes(3000)])
    app = app_of(kafka, handle)
    async with app.running():
        await eventually(lambda: "max.message.bytes=2000" in health_of(app))
        await eventually(is_committed)
        assert [record.value for record in await read(kafka, dead)] == [b"small"]
        await configure(kafka, dead, "max.message.bytes", "1000000")
        await all_committed(kafka, name)
    assert [record.value for record in await read(kafka, dead)] == [b"small", bytes(3000)]


async def configure(kafka: Kafka, name: str, key: str, value: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, name, {key: value})])
    finally:
        await admin.close()
