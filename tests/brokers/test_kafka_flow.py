"""How messages flow from Kafka: lanes, back-pressure, fairness, and how often the server is asked for anything."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import Any

import pytest

from streamfw import Backoff, Message, subscriber
from streamfw.broker import Delivery
from streamfw_kafka.client import GroupConsumer
from tests.brokers.kafka_apps import (
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
from tests.brokers.kafka_kit import new_name
from tests.helpers import eventually
from tests.services.kafka import Kafka

MIB = 2**20


class Running:
    """Which lanes are at work, and what was done in each, in order."""

    def __init__(self) -> None:
        self.now: Counter[object] = Counter()
        self.done: defaultdict[object, list[int]] = defaultdict(list)
        self.most: Counter[object] = Counter()
        self.together = 0

    async def work(self, lane: object, number: int, seconds: float = 0.001) -> None:
        self.now[lane] += 1
        self.most[lane] = max(self.most[lane], self.now[lane])
        self.together = max(self.together, self.now.total())
        await asyncio.sleep(seconds)
        self.now[lane] -= 1
        self.done[lane].append(number)


# ------------------------------------------------------------------ lanes


async def test_unordered_messages_are_handled_at_the_same_time(kafka: Kafka) -> None:
    name, running = await filled(kafka, 100, 1), Running()

    @subscriber(name, workers=8)
    async def handle(number: int) -> None:
        await running.work(None, number)

    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert sorted(running.done[None]) == list(range(100)) and running.together == 8


async def test_messages_of_one_key_one_after_another(kafka: Kafka) -> None:
    """Those without a key are of no lane; an empty key is a key like another."""
    name, running = await topic(kafka, 2), Running()
    keys = [None, b"", b"a", b"b", b"\xff"]
    for key in keys:
        await fill(kafka, name, numbers(range(50)), key=key, partition=1)

    @subscriber(name, workers=8, ordered_by="key")
    async def handle(number: int, message: Message) -> None:
        await running.work(message.key, number)

    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    texts = [None if key is None else key.decode("utf-8", "surrogateescape") for key in keys]
    assert {lane: sorted(done) for lane, done in running.done.items()} == {text: list(range(50)) for text in texts}
    assert all(running.done[lane] == list(range(50)) and running.most[lane] == 1 for lane in texts if lane is not None)
    assert running.most[None] > 1 and running.together > 4


async def test_messages_of_one_partition_one_after_another(kafka: Kafka) -> None:
    name, running = await filled(kafka, 150, 3), Running()

    @subscriber(name, workers=8, ordered_by="partition")
    async def handle(number: int) -> None:
        await running.work(number % 3, number)

    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert running.done == {partition: [*range(partition, 150, 3)] for partition in range(3)}
    assert running.together == 3 and set(running.most.values()) == {1}


async def test_a_key_keeps_its_order_over_retries_in_place(kafka: Kafka) -> None:
    name, running = await topic(kafka, 2), Running()
    failures: Counter[str] = Counter()
    for key in ("a", "b", "c"):
        await fill(kafka, name, numbers(range(40)), key=key.encode())

    @subscriber(name, workers=4, ordered_by="key", backoff=Backoff(first=0.01))
    async def handle(number: int, message: Message) -> None:
        if number % 10 == 3 and message.attempt < 3:
            failures[str(message.key)] += 1
            raise LookupError("not yet")
        await running.work(message.key, number)

    async with app_of(kafka, handle).running():
        await all_committed(kafka, name)
    assert running.done == {key: list(range(40)) for key in "abc"}
    assert failures == dict.fromkeys("abc", 4 * 2)


# ------------------------------------------------------------------ back-pressure by count


async def test_a_partition_is_not_read_beyond_its_open_limit(kafka: Kafka) -> None:
    """What stands does not stop the others, nor itself for good."""
    name, group = await topic(kafka, 2), new_name("group")
    await fill(kafka, name, numbers(range(1000)), partition=0)
    await fill(kafka, name, numbers(range(20)), partition=1)
    broker = broker_of(kafka, open_limit=100, window_limit=1000)
    async with member(kafka, name, group, broker=broker) as one:
        taken = []
        while chunk := await one.poll(0.5, 10):
            taken += chunk
            if len(taken) > 400:
                break
        at = Counter(partition for partition, _ in offsets(taken))
        assert at[1] == 20 and 100 <= at[0] < 110
        await one.acknowledge(taken)
        assert offsets(await one.take(10)) == [(0, offset) for offset in range(at[0], at[0] + 10)]


async def test_nor_too_far_beyond_a_message_that_never_ends(kafka: Kafka) -> None:
    """All but one are settled: the window bounds what a crash would repeat, and the position stays before it."""
    name, group = await filled(kafka, 2000, 1), new_name("group")
    broker = broker_of(kafka, open_limit=100, window_limit=300)
    async with member(kafka, name, group, broker=broker) as one:
        stuck, *others = await one.take(10)
        count = 10
        while others:
            await one.acknowledge(others)
            others = await one.poll(0.5, 10)
            count += len(others)
        assert 300 <= count < 310
        await one.flush()
        assert await committed(kafka, name, group) == {0: 0}
        await one.acknowledge([stuck])
        assert offsets(await one.take(10))[0] == (0, count)
        await one.flush()
        assert await committed(kafka, name, group) == {0: count}


# ------------------------------------------------------------------ back-pressure by bytes


async def test_large_records_are_held_within_the_budget(kafka: Kafka) -> None:
    """64 of nearly 1 MB, in two partitions, with a budget of 4."""
    name = await topic(kafka, 2)
    for partition in range(2):
        await fill(kafka, name, [bytes(1_000_000)] * 32, partition=partition)
    most = handled = 0

    @subscriber(name, workers=2, max_bytes=4_000_000)
    async def handle(body: bytes) -> None:
        nonlocal most, handled
        handled += 1
        source, pump = source_of(app), app.pumps[0]
        held = sum(part.mark.open for part in source.group.parts.values())
        assert held >= pump.in_flight
        most = max(most, held)
        await asyncio.sleep(0.01)

    app = app_of(kafka, handle)
    async with app.running():
        await all_committed(kafka, name)
    assert handled == 64
    assert most <= 4 + 2 + 2  # the budget, what one getmany brought beyond it, and what is settled but not counted yet


async def test_large_records_behind_small_ones_are_noticed(kafka: Kafka) -> None:
    """As long as all are small nobody measures them one by one."""
    name = await topic(kafka, 4)
    for partition in range(4):
        await fill(kafka, name, [b"x" * 100] * 600, partition=partition, linger_ms=5)
        await fill(kafka, name, [bytes(200_000)] * 10, partition=partition)
    async with member(kafka, name, new_name("group")) as one:
        small = large = 0
        while small + large < 4 * 610:
            chunk = await one.poll(20.0, 500, 1_000_000)
            assert sum(len(d.body) for d in chunk) <= 1_000_000
            small += sum(len(d.body) == 100 for d in chunk)
            large += sum(len(d.body) > 100 for d in chunk)
            await one.acknowledge(chunk)
        assert (small, large) == (2400, 40)


async def test_a_record_larger_than_the_budget_comes_alone(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    await fill(kafka, name, [b"a", b"b", bytes(900_000), b"c", bytes(900_000), bytes(900_000), b"d"])
    async with member(kafka, name, new_name("group")) as one:
        found: list[list[Delivery]] = []
        while sum(len(chunk) for chunk in found) < 7:
            found.append(await one.poll(20.0, 100, 100_000))
    assert [len(d.body) for chunk in found for d in chunk] == [1, 1, 900_000, 1, 900_000, 900_000, 1]
    assert all(len(chunk) == 1 for chunk in found if any(len(d.body) > 1 for d in chunk))


# ------------------------------------------------------------------ fairness


async def test_a_backlog_of_one_partition_does_not_starve_others(kafka: Kafka) -> None:
    """aiokafka empties what it has of one partition first: 8,000 messages before the next is looked at."""
    name = await topic(kafka, 4)
    await fill(kafka, name, numbers(range(8000)), partition=0, linger_ms=5)
    for partition in range(1, 4):
        await fill(kafka, name, numbers(range(20)), partition=partition)
    async with member(kafka, name, new_name("group")) as one:
        source: Any = one.source
        await eventually(lambda: sum(source.group.consumer.buffered(tp) for tp in source.group.parts) == 4)
        first: list[int] = []
        for _ in range(8):
            chunk = await one.take(100)
            first += [partition for partition, _ in offsets(chunk)]
        assert Counter(first)[1] == Counter(first)[2] == Counter(first)[3] == 20


# ------------------------------------------------------------------ counts


class Calls:
    """What was asked of the client."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fetches = 0
        self.commits: list[dict[Any, int]] = []
        getmany, commit = GroupConsumer.getmany, GroupConsumer.commit_once

        async def counted_fetch(consumer: GroupConsumer, *partitions: Any, **options: Any) -> Any:
            self.fetches += 1
            return await getmany(consumer, *partitions, **options)

        async def counted_commit(consumer: GroupConsumer, at: Any, *arguments: Any) -> None:
            self.commits.append(dict(at))
            await commit(consumer, at, *arguments)

        monkeypatch.setattr(GroupConsumer, "getmany", counted_fetch)
        monkeypatch.setattr(GroupConsumer, "commit_once", counted_commit)


