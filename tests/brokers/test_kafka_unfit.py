"""Records that cannot be published again as they are: they end as dead letters, and are tried again, all the same."""

from __future__ import annotations

from streamfw import DeadLetter, Message, Retry, subscriber
from streamfw.message import ERROR, LEFT_OUT
from streamfw_kafka import Topic
from tests.brokers.kafka_apps import GROUP, all_committed, app_of, fill, topic
from tests.brokers.kafka_kit import read
from tests.helpers import eventually
from tests.services.kafka import Kafka

LIMIT = 4000


async def test_a_dead_letter_leaves_out_what_does_not_fit(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    await kafka.create_topic(f"{name}.dead", 1, max_message_bytes=LIMIT)

    @subscriber(name)
    async def handle(message: Message) -> None:
        raise DeadLetter("no")

    headers = [("small", b"1"), ("large", b"x" * LIMIT), ("twice", b"1"), ("twice", b"2")]
    await fill(kafka, name, [b"it"], headers=headers)
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    (letter,) = await read(kafka, f"{name}.dead")
    told = dict(letter.headers)
    assert (letter.value, told["small"], told[ERROR], told[LEFT_OUT]) == (b"it", b"1", b"no", b"large")
    assert [value for each, value in letter.headers if each == "twice"] == [b"1", b"2"]


async def test_a_body_that_no_dead_letter_can_have_holds_up_no_drain(kafka: Kafka) -> None:
    """It is tried again: the topic's limit can be raised."""
    name = await topic(kafka, 1)
    await kafka.create_topic(f"{name}.dead", 1, max_message_bytes=LIMIT)

    @subscriber(name)
    async def handle(message: Message) -> None:
        raise DeadLetter("no")

    await fill(kafka, name, [b"x" * LIMIT], headers=[("small", b"1")])
    app = app_of(kafka, handle, drain_timeout=600)
    async with app.running():
        await eventually(lambda: "max.message.bytes" in next(iter(app.health().subscribers.values())).detail)


async def test_what_does_not_fit_into_the_retry_topic_waits_in_the_process(kafka: Kafka) -> None:
    name, seen = await topic(kafka, 1), []
    retries = await kafka.create_topic(f"{name}.{GROUP}.retry", 1, max_message_bytes=LIMIT)

    @subscriber(Topic(name, retry_topic=True, retry_after=0.0))
    async def handle(message: Message) -> None:
        seen.append((len(message.body), message.attempt))
        if message.attempt < 3:
            raise Retry(after=0.05)

    await fill(kafka, name, [b"x" * LIMIT])
    await fill(kafka, name, [b"x" * 100])
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
        await eventually(lambda: len(seen) == 6)
        await all_committed(kafka, retries)
    assert sorted(seen) == [(100, 1), (100, 2), (100, 3), (LIMIT, 1), (LIMIT, 2), (LIMIT, 3)]
    assert {len(record.value) for record in await read(kafka, retries)} == {100}
