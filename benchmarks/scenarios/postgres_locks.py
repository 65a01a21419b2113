"""The Postgres row lock form against what one would write by hand with the very same statements."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import msgspec

from benchmarks.apps import Gate
from benchmarks.harness import Case, Goal, Sample, Scenario, Window
from benchmarks.jobs import fresh
from benchmarks.loops import run
from benchmarks.queue import GROUP, MAX_BODY, NAME, Job, server, statements_sent
from benchmarks.queue import Queue as Table
from streamfw import App, subscriber
from streamfw_postgres import PostgresBroker, Queue
from streamfw_postgres.holding import HeldClaim
from streamfw_postgres.lock_sql import LockStatements
from streamfw_postgres.rowlock import RowLockSource
from streamfw_postgres.sql import LAST

__all__ = ["scenario"]

ROWS = 50_000
WARM = 100  # messages before the window opens, one fetch: statements are prepared, pages and plans are cached
HAND, HAND_500, HAND_HINT = "by hand, claims of 200", "by hand, claims of 500", "by hand, claims of 200, with a hint"
SQL = LockStatements()


async def noop(job: Job) -> None: ...


def scenario(loop: str) -> Scenario:
    """The scenario on one loop."""

    @contextmanager
    def cases() -> Iterator[Sequence[Case]]:
        with server() as running:
            yield _Bench(running.facts.dsn, running.server.pid() or 0, loop).cases()

    return Scenario(
        name="postgres_locks",
        title="Draining a Postgres queue by row locks",
        about=(
            "The wheel's Postgres with fsync on, over a Unix socket; 50,000 standard messages of about 105 bytes. By "
            "hand: one connection that locks, handles, deletes and commits, with the broker's own statements and "
            "session. A window ends with the last commit. CPU us is this process, server CPU all processes of "
            "Postgres, a message."
        ),
        cases=cases,
        facts={"Postgres": "18 (wheel)", "fsync": "on", "autovacuum": "off"},
    )


@dataclass(frozen=True)
class _Bench:
    dsn: str
    pid: int
    loop: str

    def cases(self) -> list[Case]:
        def goals(at_least: float) -> list[Goal]:
            return [
                Goal(measure="speed", reference=HAND, at_least=at_least),
                Goal(measure="cpu", reference=HAND),
                Goal(measure="speed", reference=HAND_500),
                Goal(measure="speed", reference=HAND_HINT),
            ]

        return [
            self._by_hand(HAND, 200),
            self._by_hand(HAND_500, 500),
            self._by_hand(HAND_HINT, 200, hint=True),
            self._app("app, workers=1", goals(1.5), workers=1),
            self._app("app, workers=8", goals(1.5), workers=8),
            self._app("app, workers=1, attempts=5", goals(1.1), workers=1, attempts=5),
            self._app("app, workers=8, attempts=5", goals(1.1), workers=8, attempts=5),
        ]

    def _by_hand(self, name: str, batch: int, hint: bool = False) -> Case:
        async def work(rows: int) -> Sample:
            async with Table.opened(self.dsn) as table, table.connection() as connection:
                await table.load(WARM)
                await _drain_by_hand(connection, table, WARM, noop, batch, hint)
                await table.load(rows)
                with Window(self.pid) as window:
                    await _drain_by_hand(connection, table, rows, noop, batch, hint)
                await table.all_gone()
            return window.sample(rows, **{"statements by 100": 3 * 100 / batch})

        return Case(name=name, count=ROWS, run=lambda n: run(work(n), self.loop))

    def _app(self, name: str, goals: Sequence[Goal], **options: Any) -> Case:
        async def work(rows: int) -> Sample:
            async with Table.opened(self.dsn) as table:
                await table.load(WARM)
                marked = subscriber(Queue(NAME, form="rowlock"), group=GROUP, **options)(fresh(noop))
                app = App(marked, brokers={"default": PostgresBroker(self.dsn)})
                async with app.running():
                    source = app.pumps[0].source
                    assert isinstance(source, RowLockSource)
                    gate = Gate(source, passes=1)
                    await _all_committed(source, WARM)
                    await table.load(rows)
                    before = statements_sent(app)
                    with Window(self.pid) as window:
                        gate.open()
                        source.wake()
                        await _all_committed(source, rows)
                    sent = statements_sent(app) - before
                await table.all_gone()
            return window.sample(rows, **{"statements by 100": sent * 100 / rows})

        return Case(name=name, count=ROWS, run=lambda n: run(work(n), self.loop), goals=goals)


async def _drain_by_hand(
    connection: asyncpg.Connection,
    table: Table,
    rows: int,
    handler: Callable[[Job], Awaitable[None]],
    batch: int,
    hint: bool,
) -> None:
    """One connection: lock, decode, handle, delete, commit; with the broker's own statements."""
    decode = msgspec.json.Decoder(Job).decode
    done = low = 0
    await connection.execute("begin")
    while done < rows:
        ranges = ([0], [low], [LAST]) if hint else ([-LAST], [0], [LAST])
        got = await connection.fetch(SQL.claim, table.consumer, batch, MAX_BODY, *ranges)
        ids = []
        for row in got:
            await handler(decode(row[8]))
            ids.append(row[0])
        await connection.fetch(SQL.done, ids)
        await connection.execute("commit and chain")
        low = max(ids)
        done += len(ids)
    await connection.execute("commit")


async def _all_committed(source: RowLockSource, count: int) -> None:
    """Wait until the claims of `count` more have been committed."""
    left, finished = count, asyncio.Event()

    def ended(claim: HeldClaim) -> None:
        nonlocal left
        left -= len(claim.finished)
        if left <= 0:
            finished.set()

    source.ended = ended  # type: ignore[method-assign]
    await finished.wait()
