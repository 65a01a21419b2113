"""The cases of the Kafka scenario, each in a process of its own (see `process`): ``SERVER`` is a bootstrap address."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiokafka import TopicPartition

from streamfw import App, Batch, subscriber
from streamfw_kafka.broker import KafkaBroker
from streamfw_kafka.source import KafkaSource

from .apps import Gate, all_settled
from .harness import Sample
from .process import BATCH, PUBLISHERS, Here, Job, body, main, noop, noop_batch, peer_order, spread
from .topic import (
    NAME,
    OUT,
    all_buffered,
    committed,
    consumer,
    ends,
    key,
    producer,
    read_by_hand,
    read_lists_by_hand,
)

__all__ = ["JOBS"]


# -- reading


def new_group(job: str) -> str:
    """A group that has read nothing."""
    return f"bench-{job}-{time.time_ns():x}"


async def all_committed(here: Here, group: str, count: int) -> None:
    """Raises `AssertionError` where the server knows another position."""
    if (found := await committed(here.server, group)) != count:
        raise AssertionError(f"{found} records of {count} are committed")


class Requests:
    """Counts the calls of a consumer's ``getmany`` from now on."""

    def __init__(self, reading: Any) -> None:
        self._getmany, self.count = reading.getmany, 0
        reading.getmany = self._counted

    async def _counted(self, *partitions: TopicPartition, **options: Any) -> dict[TopicPartition, list[Any]]:
        self.count += 1
        found: dict[TopicPartition, list[Any]] = await self._getmany(*partitions, **options)
        return found

    def by_10_000(self, commits: int, count: int) -> dict[str, float]:
        """Figures for a sample."""
        return {"getmany by 10,000": self.count * 10_000 / count, "commits by 10,000": commits * 10_000 / count}


@asynccontextmanager
async def joined(here: Here, group: str) -> AsyncIterator[Any]:
    """A consumer by hand, in its group, that has begun to fetch."""
    async with consumer(here.server, group) as reading:
        await all_buffered(reading)
        yield reading


async def by_hand(here: Here, count: int) -> Sample:
    group = new_group("hand")
    async with joined(here, group) as reading:
        requests = Requests(reading)
        with here.window() as window:
            commits = await read_by_hand(reading, count, noop)
    await all_committed(here, group, count)
    return window.sample(count, **requests.by_10_000(commits, count))


async def lists_by_hand(here: Here, count: int) -> Sample:
    group = new_group("lists")
    async with joined(here, group) as reading:
        requests = Requests(reading)
        with here.window() as window:
            commits = await read_lists_by_hand(reading, count, noop_batch, BATCH)
    await all_committed(here, group, count)
    return window.sample(count, **requests.by_10_000(commits, count))


async def app(here: Here, count: int, handler: Any = noop, **options: Any) -> Sample:
    group = new_group("app")
    marked = subscriber(NAME, group=group, **options)(handler)
    made = App(marked, brokers={"default": KafkaBroker(f"kafka://{here.server}")})
    async with made.running():
        (pump,) = made.pumps
        source = pump.source
        assert isinstance(source, KafkaSource)
        gate = Gate(source)
        await all_buffered(source.group.consumer)
        requests, before = Requests(source.group.consumer), source.group.commits
        with here.window() as window:
            gate.open()
            await all_settled(made, count)
            await source.flush(asyncio.get_running_loop().time() + 10)
        commits = source.group.commits - before
        if pump.counters.acked != count:
            raise AssertionError(f"{pump.counters.acked} of {count} were acknowledged by their handlers")
    await all_committed(here, group, count)
    return window.sample(count, **requests.by_10_000(commits, count))


# -- publishing


async def publish_by_hand(here: Here, count: int) -> Sample:
    bodies = [(body(number), key(number)) for number in range(count)]

    async def publish(mine: Sequence[tuple[bytes, bytes]]) -> None:
        for value, of in mine:
            await producing.send_and_wait(OUT, value, key=of)

    async with producer(here.server) as producing:
        await spread(publish, bodies[:PUBLISHERS])
        before = sum((await ends(here.server, OUT)).values())
        with here.window() as window:
            await spread(publish, bodies)
    await all_there(here, before + count)
    return window.sample(count)


async def publish(here: Here, count: int) -> Sample:
    bodies = [(body(number), key(number).decode()) for number in range(count)]
    made = App(brokers={"default": KafkaBroker(f"kafka://{here.server}")})

    async def publish(mine: Sequence[tuple[bytes, str]]) -> None:
        for value, of in mine:
            await made.publish(OUT, value, key=of)

    async with made.running():
        await spread(publish, bodies[:PUBLISHERS])
        before = sum((await ends(here.server, OUT)).values())
        with here.window() as window:
            await spread(publish, bodies)
    await all_there(here, before + count)
    return window.sample(count)


async def all_there(here: Here, count: int) -> None:
    """Raises `AssertionError` where the topic has another length."""
    if (found := sum((await ends(here.server, OUT)).values())) != count:
        raise AssertionError(f"{found} records are there, of {count}")


# -- the peer


async def faststream(here: Here, count: int) -> Sample:
    """From the first handled message on: its subscriber cannot be held until it has begun to fetch."""
    from faststream import AckPolicy
    from faststream.kafka import KafkaBroker as Peer

    logging.disable(logging.CRITICAL)
    broker = Peer(here.server, logger=None)
    window, finished, handled = here.window(), asyncio.Event(), 0

    async def handle(body: Any) -> None:
        nonlocal handled
        if not handled:
            window.__enter__()
        elif handled == count:
            window.__exit__()
            finished.set()
        handled += 1

    handle.__annotations__["body"] = peer_order()
    options: Any = {"auto_offset_reset": "earliest", "ack_policy": AckPolicy.ACK}
    broker.subscriber(NAME, group_id=new_group("peer"), **options)(handle)
    await broker.start()
    await finished.wait()
    await broker.stop()
    return window.sample(count)


JOBS: dict[str, Job] = {
    "hand": by_hand,
    "lists": lists_by_hand,
    "one": partial(app, workers=1),
    "eight": partial(app, workers=8),
    "keys": partial(app, workers=8, ordered_by="key"),
    "batches": partial(app, handler=noop_batch, batch=Batch(BATCH)),
    "send": publish_by_hand,
    "publish": publish,
    "peer": faststream,
}


if __name__ == "__main__":
    main(JOBS)
