"""``transactional=True`` on Kafka: what a handler publishes and the end of its message are seen together, or never."""

# No "from __future__ import annotations": handlers here name local topics in their annotations.

import asyncio
from collections import Counter
from typing import Annotated, Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer, TopicPartition

from streamfw import App, Backoff, Batch, Publisher, subscriber
from streamfw.broker import Subscription
from streamfw.errors import BrokerUnavailable, PublishError, TooLarge, Unroutable
from streamfw.outcome import DeadLetter, Retry
from streamfw.testing import TestApp
from streamfw_kafka import KafkaBroker, Offset, Topic, Transaction
from streamfw_kafka.client import GroupConsumer
from streamfw_kafka.opening import Opening
from streamfw_kafka.source import KafkaSource
from tests.brokers.kafka_kit import desk, new_name, read
from tests.helpers import eventually
from tests.services.kafka import Kafka


class Order(msgspec.Struct):
    id: int


def broker_of(kafka: Kafka, **options: Any) -> KafkaBroker:
    quick = {"heartbeat": 0.1, "session_timeout": 6.0, "commit_every": 0.05, "create_topics": True, "partitions": 2}
    return KafkaBroker(kafka.url, **(quick | options))


async def seen(kafka: Kafka, topic: str, *, once_ended: bool = True) -> list[int]:
    """The ids in a topic, as who reads what is committed sees them; `once_ended`: when all its transactions have (the
    server writes their markers after it has answered)."""

    async def ended() -> bool:
        async with desk(kafka.url, isolation="read_committed") as stable, desk(kafka.url) as all_there_is:
            return await stable.topics.ends(topic) == await all_there_is.topics.ends(topic)

    if once_ended:
        await eventually(ended)
    return sorted(msgspec.json.decode(record.value)["id"] for record in await read(kafka, topic))


async def all_committed(app: App, count: int) -> None:
    """The group has committed everything."""
    source: Any = app.pumps[0].source
    assert isinstance(source, KafkaSource)
    await eventually(lambda: sum(part.committed for part in source.group.parts.values()) >= count)


async def filled(kafka: Kafka, topic: str, count: int) -> None:
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
        await asyncio.gather(
            *[await producer.send(topic, b'{"id":%d}' % number, partition=number % 2) for number in range(count)]
        )


async def test_every_way_to_publish_is_in_the_transaction(kafka: Kafka) -> None:
    orders, *outs = names = [new_name(what) for what in ("orders", "returned", "injected", "raw", "app")]
    for name in names:
        await kafka.create_topic(name, partitions=2)
    failed: set[int] = set()

    @subscriber(orders, transactional=True, workers=8, publishes=outs[0], attempts=3, backoff=Backoff(first=0.01))
    async def handle(
        order: Order, receipts: Annotated[Publisher[Order], outs[1]], producer: Transaction, offset: Offset
    ) -> Order:
        await receipts.publish(order)
        await producer.send_and_wait(outs[2], b'{"id":%d}' % order.id)
        await app.publish(outs[3], order, key="k")
        if order.id % 3 == 0 and order.id not in failed:
            failed.add(order.id)
            raise LookupError(f"not yet, at {offset}")
        return order

    app = App(handle, brokers={"default": broker_of(kafka)})
    async with app.running():
        await filled(kafka, orders, 12)
        await all_committed(app, 12)
    assert len(failed) == 4
    for out in outs:
        assert await seen(kafka, out) == list(range(12)), out
    assert len(await read(kafka, outs[1], isolation="read_uncommitted")) == 12 + 4  # the others were aborted


