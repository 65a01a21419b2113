"""The journal of attempts: what a claim by row locks leaves behind when its process dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from streamfw.message import ERROR_TYPE
from streamfw.outcome import ACK, Retry
from streamfw_postgres import suspects
from streamfw_postgres.lock_sql import LockStatements
from streamfw_postgres.rowlock import RowLockSource
from tests.helpers import eventually
from tests.services.postgres import Postgres

from .postgres_kit import Kit, RecordingPump, abandon, ack, bodies, fetch, kit, outgoing, settle


@pytest.fixture
async def on(database: Postgres) -> AsyncIterator[Kit]:
    async with kit(database, form="rowlock", poll=0.1) as made:
        yield made


async def opened(on: Kit, name: str = "q", **options: Any) -> RowLockSource:
    source = await on.open(name, **{"attempts": 3, "dead_letter": "q.dead", **options})
    assert isinstance(source, RowLockSource)
    return source


async def journals(on: Kit) -> int:
    count: int = await on.sql.fetchval("select count(*) from streamfw.claim_journal")
    return count


async def abandoned(on: Kit, source: RowLockSource, limit: int = 100) -> list[bytes]:
    """What a source held when its process died."""
    held = bodies(await fetch(source, limit))
    before = await on.locked()
    await abandon(source)
    await eventually(lambda: _let_go(on, len(before) - len(held)))
    return held


async def _let_go(on: Kit, left: int) -> bool:
    return len(await on.locked()) == left


async def _empty(on: Kit) -> bool:
    return await on.count() == 0 and await journals(on) == 0


async def test_without_attempts_there_is_none(on: Kit) -> None:
    source = await opened(on, attempts=None)
    await on.publish("q", b"1")
    got = await fetch(source)
    assert await journals(on) == 0
    await ack(source, got)


async def test_it_is_there_before_a_handler_starts_and_ends_with_its_claim(on: Kit) -> None:
    source = await opened(on)
    await on.publish("q", b"1", b"2", b"3")
    first, second = await fetch(source, 2), await fetch(source, 1)
    rows = await on.sql.fetch("select ids, pg_xact_status(xid) as state from streamfw.claim_journal order by ids")
    assert [tuple(r) for r in rows] == [
        ([d.id for d in first], "in progress"),
        ([d.id for d in second], "in progress"),
    ]
    await ack(source, [*first, *second])
    await eventually(lambda: _empty(on))


async def test_it_ends_with_the_lease_that_counts_instead(on: Kit) -> None:
    source = await opened(on)
    await on.publish("q", b"1", b"2")
    got = await fetch(source)
    await ack(source, got[:1])
    await source.lease(got)
    assert await journals(on) == 0
    assert [tuple(r) for r in await on.rows("attempt, recovered")] == [(1, 0)]
    await abandon(source)
    await on.expire()
    (again,) = await fetch(await opened(on))
    assert again.attempt == 2


async def test_a_delivery_that_died_is_counted_before_the_next_one(on: Kit) -> None:
    """The claim looks itself: between two ticks the rows of the dead are free already."""
    source, other = await opened(on), await opened(on)
    await on.publish("q", b"0")
    await ack(other, await fetch(other))
    await eventually(lambda: _empty(on))
    await on.publish("q", b"1", b"2", b"3")
    assert await abandoned(on, source, 2) == [b"1", b"2"]
    other._tick_at = float("inf")
    other.wake()
    got = await asyncio.wait_for(fetch(other), 5)
    assert [(d.body, d.attempt) for d in got] == [(b"1", 2), (b"2", 2), (b"3", 1)]
    assert {tuple(r) for r in await on.rows("attempt, recovered")} == {(1, 1), (0, 0)}
    await ack(other, got)
    await eventually(lambda: _empty(on))


async def test_an_idle_source_folds_at_its_tick(on: Kit) -> None:
    source, other = await opened(on), await opened(on)
    await on.publish("q", b"1")
    (delivery,) = await fetch(source)
    await settle(source, (delivery, Retry(50)))
    await source.flush(asyncio.get_running_loop().time() + 5)
    await on.sql.execute("update streamfw.message set run_at = null")
    source.wake(rescan=True)
    assert await abandoned(on, source) == [b"1"]
    await on.sql.execute("update streamfw.message set run_at = now() + interval '1 min'")  # nothing to claim
    idle = asyncio.create_task(fetch(other))
    await eventually(lambda: _no_journal(on))
    assert [tuple(r) for r in await on.rows("attempt, recovered")] == [(2, 1)]
    await other.stop()
    await idle


async def _no_journal(on: Kit) -> bool:
    return await journals(on) == 0


async def test_claims_of_the_living_are_left_alone(on: Kit) -> None:
    source, other = await opened(on), await opened(on)
    await on.publish("q", b"1", b"2")
    one = await fetch(source, 1)
    assert other._journal is not None
    await other._journal.fold()
    assert await journals(on) == 1
    two = await fetch(other, 1)
    await ack(source, one)
    await ack(other, two)
    await eventually(lambda: _empty(on))


async def test_a_row_that_somebody_holds_is_counted_later(on: Kit) -> None:
    source, other = await opened(on), await opened(on)
    await on.publish("q", b"1", b"2")
    await abandoned(on, source)
    assert other._journal is not None
    async with on.sql.transaction():
        await on.sql.fetch("select from streamfw.message where body = '1' for update")
        await other._journal.fold()
        assert await journals(on) == 1
    assert [tuple(r) for r in await on.rows("body, attempt, recovered")] == [(b"1", 0, 0), (b"2", 1, 1)]
    await other._journal.fold()
    assert [tuple(r) for r in await on.rows("attempt, recovered")] == [(1, 1), (1, 1)]
    assert await journals(on) == 0


async def test_who_hangs_in_the_fold_does_not_stop_the_others(on: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamfw_postgres.rowlock._REFUSALS", 3)
    source, other = await opened(on), await opened(on)
    await on.publish("q", b"1")
    await abandoned(on, source)
    async with on.sql.transaction():
        await on.sql.fetch("select from streamfw.claim_journal for update")
        (delivery,) = await asyncio.wait_for(fetch(other), 5)
        assert delivery.attempt == 1
    await ack(other, [delivery])
    await other.flush(asyncio.get_running_loop().time() + 5)
    assert other._journal is not None
    await other._journal.fold()
    assert await _empty(on)


async def test_a_claim_that_nobody_saw_counts_nothing(on: Kit) -> None:
    """Its journal was written, and the answer did not arrive."""
    source = await opened(on)
    await on.publish("q", b"1")
    assert source._journal is not None
    note = source._journal._sql.note
    source._journal._sql.note = f"with n as ({note}) select 1 / 0 from n"

    from streamfw.errors import BrokerError

    with pytest.raises(BrokerError):
        await fetch(source)
    source._journal._sql.note = note
    (token,) = source._journal.void
    await on.sql.execute(
        "insert into streamfw.claim_journal select consumer, $1, pg_current_xact_id(), array[id] from streamfw.message",
        token,
    )
    await source.reopen()
    (delivery,) = await asyncio.wait_for(fetch(source), 5)
    assert delivery.attempt == 1
    assert not source._journal.void
    await ack(source, [delivery])
    await eventually(lambda: _empty(on))


async def test_a_journal_of_another_server_is_folded_like_any(on: Kit) -> None:
    """A dump that was restored holds transactions that this server has yet to begin: asking for one is an error."""
    source = await opened(on)
    await on.publish("q", b"1")
    await on.sql.execute(
        "insert into streamfw.claim_journal select consumer, 7, '999999999999', array[id] from streamfw.message"
    )
    (delivery,) = await asyncio.wait_for(fetch(source), 5)
    assert delivery.attempt == 2
    await ack(source, [delivery])
    await eventually(lambda: _empty(on))


async def test_claims_of_many_notice_the_dead_whoever_comes_first(on: Kit) -> None:
    """Every row of a dead claim is handed out once more, and by nobody as if for the first time."""
    await on.connection.publish([outgoing("q") for _ in range(400)])
    source = await opened(on)
    died = {d.id for d in await fetch(source, 200)}
    others = [await opened(on) for _ in range(4)]
    await abandon(source)
    seen: dict[int, int] = {}

    async def drain(other: RowLockSource) -> None:
        while batch := await fetch(other, 20):
            for delivery in batch:
                assert delivery.id not in seen
                seen[delivery.id] = delivery.attempt
            await ack(other, batch)
            if len(seen) == 400:
                for one in others:
                    await one.stop()

    await asyncio.wait_for(asyncio.gather(*(drain(other) for other in others)), 20)
    assert {row for row, attempt in seen.items() if attempt == 2} == died
    await eventually(lambda: _empty(on))


# -------------------------------------------------------------------- suspects


async def _drain(on: Kit, source: RowLockSource, poison: bytes) -> int:
    """Handle everything until the poison comes, which kills the process; answer how many were handled."""
    handled = 0
    while not source._stopped:
        if not await on.sql.fetchval(
            "select exists (select from streamfw.message m join streamfw.consumer c on c.id = m.consumer "
            "where queue = 'q')"
        ):
            await source.stop()
        batch = await fetch(source, 200)
        for delivery in batch:
            if delivery.body == poison:
                await abandon(source)
                await eventually(lambda: _let_go(on, 0))
                await on.expire()
                return handled
            await ack(source, [delivery])
            handled += 1
        await source.flush(asyncio.get_running_loop().time() + 5)
    return handled


async def test_one_crashing_row_among_a_thousand_makes_one_dead_letter(on: Kit) -> None:
    await on.open("q", "g")
    await on.connection.publish([outgoing("q", str(n).encode()) for n in range(1000)])
    handled: int = 0
    lives = 0
    while True:
        lives += 1
        source = await opened(on)
        handled += await _drain(on, source, b"437")
        if source._stopped and not source._closed:
            break
        assert lives < 10
    assert handled >= 999
    letters = await (await on.connection.dead_letters("q.dead")).list()
    assert bodies(letters) == [b"437"]  # type: ignore[arg-type]
    assert letters[0].headers[ERROR_TYPE] == "ProcessDied"
    assert lives in (4, 5)


async def test_a_suspect_is_alone_and_what_was_finished_is_durable_by_then(on: Kit) -> None:
    other = RecordingPump()
    neighbour = await opened(on, "other", pump=other)
    source = await opened(on)
    await on.publish("other", b"done", b"queued")
    await on.publish("q", b"fine", b"suspect", b"after")
    await on.sql.execute("update streamfw.message set recovered = 2 where body = 'suspect'")
    done, _ = await fetch(neighbour)
    await ack(neighbour, [done])
    first = await fetch(source)
    assert bodies(first) == [b"fine"]
    waiting = asyncio.create_task(fetch(source))
    await eventually(lambda: source._suspect is not None)
    assert not waiting.done()
    await ack(source, first)
    alone = await asyncio.wait_for(waiting, 5)
    assert bodies(alone) == [b"suspect"]
    assert other.held()
    rows = {bytes(r["body"]): r for r in await on.rows()}
    assert set(rows) == {b"queued", b"suspect", b"after"}, "what is finished, here or there, cannot die with it"
    assert rows[b"suspect"]["recovered"] == suspects.ALONE + 2
    await settle(source, (alone[0], ACK))
    assert not other.held()
    assert bodies(await asyncio.wait_for(fetch(source), 5)) == [b"after"]


def test_the_statements_name_their_schema() -> None:
    statements = vars(LockStatements('my "own"'))
    assert all('"my ""own"""' in sql and "{" not in sql.replace("'{}'", "") for sql in statements.values())
