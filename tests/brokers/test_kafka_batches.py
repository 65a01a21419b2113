"""Batches from Kafka: of one partition unless asked otherwise, an outcome for each element, keys in order."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import msgspec

from streamfw import Backoff, Batch, DeadLetter, Drop, Message, PartialFailure, Retry, subscriber
from streamfw.message import ERROR_TYPE, ORIGIN_ATTEMPT, ORIGIN_OFFSET
from streamfw_kafka import Topic
from tests.brokers.kafka_apps import all_committed, app_of, fill, filled, numbers, topic
from tests.brokers.kafka_kit import read
from tests.services.kafka import Kafka


def partitions_of(batch: list[Message]) -> set[int]:
    return {message.partition for message in batch}  # type: ignore[attr-defined]


async def test_a_batch_is_of_one_partition_and_full_where_there_is_enough(kafka: Kafka) -> None:
    name = await filled(kafka, 1050, 3)
    sizes: list[int] = []
    seen: list[tuple[int, int]] = []

    @subscriber(name, batch=Batch(100, wait=0.05))
    async def handle(batch: list[Message]) -> None:
        assert len(partitions_of(batch)) == 1
        sizes.append(len(batch))
        seen.extend((message.partition, message.offset) for message in batch)  # type: ignore[attr-defined]

    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert sorted(seen) == [(p, at) for p in range(3) for at in range(350)]
    assert max(sizes) == 100 and len(sizes) < 40  # 12 full ones, if they came all at once


async def test_a_batch_of_several_partitions_where_asked(kafka: Kafka) -> None:
    name = await filled(kafka, 300, 3)
    mixed: list[set[int]] = []

    @subscriber(Topic(name, mixed_batches=True), batch=Batch(150, wait=0.5))
    async def handle(batch: list[Message]) -> None:
        mixed.append(partitions_of(batch))

    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert len(mixed) == 2 and set().union(*mixed) == {0, 1, 2} and max(map(len, mixed)) > 1


async def test_a_few_wait_no_longer_than_they_should(kafka: Kafka) -> None:
    name = await filled(kafka, 6, 2)
    batches: list[list[int]] = []

    @subscriber(name, batch=Batch(100, wait=0.05))
    async def handle(batch: list[int]) -> None:
        batches.append(batch)

    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert sorted(map(sorted, batches)) == [[0, 2, 4], [1, 3, 5]]


async def test_each_element_has_its_own_outcome(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    seen: list[int] = []
    again = 0

    @subscriber(name, batch=Batch(10, wait=0.1), attempts=2, backoff=Backoff(first=0.01))
    async def handle(batch: list[int]) -> list[Any]:
        nonlocal again
        seen.extend(batch)
        again += 1
        outcomes = {1: Drop(), 2: DeadLetter("two"), 3: LookupError("three"), 4: Retry(0.01) if again == 1 else None}
        return [outcomes.get(number) for number in batch]

    await fill(kafka, name, numbers(range(6)))
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert sorted(seen) == [0, 1, 2, 3, 3, 4, 4, 5]
    letters = [dict(record.headers) for record in await read(kafka, f"{name}.dead")]
    assert sorted((one[ORIGIN_OFFSET], one[ORIGIN_ATTEMPT]) for one in letters) == [(b"2", b"1"), (b"3", b"2")]


async def test_a_partial_failure_and_a_failure_of_all(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    attempts: defaultdict[int, list[int]] = defaultdict(list)

    @subscriber(name, batch=Batch(4, wait=0.2), attempts=3, backoff=Backoff(first=0.01, jitter=False))
    async def handle(batch: list[Message]) -> None:
        for message in batch:
            attempts[int(message.body)].append(message.attempt)
        if len(batch) == 4:
            raise PartialFailure({1: LookupError("one")})
        raise LookupError("all of them")

    await fill(kafka, name, numbers(range(4)))
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert attempts == {0: [1], 1: [1, 2, 3], 2: [1], 3: [1]}
    ((letter),) = [dict(record.headers) for record in await read(kafka, f"{name}.dead")]
    assert (letter[ORIGIN_OFFSET], letter[ORIGIN_ATTEMPT], letter[ERROR_TYPE]) == (b"1", b"3", b"LookupError")


async def test_what_cannot_be_decoded_leaves_the_batch(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    batches: list[list[int]] = []

    @subscriber(name, batch=Batch(10, wait=0.1))
    async def handle(batch: list[int]) -> None:
        batches.append(batch)

    await fill(kafka, name, [b"0", b"poison", b"2"])
    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert batches == [[0, 2]]
    assert [record.value for record in await read(kafka, f"{name}.dead")] == [b"poison"]


class Step(msgspec.Struct):
    key: str
    number: int


async def test_a_failed_element_holds_later_ones_of_its_key(kafka: Kafka) -> None:
    """Over all its batches; other keys go on."""
    name, keys, count = await topic(kafka, 2), [f"key-{number}" for number in range(8)], 60
    handled: defaultdict[str, list[int]] = defaultdict(list)
    failures: defaultdict[str, int] = defaultdict(int)

    @subscriber(name, batch=Batch(25, wait=0.02), ordered_by="key", workers=4, backoff=Backoff(first=0.01))
    async def handle(batch: list[Step]) -> list[Exception | None]:
        await asyncio.sleep(0.001)
        failed: set[str] = set()
        outcomes: list[Exception | None] = []
        for step in batch:
            # What is behind a failed one in this batch is tried again with it, whatever is said about it here.
            if step.number % 20 == 7 and failures[step.key] < 1 + step.number // 20 and step.key not in failed:
                failures[step.key] += 1
                failed.add(step.key)
                outcomes.append(LookupError("not yet"))
                continue
            if step.key not in failed:
                handled[step.key].append(step.number)
            outcomes.append(None)
        return outcomes

    app = app_of(kafka, handle)
    async with app.running():
        await asyncio.gather(
            *(app.publish(name, Step(key, number), key=key) for number in range(count) for key in keys)
        )
        await all_committed(kafka, name)
    assert handled == {key: list(range(count)) for key in keys}
    assert sum(failures.values()) == 3 * len(keys)


async def test_a_batch_in_the_order_of_its_partition(kafka: Kafka) -> None:
    name = await filled(kafka, 400, 2)
    seen: defaultdict[int, list[int]] = defaultdict(list)
    running: set[int] = set()

    @subscriber(name, batch=Batch(30, wait=0.02), ordered_by="partition", workers=4)
    async def handle(batch: list[Message]) -> None:
        (partition,) = partitions_of(batch)
        assert partition not in running
        running.add(partition)
        await asyncio.sleep(0.001)
        running.discard(partition)
        seen[partition].extend(int(message.body) for message in batch)

    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert seen == {0: [*range(0, 400, 2)], 1: [*range(1, 400, 2)]}
