"""Ordered subscriptions: one owner, standbys that take over, and nobody overtakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from streamfw.errors import LeaseLost
from streamfw.outcome import ACK, RELEASE, Retry
from streamfw_postgres import PostgresBroker, Queue
from streamfw_postgres.lease import LeaseSource
from tests.helpers import eventually
from tests.services.postgres import Postgres

from .postgres_kit import Kit, RecordingPump, abandon, ack, bodies, fetch, kit, outgoing, settle


@pytest.fixture
async def on(database: Postgres) -> AsyncIterator[Kit]:
    async with kit(database, poll=0.1) as made:
        yield made


async def _ordered(on: Kit, **options: Any) -> LeaseSource:
    return await on.open("q", ordered_by="key", **options)


async def _publish(on: Kit, *bodies: bytes) -> None:
    assert await on.connection.publish([outgoing("q", body, key=body[:1].decode()) for body in bodies]) == ()


async def _end_ownership(on: Kit) -> None:
    """As time would."""
    await on.sql.execute("update streamfw.consumer set owner_until = '-infinity'")


def test_an_ordered_subscription_retries_in_place() -> None:
    from streamfw.broker import Subscription

    broker = PostgresBroker("postgres://localhost/x")
    capabilities = broker.capabilities_of(Subscription("q", ordered_by="key"))
    assert (capabilities.retry, capabilities.attempts) == (False, "process")
    assert broker.capabilities_of(Subscription("q")).retry


async def test_the_lane_is_the_key(on: Kit) -> None:
    source = await _ordered(on)
    await _publish(on, b"a1", b"b1")
    await on.publish("q", b"none")
    assert [d.lane for d in await fetch(source)] == ["a", "b", None]


async def test_one_owns_and_the_other_takes_over_when_it_closes(on: Kit) -> None:
    owner, standby = await _ordered(on), await _ordered(on)
    await _publish(on, b"a1", b"a2", b"b1")
    first = await fetch(owner, 2)
    waiting = asyncio.create_task(fetch(standby))
    await eventually(lambda: standby._claims.statements >= 2)
    assert not waiting.done()
    assert "standing by" in standby.health().detail and standby.health().ok
    await ack(owner, first[:1])
    await owner.close()
    got = await asyncio.wait_for(waiting, 5)
    assert bodies(got) == [b"a2", b"b1"]
    assert [d.attempt for d in got] == [1, 1]
    assert await ack(standby, got) == ()


async def test_a_successor_begins_with_what_the_dead_owner_had(on: Kit) -> None:
    owner = await _ordered(on)
    await _publish(on, b"a1", b"a2", b"a3")
    await fetch(owner, 2)
    await abandon(owner)
    await _end_ownership(on)
    got = await fetch(await _ordered(on))
    assert bodies(got) == [b"a1", b"a2", b"a3"]
    assert [d.attempt for d in got] == [2, 2, 1]
    assert [r[0] for r in await on.rows("recovered")] == [1, 1, 0]


@pytest.mark.parametrize("outcome", [ACK, Retry(0), Retry(5), RELEASE], ids=repr)
async def test_a_former_owner_settles_nothing(on: Kit, outcome: object) -> None:
    pump = RecordingPump()
    owner = await _ordered(on, pump=pump)
    await _publish(on, b"a1")
    (old,) = await fetch(owner)
    await _end_ownership(on)
    successor = await _ordered(on)
    assert await successor._owning.acquire(successor._claims)  # type: ignore[union-attr]
    # Before the successor has claimed anything: the ownership alone fences.
    (error,) = await settle(owner, (old, outcome))  # type: ignore[arg-type]
    assert isinstance(error, LeaseLost)
    await owner._keep_ownership()
    owner._owning._until -= 20  # type: ignore[union-attr]
    await owner._keep_ownership()
    assert not owner._owning.held  # type: ignore[union-attr]


async def test_an_owner_that_was_succeeded_marks_all_as_lost_and_its_pump_drops_it(on: Kit) -> None:
    pump = RecordingPump()
    owner = await on.open("q", ordered_by="key", pump=pump, source=Queue("q", lease=2))
    await _publish(on, b"a1", b"b1")
    old = await fetch(owner)
    await on.sql.execute("update streamfw.consumer set owner_token = 5, owner_until = now() + interval '1 h'")
    await eventually(lambda: all(d.lost for d in old))
    assert pump.calls[:2] == ["hold", "drop"]
    assert not owner.out.rows
    waiting = asyncio.create_task(fetch(owner))
    await _end_ownership(on)  # the intruder is gone: it takes part again
    assert bodies(await asyncio.wait_for(waiting, 5)) == [b"a1", b"b1"]


async def test_an_owner_keeps_it_while_nothing_is_fetched(on: Kit) -> None:
    owner = await on.open("q", ordered_by="key", source=Queue("q", lease=1))
    await _publish(on, b"a1")
    got = await fetch(owner)
    until = await on.sql.fetchval("select owner_until from streamfw.consumer")
    sql = "select owner_until > $1::timestamptz + interval '2 s' from streamfw.consumer"
    await eventually(lambda: on.sql.fetchval(sql, until))
    assert not got[0].lost
    assert await ack(owner, got) == ()


async def test_a_locked_row_is_waited_for_and_not_overtaken(on: Kit) -> None:
    """The former owner's handler still holds its row in an open transaction."""
    owner = await _ordered(on)
    await _publish(on, b"a1", b"a2")
    old = await fetch(owner, 1)
    async with owner.transaction(old):
        await _end_ownership(on)
        successor = await _ordered(on)
        waiting = asyncio.create_task(fetch(successor))
        pid = successor._claims.pid
        await eventually(lambda: on.sql.fetchval("select count(*) from pg_locks where pid = $1 and not granted", pid))
        assert not waiting.done()
    assert bodies(await asyncio.wait_for(waiting, 5)) == [b"a1", b"a2"]


