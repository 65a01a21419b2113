"""Copies one topic into another in transactions: ``python -m tests.faults.kafka_copier URL IN OUT BATCH``.

BATCH 0: message by message, with four workers; else batches of that size. Each message takes up to 3 ms.
"""

from __future__ import annotations

import asyncio
import random
import sys

import msgspec

from streamfw import App, Batch, Publisher, subscriber
from streamfw_kafka import KafkaBroker

GROUP = "copiers"


class Work(msgspec.Struct):
    number: int


def main(url: str, source: str, target: str, batch: int) -> None:
    out: Publisher[Work] = Publisher(target)

    async def copy(work: Work) -> None:
        await asyncio.sleep(random.random() * 0.003)
        await out.publish(work)

    async def copy_all(batch: list[Work]) -> None:
        await asyncio.gather(*map(copy, batch))

    handler = (
        subscriber(source, transactional=True, batch=Batch(batch, wait=0.02), workers=4)(copy_all)
        if batch
        else subscriber(source, transactional=True, workers=4)(copy)
    )
    broker = KafkaBroker(url, session_timeout=2.0, heartbeat=0.2, metadata_age=2.0)
    App(handler, name=GROUP, brokers={"default": broker}, publishers=[out]).run(wait=30)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
