"""Waking up: in process, by NOTIFY, by the poll; what an idle and a busy subscriber send."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from streamfw.broker import Delivery, Settlement
from streamfw.outcome import ACK, Retry
from streamfw_postgres.lease import LeaseSource
from streamfw_postgres.notify import Wakes, channel_of
from tests.helpers import eventually
from tests.services.postgres import Postgres

from .postgres_kit import BIG, Kit, ack, bodies, fetch, kit, outgoing, settle


@pytest.fixture
async def on(database: Postgres) -> AsyncIterator[Kit]:
    async with kit(database, poll=30) as made:  # nothing below may wait for the poll
        yield made


async def _waiting(source: LeaseSource) -> asyncio.Task[Sequence[Delivery]]:
    """A fetch that has found nothing and waits."""
    pending = asyncio.create_task(source.fetch(10, BIG))
    await eventually(lambda: not source._look and bool(source._signal._waiters))
    return pending


async def test_a_publish_in_the_process_wakes_at_once(on: Kit) -> None:
    source = await on.open("q")
    pending = await _waiting(source)
    await on.publish("q", b"1")
    assert len(await asyncio.wait_for(pending, 5)) == 1


async def test_also_by_another_connection_of_the_process(on: Kit, database: Postgres) -> None:
    async with kit(database, poll=30) as other:
        assert on.connection._wakes is other.connection._wakes
        source = await on.open("q")
        pending = await _waiting(source)
        await other.publish("q", b"1")
        assert len(await asyncio.wait_for(pending, 5)) == 1


@pytest.mark.parametrize("name", ["q", "ü" * 1000, "x" * 2600, "#=,"])
async def test_a_notification_wakes_from_another_process(on: Kit, database: Postgres, name: str) -> None:
    async with kit(database, poll=30) as other:
        other.connection._wakes = Wakes()  # as in another process
        source = await on.open(name)
        assert on.connection._listener is not None
        await on.connection._listener.listening.wait()
        pending = await _waiting(source)
        await other.publish(name, b"1")
        assert len(await asyncio.wait_for(pending, 5)) == 1
        await ack(source, await pending)
        pending = await _waiting(source)
        await other.publish(name, b"2", delay=0.2)
        assert len(await asyncio.wait_for(pending, 5)) == 1


async def test_what_nobody_here_notified_wakes_everybody(on: Kit) -> None:
    source = await on.open("q")
    assert on.connection._listener is not None
    await on.connection._listener.listening.wait()
    pending = await _waiting(source)
    await on.sql.execute("select streamfw.publish('q', 'x')")
    await on.sql.execute("select pg_notify($1, '')", channel_of("streamfw"))
    assert len(await asyncio.wait_for(pending, 5)) == 1


async def test_notifications_are_bundled_and_the_last_one_is_kept(on: Kit, database: Postgres) -> None:
    async with kit(database) as other:
        other.connection._wakes = Wakes()
        heard: list[str] = []
        await on.sql.add_listener(channel_of("streamfw"), lambda *args: heard.append(str(args[3])))
        for n in range(50):
            await other.publish("q", str(n).encode())
        last = heard[:]
        await eventually(lambda: other.connection._notifier._task is None)
        assert heard[0] == "n=q"
        assert len(last) <= len(heard) < 50


async def test_a_subscriber_works_by_the_poll_alone(database: Postgres) -> None:
    async with kit(database, poll=0.1) as on:
        source = await on.open("q")
        pending = await _waiting(source)
        await on.sql.execute("select streamfw.publish('q', 'x')")
        assert len(await asyncio.wait_for(pending, 5)) == 1


async def test_a_delay_ends_by_its_own_timer_never_early(on: Kit) -> None:
    source = await on.open("q")
    pending = await _waiting(source)
    began = time.monotonic()
    await on.publish("q", b"1", delay=0.3)
    got = await asyncio.wait_for(pending, 10)
    assert time.monotonic() - began >= 0.3
    began = time.monotonic()
    await settle(source, (got[0], Retry(0.3)))
    assert len(await asyncio.wait_for(source.fetch(10, BIG), 10)) == 1
    assert time.monotonic() - began >= 0.3


async def test_many_due_at_once_all_come(on: Kit) -> None:
    source = await on.open("q")
    await on.connection.publish([outgoing("q", delay=0.05) for _ in range(2500)])
    got = 0
    while got < 2500:
        batch = await asyncio.wait_for(fetch(source, 1000), 10)
        got += len(batch)
        await ack(source, batch)
    assert await on.count() == 0


async def test_an_idle_subscriber_sends_at_most_one_statement_a_second(database: Postgres) -> None:
    async with kit(database) as on:
        for order in (None, "key"):
            source = await on.open(f"q {order}", ordered_by=order)
            pending = await _waiting(source)
            before, began = on.connection.sent, time.monotonic()
            await _sent(on, before + 3)
            assert time.monotonic() - began >= 2.0
            await source.stop()
            await pending
            await source.close()


async def _sent(on: Kit, statements: int) -> None:
    await eventually(lambda: on.connection.sent >= statements, 20)


async def test_a_full_subscriber_sends_at_most_2_2_statements_per_100_messages(on: Kit) -> None:
    source = await on.open("q")
    for _ in range(4):
        await on.connection.publish([outgoing("q") for _ in range(1000)])
    before, got = source.sent, 0
    while got < 4000:
        batch = await source.fetch(100, BIG)
        got += len(batch)
        await source.settle([Settlement(d, ACK) for d in batch])
    assert source.sent - before <= 4000 / 100 * 2.2


async def test_a_listener_that_went_deaf_is_replaced_and_wakes_everybody(
    on: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamfw_postgres.notify.CHECK_EVERY", 0.05)
    source = await on.open("q")
    listener = on.connection._listener
    assert listener is not None
    await listener.listening.wait()
    pid = listener._role.pid
    await listener._role.fetch("unlisten *")
    pending = await _waiting(source)
    await on.sql.execute("select streamfw.publish('q', 'x')")
    assert bodies(await asyncio.wait_for(pending, 5)) == [b"x"]
    assert listener._role.pid != pid
