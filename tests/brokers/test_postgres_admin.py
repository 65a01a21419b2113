"""For the operator: dead letters and status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from streamfw.message import ERROR, Headers
from streamfw.outcome import DeadLetter, Retry
from streamfw_postgres.migrations import MIGRATIONS
from tests.services.postgres import Postgres

from .postgres_kit import Kit, bodies, fetch, kit, outgoing, settle


@pytest.fixture
async def on(database: Postgres) -> AsyncIterator[Kit]:
    async with kit(database) as made:
        yield made


async def _dead(on: Kit, *names: bytes, group: str = "g", headers: Headers | None = None) -> list[str]:
    source = await on.open("q", group, dead_letter="q.dead")
    messages = [outgoing("q", name, key="k", headers=headers or Headers(), priority=3) for name in names]
    await on.connection.publish(messages)
    await settle(source, *[(d, DeadLetter("no")) for d in await fetch(source, 1000)])
    await source.close()
    return [m.message_id for m in messages]


async def test_listing_takes_nothing_away(on: Kit) -> None:
    ids = await _dead(on, b"1", b"2", b"3")
    letters = await on.connection.dead_letters("q.dead")
    for _ in range(2):
        assert [m.message_id for m in await letters.list(2)] == ids[:2]
    listed = await letters.list()
    assert [(m.body, m.key, m.headers[ERROR]) for m in listed] == [(b, "k", "no") for b in (b"1", b"2", b"3")]


async def test_requeue_restores_the_message_for_the_group_that_failed(on: Kit) -> None:
    await on.open("q", "other")
    sent = Headers([("z", "1"), ("a", b"\xff"), ("a", "2")])
    (message_id,) = await _dead(on, b"1", headers=sent)
    letters = await on.connection.dead_letters("q.dead")
    assert await letters.requeue([message_id, "unknown"]) == 1
    source = await on.open("q", "g")
    (back,) = await fetch(source)
    assert (back.body, back.key, back.attempt, back.message_id, back.priority) == (b"1", "k", 1, message_id, 3)
    assert back.headers.pairs == sent.pairs
    assert await letters.list() == []
    assert len(await fetch(await on.open("q", "other"))) == 1  # its own copy, not another


async def test_requeue_all_in_batches_exactly_once_also_by_two_persons(on: Kit, database: Postgres) -> None:
    for part in range(3):
        await _dead(on, *[f"{part} {n}".encode() for n in range(400)])
    source = await on.open("q", "g")
    letters = await on.connection.dead_letters("q.dead")
    async with kit(database) as other:
        counts = await asyncio.gather(letters.requeue(), (await other.connection.dead_letters("q.dead")).requeue())
    assert sum(counts) == 1200
    got: list[bytes] = []
    while len(got) < 1200:
        batch = await fetch(source, 2000)
        got += bodies(batch)
        await settle(source, *[(d, Retry(600)) for d in batch])
    assert len(got) == 1200
    assert await on.count() == 1200


async def test_requeue_of_a_group_that_is_gone_waits_for_it(on: Kit) -> None:
    await _dead(on, b"1", group="gone")
    await on.open("q", "other")
    await on.sql.execute("select streamfw.remove_group('q', 'gone')")
    assert await (await on.connection.dead_letters("q.dead")).requeue() == 1
    assert bodies(await fetch(await on.open("q", "gone"))) == [b"1"]


async def test_what_has_no_origin_stays(on: Kit) -> None:
    await on.publish("q.dead", b"by hand")
    letters = await on.connection.dead_letters("q.dead")
    assert await letters.requeue() == 0
    assert len(await letters.list()) == 1


async def test_dead_letters_in_work_are_left_alone(on: Kit) -> None:
    await _dead(on, b"1", b"2")
    source = await on.open("q.dead", "fixer")
    (taken,) = await fetch(source, 1)
    letters = await on.connection.dead_letters("q.dead")
    assert await letters.requeue() == 1
    assert await letters.purge() == 0
    assert await settle(source, (taken, Retry(0))) == []
    assert await letters.purge() == 1


async def test_purge_some_and_all(on: Kit) -> None:
    ids = await _dead(on, b"1", b"2", b"3")
    letters = await on.connection.dead_letters("q.dead")
    assert await letters.purge(ids[1:2]) == 1
    assert bodies(await letters.list()) == [b"1", b"3"]  # type: ignore[arg-type]
    assert await letters.purge() == 2
    assert await letters.purge() == 0


async def test_status(on: Kit) -> None:
    await _dead(on, b"dead")
    source = await on.open("q", "g")
    await on.connection.publish([outgoing("q", b"work"), outgoing("q", b"again"), outgoing("q", b"ready")])
    first = await fetch(source, 2)
    await settle(source, (first[1], Retry(0)))
    await on.publish("q", b"later", delay=60)
    await on.publish("early", b"1")
    status = await on.connection.status()
    queues = {(s.queue, s.group): s for s in status.queues}
    q = queues["q", "g"]
    assert (q.ready, q.delayed, q.in_work, q.retried, q.dead, q.owned) == (2, 1, 1, 0, 1, False)
    assert 0 < q.oldest < 60
    assert queues["early", ""].ready == 1
    assert queues["q.dead", ""].ready == 1
    assert status.table.version == MIGRATIONS[-1].version
    assert status.table.bytes > 0
    async with on.sql.transaction(isolation="repeatable_read"):
        await on.sql.fetchval("select 1")
        assert (await on.connection.status()).table.oldest_transaction > 0


async def test_what_fails_again_while_it_is_put_back_is_not_put_back_twice(
    on: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that runs dead-letters it again at once."""
    await _dead(on, b"1", b"2")
    letters = await on.connection.dead_letters("q.dead")
    monkeypatch.setattr("streamfw_postgres.deadletters._BATCH", 1)
    requeued = letters._requeued  # type: ignore[attr-defined]

    async def and_again(*args: object) -> object:
        answer = await requeued(*args)
        source = await on.open("q", "g", dead_letter="q.dead")
        waits = (
            "select exists (select from streamfw.message join streamfw.consumer c on c.id = consumer where queue = 'q')"
        )
        if await on.sql.fetchval(waits):
            await settle(source, *[(d, DeadLetter("again")) for d in await fetch(source)])
        await source.close()
        return answer

    letters._requeued = and_again  # type: ignore[attr-defined]
    assert await letters.requeue() == 2
    assert {m.headers[ERROR] for m in await letters.list()} == {"again"}
