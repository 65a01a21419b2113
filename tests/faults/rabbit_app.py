"""The app of RabbitMQ's fault suite, one subscriber of each kind; and as a process beside the one that is tested:

python -m tests.faults.rabbit_app URL STREAM_URL TRANSPORT LEDGER
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any, Final

from streamfw import App, Batch, DeadLetter, Message, Retry, subscriber
from streamfw_rabbit import RabbitBroker, ServerOffsets, Stream
from tests.faults.rabbit_ledger import RabbitLedger, Work, recording

__all__ = ["DEAD", "GROUP", "LOG", "NAMES", "OPTIONS", "ORDERED", "QUEUES", "RETRIES", "Work", "app_of", "place_of"]

GROUP: Final = "soak"
RETRIES, DEAD, ORDERED, LOG = "retries", "retries.dead", "ordered", "log"
QUEUES: Final = ("single", "prefetch", "batch", RETRIES, ORDERED)
NAMES: Final = (*QUEUES, LOG)
"""What is published to: a name for each subscriber, so that each publish is of one queue."""
HEARTBEAT: Final = 1
OPTIONS: Final[dict[str, Any]] = {
    "heartbeat": HEARTBEAT,
    "connect_timeout": 5.0,
    "publish_timeout": 10.0,
    "blocked_timeout": 0.5,
}


def place_of(name: str, number: int) -> str:
    """Where that id comes to its end, which was published to `name`."""
    return DEAD if name == RETRIES and number % 5 == 2 else name


def _subscribers(ledger: RabbitLedger, stream_url: str) -> list[Any]:
    chance = random.Random(ledger.process)

    @subscriber("single", workers=1)
    async def single(message: Message) -> None:
        ledger.handled(time.monotonic_ns(), message)

    @subscriber("prefetch", workers=16, prefetch=200)
    async def prefetch(message: Message) -> None:
        began = time.monotonic_ns()
        await asyncio.sleep(chance.random() * 0.02)
        ledger.handled(began, message)

    @subscriber("batch", workers=2, batch=Batch(20, wait=0.02))
    async def batch(batch: list[Message]) -> None:
        began = time.monotonic_ns()
        await asyncio.sleep(chance.random() * 0.005)
        ledger.handled_all(began, batch)

    @subscriber(RETRIES, workers=8, attempts=5)
    async def retries(work: Work, message: Message) -> None:
        began, way = time.monotonic_ns(), work.id % 5
        await asyncio.sleep(chance.random() * 0.003)
        if way == 2:
            ledger.handled(began, message, "dead")
            raise DeadLetter("as it was asked for")
        if message.attempt == 1 and way < 2:
            ledger.handled(began, message, "retry")
            raise Retry(after=1.0 if way else 0.05)  # by queues on the server, or here
        ledger.handled(began, message)

    @subscriber(DEAD, workers=2)
    async def dead(message: Message) -> None:
        ledger.handled(time.monotonic_ns(), message)

    @subscriber(ORDERED, workers=4, ordered_by="key")
    async def ordered(message: Message) -> None:
        began = time.monotonic_ns()
        await asyncio.sleep(chance.random() * 0.003)
        ledger.handled(began, message)

    @subscriber(Stream(LOG, offset="first", store=ServerOffsets(stream_url)), workers=4)
    async def log(message: Message) -> None:
        began = time.monotonic_ns()
        await asyncio.sleep(chance.random() * 0.003)
        ledger.handled(began, message)

    return [single, prefetch, batch, retries, dead, ordered, log]


def app_of(ledger: RabbitLedger, url: str, stream_url: str, transport: Any) -> App:
    """An app that handles all of it; to be run inside `recording`."""
    broker = RabbitBroker(url, transport=transport, **OPTIONS)
    return App(*_subscribers(ledger, stream_url), name=GROUP, brokers={"default": broker}, drain_timeout=10)


def main(url: str, stream_url: str, transport: str, path: str) -> None:
    ledger = RabbitLedger(Path(path))
    with recording(ledger):
        app_of(ledger, url, stream_url, transport).run(wait=60)


if __name__ == "__main__":
    main(*sys.argv[1:5])
