"""What a Kafka source tells of its partitions: in this process, to other processes by its commits, and as metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from prometheus_client import CollectorRegistry, generate_latest

from streamfw import Retry, subscriber
from streamfw.broker import Settlement
from streamfw.observe.prometheus import collector
from streamfw.outcome import ACK
from streamfw_kafka import Topic, group
from streamfw_kafka.source import KafkaSource
from streamfw_kafka.status import Facts, read_facts
from tests.brokers.kafka_apps import app_of, broker_of, fill, filled, member, numbers, offsets, source_of, topic
from tests.brokers.kafka_kit import desk, new_name
from tests.helpers import eventually
from tests.services.kafka import Kafka


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("open=3 read=5100 since=1764496800", Facts(3, 5100, 1764496800)),
        ("since=1 open=0 read=7 more=things", Facts(0, 7, 1)),
        ("open=1", Facts(1)),
        ("open=1 read=7 due=9 since=1", Facts(1, 7, 1, 9)),
        ("open=2 read=x since=", Facts(2)),
        ("", None),
        ("read=7", None),
        ("open=-1", None),
        ("open=" + "9" * 30, None),
        ('{"open": 3}', None),
        ("\0open sesame=1\xff=", None),
    ],
)
def test_foreign_texts_beside_offsets_mean_nothing(text: str, facts: Facts | None) -> None:
    assert read_facts(text) == facts


async def test_the_partitions_of_a_source(kafka: Kafka) -> None:
    name = await filled(kafka, 20, 2)
    async with member(kafka, name, new_name("group")) as one:
        source: Any = one.source
        assert isinstance(source, KafkaSource)
        begun = time.time()
        taken = await one.take(20)
        await eventually(lambda: all(part.blocking == 0 for part in source.partitions()))
        await source.settle([Settlement(each, ACK) for each in taken if offsets([each]) != [(1, 4)]])
        await eventually(lambda: [part.committed for part in source.partitions()] == [10, 4])
        await eventually(lambda: source.partitions()[1].since)
        first, second = source.partitions()
        assert (first.topic, first.partition, first.mark, first.read_to, first.open) == (name, 0, 10, 10, 0)
        assert (first.blocking, first.since, first.end, first.lag) == (None, None, 10, 0)
        assert (second.mark, second.read_to, second.open, second.blocking) == (4, 10, 1, 4)
        assert (second.end, second.lag) == (10, 6)
        assert second.since is not None and begun <= second.since <= time.time()
        assert source.gauges() == {"lag": 6, "open": 1, "partitions": 2}
        assert source.health().detail == "2 partitions, lag 6"


async def test_what_is_open_is_told_again_when_it_has_changed(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offset stands, and others see all the same how much has gathered behind it; an idle group tells nothing."""
    monkeypatch.setattr(group, "TELL", 0.2)
    name, group_name = await filled(kafka, 3, 1), new_name("group")
    tp = TopicPartition(name, 0)
    async with desk(kafka.url) as asked, member(kafka, name, group_name) as one:
        source: Any = one.source

        async def told() -> tuple[int, Facts | None] | None:
            found = (await asked.topics.committed_with_text(group_name, [tp])).get(tp)
            return None if found is None else (found[0], read_facts(found[1]))

        async def tells(offset: int, count: int, read: int) -> bool:
            match await told():
                case (at, Facts(open=found, read_to=to)):
                    return (at, found, to) == (offset, count, read)
            return False

        taken = await one.take(3)
        await eventually(lambda: tells(0, 3, 3))
        await source.settle([Settlement(each, ACK) for each in taken[1:]])
        await eventually(lambda: tells(0, 1, 3))
        since = (await told())[1].since  # type: ignore[index, union-attr]
        await fill(kafka, name, numbers(range(5)))
        more = await one.take(5)
        await eventually(lambda: tells(0, 6, 8))
        assert (await told())[1].since == since  # type: ignore[index, union-attr]
        await source.settle([Settlement(each, ACK) for each in [taken[0], *more]])
        await eventually(lambda: tells(8, 0, 8))
        assert (await told()) == (8, Facts(0, 8))
        commits, looked = source.group.commits, source.watch.clock + 1.0
        await eventually(lambda: source.watch.clock > looked)
        assert source.group.commits == commits