async def test_a_batch_is_one_transaction_of_one_partition(kafka: Kafka) -> None:
    orders, receipts = new_name("orders"), new_name("receipts")
    await kafka.create_topic(orders, partitions=2)
    await kafka.create_topic(receipts, partitions=2)
    await filled(kafka, orders, 100)
    batches: list[list[int]] = []

    @subscriber(orders, transactional=True, batch=Batch(20, wait=0.05), workers=4, backoff=Backoff(first=0.01))
    async def handle(batch: list[Order], out: Annotated[Publisher[Order], receipts]) -> None:
        batches.append([order.id for order in batch])
        for order in batch:
            await out.publish(order)
        if len(batches) == 2:
            raise LookupError("the second one fails")

    app = App(handle, brokers={"default": broker_of(kafka)})
    async with app.running():
        await all_committed(app, 100)
    assert await seen(kafka, receipts) == list(range(100))
    assert all(len({order % 2 for order in batch}) == 1 for batch in batches)
    assert max(map(len, batches)) > 5


async def test_a_dead_letter_before_a_message_is_not_committed_past(kafka: Kafka) -> None:
    """The dead letter of offset 0 is on its way while offset 1 is handled: its commit waits."""
    orders, receipts = new_name("orders"), new_name("receipts")
    for name in (orders, f"{orders}.dead", receipts):
        await kafka.create_topic(name, partitions=2)
    let_go = asyncio.Event()

    @subscriber(orders, transactional=True, publishes=receipts, workers=2)
    async def handle(order: Order) -> Order:
        if order.id == 0:
            raise DeadLetter("no")
        return order

    app = App(handle, brokers={"default": broker_of(kafka)})
    async with app.running():
        connection: Any = app.connection()
        publish = connection.publishing.publish

        async def late(messages: Any) -> Any:
            await let_go.wait()
            return await publish(messages)

        connection.publishing.publish = late
        await filled(kafka, orders, 4)
        source: Any = app.pumps[0].source

        def committed(partition: int) -> int:
            part = source.group.parts.get(TopicPartition(orders, partition))
            return -1 if part is None else int(part.committed)

        await eventually(lambda: committed(1) == 2)
        assert committed(0) <= 0
        assert 2 not in await seen(
            kafka, receipts, once_ended=False
        )  # nor what is behind it, while its transaction is open
        let_go.set()
        await eventually(lambda: committed(0) == 2)
    assert await seen(kafka, receipts) == [1, 2, 3]
    assert await seen(kafka, f"{orders}.dead") == [0]


async def test_a_producer_that_was_fenced_repeats_nothing_that_is_seen(kafka: Kafka) -> None:
    """Somebody starts a producer with our transactional ids, as a new owner of the partitions would."""
    orders, receipts = new_name("orders"), new_name("receipts")
    await kafka.create_topic(orders, partitions=2)
    await kafka.create_topic(receipts, partitions=2)
    await filled(kafka, orders, 200)
    handled: Counter[int] = Counter()

    @subscriber(Topic(orders, transactional_id=orders), transactional=True, workers=4, publishes=receipts)
    async def handle(order: Order) -> Order:
        handled[order.id] += 1
        if order.id in (50, 101) and handled[order.id] == 1:
            async with AIOKafkaProducer(
                bootstrap_servers=kafka.bootstrap, transactional_id=f"{orders}-{orders}-{order.id % 2}"
            ):
                pass
        return order

    app = App(handle, brokers={"default": broker_of(kafka)})
    async with app.running():
        await eventually(lambda: len(handled) == 200, 30)
        source: Any = app.pumps[0].source
        await eventually(lambda: sum(part.committed for part in source.group.parts.values()) == 200, 30)
    assert await seen(kafka, receipts) == list(range(200))
    assert handled[50] > 1  # it was rolled back
    assert handled[101] > 1


async def test_what_a_transaction_refuses_is_said_for_each_message(kafka: Kafka) -> None:
    orders = new_name("orders")
    await kafka.create_topic(orders, partitions=2)
    answers: list[PublishError] = []

    @subscriber(orders, transactional=True, dead_letter=None)
    async def handle(order: Order) -> None:
        for name, payload in ((orders, bytes(2000)), (f"{orders}.nowhere", b"x")):
            with pytest.raises(PublishError) as raised:
                await app.publish(name, payload)
            answers.append(raised.value)

    app = App(handle, brokers={"default": broker_of(kafka, max_body=1000, create_topics=False)})
    async with app.running():
        await filled(kafka, orders, 1)
        await all_committed(app, 1)
    assert [type(answer) for answer in answers] == [TooLarge, Unroutable]


