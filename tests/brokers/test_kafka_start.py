"""Where a group begins to read a topic: earliest, latest, a time, offsets; what it has committed counts more."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from streamfw import subscriber
from streamfw.broker import Position
from streamfw.errors import BrokerRefused
from streamfw_kafka import Topic
from streamfw_kafka.client import GroupConsumer
from streamfw_kafka.opening import Opening
from tests.brokers.kafka_apps import (
    GROUP,
    all_committed,
    app_of,
    broker_of,
    committed,
    fill,
    filled,
    member,
    offsets,
    topic,
)
from tests.brokers.kafka_kit import desk, new_name
from tests.helpers import eventually
from tests.services.kafka import Kafka


async def read_from(kafka: Kafka, name: str, start: Position, count: int) -> list[tuple[int, int]]:
    """Partition and offset of the first so many that a new group gets."""
    async with member(kafka, Topic(name, start=start), new_name("group")) as one:
        return sorted(offsets(await one.take(count)))


# ------------------------------------------------------------------ earliest, a time, offsets


async def test_earliest_is_the_first_that_is_kept(kafka: Kafka) -> None:
    name = await filled(kafka, 10)
    async with desk(kafka.url) as asked:
        await asked.topics.delete_records({tp: 2 for tp in await asked.topics.ends(name) if tp.partition == 0})
    assert await read_from(kafka, name, "earliest", 8) == [(0, 2), (0, 3), (0, 4), *((1, at) for at in range(5))]


async def test_a_time_is_the_first_published_at_it_or_later(kafka: Kafka) -> None:
    name = await topic(kafka)
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
    for minutes in range(6):
        stamp = int((noon + timedelta(minutes=minutes)).timestamp() * 1000)
        await fill(kafka, name, [b"0"], partition=minutes % 2, timestamp_ms=stamp)
    assert await read_from(kafka, name, noon + timedelta(minutes=3), 3) == [(0, 2), (1, 1), (1, 2)]
    assert await read_from(kafka, name, noon - timedelta(days=1), 6) == [(p, at) for p in (0, 1) for at in range(3)]


async def test_a_time_after_everything_is_the_end(kafka: Kafka) -> None:
    name = await filled(kafka, 10)
    async with member(kafka, Topic(name, start=datetime.now(UTC) + timedelta(hours=1)), new_name("group")) as one:
        await fill(kafka, name, [b"new"], partition=1)
        assert offsets(await one.take(1)) == [(1, 5)]


async def test_offsets_by_partition_and_the_others_from_their_beginning(kafka: Kafka) -> None:
    name = await filled(kafka, 12, 3)
    assert await read_from(kafka, name, {0: 3, 2: 1}, 1 + 4 + 3) == [
        (0, 3),
        *((1, at) for at in range(4)),
        (2, 1),
        (2, 2),
        (2, 3),
    ]


async def test_offsets_that_are_not_there_become_the_nearest(kafka: Kafka, caplog: pytest.LogCaptureFixture) -> None:
    """Before what is kept: its beginning. Behind the end: the end, and nothing that comes is left out."""
    name = await filled(kafka, 10)
    async with desk(kafka.url) as asked:
        await asked.topics.delete_records({tp: 2 for tp in await asked.topics.ends(name) if tp.partition == 0})
    async with member(kafka, Topic(name, start={0: 1, 1: 1000}), new_name("group")) as one:
        assert offsets(await one.take(3)) == [(0, 2), (0, 3), (0, 4)]
        await fill(kafka, name, [b"new"], partition=1)
        assert offsets(await one.take(1)) == [(1, 5)]
        assert one.source.jumps == 0  # type: ignore[attr-defined]
    assert "1000" in caplog.text and "ends at 5" in caplog.text


async def test_offsets_of_a_partition_that_is_not_there_are_refused(kafka: Kafka) -> None:
    name = await filled(kafka, 10)
    with pytest.raises(BrokerRefused, match=r"has 2 partitions, and no \[2, 7\]"):
        await read_from(kafka, name, {0: 1, 2: 0, 7: 0}, 1)


# ------------------------------------------------------------------ latest


async def test_latest_is_what_comes_from_now_on(kafka: Kafka) -> None:
    name = await filled(kafka, 10)
    async with member(kafka, Topic(name, start="latest"), new_name("group")) as one:
        await fill(kafka, name, [b"a", b"b"], partition=0)
        assert offsets(await one.take(2)) == [(0, 5), (0, 6)]


async def test_what_is_published_while_it_joins_is_not_lost_with_latest(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ends are noted before the group is joined, which may take as long as its slowest member."""
    name, start = await filled(kafka, 10), GroupConsumer.start

    async def publish_first(consumer: GroupConsumer) -> None:
        await fill(kafka, name, [b"while joining"], partition=1)
        await start(consumer)

    monkeypatch.setattr(GroupConsumer, "start", publish_first)
    async with member(kafka, Topic(name, start="latest"), new_name("group")) as one:
        assert [d.body for d in await one.take(1)] == [b"while joining"]


async def test_a_restart_before_anything_was_handled_does_not_jump(kafka: Kafka) -> None:
    """Where a group begins is committed, so that the next process begins there as well."""
    name, group = await filled(kafka, 10), new_name("group")
    async with member(kafka, Topic(name, start="latest"), group):
        pass
    await fill(kafka, name, [b"between"], partition=0)
    async with member(kafka, Topic(name, start="latest"), group) as one:
        assert [d.body for d in await one.take(1)] == [b"between"]


