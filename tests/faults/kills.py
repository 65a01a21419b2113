"""Worker processes killed with SIGKILL at random moments while messages flow."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from streamfw.broker import Connection
from streamfw.message import Outgoing, new_message_id
from streamfw_postgres import PostgresBroker
from tests.faults.ledger import Verdict, judge
from tests.faults.processes import Processes
from tests.faults.worker import QUEUE

__all__ = ["Fleet", "KillRun", "kill_run", "poison_run"]

Depth = Callable[[], Awaitable[tuple[int, int]]]


class Fleet(Processes):
    """Worker processes; `killed` are those that got a SIGKILL, by us or by themselves."""

    def __init__(self, url: str, directory: Path, lease: float, form: str, poison: int | None = None) -> None:
        last = [] if poison is None else [str(poison)]
        super().__init__(directory, "worker", lambda ledger: [url, str(ledger), str(lease), form, *last], "worker")
        self.killed: set[str] = set()

    async def kill(self, name: str) -> None:
        await super().kill(name)
        self.killed.add(name)

    async def bury(self) -> int:
        """Take out those that killed themselves; return how many. Any other end is a failure of the run."""
        gone = [(name, process) for name, process in self._alive.items() if process.returncode is not None]
        for name, process in gone:
            del self._alive[name]
            assert process.returncode == -signal.SIGKILL, f"{name} ended with {process.returncode}: {self.tail(name)}"
            self.killed.add(name)
        return len(gone)


@asynccontextmanager
async def fleet(url: str, directory: Path, lease: float, form: str, poison: int | None = None) -> AsyncIterator[Fleet]:
    workers = Fleet(url, directory, lease, form, poison)
    try:
        yield workers
    finally:
        await workers.abandon()


@dataclass(slots=True)
class KillRun:
    verdict: Verdict
    kills: int
    left: int
    dead: int
    seconds: float


async def _publish(connection: Connection, numbers: range, published: set[str]) -> None:
    messages = [Outgoing(name=QUEUE, body=b'{"number":%d}' % number, message_id=new_message_id()) for number in numbers]
    errors = await connection.publish(messages)
    assert not any(errors), next(error for error in errors if error)
    published.update(message.message_id for message in messages)


async def _until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        await asyncio.sleep(0.02)


async def kill_run(
    url: str,
    directory: Path,
    *,
    seed: int,
    messages: int,
    kills: int,
    workers: int = 2,
    lease: float = 2.0,
    form: str = "lease",
) -> KillRun:
    """Publish `messages` in portions; after each portion kill one of `workers` processes at a random moment and start
    another. Ends when the queue is empty."""
    chance = random.Random(seed)
    published: set[str] = set()
    began = time.monotonic()
    async with _connected(url) as (connection, depth), fleet(url, directory, lease, form) as crew:
        await _publish(connection, range(1), published)  # so that the queue and its table are there
        for _ in range(workers):
            await crew.start()
        portion = messages // kills
        for round_ in range(kills):
            first = 1 + round_ * portion
            last = messages if round_ == kills - 1 else first + portion
            await _publish(connection, range(first, max(first, last)), published)
            # One that started late may find that the others have done everything already: it would never begin.
            await _until(lambda: any(map(crew.begun, crew.names)), 60, "somebody handles something")
            victim = chance.choice([name for name in crew.names if crew.begun(name)])
            await asyncio.sleep(chance.random() * 0.3)
            await crew.kill(victim)
            await crew.start()
        left, _ = await _drained(depth, 120)
        await crew.end()
        killed = crew.killed
    verdict = judge(directory, published, killed, counted=form != "rowlock")
    return KillRun(verdict, len(killed), left, 0, time.monotonic() - began)


async def poison_run(
    url: str, directory: Path, *, messages: int = 1000, lease: float = 2.0, form: str = "lease"
) -> KillRun:
    """One message of `messages` kills the process that handles it; exactly it must end as a dead letter."""
    published: set[str] = set()
    began = time.monotonic()
    async with _connected(url) as (connection, depth), fleet(url, directory, lease, form, poison=messages // 2) as crew:
        await _publish(connection, range(messages), published)
        await crew.start()
        end = time.monotonic() + 120
        while (state := await depth())[0]:
            assert time.monotonic() < end, f"{state} after {len(crew.killed)} crashes"
            if await crew.bury():
                await crew.start()
            await asyncio.sleep(0.05)
        await crew.bury()
        await crew.end()
        left, dead = await depth()
        killed = crew.killed
    verdict = judge(directory, published, killed)
    return KillRun(verdict, len(killed), left, dead, time.monotonic() - began)


async def _drained(depth: Depth, seconds: float) -> tuple[int, int]:
    end = time.monotonic() + seconds
    while True:
        state = await depth()
        if not state[0]:
            return state
        assert time.monotonic() < end, f"{state[0]} messages are left after {seconds} s"
        await asyncio.sleep(0.1)


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[tuple[Connection, Depth]]:
    """A connection to publish by, and a function that counts what is left in the queue and its dead letters, asked of
    the table itself."""
    async with PostgresBroker(url, auto_migrate=True).connect() as connection:
        watcher = await asyncpg.connect(url)
        try:

            async def depth() -> tuple[int, int]:
                rows = await watcher.fetch(
                    "select c.queue, count(*) from streamfw.message m join streamfw.consumer c on c.id = m.consumer"
                    " group by 1"
                )
                counts = {row[0]: row[1] for row in rows}
                return counts.get(QUEUE, 0), counts.get(f"{QUEUE}.dead", 0)

            yield connection, depth
        finally:
            await watcher.close()
