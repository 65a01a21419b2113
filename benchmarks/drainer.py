"""One process of several that drain the same queue: ``python -m benchmarks.drainer LOOP WORKERS``.

The first line of its input is the server's URL. It says ``ready`` when its app runs, begins at the second line, and
ends with the input: then it prints the ids that it handled.
"""

from __future__ import annotations

import asyncio
import sys

from streamfw import App, subscriber
from streamfw_postgres import PostgresBroker

from .apps import Gate
from .loops import run
from .queue import GROUP, NAME, Job


async def drain(dsn: str, workers: int) -> None:
    handled: list[int] = []

    async def note(job: Job) -> None:
        handled.append(job.id)

    app = App(subscriber(NAME, group=GROUP, workers=workers)(note), brokers={"default": PostgresBroker(dsn)})
    async with app.running():
        gate = Gate(app.pumps[0].source)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        gate.open()
        await asyncio.to_thread(sys.stdin.read)
    print(*handled)


if __name__ == "__main__":
    run(drain(sys.stdin.readline().strip(), int(sys.argv[2])), sys.argv[1])
