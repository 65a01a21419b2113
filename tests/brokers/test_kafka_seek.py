"""Seeking: back, ahead, to a time, by offsets; while handlers run, in a group, and while partitions move."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import RequestTimedOutError

from streamfw import App, Message, Retry, subscriber
from streamfw.broker import Position
from streamfw.errors import BrokerUnavailable, PartitionRevoked
from streamfw_kafka import Topic
from streamfw_kafka.client import GroupConsumer
from streamfw_kafka.group import Membership
from tests.brokers.kafka_apps import (
    GROUP,
    all_committed,
    app_of,
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


def recording(name: str | Topic, **options: Any) -> tuple[Callable[..., Awaitable[None]], list[int]]:
    """A handler, and what it has handled."""
    seen: list[int] = []

    @subscriber(name, **options)
    async def handle(number: int) -> None:
        seen.append(number)

    return handle, seen


async def seek(app: App, handler: Callable[..., Awaitable[None]], to: Position) -> None:
    """Again where partitions are just moving: a client that learns of its topic late joins once more."""

    async def done() -> bool:
        try:
            await app.seek(handler, to)
        except BrokerUnavailable:
            return False
        return True

    await eventually(done)


# ------------------------------------------------------------------ where to


async def test_back_to_the_beginning(kafka: Kafka) -> None:
    name = await filled(kafka, 10)
    handle, seen = recording(name)
    async with app_of(kafka, handle).running() as app:
        await all_committed(kafka, name)
        seen.clear()
        await seek(app, handle, "earliest")
        await eventually(lambda: len(seen) == 10)
        await all_committed(kafka, name)
    assert sorted(seen) == list(range(10))


async def test_ahead_to_the_end_leaves_out_what_is_at_hand(kafka: Kafka) -> None:
    """Queued, read ahead by the client, and not read yet: nothing of it begins."""
    name = await filled(kafka, 2000)
    began, let_go, seen = asyncio.Event(), asyncio.Event(), []

    @subscriber(name)
    async def handle(number: int) -> None:
        seen.append(number)
        began.set()
        await let_go.wait()

    async with app_of(kafka, handle, rebalance_drain=0.0).running() as app:
        await began.wait()
        await seek(app, handle, "latest")
        assert await committed(kafka, name) == {0: 1000, 1: 1000}
        let_go.set()
        await fill(kafka, name, [b"2000"], partition=1)
        await eventually(lambda: 2000 in seen)
        await all_committed(kafka, name)
        assert app.pumps[0].counters.lost >= 1  # the one that ran
    assert len(seen) == 2


async def test_to_a_time(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    for number in range(6):
        await fill(kafka, name, [b"%d" % number], timestamp_ms=1_700_000_000_000 + number * 1000)
    handle, seen = recording(name)
    async with app_of(kafka, handle).running() as app:
        await all_committed(kafka, name)
        await seek(app, handle, datetime.fromtimestamp(1_700_000_003.5, UTC))
        await eventually(lambda: len(seen) == 8)
    assert seen == [0, 1, 2, 3, 4, 5, 4, 5]


async def test_by_offsets_and_the_others_stay(kafka: Kafka) -> None:
    name, group = await filled(kafka, 10), new_name("group")
    async with member(kafka, name, group) as one:
        await one.acknowledge(await one.take(10))
        await one.flush()
        await one.source.seek({1: 3})
        again = await one.take(2)
        assert offsets(again) == [(1, 3), (1, 4)]
        assert await committed(kafka, name, group) == {0: 5, 1: 3}  # also back
        await one.acknowledge(again)
        await one.expect_nothing(0.3)
    assert await committed(kafka, name, group) == {0: 5, 1: 5}


async def test_offsets_that_are_not_there_become_the_nearest(kafka: Kafka, caplog: pytest.LogCaptureFixture) -> None:
    name = await filled(kafka, 10)
    async with member(kafka, name, new_name("group")) as one:
        await one.source.seek({0: 1000, 1: 4})
        assert offsets(await one.take(1)) == [(1, 4)]
        await fill(kafka, name, [b"new"], partition=0)
        assert offsets(await one.take(1)) == [(0, 5)]
    assert "ends at 5" in caplog.text


@pytest.mark.parametrize("to", ["erliest", datetime(2026, 1, 1), {0: -1}, {"0": 1}, 7, None])
async def test_what_is_no_position_is_refused(kafka: Kafka, to: Any) -> None:
    name = await filled(kafka, 10)
    async with member(kafka, name, new_name("group")) as one:
        with pytest.raises(ValueError, match=r"seek\(.*: ('earliest', 'latest'|a time without)"):
            await one.source.seek(to)
        assert len(await one.take(10)) == 10


async def test_a_pattern_is_seeked_but_not_by_offsets(kafka: Kafka) -> None:
    name = await filled(kafka, 10)
    async with member(kafka, Topic(name, pattern=name), new_name("group")) as one:
        await one.acknowledge(await one.take(10))
        with pytest.raises(ValueError, match="partitions of one topic"):
            await one.source.seek({0: 1})
        await one.source.seek("earliest")
        assert len(await one.take(10)) == 10


async def test_explicit_partitions_are_seeked(kafka: Kafka) -> None:
    name, group = await filled(kafka, 10), new_name("group")
    async with member(kafka, Topic(name, partitions=[1]), group) as one:
        await one.acknowledge(await one.take(5))
        await one.source.seek({1: 4})
        assert offsets(await one.take(1)) == [(1, 4)]
        with pytest.raises(ValueError, match=r"partitions \[0\] are not this process's"):
            await one.source.seek({0: 0})
    assert await committed(kafka, name, group) == {1: 4}


async def test_what_waits_in_a_retry_topic_stays(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    seen: list[tuple[int, int]] = []

    @subscriber(Topic(name, retry_topic=True, retry_after=0.0))
    async def handle(number: int, message: Message) -> None:
        seen.append((number, message.attempt))
        if number == 0 and message.attempt == 1:
            raise Retry(after=1.0)

    await fill(kafka, name, numbers(range(2)))
    async with app_of(kafka, handle).running() as app:
        await all_committed(kafka, name)
        await eventually(lambda: len(source_of(app)._waiting) == 1)
        await seek(app, handle, {0: 1})
        await eventually(lambda: (0, 2) in seen)
        await all_committed(kafka, f"{name}.{GROUP}.retry")
    assert sorted(seen) == [(0, 1), (0, 2), (1, 1), (1, 1)]


# ------------------------------------------------------------------ while handlers run


async def test_the_settlement_of_what_runs_changes_nothing(kafka: Kafka) -> None:
    name, group = await filled(kafka, 10, 1), new_name("group")
    async with member(kafka, name, group) as one:
        taken = await one.take(10)
        await one.acknowledge(taken[:3])
        await one.source.seek({0: 7})
        errors = await one.settle(taken[3:])
        assert [type(error) for error in errors] == [PartitionRevoked] * 7
        again = await one.take(3)
        assert offsets(again) == [(0, 7), (0, 8), (0, 9)]
        await one.flush()
        assert await committed(kafka, name, group) == {0: 7}


async def test_it_waits_for_handlers_that_end_in_time(kafka: Kafka) -> None:
    """They count as handled: of what they did nothing is lost, and nobody repeats it."""
    name = await filled(kafka, 2, 1)
    began, let_go, seen = asyncio.Event(), asyncio.Event(), []

    @subscriber(name)
    async def handle(number: int) -> None:
        began.set()
        await let_go.wait()
        seen.append(number)

    async with app_of(kafka, handle, rebalance_drain=30.0).running() as app:
        await began.wait()
        seeking = asyncio.create_task(app.seek(handle, "latest"))
        await eventually(lambda: not source_of(app).group.gate)
        let_go.set()
        await seeking
        assert app.pumps[0].counters.lost == 1  # the one that was queued
        assert app.pumps[0].counters.acked == 1
    assert seen == [0]


async def test_one_while_another_is_under_way_is_an_error(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    name = await filled(kafka, 10)
    commit, sent, go_on = GroupConsumer.commit_once, asyncio.Event(), asyncio.Event()

    async def slow(consumer: GroupConsumer, *arguments: Any) -> None:
        sent.set()
        await go_on.wait()
        await commit(consumer, *arguments)

    async with member(kafka, name, new_name("group")) as one:
        await one.acknowledge(await one.take(10))
        await one.flush()
        monkeypatch.setattr(GroupConsumer, "commit_once", slow)
        seeking = asyncio.create_task(one.source.seek({0: 3}))
        await sent.wait()
        with pytest.raises(BrokerUnavailable, match="seek again"):
            await one.source.seek("earliest")
        go_on.set()
        await seeking
        assert offsets(await one.take(2)) == [(0, 3), (0, 4)]
        await one.expect_nothing(0.2)


# ------------------------------------------------------------------ in a group


async def test_a_process_moves_its_own_partitions_only(kafka: Kafka) -> None:
    name, group = await filled(kafka, 20, 4), new_name("group")
    async with member(kafka, name, group) as one, member(kafka, name, group) as two:
        await eventually(lambda: [len(parts_of(each)) for each in (one, two)] == [2, 2])
        for each in (one, two):
            await each.acknowledge(await each.take(10))
        mine, others = sorted(parts_of(one)), sorted(parts_of(two))
        with pytest.raises(ValueError, match=rf"partitions \[{others[0]}\] are not this process's"):
            await one.source.seek({mine[0]: 0, others[0]: 0})
        await one.source.seek("earliest")
        assert sorted(offsets(await one.take(10))) == [(p, at) for p in mine for at in range(5)]
        await two.flush()
        at = await committed(kafka, name, group)
        assert {p: at[p] for p in mine} == dict.fromkeys(mine, 0) and {p: at[p] for p in others} == dict.fromkeys(
            others, 5
        )


def parts_of(one: Any) -> set[int]:
    group: Membership = one.source.group
    return {tp.partition for tp in group.parts} if group.gate else set()


async def test_while_partitions_move_it_is_unavailable_and_nothing_moves(kafka: Kafka) -> None:
    """A handler runs, so the rebalance waits for it, and a seek that comes then does not."""
    name = await filled(kafka, 10)
    began, let_go = asyncio.Event(), asyncio.Event()

    @subscriber(name)
    async def handle(number: int) -> None:
        began.set()
        await let_go.wait()

    app = app_of(kafka, handle, rebalance_drain=30.0)
    async with app.running():
        await began.wait()
        joining = asyncio.create_task(enter(member(kafka, name)))
        await eventually(lambda: source_of(app).group.rebalancing)
        for to in ("latest", {0: 5}, {7: 0}):
            with pytest.raises(BrokerUnavailable, match="just moving; seek again"):
                await app.seek(handle, to)
        assert max((await committed(kafka, name)).values(), default=0) == 0
        let_go.set()
        other = await joining
        await eventually(lambda: source_of(app).group.gate)
        await other.__aexit__(None, None, None)


async def enter(context: Any) -> Any:
    await context.__aenter__()
    return context


async def test_a_rebalance_that_begins_in_a_seek_leaves_all_as_it_was(kafka: Kafka) -> None:
    """It waits for a handler, which ends only when the partitions are moving already."""
    name = await filled(kafka, 10, 1)
    began, let_go, seen = asyncio.Event(), asyncio.Event(), []

    @subscriber(name)
    async def handle(number: int) -> None:
        seen.append(number)
        began.set()
        await let_go.wait()

    app = app_of(kafka, handle, rebalance_drain=30.0)
    async with app.running():
        await began.wait()
        seeking = asyncio.create_task(app.seek(handle, "latest"))
        await eventually(lambda: not source_of(app).group.gate)
        joining = asyncio.create_task(enter(member(kafka, name)))
        await eventually(lambda: source_of(app).group.rebalancing)
        let_go.set()
        with pytest.raises(BrokerUnavailable, match="just moving; seek again"):
            await seeking
        other = await joining
        await all_committed_by(app, other, 10)
        await other.__aexit__(None, None, None)
    assert sorted(seen) == list(range(len(seen)))


async def all_committed_by(app: App, other: Any, end: int) -> None:
    """Whoever has the partition now, it was not moved to its end: what is left comes."""
    if source_of(app).group.parts:
        await eventually(lambda: app.pumps[0].counters.acked == end)


async def test_a_rebalance_waits_for_a_seek_that_is_being_committed(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its own commit would undo it behind its back."""
    name, group = await filled(kafka, 10, 1), new_name("group")
    commit, sent, go_on = GroupConsumer.commit_once, asyncio.Event(), asyncio.Event()

    async def slow(consumer: GroupConsumer, at: Any, *arguments: Any) -> None:
        if at == {TopicPartition(name, 0): 0}:
            sent.set()
            await go_on.wait()
        await commit(consumer, at, *arguments)

    async with member(kafka, name, group) as one:
        await one.acknowledge(await one.take(10))
        await one.flush()
        monkeypatch.setattr(GroupConsumer, "commit_once", slow)
        source: Any = one.source
        seeking = asyncio.create_task(source.seek("earliest"))
        await sent.wait()
        joining = asyncio.create_task(enter(member(kafka, name, group)))
        await eventually(lambda: source.group.rebalancing)
        go_on.set()
        await seeking
        other = await joining
        assert await committed(kafka, name, group) == {0: 0}
        await other.__aexit__(None, None, None)
        assert offsets(await one.take(10)) == [(0, at) for at in range(10)]


