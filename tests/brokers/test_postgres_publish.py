"""Publishing to Postgres: groups, bad messages, hostile names, coalescing, SQL writers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from streamfw.errors import BrokerClosed, OutcomeUnknown, Rejected, TooLarge, Unavailable
from streamfw.message import Headers
from streamfw_postgres.roles import Cut, Role
from tests.helpers import eventually
from tests.services.postgres import Postgres

from .postgres_kit import Kit, ack, bodies, fetch, kit, outgoing


@pytest.fixture
async def on(database: Postgres) -> AsyncIterator[Kit]:
    async with kit(database, max_body=1000) as made:
        yield made


async def test_one_row_for_each_group(on: Kit) -> None:
    await on.open("orders", "a")
    await on.open("orders", "b")
    assert await on.publish("orders", b"1", b"2", key="k") == ()
    rows = await on.rows("consumer, body, key, message_id")
    assert [bytes(r["body"]) for r in rows] == [b"1", b"1", b"2", b"2"]
    assert len({r["message_id"] for r in rows}) == 2


async def test_the_first_group_adopts_what_waited_and_the_second_does_not(on: Kit) -> None:
    await on.publish("orders", b"early")
    source = await on.open("orders", "first")
    other = await on.open("orders", "second")
    await on.publish("orders", b"late")
    assert bodies(await fetch(source)) == [b"early", b"late"]
    assert bodies(await fetch(other)) == [b"late"]


async def test_a_group_that_registers_while_another_does_gets_all_of_its_own(on: Kit) -> None:
    await on.publish("orders", b"early")
    sources = await asyncio.gather(*(on.open("orders", f"g{n}") for n in range(5)))
    await on.publish("orders", b"late")
    got = [bodies(await fetch(source)) for source in sources]
    assert sorted(map(len, got)) == [1, 1, 1, 1, 2]


async def test_to_many_queues_with_delays_in_one_statement(on: Kit) -> None:
    for name in ("a", "b"):
        await on.open(name)
    before = on.connection._publishes.statements
    answers = await on.connection.publish(
        [outgoing("a", b"1"), outgoing("b", b"2", delay=60), outgoing("a", b"3", priority=-5)]
    )
    assert answers == ()
    assert on.connection._publishes.statements - before <= 2  # one, and its notification
    rows = await on.rows("body, run_at is null as ready, priority")
    assert [(bytes(r[0]), r[1], r[2]) for r in rows] == [(b"1", True, 0), (b"2", False, 0), (b"3", True, -5)]


async def test_unknown_queues_in_a_group_are_made_known_and_nothing_is_lost_or_doubled(on: Kit) -> None:
    await on.open("known")
    names = ["known", "new1", "known", "new2", "new1"]
    answers = await on.connection.publish(
        [outgoing(name, str(n).encode(), delay=0.001) for n, name in enumerate(names)]
    )
    assert answers == ()
    assert sorted(bytes(r["body"]) for r in await on.rows("body")) == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_queue_that_was_forgotten_meanwhile_is_made_known_again(on: Kit) -> None:
    await on.publish("orders", b"1")
    await on.sql.execute("delete from streamfw.message; delete from streamfw.consumer")
    await on.publish("orders", b"2")
    assert [bytes(r["body"]) for r in await on.rows("body")] == [b"2"]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("key", "a\0b", "NUL"),
        ("key", "\ud800", "surrogates"),
        ("message_id", "m\0", "NUL"),
        ("name", "q\0", "NUL"),
        ("name", "q\udfff", "surrogates"),
        ("headers", Headers({"h\ud800": "x"}), "surrogates"),
        ("priority", 2**31, "32 bits"),
        ("delay", float("nan"), "seconds"),
        ("delay", -1.0, "seconds"),
    ],
)
async def test_a_bad_message_fails_alone(on: Kit, field: str, value: object, said: str) -> None:
    good, bad, other = outgoing("q", b"1"), outgoing("q", b"2"), outgoing("q", b"3")
    setattr(bad, field, value)
    answers = await on.connection.publish([good, bad, other])
    assert [type(a) for a in answers] == [type(None), Rejected, type(None)]
    assert said in str(answers[1])
    assert [bytes(r["body"]) for r in await on.rows("body")] == [b"1", b"3"]


async def test_what_only_the_server_refuses_fails_alone_too(on: Kit) -> None:
    """An index entry has a limit that a client does not know: found by halves."""
    await on.sql.execute("alter table streamfw.message add check (message_id <> 'no')")
    messages = [outgoing("q", str(n).encode()) for n in range(20)]
    messages[13].message_id = "no"
    answers = await on.connection.publish(messages)
    assert [n for n, a in enumerate(answers) if a is not None] == [13]
    assert isinstance(answers[13], Rejected)
    assert await on.count() == 19


async def test_a_queue_whose_name_is_too_long_for_an_index_is_refused(on: Kit) -> None:
    name = "".join(chr(0x4E00 + n) for n in range(5000))
    answers = await on.connection.publish([outgoing(name), outgoing("ok")])
    assert isinstance(answers[0], Rejected)
    assert answers[1] is None


async def test_a_queue_that_cannot_be_made_known_leaves_the_others_stored_once(on: Kit) -> None:
    """They were stored by the statement that found its name unknown: to repeat them would double them."""
    await on.publish("known", b"0")
    name = "".join(chr(0x4E00 + n) for n in range(5000))
    messages = [outgoing("known", b"1"), outgoing(name), outgoing("new", b"2"), outgoing("known", b"3"), outgoing(name)]
    answers = await on.connection.publish(messages)
    assert [type(answer) for answer in answers] == [type(None), Rejected, type(None), type(None), Rejected]
    assert sorted(bytes(r["body"]) for r in await on.rows("body")) == [b"0", b"1", b"2", b"3"]


async def test_a_server_that_goes_before_a_queue_is_known_takes_no_stored_message_along(
    on: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was stored is answered as stored, and what was not as surely not: nobody publishes again in vain."""
    await on.publish("known", b"0")
    fetch_, made_known = on.connection._publishes.fetch, on.connection.statements.ensure_queue

    async def cut(sql: str, *args: object, **options: Any) -> Any:
        if sql == made_known:
            on.connection._publishes.terminate()
            raise Cut("cut")
        return await fetch_(sql, *args, **options)

    monkeypatch.setattr(Role, "fetch", lambda role, *args, **options: cut(*args, **options))
    answers = await on.connection.publish([outgoing("known", b"1"), outgoing("new"), outgoing("newer")])
    assert [type(answer) for answer in answers] == [type(None), Unavailable, Unavailable]
    assert [bytes(r["body"]) for r in await on.rows("body")] == [b"0", b"1"]