async def test_who_publishes_after_the_end_is_refused(kafka: Kafka) -> None:
    orders, receipts = new_name("orders"), new_name("receipts")
    await kafka.create_topic(orders, partitions=2)
    await kafka.create_topic(receipts, partitions=2)
    tasks: list[asyncio.Task[str]] = []
    ended = asyncio.Event()

    async def later() -> str:
        await ended.wait()
        return await app.publish(receipts, Order(1))

    @subscriber(orders, transactional=True)
    async def handle(order: Order) -> None:
        tasks.append(asyncio.ensure_future(later()))  # its context is the handler's

    app = App(handle, brokers={"default": broker_of(kafka)})
    async with app.running():
        await filled(kafka, orders, 1)
        await all_committed(app, 1)
        ended.set()
        with pytest.raises(PublishError, match="is over"):
            await tasks[0]
    assert await seen(kafka, receipts) == []


async def test_two_members_hand_partitions_over_between_transactions(kafka: Kafka) -> None:
    orders, receipts = new_name("orders"), new_name("receipts")
    await kafka.create_topic(orders, partitions=2)
    await kafka.create_topic(receipts, partitions=2)
    await filled(kafka, orders, 400)
    done: set[int] = set()

    def member() -> App:
        @subscriber(Topic(orders), transactional=True, workers=2, publishes=receipts, group="g")
        async def handle(order: Order) -> Order:
            await asyncio.sleep(0.002)
            done.add(order.id)
            return order

        return App(handle, brokers={"default": broker_of(kafka)})

    async with member().running():
        await eventually(lambda: len(done) > 50)
        async with member().running():
            await eventually(lambda: len(done) > 200)
        await eventually(lambda: len(done) == 400, 30)
    assert await seen(kafka, receipts) == list(range(400))


async def test_a_rebalance_right_after_a_commit_takes_up_behind_it(kafka: Kafka) -> None:
    """The server has answered the commit, and the group has its offset a moment later."""
    orders, receipts = new_name("orders"), new_name("receipts")
    await kafka.create_topic(orders, partitions=1)
    await kafka.create_topic(receipts, partitions=1)

    @subscriber(orders, transactional=True, publishes=receipts, group=orders)
    async def handle(order: Order) -> Order:
        return order

    app = App(handle, brokers={"default": broker_of(kafka)})
    async with app.running():
        source: Any = app.pumps[0].source
        group = source.group
        (tp,) = group.parts
        for number in range(20):
            part = group.parts[tp]
            async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
                await producer.send_and_wait(orders, b'{"id":%d}' % number)
            while part.committed <= number:  # noqa: ASYNC110 - not a moment later
                await asyncio.sleep(0)
            await group.take_over({tp})
            assert group.parts[tp] is part, f"it began anew at {group.parts[tp].start}, after {part.committed}"
    assert await seen(kafka, receipts) == list(range(20))


