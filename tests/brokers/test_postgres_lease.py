"""Leases: claiming in order, settling with a fence, giving back, renewing, and what a claim costs."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest

from streamfw import App, Batch, Message
from streamfw.broker import Settlement
from streamfw.errors import LeaseLost
from streamfw.message import ERROR, ERROR_TYPE, ORIGIN, ORIGIN_ATTEMPT, ORIGIN_GROUP, Headers
from streamfw.outcome import ACK, RELEASE, DeadLetter, Drop, Retry
from streamfw_postgres import PostgresBroker, Queue
from tests.helpers import eventually
from tests.services.postgres import Postgres

from .postgres_kit import BIG, Kit, abandon, ack, bodies, fetch, kit, outgoing, settle


@pytest.fixture
async def on(database: Postgres) -> AsyncIterator[Kit]:
    async with kit(database) as made:
        yield made


# ------------------------------------------------------------------- claiming


async def test_by_priority_then_by_age(on: Kit) -> None:
    source = await on.open("q")
    await on.connection.publish([outgoing("q", f"{p}{n}".encode(), priority=p) for n in range(3) for p in (5, -1, 0)])
    assert bodies(await fetch(source, 4)) == [b"-10", b"-11", b"-12", b"00"]
    assert bodies(await fetch(source)) == [b"01", b"02", b"50", b"51", b"52"]


async def test_an_urgent_message_comes_next_whatever_was_claimed_before(on: Kit) -> None:
    source = await on.open("q")
    await on.connection.publish([outgoing("q", b"5", priority=5) for _ in range(50)])
    await on.connection.publish([outgoing("q", b"7", priority=7) for _ in range(50)])
    assert len(await fetch(source, 20)) == 20
    await on.connection.publish([outgoing("q", b"6", priority=6), outgoing("q", b"0", priority=0)])
    assert bodies(await fetch(source, 2)) == [b"0", b"5"]
    assert len(await fetch(source, 29)) == 29
    await on.connection.publish([outgoing("q", b"5 again", priority=5)])
    assert bodies(await fetch(source, 3)) == [b"5 again", b"6", b"7"]


async def test_a_row_that_commits_late_below_the_hint_is_seen_by_the_next_tick(on: Kit) -> None:
    source = await on.open("q")
    late = await on.sql.fetchval("select nextval(pg_get_serial_sequence('streamfw.message', 'id'))")
    await on.connection.publish([outgoing("q", b"early") for _ in range(40)])
    assert len(await fetch(source, 10)) == 10  # a full claim: the hint is the newest
    await on.sql.execute(
        "insert into streamfw.message (id, consumer, message_id, body) overriding system value "
        "select $1, id, 'late', 'late' from streamfw.consumer",
        late,
    )
    assert b"late" not in bodies(await fetch(source, 10))
    source._tick_at = 0.0  # a second later
    assert bodies(await fetch(source, 1)) == [b"late"]


async def test_in_a_queue_that_is_nearly_empty_a_late_row_is_seen_at_once(on: Kit) -> None:
    source = await on.open("q")
    late = await on.sql.fetchval("select nextval(pg_get_serial_sequence('streamfw.message', 'id'))")
    await on.publish("q", b"1")
    await ack(source, await fetch(source))
    ticks = source._tick_at = source._tick_at + 1000.0  # none comes, however busy the machine is
    await on.sql.execute(
        "insert into streamfw.message (id, consumer, message_id, body) overriding system value "
        "select $1, id, 'late', 'late' from streamfw.consumer",
        late,
    )
    source.wake()
    assert bodies(await fetch(source)) == [b"late"]
    assert source._tick_at == ticks  # by the claim, not by a tick


async def test_claims_are_hot_updates(on: Kit) -> None:
    source = await on.open("q")
    await on.connection.publish([outgoing("q", b"x" * 105, key="k", headers=Headers({"a": "b"})) for _ in range(1000)])
    for _ in range(5):
        await ack(source, await fetch(source, 200))
    stats = "select n_tup_upd, n_tup_hot_upd, n_tup_del from pg_stat_user_tables where relname = 'message'"
    await eventually(lambda: _counts(on, stats, 1000))


async def _counts(on: Kit, sql: str, wanted: int) -> bool:
    for role in on.connection._roles:  # a backend tells its numbers when it is idle, at most once a second
        await role.fetch("select pg_stat_force_next_flush()") if role.pid else None
    updated, hot, deleted = await on.sql.fetchrow(sql) or (0, 0, 0)
    return (updated, hot, deleted) == (wanted, wanted, wanted)


async def test_four_claimers_never_take_a_row_twice(database: Postgres, on: Kit) -> None:
    total = 4000
    seen: list[int] = []
    sources = [await on.open("q") for _ in range(4)]
    for _ in range(4):
        await on.connection.publish([outgoing("q", b"x") for _ in range(total // 4)])

    async def drain(n: int) -> None:
        source = sources[n]
        while len(seen) < total:
            batch = await fetch(source, random.randint(1, 60))
            seen.extend(d.id for d in batch)
            assert await ack(source, batch) == ()
        for other in sources:
            await other.stop()

    await asyncio.gather(*(drain(n) for n in range(4)))
    assert len(seen) == len(set(seen)) == total
    assert await on.count() == 0


async def test_at_most_limit_and_about_max_bytes(on: Kit) -> None:
    source = await on.open("q")
    await on.connection.publish([outgoing("q", bytes(200_000)) for _ in range(12)])
    first = await fetch(source, 100, 1_000_000)
    assert len(first) == 5
    assert len(await fetch(source, 3, 1_000_000)) == 3
    assert [r[0] for r in await on.rows("attempt")][8:] == [0] * 4  # what did not fit was given back


async def test_a_message_larger_than_max_bytes_comes_alone(on: Kit) -> None:
    source = await on.open("q")
    await on.publish("q", b"1", bytes(300_000), b"3")
    assert bodies(await fetch(source, 10, 1000)) == [b"1"]
    assert bodies(await fetch(source, 10, 1000)) == [bytes(300_000)]
    assert bodies(await fetch(source, 10, 1000)) == [b"3"]


async def test_a_giant_that_another_wrote_is_put_aside_unread(database: Postgres) -> None:
    async with kit(database, max_body=1000) as on:
        source = await on.open("q", dead_letter="q.dead")
        await on.sql.execute("select streamfw.publish('q', convert_to(repeat('x', 5000), 'UTF8'), message_id => 'big')")
        await on.publish("q", b"small")
        assert bodies(await fetch(source)) == [b"small"]
        (letter,) = await (await on.connection.dead_letters("q.dead")).list()
        assert letter.message_id == "big"
        assert letter.headers[ERROR_TYPE] == "TooLarge"


# -------------------------------------------------------------------- settling


async def test_every_outcome_in_one_settle(on: Kit) -> None:
    source = await on.open("q", "g", dead_letter="q.dead")
    await on.connection.publish([outgoing("q", str(n).encode(), headers=Headers({"a": "b"})) for n in range(6)])
    got = await fetch(source)
    why = DeadLetter("ValueError: no\udc80")
    why.error_type = "ValueError"
    before = source._settles.statements
    outcomes = [ACK, Retry(0), Retry(50), RELEASE, Drop(), why]
    assert await settle(source, *zip(got, outcomes, strict=True)) == []
    assert source._settles.statements - before == 2
    assert not source.out.rows
    rows = {bytes(r["body"]): r for r in await on.rows("*, run_at > now() + interval '45 s' as later")}
    assert set(rows) == {b"1", b"2", b"3", b"5"}
    assert [(rows[b][c] or 0) for b in (b"1", b"2", b"3") for c in ("attempt", "token", "later")] == [
        1, 0, 0,
        1, 0, True,
        0, 0, 0,
    ]  # fmt: skip
    (letter,) = await (await on.connection.dead_letters("q.dead")).list()
    assert dict(letter.headers) == {
        "a": "b",
        ERROR: "ValueError: no\\udc80",
        ERROR_TYPE: "ValueError",
        ORIGIN: "q",
        ORIGIN_GROUP: "g",
        ORIGIN_ATTEMPT: "1",
    }


async def test_a_retry_counts_and_a_release_does_not(on: Kit) -> None:
    source = await on.open("q")
    await on.publish("q", b"1")
    for outcome, attempt in ((Retry(0), 1), (RELEASE, 2), (Retry(0), 2), (ACK, 3)):
        (delivery,) = await fetch(source)
        assert delivery.attempt == attempt
        await settle(source, (delivery, outcome))
    assert await on.count() == 0


async def test_a_dead_letter_goes_to_every_group_of_its_queue_and_survives_its_removal(on: Kit) -> None:
    source = await on.open("q", dead_letter="q.dead")
    await on.open("q.dead", "a")
    await on.open("q.dead", "b")
    await on.publish("q", b"1", b"2")
    first, second = await fetch(source)
    await settle(source, (first, DeadLetter("x")))
    assert await on.count() == 3
    await on.sql.execute("select streamfw.remove_group('q.dead', 'a'), streamfw.remove_group('q.dead', 'b')")
    await on.sql.execute("delete from streamfw.consumer where queue = 'q.dead'")
    assert await settle(source, (second, DeadLetter("x"))) == []
    assert [bytes(r["body"]) for r in await on.rows("body")] == [b"2"]
    assert len(await (await on.connection.dead_letters("q.dead")).list()) == 1


@pytest.mark.parametrize("outcome", [ACK, Retry(0), Retry(5), RELEASE, Drop(), DeadLetter("x")], ids=repr)
async def test_a_late_settle_changes_nothing(on: Kit, outcome: object) -> None:
    mine, theirs = await on.open("q", dead_letter="d"), await on.open("q", dead_letter="d")
    await on.publish("q", b"1", b"2", b"3")
    old = await fetch(mine)
    await on.sql.execute(
        "update streamfw.message set lease_until = '-infinity' where id = any($1)", [d.id for d in old[:2]]
    )
    new = await fetch(theirs)
    assert [d.id for d in new] == [d.id for d in old[:2]]
    assert [d.attempt for d in new] == [2, 2]
    errors = await mine.settle([Settlement(d, outcome) for d in old])  # type: ignore[arg-type]
    assert [type(e) for e in errors] == [LeaseLost, LeaseLost]
    assert {e.delivery.message_id for e in errors} == {d.message_id for d in new}
    assert await ack(theirs, new) == ()


async def test_the_process_that_lost_a_row_and_has_it_again_keeps_it_in_its_book(on: Kit) -> None:
    source = await on.open("q")
    await on.publish("q", b"1")
    (old,) = await fetch(source)
    await on.expire()
    source.wake(rescan=True)
    (new,) = await fetch(source)
    assert (new.id, new.attempt) == (old.id, 2)
    (error,) = await ack(source, [old])
    assert isinstance(error, LeaseLost)
    assert source.out.rows == {new.id: new}
    assert await ack(source, [new]) == ()


async def test_a_settle_that_was_cut_is_repeated_without_false_alarm(on: Kit) -> None:
    source = await on.open("q", dead_letter="d")
    await on.publish("q", b"1", b"2", b"3")
    got = await fetch(source)
    group = [Settlement(got[0], ACK), Settlement(got[1], Retry(60)), Settlement(got[2], DeadLetter("x"))]
    assert await source.settle(group) == []
    source._settler._ambiguous.update(d.id for d in got)  # as when the answer did not arrive
    assert await source.settle(group) == []
    assert not source._settler._ambiguous
    assert sorted(bytes(r["body"]) for r in await on.rows("body")) == [b"2", b"3"]


# --------------------------------------------------------------- end and renewal


async def test_stop_returns_the_pending_fetch_and_keeps_what_is_out(on: Kit) -> None:
    source = await on.open("q")
    await on.publish("q", b"1")
    got = await fetch(source)
    pending = asyncio.create_task(fetch(source))
    await asyncio.sleep(0)
    await source.stop()
    assert await pending == []
    assert await fetch(source) == []
    assert await ack(source, got) == ()


async def test_rows_of_a_claim_that_ends_after_stop_are_given_back(on: Kit) -> None:
    source = await on.open("q")
    await on.publish("q", b"1", b"2")
    await on.sql.execute("begin; lock table streamfw.message in share mode")
    pending = asyncio.create_task(fetch(source))
    pid = source._claims.pid
    await eventually(lambda: on.sql.fetchval("select count(*) from pg_locks where pid = $1 and not granted", pid))
    await source.stop()
    await on.sql.execute("rollback")
    assert await pending == []
    assert [tuple(r) for r in await on.rows("attempt, token")] == [(0, 0), (0, 0)]
    assert not source.out.rows


async def test_close_gives_back_at_once_without_an_attempt(on: Kit) -> None:
    source, other = await on.open("q"), await on.open("q")
    await on.connection.publish([outgoing("q") for _ in range(300)])
    got = await fetch(source, 300)
    await ack(source, got[:100])
    pending = asyncio.create_task(fetch(other, 300))
    await source.close()
    again = await asyncio.wait_for(pending, 5)
    assert {d.id for d in again} == {d.id for d in got[100:]}
    assert {d.attempt for d in again} == {1}


async def test_leases_are_renewed_in_one_statement_and_a_locked_row_is_not_lost(on: Kit) -> None:
    source = await on.open(Queue("q", lease=4).name, source=Queue("q", lease=4))
    await on.connection.publish([outgoing("q") for _ in range(1000)])
    got = await fetch(source, 1000)
    for delivery in got:
        delivery.claim.until -= 2  # half of the lease is over
    async with on.sql.transaction():
        await on.sql.fetch("select from streamfw.message where id = $1 for update", got[0].id)
        before = source._settles.statements
        assert await source._renewer.renew() is False  # one was locked: try again soon
        assert source._settles.statements - before == 2
        left = "select count(*) from streamfw.message where lease_until > now() + interval '3 s'"
        assert await on.sql.fetchval(left) >= 999
    assert not any(d.lost for d in got)
    assert await ack(source, got) == ()


async def test_a_lease_lives_as_long_as_its_handler(on: Kit) -> None:
    source, other = await on.open("q", source=Queue("q", lease=1)), await on.open("q")
    await on.publish("q", b"1")
    got = await fetch(source)
    stealing = asyncio.create_task(fetch(other))
    first = await on.sql.fetchval("select lease_until from streamfw.message")
    await eventually(lambda: _later(on, first, "1.5 s"))
    assert not got[0].lost
    await ack(source, got)
    await other.stop()
    assert await stealing == []


async def _later(on: Kit, first: object, by: str) -> bool:
    return bool(
        await on.sql.fetchval(
            "select lease_until > $1::timestamptz + $2::text::interval from streamfw.message", first, by
        )
    )


@pytest.mark.parametrize(
    ("form", "options"),
    [
        *[("lease", options) for options in ({}, {"workers": 3}, {"ordered_by": "key"}, {"batch": Batch(1)})],
        *[("rowlock", options) for options in ({}, {"workers": 3}, {"batch": Batch(1)})],
    ],
)
async def test_nothing_begins_under_a_lease_that_ended_while_the_loop_stood_still(
    database: Postgres, form: Literal["lease", "rowlock"], options: dict[str, Any]
) -> None:
    """A handler blocks it here; a process that is stopped and goes on is the same. Others may have had all of it. (A
    row lock is not a matter of time: what it holds is begun.)"""
    began: list[tuple[bytes, int]] = []

    def handle(message: Message) -> None:
        if not began:
            time.sleep(1.5)
        began.append((message.body, message.attempt))

    async def one(message: Message) -> None:
        handle(message)
        await asyncio.sleep(0)

    async def many(messages: list[Message]) -> None:
        handle(messages[0])

    async with kit(database) as on:
        await on.publish("q", *[b"%d" % number for number in range(50)], key="k")
    broker = PostgresBroker(database.dsn, lease=1.0, form=form)
    app = App(name="g", brokers={"default": broker}, watchdog=None)
    app.subscriber("q", **options)(many if "batch" in options else one)
    async with app.running():
        await eventually(lambda: len({body for body, _ in began}) == 50)
    assert {attempt for _, attempt in began[1:]} == {2 if form == "lease" else 1}


async def test_what_another_took_is_marked_lost_at_the_renewal(on: Kit) -> None:
    source = await on.open("q")
    await on.publish("q", b"1", b"2", b"3")
    got = await fetch(source)
    await on.sql.execute("update streamfw.message set token = 7 where id = $1", got[1].id)
    await on.sql.execute("delete from streamfw.message where id = $1", got[2].id)
    got[0].claim.until -= 20
    await source._renewer.renew()
    assert [d.lost for d in got] == [False, True, True]
    assert [type(e) for e in await ack(source, got)] == [LeaseLost, LeaseLost]


async def test_when_the_database_is_away_for_longer_than_the_lease_all_is_lost(on: Kit) -> None:
    source = await on.open("q", source=Queue("q", lease=1))
    await on.publish("q", b"1")
    (delivery,) = await fetch(source)
    await source._settles.close()  # nothing is renewed any more
    await eventually(lambda: delivery.lost, 5)
    assert not source.out.rows


async def test_a_claim_that_fails_half_way_leaves_nothing_in_the_book(on: Kit) -> None:
    from streamfw.errors import BrokerUnavailable

    source = await on.open("q")
    await on.publish("q", bytes(300_000))

    async def cut(*_: object) -> None:
        raise BrokerUnavailable("cut between two statements")

    source._claimer._within = cut  # type: ignore[assignment, method-assign]
    with pytest.raises(BrokerUnavailable):
        await source.fetch(10, 1000)
    assert not source.out.rows


async def test_abandoned_rows_come_back_with_their_attempt_counted(on: Kit) -> None:
    source = await on.open("q")
    await on.publish("q", b"1")
    await source.fetch(10, BIG)
    await abandon(source)
    await on.expire()
    (again,) = await fetch(await on.open("q"))
    assert again.attempt == 2
    assert (await on.rows("recovered"))[0][0] == 1