async def test_a_body_beyond_the_limit(on: Kit) -> None:
    answers = await on.publish("q", b"x" * 1000, b"x" * 1001)
    assert answers[0] is None
    assert isinstance(answers[1], TooLarge)
    assert "max_body=1000" in str(answers[1]) and "1001 bytes" in str(answers[1])


async def test_names_are_names_and_never_sql(on: Kit) -> None:
    name = '"; drop table x; --'
    source = await on.open(name, "'; drop schema streamfw cascade; --", dead_letter='"; truncate message')
    await on.publish(name, b"1", key="'; --")
    (delivery,) = await fetch(source)
    assert (delivery.name, delivery.key) == (name, "'; --")
    assert await ack(source, [delivery]) == ()


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [("a", "1"), ("b", "ü\0")],
        [("a", "1"), ("a", "2")],
        [("raw", bytes(range(256)))],
        [("null", None), ("a", "1")],
        [("a", b"\xff"), ("a", b"")],
        [('"', "'"), ("base64", "{}")],
    ],
)
async def test_headers_survive_byte_for_byte(on: Kit, pairs: list[tuple[str, str | bytes | None]]) -> None:
    source = await on.open("q")
    sent = Headers(pairs)
    await on.publish("q", bytes(range(256)), headers=sent)
    (delivery,) = await fetch(source)
    assert delivery.headers.pairs == sent.pairs
    assert delivery.body == bytes(range(256))


async def test_single_publishes_of_many_tasks_coalesce(on: Kit) -> None:
    await on.open("q")
    before = on.connection.sent
    await asyncio.gather(*(on.publish("q", str(n).encode()) for n in range(500)))
    assert on.connection.sent - before <= 6
    assert {bytes(r["body"]) for r in await on.rows("body")} == {str(n).encode() for n in range(500)}


async def test_what_one_publishes_stays_in_order_also_in_a_crowd(on: Kit) -> None:
    source = await on.open("q")

    async def publish(who: int) -> None:
        await on.publish("q", *[f"{who} {n}".encode() for n in range(3)])
        for n in range(3, 6):
            await on.publish("q", f"{who} {n}".encode())

    await asyncio.gather(
        *(publish(who) for who in range(100)), on.publish("q", *[f"x {n}".encode() for n in range(2500)])
    )
    got: dict[bytes, list[int]] = {}
    while sum(map(len, got.values())) < 3100:
        for delivery in await fetch(source, 1000):
            who, n = delivery.body.split()
            got.setdefault(who, []).append(int(n))
    assert all(numbers == sorted(numbers) for numbers in got.values())


