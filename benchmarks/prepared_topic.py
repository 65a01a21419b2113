"""A Kafka source whose consumer has the records at hand: no server, no client, no group; everything else is the
broker's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import TopicPartition
from aiokafka.structs import ConsumerRecord

from streamfw.broker import Broker, Connection, Health, Source, Subscription
from streamfw.errors import PublishError
from streamfw.message import Outgoing
from streamfw_kafka.admin import Topics
from streamfw_kafka.broker import KafkaBroker
from streamfw_kafka.client import GroupConsumer
from streamfw_kafka.group import Membership
from streamfw_kafka.opening import Opening
from streamfw_kafka.settings import Settings
from streamfw_kafka.source import KafkaSource

__all__ = ["PreparedConsumer", "PreparedKafka", "prepared"]

SETTINGS = Settings(bootstrap=("nowhere:1",), commit_every=60.0)  # nothing by the clock: commits by count alone
Take = Callable[[TopicPartition, int], "list[Any]"]


class PreparedConsumer(GroupConsumer):
    """What a source asks of its consumer. `take` returns the next records of a partition, at most so many; partitions
    are emptied in order, as aiokafka does. It counts the calls that returned something, and the commits."""

    _closed = True  # for aiokafka, which warns of one that was not closed
    generation, coordinated, beating = 1, True, True

    def __init__(self, partitions: Collection[TopicPartition], take: Take) -> None:
        self.partitions, self._take = partitions, take
        self.calls = self.commits = 0
        self._interrupted = asyncio.Event()

    async def getmany(
        self, *partitions: TopicPartition, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Any]]:
        found, left = {}, max_records or 500
        for tp in partitions:
            if left and tp in self.partitions and (some := self._take(tp, left)):
                found[tp] = self.make(tp, some)
                left -= len(some)
        if found:
            self.calls += 1
        elif timeout_ms:
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    await self._interrupted.wait()
            except TimeoutError:
                pass
        return found

    def interrupt(self) -> None:
        self._interrupted.set()

    async def commit_once(
        self, offsets: Mapping[TopicPartition, int], seconds: float, facts: Mapping[TopicPartition, str] | None = None
    ) -> None:
        self.commits += 1

    async def committed_offsets(
        self, partitions: Iterable[TopicPartition], *, stable: bool = False
    ) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, 0)

    def seek(self, tp: TopicPartition, offset: int) -> None: ...

    def read_to(self, tp: TopicPartition) -> None: ...

    def stay_polled(self) -> None: ...

    def tell_assignor(self, generation: int) -> None: ...

    async def end(self, seconds: float) -> None: ...


class _Opening(Opening):
    def __init__(self, subscription: Subscription, consumer: PreparedConsumer) -> None:
        super().__init__(subscription, SETTINGS, Topics(SETTINGS), _publish)
        self._prepared = consumer

    async def join(self) -> Membership:
        membership = Membership(self._prepared, self.subscription, self.settings, first=self._first)
        await membership.take_over(self._prepared.partitions)
        return membership


async def _publish(messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
    raise AssertionError("nothing is published here")


class _Connection(Connection):
    def __init__(self, consumer: PreparedConsumer) -> None:
        self._consumer = consumer

    async def open(self, subscription: Subscription) -> Source:
        source = KafkaSource(_Opening(subscription, self._consumer))
        await source.reopen()
        return source

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        return await _publish(messages)

    async def check(self) -> Health:
        return Health(True)


class PreparedKafka(Broker):
    """A broker with one such consumer."""

    capabilities = KafkaBroker.capabilities

    def __init__(self, consumer: PreparedConsumer) -> None:
        super().__init__("prepared://")
        self.consumer = consumer

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        yield _Connection(self.consumer)


def prepared(name: str, count: int, value: bytes, partitions: int = 4) -> PreparedKafka:
    """A broker with `count` records over some partitions, of a thousand keys."""
    logs: dict[TopicPartition, list[Any]] = {TopicPartition(name, number): [] for number in range(partitions)}
    for number in range(count):
        tp = TopicPartition(name, number % partitions)
        logs[tp].append(_record(tp, len(logs[tp]), b"key-%d" % (number % 1000), value))
    read = dict.fromkeys(logs, 0)

    def take(tp: TopicPartition, most: int) -> list[Any]:
        some = logs[tp][read[tp] : read[tp] + most]
        read[tp] += len(some)
        return some

    return PreparedKafka(PreparedConsumer(logs, take))


def _record(tp: TopicPartition, offset: int, key: bytes, value: bytes) -> Any:
    """As aiokafka makes it."""
    return ConsumerRecord(tp.topic, tp.partition, offset, 0, 0, key, value, None, len(key), len(value), ())
