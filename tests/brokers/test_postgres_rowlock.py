"""Row locks: claims by open transactions, settled together, for a second at most."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any, cast

import asyncpg
import msgspec
import pytest

from streamfw import App, subscriber
from streamfw.broker import Settlement, Subscription
from streamfw.errors import BrokerRefused, BrokerUnavailable, LeaseLost
from streamfw.message import ERROR_TYPE, Headers
from streamfw.outcome import ACK, RELEASE, DeadLetter, Drop, Outcome, Retry
from streamfw_postgres import PostgresBroker, Queue
from streamfw_postgres.deliveries import PostgresDelivery
from streamfw_postgres.rowlock import RowLockSource
from tests.helpers import eventually
from tests.services.postgres import Postgres

from .postgres_kit import Kit, RecordingPump, ack, bodies, fetch, kit, outgoing, settle


@pytest.fixture
async def on(database: Postgres) -> AsyncIterator[Kit]:
    async with kit(database, form="rowlock", poll=0.1) as made:
        yield made


async def opened(on: Kit, name: str = "q", **options: Any) -> RowLockSource:
    source = await on.open(name, **options)
    assert isinstance(source, RowLockSource)
    return source


class Work(msgspec.Struct):
    number: int


def now() -> float:
    return asyncio.get_running_loop().time()


# ------------------------------------------------------------------- claiming


async def test_a_claim_holds_its_rows_and_writes_nothing(on: Kit) -> None:
    source = await opened(on)
    await on.publish("q", b"1", b"2", b"3")
    got = await fetch(source, 2)
    assert (bodies(got), [d.attempt for d in got]) == ([b"1", b"2"], [1, 1])
    assert await on.locked() == [b"1", b"2"]
    assert [tuple(r) for r in await on.rows("attempt, token")] == [(0, 0)] * 3


async def test_settlements_take_effect_together(on: Kit) -> None:
    source = await opened(on)
    await on.publish("q", b"1", b"2", b"3")
    one, two, three = await fetch(source)
    assert await ack(source, [three]) == ()
    assert await ack(source, [one]) == ()
    assert await on.locked() == [b"1", b"2", b"3"]
    assert await ack(source, [two]) == ()
    await eventually(lambda: _is_empty(on))


async def _is_empty(on: Kit) -> bool:
    return await on.count() == 0


async def test_two_claims_take_turns(on: Kit) -> None:
    source = await opened(on)
    await on.publish("q", *(b"%d" % n for n in range(6)))
    first, second = await fetch(source, 2), await fetch(source, 2)
    third = asyncio.create_task(fetch(source, 2))
    assert await on.locked() == [b"0", b"1", b"2", b"3"]
    assert not third.done()
    await ack(source, second)
    assert bodies(await asyncio.wait_for(third, 0.9)) == [b"4", b"5"]
    assert await on.locked() == [b"0", b"1", b"4", b"5"]
    await ack(source, first)


async def test_as_many_connections_as_asked_for(on: Kit) -> None:
    source = await opened(on, source=Queue("q", form="rowlock", connections=3))
    await on.publish("q", b"1", b"2", b"3", b"4")
    for _ in range(3):
        assert len(await fetch(source, 1)) == 1
    waiting = asyncio.create_task(fetch(source, 1))
    assert await on.locked() == [b"1", b"2", b"3"]
    await source.stop()
    assert await asyncio.wait_for(waiting, 0.9) == []


async def test_by_priority_then_by_age(on: Kit) -> None:
    source = await opened(on)
    await on.connection.publish([outgoing("q", f"{p}{n}".encode(), priority=p) for n in range(3) for p in (5, -1, 0)])
    assert bodies(await fetch(source, 4)) == [b"-10", b"-11", b"-12", b"00"]
    assert bodies(await fetch(source)) == [b"01", b"02", b"50", b"51", b"52"]


async def test_what_was_published_since_the_last_commit_is_seen(on: Kit) -> None:
    """The next transaction began at that commit, so its now() is older than these rows and their leases' ends."""
    source = await opened(on)
    await on.publish("q", b"1")
    await ack(source, await fetch(source))
    await eventually(lambda: _is_empty(on))
    await on.publish("q", b"2", b"leased")
    await on.sql.execute("update streamfw.message set lease_until = clock_timestamp(), token = 1 where body = 'leased'")
    source.wake()
    assert bodies(await fetch(source)) == [b"2", b"leased"]


