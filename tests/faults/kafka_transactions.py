"""Copiers in transactions, killed with SIGKILL at random moments, while others join their group and leave it: who reads
what is committed sees each effect once."""

from __future__ import annotations

import asyncio
import random
import secrets
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from streamfw_kafka.client import fresh_assignor
from tests.faults.kafka_copier import GROUP, Work
from tests.services.kafka import Kafka

__all__ = ["CopyRun", "copy_run"]

ROOT = Path(__file__).resolve().parents[2]
PARTITIONS = 4
PATIENCE = 60.0  # seconds without anything new


@dataclass
class CopyRun:
    """What came of it: how often each number stands in the target, for who reads what is committed; `aborted` is what
    others would see besides."""

    messages: int
    kills: int = 0
    visits: int = 0
    seen: Counter[int] = field(default_factory=Counter)
    aborted: int = 0

    @property
    def lost(self) -> list[int]:
        return [number for number in range(self.messages) if not self.seen[number]]

    @property
    def twice(self) -> list[int]:
        return [number for number, count in self.seen.items() if count > 1]


async def copy_run(kafka: Kafka, *, seed: int, messages: int, kills: int, batch: int, copiers: int = 2) -> CopyRun:
    """Copy `messages` while copiers are killed `kills` times. Visitors make the group rebalance all the time: copiers
    that live give partitions up, and go on with them, at any moment of a transaction."""
    rng = random.Random(seed)
    name = secrets.token_hex(4)
    source, target = f"copy-in-{name}", f"copy-out-{name}"
    for topic in (source, f"{source}.dead", target):
        await kafka.create_topic(topic, partitions=PARTITIONS)
    run = CopyRun(messages)
    running: list[Process] = [await _copier(kafka, source, target, batch) for _ in range(copiers)]
    watching = asyncio.ensure_future(_watch(kafka, target, run))
    over = asyncio.Event()
    visiting = asyncio.ensure_future(_visit(kafka, source, random.Random(seed), run, over))
    try:
        publishing = asyncio.ensure_future(_publish(kafka, source, messages, kills * 1.0 + 1.0))
        for _ in range(kills):
            await asyncio.sleep(rng.uniform(0.3, 1.7))
            victim = running.pop(rng.randrange(len(running)))
            victim.send_signal(signal.SIGKILL)
            await victim.wait()
            run.kills += 1
            running.append(await _copier(kafka, source, target, batch))
        await publishing
        await watching
    finally:
        watching.cancel()
        over.set()
        await asyncio.wait([visiting])
        for process in running:
            if process.returncode is None:
                process.terminate()
        codes = [await process.wait() for process in running]
    visiting.result()
    assert codes == [0] * copiers, f"copiers ended with {codes}"
    await _read_again(kafka, target, run)
    return run


async def _copier(kafka: Kafka, source: str, target: str, batch: int) -> Process:
    command = [sys.executable, "-m", "tests.faults.kafka_copier", kafka.url, source, target, str(batch)]
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=DEVNULL, stderr=DEVNULL)


async def _visit(kafka: Kafka, topic: str, rng: random.Random, run: CopyRun, over: asyncio.Event) -> None:
    """Join the copiers' group and leave it, again and again, without reading anything: two rebalances each time."""
    while not over.is_set():
        await asyncio.sleep(rng.uniform(0.1, 0.8))
        visitor = AIOKafkaConsumer(
            topic,
            bootstrap_servers=kafka.bootstrap,
            group_id=GROUP,
            enable_auto_commit=False,
            partition_assignment_strategy=(fresh_assignor(),),
        )
        try:
            await visitor.start()
            await asyncio.sleep(rng.uniform(0.0, 0.2))
        finally:
            await visitor.stop()
        run.visits += 1


async def _publish(kafka: Kafka, topic: str, messages: int, seconds: float) -> None:
    pause = seconds / messages
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, linger_ms=5) as producer:
        for first in range(0, messages, 50):
            some = range(first, min(first + 50, messages))
            bodies = [msgspec.json.encode(Work(number)) for number in some]
            await asyncio.gather(*[await producer.send(topic, body) for body in bodies])
            await asyncio.sleep(pause * 50)


async def _watch(kafka: Kafka, topic: str, run: CopyRun) -> None:
    """Read the target until every number was seen."""
    loop = asyncio.get_running_loop()
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=kafka.bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    seen: set[int] = set()
    async with consumer:
        changed = loop.time()
        while len(seen) < run.messages:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                seen.update(msgspec.json.decode(record.value, type=Work).number for record in records)
                changed = loop.time()
            assert loop.time() - changed < PATIENCE, f"{len(seen)} of {run.messages} were copied, and no more"


async def _read_again(kafka: Kafka, topic: str, run: CopyRun) -> None:
    """Everything once more, when nobody writes any more: what came late counts as well."""
    run.seen = Counter(await _numbers(kafka, topic, "read_committed"))
    run.aborted = len(await _numbers(kafka, topic, "read_uncommitted")) - run.seen.total()


async def _numbers(kafka: Kafka, topic: str, isolation: str) -> list[int]:
    numbers: list[int] = []
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    async with AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, isolation_level=isolation) as consumer:
        consumer.assign(partitions)
        await consumer.seek_to_beginning(*partitions)
        ends = await consumer.end_offsets(partitions)
        for partition, end in ends.items():
            while await consumer.position(partition) < end:
                for records in (await consumer.getmany(partition, timeout_ms=1000)).values():
                    numbers += [msgspec.json.decode(record.value, type=Work).number for record in records]
    return numbers
