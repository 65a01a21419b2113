"""The Postgres lease form against what one would write by hand with the very same statements."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from benchmarks.apps import Gate, all_settled
from benchmarks.harness import Case, Goal, Sample, Scenario, Window
from benchmarks.jobs import BODY, fresh
from benchmarks.loops import run
from benchmarks.queue import (
    GROUP,
    NAME,
    Job,
    Queue,
    drain_by_hand,
    publish_by_hand,
    server,
    settings_of,
    statements_sent,
)
from streamfw import App, subscriber
from streamfw.message import Outgoing, new_message_id
from streamfw_postgres import PostgresBroker
from streamfw_postgres.lease import LeaseSource

__all__ = ["scenario"]

ROWS, QUERIES, PUBLISHED = 50_000, 8_000, 20_000
WARM = 100  # messages before the window opens: statements are prepared, pages and plans are cached; one fetch
HAND, HAND_500, HAND_HINT = "by hand, claims of 200", "by hand, claims of 500", "by hand, claims of 200, with a hint"
QUERY_HAND = "by hand, claims of 200, a query each"
UNNEST = "by hand, publish by 100"
APP_8 = "app, workers=8"
Handler = Callable[[Job], Awaitable[None]]


async def noop(job: Job) -> None: ...


def scenario(loop: str) -> Scenario:
    """The scenario on one loop."""

    facts: dict[str, str] = {}

    @contextmanager
    def cases() -> Iterator[Sequence[Case]]:
        with server() as running:
            facts.update(run(settings_of(running.facts.dsn), loop))
            yield _Bench(running.facts.dsn, running.server.pid() or 0, loop).cases()

    return Scenario(
        name="postgres",
        title="Draining and filling a Postgres queue",
        about=(
            "The wheel's Postgres with fsync on, over a Unix socket; 50,000 standard messages of about 105 bytes. By "
            "hand: one connection that claims, handles and settles with the broker's own statements and session. CPU "
            "us is this process, server CPU all processes of Postgres, a message."
        ),
        cases=cases,
        facts=facts,
    )


@dataclass(frozen=True)
class _Bench:
    dsn: str
    pid: int
    loop: str

    def cases(self) -> list[Case]:
        def drained(at_least: float | None, reference: str, cpu: float | None = None) -> list[Goal]:
            return [
                Goal(measure="speed", reference=reference, at_least=at_least),
                Goal(measure="cpu", reference=reference, at_most=cpu),
            ]

        both = [*drained(1.2, HAND, 1.0), *drained(1.0, HAND_500), *drained(None, HAND_HINT)]
        for_query = [
            Goal(measure="speed", reference=QUERY_HAND, at_least=0.85),
            Goal(measure="cpu", reference=QUERY_HAND),
        ]
        return [
            self._by_hand(HAND, ROWS, 200),
            self._by_hand(HAND_500, ROWS, 500),
            self._by_hand(HAND_HINT, ROWS, 200, hint=True),
            self._app("app, workers=1", ROWS, both, workers=1),
            self._app(APP_8, ROWS, both, workers=8),
            self._app(
                "app, workers=8, a transaction held open elsewhere", ROWS,
                [Goal(measure="speed", reference=APP_8, at_least=0.5)], held=True, workers=8,
            ),
            self._case("app, workers=8, four processes", ROWS, lambda n: self._processes(n, 4),
                       [Goal(measure="speed", reference=APP_8)]),
            self._by_hand(QUERY_HAND, QUERIES, 200, query=True),
            self._app("app, workers=1, a query each", QUERIES, for_query, query=True, workers=1),
            self._app("app, workers=8, a query each", QUERIES,
                      [Goal(measure="speed", reference=QUERY_HAND)], query=True, workers=8),
            self._case(UNNEST, PUBLISHED, self._publish_by_hand, []),
            self._case("app, single publishes by 100 tasks", PUBLISHED, self._publish,
                       [Goal(measure="speed", reference=UNNEST, at_least=0.7), Goal(measure="cpu", reference=UNNEST)]),
        ]  # fmt: skip

    def _case(self, name: str, count: int, work: Callable[[int], Any], goals: Sequence[Goal]) -> Case:
        return Case(name=name, count=count, run=lambda n: run(work(n), self.loop), goals=goals)

    def _by_hand(self, name: str, count: int, batch: int, hint: bool = False, query: bool = False) -> Case:
        async def work(rows: int) -> Sample:
            async with (
                Queue.opened(self.dsn) as queue,
                queue.connection() as connection,
                _handler(queue, query, 1) as h,
            ):
                await queue.load(WARM)
                await drain_by_hand(connection, queue, WARM, h, batch, hint)
                await queue.load(rows)
                with Window(self.pid) as window:
                    await drain_by_hand(connection, queue, rows, h, batch, hint)
                await queue.all_gone()
            return window.sample(rows, **{"statements by 100": 2 * 100 / batch})

        return self._case(name, count, work, [])

    def _app(
        self, name: str, count: int, goals: Sequence[Goal], held: bool = False, query: bool = False, **options: Any
    ) -> Case:
        async def work(rows: int) -> Sample:
            async with AsyncExitStack() as stack:
                queue = await stack.enter_async_context(Queue.opened(self.dsn))
                handler = await stack.enter_async_context(_handler(queue, query, options["workers"]))
                await queue.load(WARM)
                marked = subscriber(NAME, group=GROUP, **options)(fresh(handler))
                app = App(marked, brokers={"default": PostgresBroker(self.dsn)})
                async with app.running():
                    source = app.pumps[0].source
                    assert isinstance(source, LeaseSource)
                    gate = Gate(source, passes=1)
                    await all_settled(app, WARM)
                    await queue.load(rows)
                    if held:
                        await stack.enter_async_context(queue.transaction_held_open())
                    before = statements_sent(app)
                    with Window(self.pid) as window:
                        gate.open()
                        source.wake()
                        await all_settled(app, rows)
                    sent = statements_sent(app) - before
                await queue.all_gone()
            return window.sample(rows, **{"statements by 100": sent * 100 / rows})

        return self._case(name, count, work, goals)

    async def _processes(self, rows: int, processes: int) -> Sample:
        async with Queue.opened(self.dsn) as queue, AsyncExitStack() as stack:
            await queue.load(rows)
            command = [sys.executable, "-m", "benchmarks.drainer", self.loop, "8"]
            pipe = asyncio.subprocess.PIPE
            started = [
                await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe) for _ in range(processes)
            ]
            for process in started:
                stack.push_async_callback(_ended, process)
                assert process.stdout is not None
                assert process.stdin is not None
                process.stdin.write(f"{self.dsn}\n".encode())
                assert await process.stdout.readline() == b"ready\n", "a process could not start"
            with Window(self.pid, [process.pid for process in started]) as window:
                for process in started:
                    assert process.stdin is not None
                    process.stdin.write(b"go\n")
                while await queue.left():  # noqa: ASYNC110 - only the server knows when all of them are done
                    await asyncio.sleep(0.005)
            said = [await _ended(process) for process in started]
        handled = sorted(int(one) for text in said for one in text.split())
        if handled != list(range(1, rows + 1)):
            raise AssertionError(f"{len(handled)} messages handled, {len(set(handled))} different, of {rows}")
        return window.sample(rows, **{"least by one process": min(len(text.split()) for text in said)})

    async def _publish_by_hand(self, count: int) -> Sample:
        async with Queue.opened(self.dsn) as queue, queue.connection() as connection:
            await queue.load(0)
            messages = [Outgoing(name=NAME, body=BODY, message_id=new_message_id()) for _ in range(count)]
            await publish_by_hand(connection, messages[:WARM], 100)
            with Window(self.pid) as window:
                await publish_by_hand(connection, messages, 100)
            await _all_there(queue, count + WARM)
        return window.sample(count, **{"statements by 100": 1.0})

    async def _publish(self, count: int) -> Sample:
        async with Queue.opened(self.dsn) as queue:
            await queue.load(0)
            app = App(brokers={"default": PostgresBroker(self.dsn)})
            async with app.running():

                async def publish(times: int) -> None:
                    for _ in range(times):
                        await app.publish(NAME, BODY)

                await asyncio.gather(*(publish(1) for _ in range(WARM)))
                before = statements_sent(app)
                with Window(self.pid) as window:
                    await asyncio.gather(*(publish(count // 100) for _ in range(100)))
                sent = statements_sent(app) - before
            await _all_there(queue, count + WARM)
        return window.sample(count, **{"statements by 100": sent * 100 / count})


@asynccontextmanager
async def _handler(queue: Queue, query: bool, workers: int = 1) -> Any:
    """The no-op, or one that makes a query on a connection of its own, about 100 us."""
    if not query:
        yield noop
        return
    async with AsyncExitStack() as stack:
        free: list[asyncpg.prepared_stmt.PreparedStatement] = []
        for _ in range(workers):
            connection = await stack.enter_async_context(queue.connection())
            free.append(await connection.prepare("select $1::bigint"))

        async def ask(job: Job) -> None:
            statement = free.pop()
            try:
                await statement.fetch(job.id)
            finally:
                free.append(statement)

        yield ask


async def _ended(process: asyncio.subprocess.Process) -> bytes:
    """End its input, and wait for the rest of what it says."""
    if process.stdin is not None:
        process.stdin.close()
    return (await process.communicate())[0]


async def _all_there(queue: Queue, count: int) -> None:
    if (found := await queue.count()) != count:
        raise AssertionError(f"{found} rows of {count} were published")