async def test_a_seek_without_an_answer_is_taken_back(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have arrived: what holds is committed again, so that a restart leaves nothing out."""
    name, group = await filled(kafka, 10, 1), new_name("group")
    commit = GroupConsumer.commit_once

    async def unanswered(consumer: GroupConsumer, *arguments: Any) -> None:
        monkeypatch.setattr(GroupConsumer, "commit_once", commit)
        await commit(consumer, *arguments)
        raise RequestTimedOutError

    async with member(kafka, name, group) as one:
        await one.acknowledge(await one.take(3))
        await one.flush()
        monkeypatch.setattr(GroupConsumer, "commit_once", unanswered)
        with pytest.raises(BrokerUnavailable):
            await one.source.seek("latest")

        async def taken_back() -> bool:
            return await committed(kafka, name, group) == {0: 3}

        await eventually(taken_back)
        assert offsets(await one.take(7)) == [(0, at) for at in range(3, 10)]


@pytest.mark.parametrize("to", ["earliest", "latest"])
async def test_a_seek_that_is_cancelled_is_taken_back(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch, to: Position
) -> None:
    """Whoever waited for it did not wait long enough: it may have arrived as well."""
    name, group = await filled(kafka, 10, 1), new_name("group")
    commit, sent = GroupConsumer.commit_once, asyncio.Event()

    async def stuck(consumer: GroupConsumer, *arguments: Any) -> None:
        monkeypatch.setattr(GroupConsumer, "commit_once", commit)
        await commit(consumer, *arguments)
        sent.set()
        await asyncio.Event().wait()

    async with member(kafka, name, group) as one:
        await one.acknowledge(await one.take(3))
        await one.flush()
        monkeypatch.setattr(GroupConsumer, "commit_once", stuck)
        seeking = asyncio.create_task(one.source.seek(to))
        await sent.wait()
        seeking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await seeking
        taken = await one.take(7)
        assert offsets(taken) == [(0, at) for at in range(3, 10)]
        await one.acknowledge(taken)
    assert await committed(kafka, name, group) == {0: 10}
