"""What the server does for each statement, over a million rows: its plans, and what it reads.

The plans are generic ones, which is what a prepared statement ends up with, and are made without statistics as well as
with them: a queue's statistics are wrong most of the time.
"""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import pytest

from streamfw_postgres import PostgresBroker, migrate
from streamfw_postgres.hints import Hints
from streamfw_postgres.lock_sql import LockStatements
from streamfw_postgres.roles import SESSION, set_session
from streamfw_postgres.sql import LAST, Statements
from tests.helpers import eventually
from tests.services.postgres import Postgres

from .postgres_kit import ack, fetch, kit

MILLION = 1_000_000
FILL = f"""
insert into streamfw.message (consumer, priority, message_id, body)
  select 1 + g % 2, g % 3, g::text, 'x' from generate_series(1, {MILLION}) g;
insert into streamfw.message (consumer, run_at, message_id, body)
  select 1, now() + g * interval '1 s', g::text, 'x' from generate_series(1, {MILLION // 10}) g;
"""
RANGES = "array[-1099511627776, 0, 1], array[0, 300000, -1], array[0, 1, 1099511627776]"


@pytest.fixture(params=["database", "database15"])
async def filled(request: pytest.FixtureRequest) -> Any:
    database: Postgres = request.getfixturevalue(request.param)
    await migrate(PostgresBroker(database.dsn))
    connection = await database.connect()
    await set_session(connection, SESSION)
    await connection.execute("set plan_cache_mode = force_generic_plan")
    await connection.execute("select streamfw.register_group('q', 'a'), streamfw.register_group('q', 'b')")
    await connection.execute(FILL)
    try:
        yield connection
    finally:
        await connection.close()