async def test_own_transactions_hold_nothing_up(on: Kit) -> None:
    owner = await _ordered(on)
    await _publish(on, b"a1", b"b1")
    first = await fetch(owner, 1)
    await on.expire()  # an open transaction cannot be renewed
    async with owner.transaction(first) as unit:
        got = await asyncio.wait_for(fetch(owner), 5)
        assert bodies(got) == [b"b1"]
        await unit.finish(ACK)
    await ack(owner, got)
    assert await on.count() == 0


async def test_rows_of_a_claim_whose_answer_was_lost_come_next(on: Kit) -> None:
    owner = await _ordered(on)
    await _publish(on, b"a1", b"a2", b"a3")
    first = await fetch(owner, 1)
    lost = await fetch(owner, 1)
    owner.out.remove([d.id for d in lost])  # the answer never came: nobody here knows of it
    owner._hints.clear()
    assert bodies(await fetch(owner, 1)) == [b"a2"]
    assert await ack(owner, first) == ()


async def test_a_claim_of_one_who_is_no_owner_takes_nothing(on: Kit) -> None:
    owner = await _ordered(on)
    await _publish(on, b"a1", b"a2")
    assert len(await fetch(owner, 1)) == 1
    await on.sql.execute("update streamfw.consumer set owner_token = 5, owner_until = now() + interval '1 h'")
    assert (await owner._claimer.claim(10, 1000)).deliveries == []


async def test_two_owners_never_claim_at_once(on: Kit) -> None:
    """A claim holds the ownership's row until it commits."""
    owner, successor = await _ordered(on), await _ordered(on)
    await _publish(on, b"a1")
    assert await owner._owning.acquire(owner._claims)  # type: ignore[union-attr]
    row = await on.sql.fetchval("select id from streamfw.message")
    async with on.sql.transaction():
        await on.sql.execute("select from streamfw.message where id = $1 for update", row)
        claiming = asyncio.create_task(owner._claimer.claim(10, 1000))
        pid = owner._claims.pid
        await eventually(lambda: on.sql.fetchval("select count(*) from pg_locks where pid = $1 and not granted", pid))
        taking = asyncio.create_task(
            successor._claims.count(
                "update streamfw.consumer set owner_token = 7, owner_until = now() + interval '1 h' where queue = 'q'"
            )
        )
        pid = successor._claims.pid
        await eventually(lambda: on.sql.fetchval("select count(*) from pg_locks where pid = $1 and not granted", pid))
    assert bodies((await claiming).deliveries) == [b"a1"]
    assert await taking == 1
