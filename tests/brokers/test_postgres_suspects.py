"""Rows that kill their process, and the bystanders that must not pay for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from streamfw.message import ERROR_TYPE
from streamfw.outcome import ACK, RELEASE, Retry
from streamfw_postgres import suspects
from streamfw_postgres.lease import LeaseSource
from tests.helpers import eventually
from tests.services.postgres import Postgres

from .postgres_kit import Kit, RecordingPump, abandon, ack, bodies, fetch, kit, outgoing, settle


@pytest.fixture
async def on(database: Postgres) -> AsyncIterator[Kit]:
    async with kit(database, poll=0.1) as made:
        yield made


async def _drain(on: Kit, source: LeaseSource, poison: bytes) -> int:
    """Handle everything until the poison comes, which kills the process; answer how many were handled."""
    handled = 0
    while True:
        await _nothing_left(on, source)
        if source._stopped and not source.out.rows:
            return handled
        batch = await fetch(source, 200)
        if not batch:
            return handled
        for delivery in batch:
            if delivery.body == poison:
                await abandon(source)
                await on.expire()
                return handled
            await ack(source, [delivery])
            handled += 1


async def _nothing_left(on: Kit, source: LeaseSource) -> None:
    if not await on.sql.fetchval(
        "select exists (select from streamfw.message m join streamfw.consumer c on c.id = m.consumer where queue = 'q')"
    ):
        await source.stop()


async def test_one_crashing_row_among_a_thousand_makes_one_dead_letter(on: Kit) -> None:
    await on.open("q", "g")
    await on.connection.publish([outgoing("q", str(n).encode()) for n in range(1000)])
    handled, lives = 0, 0
    while True:
        lives += 1
        source = await on.open("q", "g", attempts=3, dead_letter="q.dead")
        handled += await _drain(on, source, b"437")
        if source._stopped and not source._closed:
            break
        assert lives < 10
    assert handled == 999
    letters = await (await on.connection.dead_letters("q.dead")).list()
    assert bodies(letters) == [b"437"]  # type: ignore[arg-type]
    assert letters[0].headers[ERROR_TYPE] == "ProcessDied"
    assert lives == 4 + 1 or lives == 4


async def _recovered(on: Kit, **columns: int) -> None:
    sets = ", ".join(f"{name} = {value}" for name, value in columns.items())
    await on.sql.execute(f"update streamfw.message set {sets}")


async def test_a_suspect_waits_for_the_others_and_is_alone(on: Kit) -> None:
    other = RecordingPump()
    neighbour = await on.open("other", pump=other)
    own = RecordingPump()
    source = await on.open("q", attempts=5, dead_letter="d", pump=own)
    await on.publish("q", b"fine")
    await on.publish("q", b"suspect", b"after")
    await on.sql.execute("update streamfw.message set recovered = 2 where body = 'suspect'")
    first = await fetch(source)
    assert bodies(first) == [b"fine"]
    waiting = asyncio.create_task(fetch(source))
    await eventually(lambda: source._suspect is not None)
    assert not waiting.done() and not other.held()
    await ack(source, first)
    alone = await asyncio.wait_for(waiting, 5)
    assert bodies(alone) == [b"suspect"]
    assert other.held() and not own.held()
    assert (await on.rows("recovered"))[0][0] == suspects.ALONE + 2
    after = asyncio.create_task(fetch(source))
    await asyncio.sleep(0)
    assert not after.done()
    await ack(source, alone)
    assert not other.held()
    assert bodies(await asyncio.wait_for(after, 5)) == [b"after"]
    await neighbour.close()


async def test_two_sources_take_turns(on: Kit) -> None:
    sources = [await on.open(name, pump=RecordingPump()) for name in ("a", "b")]
    await on.connection.publish([outgoing("a"), outgoing("b")])
    await _recovered(on, recovered=2)
    fetching = [asyncio.create_task(fetch(source)) for source in sources]
    done, rest = await asyncio.wait(fetching, return_when=asyncio.FIRST_COMPLETED, timeout=5)
    assert len(done) == len(rest) == 1
    first = fetching.index(done.pop())
    await ack(sources[first], fetching[first].result())
    second = 1 - first
    await ack(sources[second], await asyncio.wait_for(fetching[second], 5))
    assert not any(source.pump.held() for source in sources)  # type: ignore[attr-defined]


async def test_stop_while_it_waits_for_its_turn_gives_it_back(on: Kit) -> None:
    sources = [await on.open(name) for name in ("a", "b")]
    await on.connection.publish([outgoing("a"), outgoing("b")])
    await _recovered(on, recovered=2)
    (alone,) = await fetch(sources[0])
    waiting = asyncio.create_task(fetch(sources[1]))
    await eventually(lambda: sources[1]._entering is not None)
    await sources[1].stop()
    assert await asyncio.wait_for(waiting, 5) == []
    assert [tuple(r) for r in await on.rows("attempt, recovered, token = 0")] == [(1, 102, False), (0, 2, True)]
    await ack(sources[0], [alone])


async def test_a_suspect_that_lives_long_enough_lets_the_others_go_on(on: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamfw_postgres.lease.PATIENCE", 0.2)
    other = RecordingPump()
    await on.open("other", pump=other)
    source = await on.open("q", attempts=3, dead_letter="d")
    await on.publish("q", b"long", b"next")
    await on.sql.execute("update streamfw.message set recovered = 2, attempt = 3 where body = 'long'")
    (long,) = await fetch(source)
    assert bodies(await asyncio.wait_for(fetch(source), 5)) == [b"next"]
    assert not other.held()
    assert (await on.rows("recovered"))[0][0] == suspects.SURVIVED + 2
    # The process dies now: it was not alone, so it is not put aside, and next time it is alone to its end.
    await abandon(source)
    await on.expire()
    other.release()
    await on.open("other", pump=other)
    source = await on.open("q", attempts=3, dead_letter="d")
    (long,) = await fetch(source, 1)
    assert (long.body, long.attempt) == (b"long", 5)
    assert source._watch is not None
    await source._watch
    assert source._alone is not None and not source._alone.over.is_set() and other.held()
    assert (await on.rows("recovered"))[0][0] == suspects.ALONE + 3
    await ack(source, [long])
    assert not other.held()


async def test_where_the_others_do_not_come_to_rest_it_is_not_marked_as_alone(
    on: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamfw_postgres.lease.PATIENCE", 0.1)
    await on.open("other", pump=RecordingPump(busy=True))
    source = await on.open("q")
    await on.publish("q", b"1")
    await _recovered(on, recovered=2)
    (delivery,) = await fetch(source)
    assert (await on.rows("recovered"))[0][0] == 2
    await ack(source, [delivery])


async def test_given_back_it_did_not_die_alone_and_a_retry_clears_it(on: Kit) -> None:
    source = await on.open("q", attempts=3, dead_letter="d")
    await on.publish("q", b"1")
    await _recovered(on, recovered=3, attempt=3)
    (delivery,) = await fetch(source)
    assert delivery.attempt == 4
    await settle(source, (delivery, RELEASE))
    assert tuple((await on.rows("attempt, recovered"))[0]) == (3, 3)
    (delivery,) = await fetch(source)
    await settle(source, (delivery, Retry(0)))
    assert tuple((await on.rows("attempt, recovered"))[0]) == (4, 0)


async def test_without_dead_letter_a_condemned_row_is_discarded(on: Kit) -> None:
    source = await on.open("q", attempts=3, dead_letter=None)
    await on.publish("q", b"1", b"2")
    await on.sql.execute("update streamfw.message set recovered = 102, attempt = 3 where body = '1'")
    assert bodies(await fetch(source)) == [b"2"]
    assert await on.count() == 1


async def test_with_keys_in_order_nothing_overtakes_a_suspect(on: Kit) -> None:
    source = await on.open("q", ordered_by="key")
    await on.connection.publish([outgoing("q", body, key="k") for body in (b"1", b"2", b"3")])
    await on.sql.execute("update streamfw.message set recovered = 2 where body = '2'")
    got = []
    for _ in range(3):
        batch = await asyncio.wait_for(fetch(source), 5)
        got.append(bodies(batch))
        assert await ack(source, batch) == ()
    assert got == [[b"1"], [b"2"], [b"3"]]


@pytest.mark.parametrize(
    ("recovered", "attempt", "attempts", "suspect", "condemned"),
    [
        (0, 1, 3, False, False),
        (0, 9, 3, False, False),
        (1, 2, 3, False, False),
        (1, 3, 3, True, False),
        (2, 1, None, True, False),
        (2, 4, 3, True, False),
        (102, 3, 3, True, False),
        (102, 4, 3, True, True),
        (102, 9, None, True, False),
        (1003, 9, 3, True, False),
    ],
)
def test_the_rules(recovered: int, attempt: int, attempts: int | None, suspect: bool, condemned: bool) -> None:
    assert suspects.is_suspect(recovered, attempt, attempts) is suspect
    assert suspects.is_condemned(recovered, attempt, attempts) is condemned


def test_a_mark_keeps_the_count_and_stays_in_its_level() -> None:
    assert suspects.mark(3, suspects.ALONE) == 103
    assert suspects.mark(1007, suspects.ALONE) == 107
    assert suspects.mark(199, suspects.SURVIVED) == 1050
    assert ACK is not None