async def _explained(connection: asyncpg.Connection[Any], sql: str, types: str, values: str) -> dict[str, Any]:
    """The plan as it ran; nothing stays changed."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute(f"prepare tested ({types}) as {sql}")
        text = await connection.fetchval(f"explain (analyze, buffers, format json) execute tested ({values})")
        await connection.execute("deallocate tested")
    finally:
        await transaction.rollback()
    plan: dict[str, Any] = json.loads(text)[0]["Plan"]
    return plan


def _nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", ()) for node in _nodes(child))]


def _check(plan: dict[str, Any], most_buffers: int) -> None:
    nodes = _nodes(plan)
    assert [n for n in nodes if n["Node Type"] in ("Seq Scan", "Bitmap Heap Scan")] == []
    # Sorted is only what a statement was given or answers, never what is in the table.
    assert [n for n in nodes if "Sort" in n["Node Type"] and n["Actual Rows"] > 200] == []
    read = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    assert read <= most_buffers, f"{read} buffers"


# Pages that one row may cost: itself, its new version, and a descent of each index for both (how many of them, the
# server's fill of its pages decides). 200 rows by this are far from what a walk over a million rows reads (10,000).
A_ROW = 20
MANY = 200 * A_ROW
SOME = f"array[{', '.join(map(str, range(1, 201)))}]"
CLAIM = ("int, int, bigint, float8, int, bigint[], bigint[], bigint[]", f"1, 200, 42, 30, 1000000, {RANGES}")
LOCK = ("int, int, int, bigint[], bigint[], bigint[]", f"1, 200, 1000000, {RANGES}", MANY)
STATEMENTS = {
    "claim": (*CLAIM, MANY),
    "claim_ordered": (f"{CLAIM[0]}, bigint[], bigint", f"{CLAIM[1]}, array[1, 2], 9", MANY),
    "tick": ("int", "1", 1000),
    "tick_ordered": ("int, bigint[]", "1, array[1, 2]", 1000),
    "ack": ("bigint[], bigint[]", f"{SOME}, array[0]", 1000),
    "ack_ordered": ("bigint[], bigint[], int, bigint", f"{SOME}, array[0], 1, 9", 1000),
    "settle_odd": (
        "bigint[], bigint[], int[], float8[], bytea[], text",
        "array[2, 4, 6, 8], array[0, 0, 0, 0], array[1, 2, 3, 4], array[9, 0, 0, 0], "
        "array[null, null, null, null]::bytea[], 'q'",
        300,
    ),
    "renew": ("bigint[], bigint[], float8", f"{SOME}, array[0], 30", MANY),
    "publish_one": (
        "text, text[], text[], bytea[], bytea[], int[]",
        "'q', array['a', 'b'], array[null, 'k'], array[null, null]::bytea[], array['x', 'y']::bytea[], array[0, 0]",
        200,
    ),
    "publish": (
        "text[], text[], text[], bytea[], bytea[], int[], float8[], text[]",
        "array['q', 'q'], array['a', 'b'], array[null, 'k'], array[null, null]::bytea[], array['x', 'y']::bytea[], "
        "array[0, 0], array[0, 1], array['q', 'z']",
        200,
    ),
    "mark": ("bigint, bigint, int", "5, 0, 100", 60),
    "tick_journal": ("int", "1", 1000),
    "lock_claim": LOCK,
    "lock_claim_for_journal": LOCK,
    "lock_lease": ("bigint[], bigint, float8", f"{SOME}, 42, 30", MANY),
    "lock_done": ("bigint[]", SOME, MANY),
    "lock_done_noted": ("bigint[], int, bigint", f"{SOME}, 1, 7", MANY),
    "lock_odd": (
        "bigint[], bigint[], int[], float8[], bytea[], text",
        "array[2, 4, 6, 8], array[0, 0, 0, 0], array[1, 2, 3, 4], array[9, 0, 0, 0], "
        "array[null, null, null, null]::bytea[], 'q'",
        300,
    ),
    "lock_note": ("int, bigint, text, bigint[]", f"1, 99, '5', {SOME}", 200),
    "lock_fold": ("int, bigint[], bigint[]", "1, array[7], array[8]", 8000),
}


async def _each_priority_starts_at_its_own_hint(filled: asyncpg.Connection[Any]) -> None:
    """The ranges are index conditions, on servers without skip scan as well."""
    plan = await _explained(filled, Statements().claim, *CLAIM)
    (scan,) = [n for n in _nodes(plan) if n.get("Index Name") == "message_ready"]
    for part in ("consumer", "ROW(priority, id) > ROW(", "priority <"):
        assert part in scan["Index Cond"]
    assert scan.get("Rows Removed by Filter", 0) == 0


@pytest.mark.timeout(240)
async def test_plans_over_a_million_rows(filled: asyncpg.Connection[Any]) -> None:
    """All of them over one table: filling it takes longer than the rest."""
    await _each_priority_starts_at_its_own_hint(filled)
    statements = Statements()
    sql = vars(statements) | {f"lock_{name}": text for name, text in vars(LockStatements()).items()}
    await filled.execute(
        "insert into streamfw.claim_journal select 1, t, '5', array(select generate_series(100 * t, 100 * t + 200)) "
        "from generate_series(7, 9) t"
    )
    await filled.execute(
        "update streamfw.consumer set owner_token = 9, owner_until = now() + interval '1 h' where id = 1"
    )
    for statistics in (False, True):
        if statistics:
            await filled.execute("vacuum analyze streamfw.message")
        for name, (types, values, most) in STATEMENTS.items():
            plan = await _explained(filled, sql[name], types, values)
            try:
                _check(plan, most)
            except AssertionError as error:
                error.add_note(f"{name}, {statistics=}")
                raise
    plan = await _explained(filled, statements.claim, *CLAIM)
    assert plan["Actual Rows"] == 200
    assert {n.get("Index Name") for n in _nodes(plan)} >= {"message_ready", "message_pkey"}


async def test_a_long_foreign_transaction_does_not_make_claims_walk_over_the_dead(database: Postgres) -> None:
    total, size = 20_000, 200
    async with kit(database, poll=1.0) as on:
        source = await on.open("q")
        await on.sql.execute(
            "insert into streamfw.message (consumer, message_id, body) "
            f"select 1, g, 'x' from generate_series(1, {total}) g"
        )
        other = await database.connect()
        try:
            async with other.transaction(isolation="repeatable_read"):
                await other.fetchval("select count(*) from streamfw.consumer")  # its snapshot is taken
                for _ in range(total // size):
                    await ack(source, await fetch(source, size))
                reads = "select idx_tup_read from pg_stat_user_indexes where indexrelname = 'message_ready'"

                async def flushed() -> bool:
                    await source._claims.fetch("select pg_stat_force_next_flush()")
                    return int(await on.sql.fetchval(reads)) >= total

                await eventually(flushed)
                read = await on.sql.fetchval(reads)
        finally:
            await other.close()
    ticks = source._claims.statements - total // size
    # Each claim reads what it takes; each tick may walk over all of it. From the bottom it would be total / 2 a claim.
    assert read <= 2 * total + total * (ticks + 1)
    assert read < total * (total / size) / 4


def test_the_ranges_of_hints_cover_everything_above_the_hints_once() -> None:
    hints = Hints()
    assert hints.ranges(0.0) == ([-LAST], [0], [LAST])
    hints.claimed(0, 10, full=True)
    hints.claimed(5, 7, full=True)
    assert hints.ranges(1.0) == ([-LAST, 0, 5], [0, 10, 7], [0, 5, LAST])
    hints.ticked([0], [4])
    assert hints.ranges(1.0) == ([-LAST, 0, 5], [0, 3, 7], [0, 5, LAST])
    hints.lower(5, 2)
    hints.lower(9, 2)
    assert hints.ranges(1.0) == ([-LAST, 0, 5], [0, 3, 1], [0, 5, LAST])
    hints.clear()
    assert hints.ranges(9.0) == ([-LAST], [0], [LAST])


def test_hints_lag_while_claims_are_short() -> None:
    hints = Hints()
    hints.ranges(0.0)
    hints.claimed(0, 10, full=False)
    assert hints.ranges(0.05) == ([-LAST], [0], [LAST])  # nothing is known to be old enough
    hints.ranges(0.15)
    hints.claimed(0, 20, full=False)
    assert hints.ranges(0.3) == ([-LAST, 0], [0, 10], [0, LAST])
    hints.claimed(0, 30, full=True)
    assert hints.ranges(0.31) == ([-LAST, 0], [0, 30], [0, LAST])
    hints.short()
    assert hints.ranges(0.32) == ([-LAST, 0], [0, 10], [0, LAST])


def test_a_queue_with_very_many_priorities_keeps_its_ranges_few() -> None:
    hints = Hints()
    for priority in range(1000):
        hints.claimed(priority, 5, full=True)
    hints.ticked(range(1000), [3] * 1000)
    assert len(hints.ranges(1.0)[0]) == 65