async def test_where_it_begins_is_committed_at_once(kafka: Kafka) -> None:
    """However seldom commits are: a process that is killed before its first would begin at a later "latest"."""
    name, group = await filled(kafka, 10), new_name("group")

    async def begun() -> bool:
        return await committed(kafka, name, group) == {0: 5, 1: 5}

    async with member(kafka, Topic(name, start="latest"), group, broker=broker_of(kafka, commit_every=60.0)):
        await eventually(begun)


async def test_reopening_does_not_jump_either(kafka: Kafka) -> None:
    """Killed before its first commit: the ends are those of the first opening."""
    name, group = await filled(kafka, 10), new_name("group")
    async with member(kafka, Topic(name, start="latest"), group, broker=broker_of(kafka, commit_every=60.0)) as one:
        source: Any = one.source
        await source.group.consumer.end(1.0)
        await fill(kafka, name, [b"between"], partition=0)
        await one.reopen()
        assert [d.body for d in await one.take(1)] == [b"between"]


async def test_two_processes_that_join_together_with_latest(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has committed where its partitions begin when the other looks where its own do: they are not new."""
    name, group = await filled(kafka, 10), new_name("group")
    first = Opening._first

    async def after_the_other(opening: Opening, unknown: Any) -> Any:
        if {tp.partition for tp in unknown} == {1}:
            await eventually(lambda: known(kafka, name, group))
        return await first(opening, unknown)

    monkeypatch.setattr(Opening, "_first", after_the_other)
    latest = Topic(name, start="latest")
    async with member(kafka, latest, group) as one:
        source: Any = one.source
        source.group.drop_all()  # nothing is committed for partition 1, which moves
        async with member(kafka, latest, group) as two:
            await eventually(lambda: source.group.gate and len(source.group.parts) == 1)
            await fill(kafka, name, [b"new"], partition=0)
            await fill(kafka, name, [b"new"], partition=1)
            found = [*await one.take(1), *await two.take(1)]
    assert sorted(offsets(found)) == [(0, 5), (1, 5)]


async def known(kafka: Kafka, name: str, group: str) -> bool:
    return bool(await committed(kafka, name, group))


# ------------------------------------------------------------------ what is committed counts more


@pytest.mark.parametrize(
    "start",
    ["earliest", "latest", datetime(2000, 1, 1, tzinfo=UTC), {0: 0, 1: 0}],
    ids=["earliest", "latest", "time", "offsets"],
)
async def test_a_committed_position_counts_more(kafka: Kafka, start: Position) -> None:
    name, group = await filled(kafka, 10), new_name("group")
    async with member(kafka, name, group) as one:
        await one.acknowledge(await one.take(10))
    assert await committed(kafka, name, group) == {0: 5, 1: 5}
    await fill(kafka, name, [b"new"], partition=0)
    async with member(kafka, Topic(name, start=start), group) as one:
        assert offsets(await one.take(1)) == [(0, 5)]
        await one.expect_nothing(0.3)


async def test_a_partition_that_is_added_is_read_from_its_beginning_with_latest(kafka: Kafka) -> None:
    """Also where it was filled before anybody noticed it."""
    name, group = await filled(kafka, 10), new_name("group")
    async with member(kafka, Topic(name, start="latest"), group, broker=broker_of(kafka, metadata_age=0.5)) as one:
        await all_committed(kafka, name, group)
        await add_partitions(kafka, name, 4)
        await fill(kafka, name, [b"new", b"newer"], partition=3)
        assert offsets(await one.take(2)) == [(3, 0), (3, 1)]


async def test_and_where_it_was_added_while_nobody_read(kafka: Kafka) -> None:
    name, group = await filled(kafka, 10), new_name("group")
    async with member(kafka, Topic(name, start="latest"), group):
        pass
    await add_partitions(kafka, name, 4)
    await fill(kafka, name, [b"new", b"newer"], partition=3)
    async with member(kafka, Topic(name, start="latest"), group) as one:
        assert offsets(await one.take(2)) == [(3, 0), (3, 1)]


async def add_partitions(kafka: Kafka, name: str, count: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        await admin.create_partitions({name: NewPartitions(count)})
    finally:
        await admin.close()
    async with desk(kafka.url) as asked:

        async def there() -> bool:
            leaders = await asked.topics.leaders(name, fresh=True)
            return leaders is not None and len(leaders) == count and -1 not in leaders

        await eventually(there)


async def test_a_retry_topic_is_read_from_its_beginning(kafka: Kafka) -> None:
    """Wherever its topic begins: what is in it was the group's already."""
    name = await filled(kafka, 10)
    await fill(kafka, await kafka.create_topic(f"{name}.{GROUP}.retry", 1), [b"before"])
    for start in ("latest", datetime.now(UTC) + timedelta(hours=1)):
        async with member(
            kafka, Topic(name, start=start, retry_topic=f"{name}.{GROUP}.retry"), new_name("group")
        ) as one:
            assert [(d.name, d.body) for d in await one.take(1)] == [(name, b"before")]
            await one.expect_nothing(0.2)


async def test_an_app_begins_where_its_topic_says(kafka: Kafka) -> None:
    name = await filled(kafka, 10)
    seen: list[int] = []

    @subscriber(Topic(name, start={0: 4, 1: 3}))
    async def handle(number: int) -> None:
        seen.append(number)

    app = app_of(kafka, handle)
    async with app.running():
        await all_committed(kafka, name)
    assert sorted(seen) == [7, 8, 9]
