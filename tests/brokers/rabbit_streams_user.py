"""A process that reads a stream, one message after another, and tells each number it has handled."""

from __future__ import annotations

import asyncio
import sys

from streamfw import App, subscriber
from streamfw_rabbit import PostgresOffsets, RabbitBroker, Stream


def main(url: str, dsn: str) -> None:
    @subscriber(Stream("events", store=PostgresOffsets(dsn)))
    async def handle(number: int) -> None:
        await asyncio.sleep(0.005)
        print(number, flush=True)

    App(handle, name="killed", brokers={"default": RabbitBroker(url)}).run()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
