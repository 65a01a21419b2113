"""A member of the rebalance suite: ``python -m tests.faults.rebalance_member URL TOPIC GROUP LEDGER MODE``.

An app as any other, with sixteen workers whose handlers take up to 50 ms, at random, and the shortest sessions that the
test servers allow. MODE is ``single``, ``key`` (ordered by key) or ``batch`` (of up to 20). What it does goes into
LEDGER (see `kafka_ledger`); SIGTERM lets it leave politely.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from streamfw import App, Batch, Message, subscriber
from streamfw_kafka.broker import KafkaBroker
from tests.faults.kafka_ledger import MemberLedger, recording

WORKERS = 16
LONGEST = 0.05  # seconds that a handler takes at most
SESSION = 2.0
HEARTBEAT = 0.3
COMMIT_EVERY = 0.2
BATCH = Batch(size=20, wait=0.05)


class Work(msgspec.Struct):
    id: int


def made(topic: str, group: str, ledger: MemberLedger, mode: str, chance: random.Random) -> Any:
    """The handler."""
    if mode == "batch":

        @subscriber(topic, group=group, workers=WORKERS, batch=BATCH)
        async def handle_many(batch: list[Message]) -> None:
            began = time.monotonic_ns()
            await asyncio.sleep(chance.random() * LONGEST)
            ids = {msgspec.json.decode(message.body, type=Work).id: message for message in batch}
            ledger.handled(began, ids, batch=True)

        return handle_many

    @subscriber(topic, group=group, workers=WORKERS, ordered_by="key" if mode == "key" else None)
    async def handle(work: Work, message: Message) -> None:
        began = time.monotonic_ns()
        await asyncio.sleep(chance.random() * LONGEST)
        ledger.handled(began, {work.id: message})

    return handle


def main(url: str, topic: str, group: str, path: str, mode: str) -> None:
    ledger = MemberLedger(Path(path))

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        async with ledger.watching_the_loop():
            yield

    broker = KafkaBroker(url, session_timeout=SESSION, heartbeat=HEARTBEAT, commit_every=COMMIT_EVERY)
    handler = made(topic, group, ledger, mode, random.Random(path))
    with recording(ledger):
        App(handler, name=group, brokers={"default": broker}, lifespan=lifespan, drain_timeout=10).run(wait=30)
    ledger.end()


if __name__ == "__main__":
    main(*sys.argv[1:6])