async def test_claimers_of_both_forms_never_take_a_row_twice(on: Kit) -> None:
    total = 4000
    seen: list[int] = []
    sources = [await on.open("q", source=Queue("q", form=form)) for form in ("rowlock", "lease", "rowlock", "rowlock")]
    for _ in range(4):
        await on.connection.publish([outgoing("q") for _ in range(total // 4)])

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
    await eventually(lambda: _is_empty(on))


async def test_large_bodies_come_by_lease_within_the_budget(on: Kit) -> None:
    source = await opened(on)
    await on.connection.publish([outgoing("q", bytes(200_000)) for _ in range(12)])
    first = await fetch(source, 100, 1_000_000)
    assert len(first) == 5
    await ack(source, first)
    rest = 0
    while rest < 7:
        batch = await fetch(source, 100, 1_000_000)
        assert 1 <= len(batch) <= 5
        rest += len(batch)
        await ack(source, batch)
    await eventually(lambda: _is_empty(on))


async def test_a_giant_that_another_wrote_is_put_aside_unread(database: Postgres) -> None:
    async with kit(database, form="rowlock", max_body=1000) as on:
        source = await opened(on, dead_letter="q.dead", attempts=3)
        await on.sql.execute("select streamfw.publish('q', convert_to(repeat('x', 5000), 'UTF8'), message_id => 'big')")
        await on.publish("q", b"small")
        assert bodies(await fetch(source)) == [b"small"]
        (letter,) = await (await on.connection.dead_letters("q.dead")).list()
        assert letter.headers[ERROR_TYPE] == "TooLarge"


# -------------------------------------------------------------------- settling


OUTCOMES: list[Outcome] = [ACK, Retry(0), Retry(50), RELEASE, Drop()]


async def _every_outcome(on: Kit, source: RowLockSource, got: list[PostgresDelivery]) -> None:
    why = DeadLetter("ValueError: no")
    why.error_type = "ValueError"
    assert not await settle(source, *zip(got, [*OUTCOMES, why], strict=True))
    await source.flush(now() + 5)
    rows = {bytes(r["body"]): r for r in await on.rows("*, run_at > now() + interval '45 s' as later")}
    assert set(rows) == {b"1", b"2", b"3", b"5"}
    assert [(rows[b][c] or 0) for b in (b"1", b"2", b"3") for c in ("attempt", "token", "later")] == [
        1, 0, 0,
        1, 0, True,
        0, 0, 0,
    ]  # fmt: skip
    (letter,) = await (await on.connection.dead_letters("q.dead")).list()
    assert (letter.headers["a"], letter.headers[ERROR_TYPE]) == ("b", "ValueError")
    assert bodies(await fetch(source)) == [b"1", b"3"]


async def test_every_outcome_in_the_transaction_of_its_claim(on: Kit) -> None:
    source = await opened(on, dead_letter="q.dead")
    await on.connection.publish([outgoing("q", str(n).encode(), headers=Headers({"a": "b"})) for n in range(6)])
    await _every_outcome(on, source, await fetch(source))


async def test_every_outcome_of_what_outlived_its_claim(on: Kit) -> None:
    source = await opened(on, dead_letter="q.dead", attempts=9)
    await on.connection.publish([outgoing("q", str(n).encode(), headers=Headers({"a": "b"})) for n in range(6)])
    got = await fetch(source)
    await source.flush(now() + 5)
    assert {tuple(r) for r in await on.rows("attempt, token")} == {(1, got[0].claim.token)}
    await _every_outcome(on, source, got)


async def test_the_pause_of_a_retry_begins_when_it_is_recorded(on: Kit) -> None:
    source = await opened(on)
    await on.publish("q", b"slow", b"again")
    slow, again = await fetch(source)
    began = now()
    await settle(source, (again, Retry(1.2)))
    (delivery,) = await asyncio.wait_for(fetch(source), 5)
    assert (delivery.body, delivery.attempt) == (b"again", 2)
    assert 1.2 <= now() - began < 1.9, "a claim of a second does not make it 2.2"
    assert not await ack(source, [slow, delivery])


async def test_a_dead_letter_survives_the_removal_of_its_queue(on: Kit) -> None:
    source = await opened(on, dead_letter="q.dead")
    await on.publish("q", b"1", b"2")
    got = await fetch(source)
    await on.sql.execute("delete from streamfw.consumer where queue = 'q.dead'")
    await settle(source, (got[0], DeadLetter("x")), (got[1], ACK))
    await source.flush(now() + 5)
    assert bodies(await (await on.connection.dead_letters("q.dead")).list()) == [b"1"]  # type: ignore[arg-type]
    assert await on.count() == 1


async def test_settled_twice_is_settled_once(on: Kit) -> None:
    source = await opened(on)
    await on.publish("q", b"1", b"2")
    one, two = await fetch(source)
    await ack(source, [one])
    assert not await settle(source, (one, Retry(0)), (one, ACK))
    assert await on.locked() == [b"1", b"2"]
    await ack(source, [two])
    await eventually(lambda: _is_empty(on))
    assert not await ack(source, [one, two])


# ------------------------------------------------------------- the one second


async def test_what_is_unfinished_after_a_second_gets_a_lease(on: Kit) -> None:
    source = await opened(on, source=Queue("q", form="rowlock", lease=1))
    await on.publish("q", b"slow", b"1", b"2")
    slow, *fast = await fetch(source)
    began = now()
    await ack(source, fast)
    await eventually(lambda: _left(on, 1))
    assert 0.8 < now() - began < 1.5
    (row,) = await on.rows("body, attempt, token, lease_until > now()")
    assert tuple(row) == (b"slow", 1, slow.claim.token, True)
    assert await on.locked() == []
    first = await on.sql.fetchval("select lease_until from streamfw.message")
    await eventually(lambda: _later(on, first))  # it is renewed like any lease
    assert not slow.lost
    assert not await ack(source, [slow])
    assert await on.count() == 0


async def _left(on: Kit, count: int) -> bool:
    return await on.count() == count


async def _later(on: Kit, first: object) -> bool:
    sql = "select lease_until > $1::timestamptz + interval '0.6 s' from streamfw.message"
    return bool(await on.sql.fetchval(sql, first))


async def test_a_slow_handler_among_ten_thousand_delays_nobody(database: Postgres) -> None:
    """Five seconds among 10,000 fast ones: of no other is the row there 1.5 s after its handler ended."""
    ended: dict[str, float] = {}
    worst = longest = 0.0
    total = 10_000

    async def of(work: Work) -> None:
        if work.number == 1000:
            await asyncio.sleep(5)
        elif work.number % 100 == 0:
            await asyncio.sleep(0.002)
        ended[str(work.number)] = monotonic()

    handler = subscriber("q", group="g", workers=8)(of)
    async with kit(database) as on:
        await on.open("q")
        await on.sql.execute(
            "insert into streamfw.message (consumer, message_id, body) select c.id, g::text, "
            "convert_to('{\"number\":' || g || '}', 'UTF8') from streamfw.consumer c, generate_series(1, $1::int) g "
            "where grp = 'g'",
            total,
        )
        await on.connection._sources[0].close()
        app = App(handler, brokers={"default": PostgresBroker(database.dsn, form="rowlock")})
        locked: dict[str, float] = {}
        async with app.running():
            while len(ended) < total:
                there = {
                    r[0]: r[1]
                    for r in await on.sql.fetch(
                        "select m.message_id, f.id is null from streamfw.message m left join "
                        "(select id from streamfw.message for update skip locked) f using (id)"
                    )
                }
                at = monotonic()
                worst = max([worst, *(at - ended[one] for one in there if one in ended)])
                locked = {one: locked.get(one, at) for one, held in there.items() if held}
                longest = max([longest, *(at - since for since in locked.values())])
                await asyncio.sleep(0.05)
        assert await on.count() == 0
    assert len(ended) == total
    assert worst < 1.5
    assert longest < 1.5


# ---------------------------------------------------------------------- ending


async def test_flush_ends_every_claim(on: Kit) -> None:
    source = await opened(on)
    await on.publish("q", b"1", b"2", b"3", b"4")
    first, second = await fetch(source, 2), await fetch(source, 2)
    await ack(source, [first[0], second[0]])
    await source.flush(now() + 5)
    assert [tuple(r) for r in await on.rows("body, attempt, token <> 0")] == [(b"2", 1, True), (b"4", 1, True)]
    assert await on.locked() == []
    assert not await ack(source, [first[1], second[1]])
    assert await on.count() == 0


async def test_close_gives_back_at_once_without_an_attempt(on: Kit) -> None:
    source, other = await opened(on, attempts=3), await opened(on, attempts=3)
    await on.connection.publish([outgoing("q") for _ in range(300)])
    got = await fetch(source, 200)
    slow = await fetch(source, 50)
    await source.lease(slow)
    await ack(source, got[:100])
    pending = asyncio.create_task(fetch(other, 300))
    began = now()
    await source.close()
    again = await asyncio.wait_for(pending, 5)
    while len(again) < 200:
        again += await asyncio.wait_for(fetch(other, 300), 5)
    assert now() - began < 2
    assert {d.id for d in again} & {d.id for d in got[:100]} == set()
    assert {d.attempt for d in again} == {1}
    assert await on.sql.fetchval("select count(*) from streamfw.message where recovered > 0") == 0


async def test_a_claim_on_its_way_at_stop_lets_go(on: Kit) -> None:
    source = await opened(on, attempts=3)
    await on.publish("q", b"1")
    await on.sql.execute("begin")
    await on.sql.execute("lock table streamfw.message in access exclusive mode")
    source.wake()
    pending = asyncio.create_task(fetch(source))
    await eventually(lambda: _waiting(source))
    await source.stop()
    await on.sql.execute("rollback")
    assert await asyncio.wait_for(pending, 5) == []
    assert await on.locked() == []
    assert not source.out.rows
    assert await on.sql.fetchval("select count(*) from streamfw.claim_journal") == 0


def _waiting(source: RowLockSource) -> bool:
    return source._settles._lock.locked() or any(h.role._lock.locked() for h in source._holders.all)


async def test_when_idle_no_transaction_is_open_and_the_table_is_free(on: Kit) -> None:
    source = await opened(on)
    await on.publish("q", *(b"%d" % n for n in range(20)))
    for _ in range(4):
        await ack(source, await fetch(source, 5))
    idle = asyncio.create_task(fetch(source))
    await eventually(lambda: _no_transaction(on))
    await on.sql.execute("set lock_timeout = '1s'; alter table streamfw.message add column more int")
    await on.publish("q", b"after")
    assert bodies(await asyncio.wait_for(idle, 5)) == [b"after"]
    await source.flush(now() + 5)
    await eventually(lambda: _no_transaction(on))


async def _no_transaction(on: Kit) -> bool:
    sql = (
        "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() "
        "and (state like 'idle in%' or xact_start is not null)"
    )
    return await on.sql.fetchval(sql) == 0 and await _is_empty_or_leased(on)


async def _is_empty_or_leased(on: Kit) -> bool:
    return await on.locked() == []


# --------------------------------------------------------------- what may break


async def _end_session(on: Kit, delivery: PostgresDelivery) -> None:
    """As an administrator does it, or a failover."""
    pid = await on.sql.fetchval(
        "select l.pid from pg_locks l join pg_stat_activity a using (pid) "
        "where a.datname = current_database() and locktype = 'transactionid' and l.granted "
        "and a.application_name like 'streamfw holding%' "
        "order by a.xact_start limit 1"
    )
    await on.sql.execute("select pg_terminate_backend($1)", pid)


@pytest.mark.parametrize("attempts", [None, 5])
async def test_a_claim_whose_connection_was_lost_has_lost_its_rows(on: Kit, attempts: int | None) -> None:
    pump = RecordingPump()
    source = await opened(on, pump=pump, attempts=attempts)
    await on.publish("q", b"1", b"2", b"3")
    one, two = await fetch(source, 2)
    (three,) = await fetch(source, 1)
    await ack(source, [one])
    await _end_session(on, one)
    await eventually(lambda: two.lost)
    assert not three.lost, "it is held by another connection"
    assert pump.calls == ["hold", "drop"]
    errors = await ack(source, [two, three])
    assert [type(e) for e in errors] == [LeaseLost]
    assert errors[0].delivery is two
    again = await asyncio.wait_for(fetch(source), 5)
    assert [(d.body, d.attempt) for d in again] == [(b"1", 2 if attempts else 1), (b"2", 2 if attempts else 1)]
    assert await ack(source, again) == ()
    await eventually(lambda: _is_empty(on))
    assert await on.sql.fetchval("select count(*) from streamfw.claim_journal") == 0


async def test_what_ends_a_claim_never_runs_on_another_connection(on: Kit) -> None:
    """The rows are another's by then: a delete there would end them under his hands."""
    source, other = await opened(on), await opened(on)
    await on.publish("q", b"1", b"2")
    one, two = await fetch(source)
    await ack(source, [one])
    claim = source._held.copy().pop()
    claim.holder._broke = lambda _: None  # the news of the loss is late
    await _end_session(on, one)
    theirs = await asyncio.wait_for(fetch(other), 5)
    assert bodies(theirs) == [b"1", b"2"]
    assert await ack(source, [two]) == ()
    await eventually(lambda: claim.lost)
    assert await on.count() == 2
    assert await ack(other, theirs) == ()
    await eventually(lambda: _is_empty(on))


async def test_a_server_that_ends_every_connection(on: Kit) -> None:
    source = await opened(on, attempts=5)
    await on.publish("q", b"1", b"2")
    one, two = await fetch(source)
    await on.sql.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() "
        "and pid <> pg_backend_pid()"
    )
    await eventually(lambda: one.lost and two.lost)
    await _reopened(source)
    again = await asyncio.wait_for(fetch(source), 5)
    assert [d.attempt for d in again] == [2, 2]
    assert {tuple(r) for r in await on.rows("attempt, recovered")} == {(1, 0)}, "its process lived"
    await ack(source, again)


async def _reopened(source: RowLockSource) -> None:
    """As the runtime does: again, where a connection was not known to be lost yet."""
    while True:
        try:
            return await source.reopen()
        except BrokerUnavailable:
            await asyncio.sleep(0)


async def test_a_session_that_may_not_be_idle_in_a_transaction(database: Postgres) -> None:
    """Its own setting wins over that of the database: nothing else ends a claim before its second is over."""
    admin = await database.connect()
    try:
        await admin.execute(f"alter database {database.database} set idle_in_transaction_session_timeout = '100ms'")
    finally:
        await admin.close()
    async with kit(database, form="rowlock") as on:
        source = await opened(on)
        await on.publish("q", b"1", b"2")
        one, two = await fetch(source)
        await ack(source, [one])
        await eventually(lambda: _left(on, 1))
        assert not two.lost
        assert not await ack(source, [two])


async def test_a_process_that_stands_still_loses_its_rows(database: Postgres) -> None:
    """Stopped, or with a blocked loop, it ends no claim; its kernel answers all the same, so only the server can."""
    async with kit(database, form="rowlock", poll=0.1, lease=1.0) as still:
        source = await opened(still)
        await still.publish("q", b"1")
        (delivery,) = await fetch(source)
        assert await still.locked() == [b"1"]
        claims = list(source._held)
        for held in claims:
            assert held.timer is not None
            held.timer.cancel()  # what stands still runs no timer

        async def is_free() -> bool:
            return await still.locked() == []

        await eventually(is_free, deadline=20.0)
        await eventually(lambda: all(held.lost for held in claims))  # what it hears when it goes on
        errors = await source.settle([Settlement(delivery, ACK)])
        assert [type(e) for e in errors] == [LeaseLost]


async def test_a_half_open_peer_does_not_hold_rows_for_long(database: Postgres) -> None:
    async with kit(database, form="rowlock", url=database.over_tcp().dsn) as on:
        source = await opened(on)

        async def shown(connection: asyncpg.Connection) -> tuple[int, ...]:
            names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
            return tuple([int((await connection.fetchval(f"show {n}")).rstrip("ms")) for n in names])

        idle, interval, count, user = await source._holders.all[0].role.run(shown)
        assert idle + interval * count <= 60
        assert 0 < user <= 60_000


# ---------------------------------------------------------------------- costs


async def test_an_idle_subscriber_sends_a_statement_a_poll(database: Postgres) -> None:
    async with kit(database, form="rowlock", poll=0.2) as on:
        source = await opened(on, attempts=3)
        idle = asyncio.create_task(fetch(source))
        await eventually(lambda: source.sent > 2)
        before, began = source.sent, now()
        await eventually(lambda: source.sent >= before + 5)
        assert now() - began >= 4 * 0.2
        await source.stop()
        await idle


@pytest.mark.parametrize(("attempts", "statements"), [(None, 3), (5, 4)])
async def test_what_a_claim_costs(on: Kit, attempts: int | None, statements: int) -> None:
    """Lock, delete, commit; with the journal one more, before the handlers start."""
    source = await opened(on, attempts=attempts)
    await on.connection.publish([outgoing("q") for _ in range(900)])
    await ack(source, await fetch(source, 100))
    await ack(source, await fetch(source, 100))
    await eventually(lambda: _left(on, 700))
    source._tick_at = now() + 60
    before = source.sent
    for left in (600, 500, 400):
        await ack(source, await fetch(source, 100))
        await eventually(lambda left=left: _left(on, left))  # type: ignore[misc]
    assert source.sent - before == 3 * statements


# ------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ordered_by": "key"}, "form='lease'"),
        ({"transactional": True, "workers": 11}, "pool_size"),
        ({"source": Queue("q", form="rowlock", connections=0)}, "connections"),
        ({"source": Queue("q", form="lease", connections=2)}, "connections"),
        ({"source": Queue("q", form="advisory")}, "lease, rowlock"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_honoured_is_said_at_build(options: dict[str, object], said: str) -> None:
    broker = PostgresBroker("postgres://localhost/x", form="rowlock")
    (mistake,) = broker.mistakes(Subscription("q", **options))  # type: ignore[arg-type]
    assert said in mistake


def test_the_app_says_once_why_an_order_cannot_be_kept() -> None:
    async def handle(body: bytes) -> None: ...

    broker = PostgresBroker("postgres://localhost/x")
    marked = subscriber(Queue("q", form="rowlock"), ordered_by="key")(handle)
    with pytest.raises(ExceptionGroup) as caught:
        App(marked, brokers={"default": broker}).build()
    (error,) = caught.value.exceptions
    assert "form='lease'" in str(error)


def test_a_wrong_form_of_the_broker() -> None:
    with pytest.raises(ValueError, match="form='table': one of lease, rowlock"):
        PostgresBroker("postgres://localhost/x", form=cast("object", "table"))  # type: ignore[arg-type]


def test_what_the_form_guarantees() -> None:
    broker = PostgresBroker("postgres://localhost/x")
    locks = Subscription("q", source=Queue("q", form="rowlock"))
    assert broker.capabilities_of(Subscription("q")).settlement == "immediate"
    assert broker.capabilities_of(locks).settlement == "grouped"
    assert broker.capabilities_of(locks).attempts == "process", "nobody counts what dies"
    locks.attempts = 3
    assert broker.capabilities_of(locks).attempts == "durable"
    assert broker.capabilities_of(locks).ordered_by == frozenset()
    assert PostgresBroker("postgres://localhost/x", form="rowlock").capabilities.settlement == "grouped"


async def test_transactional_subscribers_together_must_fit_into_the_pool(database: Postgres) -> None:
    async with kit(database, form="rowlock", pool_size=5) as on:
        await on.open("a", transactional=True, workers=3)
        with pytest.raises(BrokerRefused, match="need 6 connections: set pool_size=6"):
            await on.open("b", transactional=True, workers=3)
        await on.open("b", transactional=True, workers=2)