async def test_what_waits_in_a_retry_topic_is_told_apart(kafka: Kafka) -> None:
    """From what nobody has read: in the process, and for others, with when the first of it may run."""
    name, group_name = await topic(kafka, 1), new_name("group")
    retry = await kafka.create_topic(f"{name}.{group_name}.retry", 1)

    @subscriber(Topic(name, retry_topic=True))
    async def handle(number: int) -> None:
        raise Retry(after=3600 + number)

    await fill(kafka, name, numbers([200, 100]))
    app = app_of(kafka, handle, name=group_name)
    async with broker_of(kafka).connect() as opened, app.running():
        connection: Any = opened

        async def told() -> bool:
            (found,) = await connection.status([group_name])
            rows = {part.topic: part for part in found.partitions}
            assert not rows[name].retry and rows[name].due is None
            there = rows.get(retry)
            if there is None or there.lag != 2 or there.open != 2:
                return False
            assert there.retry and there.due is not None and 3500 < there.due - time.time() <= 3702
            return bool(there.due - time.time() < 3701)

        await eventually(told, 20)
        said = "1 partition, lag 0; retry topic: 1 partition, lag 2"
        await eventually(lambda: source_of(app).health().detail == said, 20)
    async with broker_of(kafka).connect() as opened:  # and when it does not run
        connection = opened
        (found,) = await connection.status([group_name])
        assert [part.due is not None for part in found.partitions] == [False, True]


async def test_the_groups_of_a_topic(kafka: Kafka) -> None:
    name, one, two = await filled(kafka, 20, 2), new_name("one"), new_name("two")
    async with broker_of(kafka).connect() as opened, member(kafka, name, one) as reader:
        connection: Any = opened
        await reader.take(20)
        await connection.seek_group(two, name, {0: 3})
        gone = new_name("gone")

        async def shown() -> bool:
            found = await connection.status([one, two, gone, one])
            assert [each.group for each in found] == [one, two, gone]
            first, second, third = found
            assert (second.state, second.members) == ("Empty", ())
            (only,) = second.partitions
            assert (only.partition, only.committed, only.end, only.lag, only.member) == (0, 3, 10, 7, None)
            assert (only.open, only.blocking, only.since, only.read_to) == (None, None, None, None)
            assert (third.state, third.members, third.partitions) == ("Dead", (), ())
            if first.state != "Stable":
                return False
            (who,) = first.members
            assert (who.client_id, who.partitions) == ("streamfw", 2)
            assert {part.member for part in first.partitions} == {who.member_id}
            return [(part.committed, part.open, part.blocking) for part in first.partitions] == [(0, 10, 0)] * 2

        await eventually(shown)
        every = {each.group for each in await connection.status()}
        assert {one, two} <= every and gone not in every


async def test_a_partition_that_is_gone_has_no_end(kafka: Kafka) -> None:
    name, group_name = await filled(kafka, 4, 1), new_name("group")
    async with broker_of(kafka).connect() as opened:
        connection: Any = opened
        await connection.seek_group(group_name, name, "latest")
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
        await admin.start()
        try:
            await admin.delete_topics([name])
        finally:
            await admin.close()

        async def told() -> bool:
            (found,) = await connection.status([group_name])
            # The server forgets what was committed of it a little later.
            return all((part.end, part.lag) == (None, None) for part in found.partitions)

        await eventually(told)


async def test_the_gauges_of_an_app(kafka: Kafka) -> None:
    name, go_on = await topic(kafka, 2), asyncio.Event()

    @subscriber(name, workers=2)
    async def handle(number: int) -> None:
        if number == 3:
            await go_on.wait()

    app = app_of(kafka, handle, name=new_name("group"))

    def gauges() -> dict[str, Any]:
        begin = "streamfw_source_"
        found = [metric for metric in app.metrics() if metric.name.startswith(begin) and metric.kind == "gauge"]
        assert all(metric.labels["name"] == name for metric in found)
        return {metric.name.removeprefix(begin): metric.value for metric in found}

    async with app.running():
        await eventually(lambda: source_of(app).group.gate)
        await fill(kafka, name, numbers(range(3, 10)), partition=0)
        await fill(kafka, name, numbers(range(10, 15)), partition=1)
        await eventually(lambda: gauges() == {"live": 1, "lag": 7, "open": 1, "partitions": 2})
        registry = CollectorRegistry()
        registry.register(collector(app))
        text = (await asyncio.to_thread(generate_latest, registry)).decode()
        assert "# TYPE streamfw_source_lag gauge" in text
        assert next(line for line in text.splitlines() if line.startswith("streamfw_source_lag{")).endswith(" 7.0")
        go_on.set()
        await eventually(lambda: gauges() == {"live": 1, "lag": 0, "open": 0, "partitions": 2})


async def test_chosen_partitions_have_a_status_too(kafka: Kafka) -> None:
    name = await filled(kafka, 20, 4)
    async with member(kafka, Topic(name, partitions=[1, 3]), new_name("group")) as one:
        source: Any = one.source
        await one.take(10)
        await eventually(lambda: [(part.partition, part.blocking) for part in source.partitions()] == [(1, 0), (3, 0)])
        await eventually(lambda: source.health().ok and source.health().detail == "2 partitions, lag 10")
