"""Transports cut under a running app: connections reset or swallowed, backends terminated, the server restarted or
killed, while one app publishes and handles messages through all of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import asyncpg
import msgspec

from streamfw import App, Attempt, Message, OutcomeUnknown, PublishError, subscriber
from streamfw.message import new_message_id
from streamfw_postgres import PostgresBroker
from streamfw_postgres.queue import Form
from tests.faults.ledger import Ledger, Verdict, judge, recorded
from tests.faults.pace import Pace
from tests.helpers import eventually
from tests.services.postgres import OwnPostgres
from tests.services.proxy import Proxy

__all__ = ["CutRun", "cut_run"]

LEASE = 4.0
QUEUE = "cuts"


class Work(msgspec.Struct):
    number: int


@dataclass(slots=True)
class CutRun:
    verdict: Verdict
    faults: Counter[str]
    unknown: int
    refused: int
    unhealthy_seen: bool
    seconds: float


async def cut_run(
    server: OwnPostgres, directory: Path, *, seed: int, messages: int, faults: int, form: str = "lease"
) -> CutRun:
    """Publish `messages` one by one while `faults` faults happen; end when everything published is settled. `form` as
    for the workers (``worker.py``)."""
    began = time.monotonic()
    ledger = Ledger(directory / "app.log")
    facts = server.facts.over_tcp()
    async with Proxy.to_tcp(facts.host, facts.port) as proxy:
        url = facts.at(proxy.host, proxy.port).dsn
        held: Form = "lease" if form == "lease" else "rowlock"
        broker = PostgresBroker(url, form=held, lease=LEASE, auto_migrate=True, command_timeout=3.0)

        @subscriber(QUEUE, workers=8, attempts=1000 if form == "journal" else None)
        async def handle(work: Work, message: Message, attempt: Annotated[int, Attempt]) -> None:
            ledger.started(message.message_id, attempt)
            if work.number % 3 == 0:
                await asyncio.sleep(0.002)

        app = App(handle, name="cuts", brokers={"default": recorded(broker, ledger)}, drain_timeout=10)
        async with app.running():
            run = _Run(app, server, proxy, random.Random(seed), Pace(messages, faults))
            await asyncio.gather(run.publish(messages), run.harm(faults))
            await run.settled()
    # A lost connection takes its claim with it at once; a lease outlives it.
    over = LEASE if held == "lease" else 0.0
    verdict = judge(
        directory,
        run.published,
        set(),
        maybe=run.maybe,
        lease=over,
        counted=form != "rowlock",
        crashes=run.crashes if held == "rowlock" else (),
    )
    return CutRun(verdict, run.faults, len(run.maybe), run.refused, run.unhealthy_seen, time.monotonic() - began)


class _Run:
    def __init__(self, app: App, server: OwnPostgres, proxy: Proxy, chance: random.Random, pace: Pace) -> None:
        self.app, self.server, self.proxy, self.chance, self.pace = app, server, proxy, chance, pace
        self.published: set[str] = set()
        self.maybe: set[str] = set()
        self.refused = 0
        self.faults: Counter[str] = Counter()
        self.unhealthy_seen = False
        self.crashes: list[int] = []

    async def publish(self, messages: int) -> None:
        for number in range(messages):
            await self.pace.turn(number)
            await self._publish_one(number)

    async def _publish_one(self, number: int) -> None:
        identity = new_message_id()
        while True:
            try:
                await self.app.publish(QUEUE, Work(number), message_id=identity)
            except OutcomeUnknown:
                self.maybe.add(identity)  # it may be stored: to publish it again is what an inbox is for
                return
            except PublishError:
                self.refused += 1
                await asyncio.sleep(0.05)
                continue
            self.published.add(identity)
            return

    async def harm(self, faults: int) -> None:
        kinds: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            *[("connections reset", self._cut)] * 13,
            *[("backend terminated", self._terminate)] * 4,
            ("network swallowed", self._swallow),
            ("server restarted", self._restart),
            ("server killed (SIGKILL)", self._kill),
        ]
        plan = [kinds[number % len(kinds)] for number in range(faults)]
        self.chance.shuffle(plan)
        for name, fault in plan:
            await asyncio.sleep(self.chance.uniform(0.02, 0.3))
            await fault()
            self.faults[name] += 1
            self.pace.fault_is_over()
            self.unhealthy_seen = self.unhealthy_seen or not self.app.health().ok

    async def _cut(self) -> None:
        self.proxy.cut()

    async def _terminate(self) -> None:
        connection = await asyncpg.connect(self.server.facts.dsn)
        try:
            rows = await connection.fetch(
                "select pid from pg_stat_activity where application_name like 'streamfw%' and pid <> pg_backend_pid()"
            )
            if rows:
                await connection.execute("select pg_terminate_backend($1)", self.chance.choice(rows)[0])
        finally:
            await connection.close()

    async def _swallow(self) -> None:
        self.proxy.black_hole()
        await asyncio.sleep(self.chance.uniform(0.2, 3.5))
        self.proxy.cut()  # what was swallowed long enough does not come back
        self.proxy.resume()

    async def _restart(self) -> None:
        await asyncio.to_thread(self.server.restart)

    async def _kill(self) -> None:
        await asyncio.to_thread(self.server.kill)
        self.crashes.append(time.monotonic_ns())
        # An idle app finds out with its next poll.
        await eventually(lambda: not self.app.health().ok, 5.0, "health tells that the server is away")
        self.unhealthy_seen = True
        await asyncio.to_thread(self.server.start)

    async def settled(self) -> None:
        """Wait until the queue is empty and the app healthy again."""
        connection = await asyncpg.connect(self.server.facts.dsn)
        try:
            end = time.monotonic() + 60
            while await connection.fetchval("select count(*) from streamfw.message") or not self.app.health().ok:
                if time.monotonic() > end:
                    left = await connection.fetch("select id, attempt, token, lease_until::text from streamfw.message")
                    raise AssertionError(f"not settled: {left[:5]}, {self.app.health()}")
                await asyncio.sleep(0.1)
        finally:
            await connection.close()