async def test_what_a_rebalance_starts_while_the_source_closes_is_ended(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = new_name("orders")
    await kafka.create_topic(orders, partitions=2)

    @subscriber(orders, transactional=True, group=orders)
    async def handle(order: Order) -> None: ...

    app = App(handle, brokers={"default": broker_of(kafka)})
    async with app.running():
        source: Any = app.pumps[0].source
        transactions: Any = source._opening.transactions
        end = GroupConsumer.end

        async def end_in_a_rebalance(consumer: GroupConsumer, seconds: float) -> None:
            await transactions.fence([])
            await transactions.fence([TopicPartition(orders, 0), TopicPartition(orders, 1)])
            assert len(transactions._producers) == 2
            await end(consumer, seconds)

        monkeypatch.setattr(GroupConsumer, "end", end_in_a_rebalance)
    assert (transactions._producers, transactions._ending) == ({}, set())


async def test_an_opening_that_is_broken_off_ends_its_producers(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = new_name("orders")
    await kafka.create_topic(orders, partitions=2)
    subscribe = Opening._subscribe
    fenced: list[int] = []

    async def fails(opening: Opening, *rest: Any) -> None:
        await subscribe(opening, *rest)
        transactions: Any = opening.transactions
        openings.append(transactions)
        fenced.append(len(transactions._producers))
        raise BrokerUnavailable("after all")

    openings: list[Any] = []
    monkeypatch.setattr(Opening, "_subscribe", fails)
    async with broker_of(kafka).connect() as connection:
        with pytest.raises(BrokerUnavailable, match="after all"):
            await connection.open(Subscription(orders, transactional=True, group=orders))
    assert fenced == [2]
    assert (openings[0]._producers, openings[0]._ending) == ({}, set())


async def test_a_source_without_transactions_refuses_one(kafka: Kafka) -> None:
    broker = broker_of(kafka)
    topic = Topic("orders", mixed_batches=True)
    assert list(broker.mistakes(Subscription("orders", source=topic, transactional=True)))
    topic = Topic("orders", retry_topic=True)
    assert list(broker.mistakes(Subscription("orders", source=topic, transactional=True)))


async def test_no_commit_beside_a_transaction_undoes_it(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both the server keeps what it got last, and it gets a transaction's offsets before the transaction ends. In a
    topic that was written in transactions there is always something to commit: the markers that were read past."""
    orders, receipts, group = new_name("orders"), new_name("receipts"), new_name("group")
    for name in (orders, receipts):
        await kafka.create_topic(name, partitions=1)
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=new_name()) as producer:
        for number in range(2):
            async with producer.transaction():
                await producer.send(orders, b'{"id":%d}' % number)
    ending = AIOKafkaProducer.commit_transaction
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def held(producer: AIOKafkaProducer) -> None:
        if first.is_set():
            reached.set()
            await go_on.wait()
        first.set()
        await ending(producer)

    beside: list[object] = []
    commit = GroupConsumer.commit_once

    async def noted(consumer: GroupConsumer, offsets: Any, *more: Any) -> None:
        if reached.is_set() and not go_on.is_set():
            beside.append(offsets)
        await commit(consumer, offsets, *more)

    first = asyncio.Event()
    monkeypatch.setattr(AIOKafkaProducer, "commit_transaction", held)
    monkeypatch.setattr(GroupConsumer, "commit_once", noted)

    @subscriber(orders, transactional=True, publishes=receipts)
    async def handle(order: Order) -> Order:
        return order

    app = App(handle, name=group, brokers={"default": broker_of(kafka)})
    async with app.running():
        source: Any = app.pumps[0].source
        await reached.wait()
        (part,) = source.group.parts.values()
        assert (part.mark.position, part.bound) == (2, True)
        assert part.committed in (1, 2), "behind the first, or its marker where the committer came by in between"
        looks = source.watch.clock + 1.5  # two of them, and many ticks of the committer
        await eventually(lambda: source.watch.clock > looks)
        assert beside == []
        go_on.set()
        await eventually(lambda: part.committed == 4)  # past the last marker, when nothing is open any more
    assert await seen(kafka, receipts) == [0, 1]


async def test_a_live_test_sees_what_a_transaction_published(kafka: Kafka) -> None:
    orders, receipts, audit = names = [new_name(what) for what in ("orders", "receipts", "audit")]
    for name in (*names, f"{orders}.dead"):
        await kafka.create_topic(name, partitions=2)
    failed = False

    @subscriber(orders, transactional=True, publishes=receipts, attempts=3, backoff=Backoff(first=0.01))
    async def handle(order: Order, out: Annotated[Publisher[Order], audit]) -> Order:
        nonlocal failed
        await out.publish(order)
        if not failed:
            failed = True
            raise Retry(after=0)
        return order

    app = App(handle, brokers={"default": broker_of(kafka)})
    async with TestApp(app, live=True) as tb:
        await tb.publish(orders, Order(1))
        await tb.settle()
        assert [one.value for one in tb.published(receipts, Order)] == [Order(1)]
        assert [one.value for one in tb.published(audit, Order)] == [Order(1)]  # what was rolled back nobody saw