async def test_a_large_publish_goes_in_pieces_and_answers_in_order(on: Kit) -> None:
    messages = [outgoing("q", str(n).encode()) for n in range(2500)]
    messages[1700].key = "\0"
    answers = await on.connection.publish(messages)
    assert [n for n, a in enumerate(answers) if a is not None] == [1700]
    assert await on.count() == 2499


async def test_a_cancelled_publisher_takes_nobody_with_it(on: Kit) -> None:
    await on.open("q")
    first = asyncio.create_task(on.publish("q", b"1"))
    second = asyncio.create_task(on.publish("q", b"2"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == ()


async def test_a_cut_in_the_middle_is_unknown_and_a_server_away_is_surely_not_stored(database: Postgres) -> None:
    async with kit(database) as on:
        await on.publish("q", b"1")
        await on.sql.execute("begin; lock table streamfw.message")
        sending = asyncio.create_task(on.publish("q", b"2"))
        pid = on.connection._publishes.pid
        waits = "select count(*) from pg_locks where pid = $1 and not granted"
        await eventually(lambda: on.sql.fetchval(waits, pid))
        await on.sql.execute("select pg_terminate_backend($1)", pid)
        (answer,) = await sending
        assert isinstance(answer, OutcomeUnknown)
        await on.sql.execute("rollback")
        assert await on.publish("q", b"3") == ()  # it healed
        assert [bytes(r["body"]) for r in await on.rows("body")] == [b"1", b"3"]


async def test_missing_tables_are_named_with_what_to_do(on: Kit) -> None:
    await on.publish("q", b"1")
    await on.sql.execute("drop schema streamfw cascade")
    (answer,) = await on.publish("q", b"2")
    assert isinstance(answer, Unavailable)
    assert "streamfw postgres migrate" in str(answer)
    health = await on.connection.check()
    assert not health.ok and "streamfw postgres migrate" in health.detail


async def test_after_close_every_handle_says_so(database: Postgres) -> None:
    async with kit(database) as on:
        source = await on.open("q")
        await on.publish("q", b"1")
        (delivery,) = await fetch(source)
        letters = await on.connection.dead_letters("q.dead")
        connection = on.connection
    for call in (
        lambda: connection.publish([outgoing("q")]),
        connection.check,
        lambda: connection.dead_letters("q"),
        connection.status,
        lambda: source.fetch(1, 1),
        lambda: ack(source, [delivery]),
        lambda: source.flush(0.0),
        source.reopen,
        letters.list,
        letters.requeue,
        letters.purge,
    ):
        with pytest.raises(BrokerClosed):
            await call()
    await source.close()
    await connection.close()


async def test_sql_writers_use_a_function(on: Kit) -> None:
    source = await on.open("orders")
    await on.open("orders", "other")
    sql = (
        "select streamfw.publish('orders', convert_to('{}', 'UTF8'), "
        "key => 'k', headers => $1::jsonb, message_id => 'm')"
    )
    assert await on.sql.fetchval(sql, json.dumps({"tenant": "ü"})) == "m"
    await on.sql.execute("select streamfw.publish('orders', '', delay => interval '1 hour', priority => 3)")
    await on.sql.execute("select streamfw.publish('new', 'x')")
    (delivery,) = await fetch(source)
    assert (delivery.body, delivery.key, delivery.message_id, delivery.headers["tenant"]) == (b"{}", "k", "m", "ü")
    rows = await on.rows("run_at > now() + interval '59 min' as late, priority, length(message_id)")
    assert [tuple(r) for r in rows[2:4]] == [(True, 3, 36), (True, 3, 36)]
    assert len(rows) == 5
    with pytest.raises(asyncpg.PostgresError, match="text values"):
        await on.sql.execute("select streamfw.publish('orders', '', headers => '{\"a\": 1}')")


async def test_headers_that_nobody_here_wrote_are_an_error_of_the_message(on: Kit) -> None:
    from streamfw.errors import ArgumentError

    source = await on.open("orders")
    await on.publish("orders", b"1")
    await on.sql.execute("update streamfw.message set headers = '{\"a\": 1'")
    (delivery,) = await fetch(source)
    with pytest.raises(ArgumentError, match="not as streamfw writes it"):
        delivery.headers  # noqa: B018


async def test_a_removed_group_takes_its_messages_and_the_last_one_leaves_the_queue_known(on: Kit) -> None:
    await on.open("q", "a")
    await on.open("q", "b")
    await on.publish("q", b"1")
    assert await on.sql.fetchval("select streamfw.remove_group('q', 'a')") == 1
    assert await on.count() == 1
    assert await on.sql.fetchval("select streamfw.remove_group('q', 'b')") == 1
    assert await on.sql.fetchval("select streamfw.remove_group('q', 'c')") is None
    await on.publish("q", b"2")
    assert bodies(await fetch(await on.open("q", "c"))) == [b"2"]
