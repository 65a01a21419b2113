"""The demo: publish, watch, kill a worker, compare.

The service runs in two processes, and one of them is killed half way. Its subscription is ordered: on Postgres and
RabbitMQ one process handles the messages and the other stands by, on Kafka each has its partitions. On memory all is in
this process, and nothing is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from streamfw import App, DeadLetters, Message
from streamfw.broker import Subscription

from .report import Report, make_report
from .sqlite_store import open_sqlite_store
from .store import Store
from .traffic import Webhook, load, publish
from .workers import Workers, running_workers

__all__ = ["DemoFailed", "demo", "progress_bar"]

QUEUES: Final = "webhooks_example_queues"  # the broker's schema, the demo's own: nothing else is touched
LEASE: Final = 5  # seconds until the messages of a dead worker are free
SESSION: Final = 6  # seconds until Kafka believes a worker dead: what its servers allow at least
PATIENCE: Final = 30.0  # seconds without progress


class DemoFailed(Exception):
    """It did not come to an end."""


class Running(msgspec.Struct):
    """The service at work: the app that publishes to it, its store, its processes (None: this one), the name that it
    subscribes to, and when the messages of a killed worker come to the other."""

    publisher: App
    store: Store
    workers: Workers | None = None
    name: str = "webhooks"
    taken_over: str = ""


async def demo(broker: str, rounds: int, console: Console, progress: Progress) -> Report:
    """Run it all. Raises `DemoFailed` when the messages do not come to an end, `ExceptionGroup` for a wrong URL."""
    description = App(brokers={"default": broker}).build().brokers["default"].describe()
    webhooks = load(rounds)
    async with running_on(broker, description) as running:
        if running.workers is None:
            console.print("On memory everything is in one process, so no worker is killed.")
        letters = await running.publisher.connection().dead_letters(f"{running.name}.dead")
        publishing = asyncio.ensure_future(publish(running.publisher, running.name, webhooks))
        try:
            await watch(running, webhooks, letters, publishing, console, progress)
            await publishing
        finally:
            publishing.cancel()
        if running.workers is not None:
            await running.workers.stop()
        killed = running.workers.killed if running.workers else None
        return await make_report(description, webhooks, running.store, await dead(letters), killed)


def running_on(broker: str, description: str) -> AbstractAsyncContextManager[Running]:
    if broker.startswith("memory:"):
        return running_on_memory(broker)
    if broker.startswith("postgres"):
        return running_on_postgres(broker, description)
    return running_on_a_file(broker)


@asynccontextmanager
async def running_on_memory(broker: str) -> AsyncIterator[Running]:
    """The service in this process."""
    logging.getLogger("streamfw").setLevel(logging.ERROR)  # what failed and was tried again is in the table
    os.environ["STREAMFW_BROKERS__DEFAULT__URL"] = broker
    from .service import app  # reads the environment

    async with app.running():
        (store,) = app.state
        assert isinstance(store, Store)
        yield Running(app, store)


@asynccontextmanager
async def running_on_postgres(broker: str, description: str) -> AsyncIterator[Running]:
    """The service in two processes, over tables that are new."""
    import asyncpg

    from .postgres_store import SCHEMA, drop, open_pool, open_postgres_store

    environment = {
        "STREAMFW_BROKERS__DEFAULT__URL": broker,
        "STREAMFW_BROKERS__DEFAULT__SCHEMA": QUEUES,
        "STREAMFW_BROKERS__DEFAULT__AUTO_MIGRATE": "true",
        "STREAMFW_BROKERS__DEFAULT__LEASE": str(LEASE),
        "STREAMFW_WAIT": "10",  # seconds for a server that is away at start
    }
    os.environ.update(environment)
    async with AsyncExitStack() as stack:
        try:
            pool = await stack.enter_async_context(open_pool(broker))
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise DemoFailed(f"{description} cannot be reached: {error}") from error
        await drop(pool, SCHEMA, QUEUES)
        store = await stack.enter_async_context(open_postgres_store(broker))
        publisher = await stack.enter_async_context(App(name="github").running())
        workers = await stack.enter_async_context(running_workers(2, environment))
        taken_over = f"when its lease of {LEASE} s has ended"
        yield Running(publisher, store, workers, taken_over=taken_over)


@asynccontextmanager
async def running_on_a_file(broker: str) -> AsyncIterator[Running]:
    """The service in two processes, on a broker that keeps no tables: its summary is in a new file, and the name it
    subscribes to is new as well, so that nobody else's messages are touched."""
    name = f"webhooks-example-{os.urandom(4).hex()}"
    environment = {
        "STREAMFW_BROKERS__DEFAULT__URL": broker,
        "STREAMFW_WAIT": "10",  # seconds for a server that is away at start
        "WEBHOOKS_NAME": name,
    }
    taken_over = "at once"
    if broker.startswith("kafka"):
        environment["STREAMFW_BROKERS__DEFAULT__SESSION_TIMEOUT"] = str(SESSION)
        taken_over = f"when its session of {SESSION} s has ended"
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(TemporaryDirectory(prefix="webhooks-demo-"))
        environment["WEBHOOKS_STORE"] = str(Path(directory) / "store.sqlite")
        os.environ.update(environment)
        store = await stack.enter_async_context(open_sqlite_store(environment["WEBHOOKS_STORE"]))
        publisher = await stack.enter_async_context(App(name="github").running())
        await register(publisher, name)
        workers = await stack.enter_async_context(running_workers(2, environment))
        yield Running(publisher, store, workers, name=name, taken_over=taken_over)