async def test_one_commit_for_many_partitions_and_none_when_nothing_moved(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, group = await filled(kafka, 240, 12), new_name("group")
    calls = Calls(monkeypatch)
    async with member(kafka, name, group, broker=broker_of(kafka, commit_every=0.1)) as one:
        await eventually(lambda: calls.commits)  # where it begins
        taken = await one.take(240)
        before = len(calls.commits)
        await one.acknowledge(taken)
        await eventually(lambda: len(calls.commits) > before)
        assert calls.commits[before:] == [dict.fromkeys(calls.commits[before], 20)]
        assert len(calls.commits[before]) == 12
        source: Any = one.source
        commit, ticks = source.group.commit, 0

        async def counted(*arguments: float) -> bool:
            nonlocal ticks
            ticks += 1
            done: bool = await commit(*arguments)
            return done

        source.group.commit = counted
        await eventually(lambda: ticks >= 5)
        assert len(calls.commits) == before + 1


async def test_10_000_messages_cost_few_fetches_and_commits(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    name = await filled(kafka, 10_000, 4, retention_ms=3_600_000)
    calls = Calls(monkeypatch)
    seen = 0

    @subscriber(name)
    async def handle(number: int) -> None:
        nonlocal seen
        seen += 1

    async with app_of(kafka, handle, commit_every=60.0, commit_after=2500).running() as app:
        await eventually(lambda: seen == 10_000 and app.pumps[0].counters.settled == 10_000)
        await eventually(lambda: source_of(app).group.resolved < 2500)
        assert len(calls.commits) <= 1 + 10_000 // 2500 + 1
        busy = calls.fetches
    assert busy <= 10_000 / 100  # mostly of 500; a round of partitions ends with a smaller one
    assert await committed(kafka, name) == dict.fromkeys(range(4), 2500)