async def register(publisher: App, name: str) -> None:
    """Let the service's group be known before it runs: where nothing is kept for groups to come, a publish before that
    would be refused. (And the dead letters' topic or queue is there, for whoever looks at it.)"""
    subscription = Subscription(name, "webhooks", ordered_by="key", dead_letter=f"{name}.dead", attempts=5)
    source = await publisher.connection().open(subscription)
    await source.close()


async def watch(
    running: Running,
    webhooks: list[Webhook],
    letters: DeadLetters,
    publishing: asyncio.Future[None],
    console: Console,
    progress: Progress,
) -> None:
    """Show how many came to an end, until all did; kill a worker half way."""
    loop = asyncio.get_running_loop()
    task = progress.add_task("handling webhooks", total=len(webhooks))
    ended, seen_at = 0, loop.time()
    while ended < len(webhooks):
        await asyncio.sleep(0.1)
        stored = await running.store.count()
        if running.workers is not None:  # before the dead letters are looked at, which may take its time
            await kill_half_way(running.workers, running, stored, len(webhooks) - 1, console)
        now = stored + len(await dead(letters))
        if now > ended:
            ended, seen_at = now, loop.time()
            progress.update(task, completed=ended)
        if publishing.done():
            publishing.result()
        if loop.time() - seen_at > PATIENCE:
            said = f"\n{running.workers.said()}" if running.workers is not None else ""
            raise DemoFailed(f"{ended} of {len(webhooks)} webhooks, and no more within {PATIENCE:g} s{said}")


async def kill_half_way(workers: Workers, running: Running, stored: int, expected: int, console: Console) -> None:
    """Kill the worker that handles the messages, once, when half of them are done, in the middle of one (or, where the
    machine was too slow to look in time, after the last)."""
    store, taken_over = running.store, running.taken_over
    if words := workers.failed():
        raise DemoFailed(words)
    if stored < expected / 2 or workers.killed is not None:
        return

    async def at_work() -> int:
        worker = await store.last_worker()
        assert worker is not None, "half of the webhooks were stored by somebody"
        return worker

    async def busy(worker: int) -> bool:
        return await store.unfinished(worker) > 0 or await store.count() >= expected

    async with asyncio.timeout(PATIENCE):
        worker = await workers.kill(at_work, busy)
    console.print(f"Worker {worker} is killed (SIGKILL); the other takes over {taken_over}.")


async def dead(letters: DeadLetters) -> list[Message]:
    return list(await letters.list(1000))


def progress_bar(console: Console, disable: bool) -> Progress:
    """A bar that shows how many webhooks came to an end."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console, disable=disable)
