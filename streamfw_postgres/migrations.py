"""The schema's versions: one list, expand then contract, applied under a lock.

A migration is never edited once released; a change is a new entry. `compatible_from` is the lowest schema version
that a release may know and still work on the result: a release that knows version 3 accepts a database at 5 whose
last migration says ``compatible_from=3``. So: first a release whose migration only adds (expand), later one that
removes (contract) what no running release uses any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import asyncpg
import msgspec

from streamfw.errors import BrokerRefused

from .schema import PLACE, quoted

__all__ = ["MIGRATIONS", "Migration", "apply", "check_version", "current_version", "pending", "sql_of"]


class Migration(msgspec.Struct, frozen=True):
    """One step: its number, what it does in a few words, its SQL, and who can still work on the result."""

    version: int
    title: str
    compatible_from: int
    sql: str


# The columns that a claim changes are of fixed width, not null, in no index and in no index predicate, and the fill
# factor leaves room for each row's second version: so every claim is a HOT update, which halves server CPU and WAL.
# autovacuum: by count, not by a fraction of the table: a queue's table is small or large for reasons of its own.
_MESSAGE = """
create table {schema}.message (
  id bigint generated always as identity primary key,
  created_at timestamptz not null default now(),
  run_at timestamptz,
  lease_until timestamptz not null default '-infinity',
  token bigint not null default 0,
  consumer int not null,
  priority int not null default 0,
  attempt int not null default 0,
  recovered int not null default 0,
  message_id text not null,
  key text,
  headers bytea,
  body bytea not null
) with (
  fillfactor = 50,
  autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
  autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_vacuum_insert_threshold = 100000,
  autovacuum_analyze_scale_factor = 0.2, autovacuum_analyze_threshold = 5000,
  autovacuum_vacuum_cost_delay = 1
);
create index message_ready on {schema}.message (consumer, priority, id) where run_at is null;
create index message_due on {schema}.message (consumer, run_at) where run_at is not null;
comment on table {schema}.message is
  'One row a message and group. run_at null: ready. A row is in work while lease_until is in the future.';
comment on column {schema}.message.token is 'Whose lease it is: settling needs it. 0: nobody''s.';
comment on column {schema}.message.recovered is
  'How often a lease ended without a settlement. From 100: it was alone in its process then; from 1000: and survived.';
"""

_CONSUMER = """
create table {schema}.consumer (
  id int generated always as identity primary key,
  queue text not null,
  grp text not null,
  owner_token bigint not null default 0,
  owner_until timestamptz not null default '-infinity',
  created_at timestamptz not null default now(),
  unique (queue, grp)
) with (fillfactor = 50);
comment on table {schema}.consumer is
  'One row a queue and group. The group '''' holds what was published before any group; the first one takes it over.';
"""

# plpgsql, because each of its statements sees what was committed before the statement: what another session did
# before it gave up the lock must be seen after the lock is ours.
_FUNCTIONS = """
create function {schema}.ensure_queue(queue_ text) returns void language plpgsql as $body$
begin
  perform pg_advisory_xact_lock(hashtextextended(queue_, 7377));
  if not exists (select from {schema}.consumer c where c.queue = queue_) then
    insert into {schema}.consumer (queue, grp) values (queue_, '') on conflict do nothing;
  end if;
end $body$;
comment on function {schema}.ensure_queue(text) is 'Makes a queue known, so that what is published to it is kept.';

create function {schema}.register_group(queue_ text, grp_ text) returns int language plpgsql as $body$
declare
  found_id int;
begin
  if grp_ = '' then
    raise exception 'a group needs a name' using errcode = '22023';
  end if;
  perform pg_advisory_xact_lock(hashtextextended(queue_, 7377));
  select c.id into found_id from {schema}.consumer c where c.queue = queue_ and c.grp = grp_;
  if found_id is null then
    update {schema}.consumer c set grp = grp_ where c.queue = queue_ and c.grp = '' returning c.id into found_id;
  end if;
  if found_id is null then
    insert into {schema}.consumer (queue, grp) values (queue_, grp_) returning id into found_id;
  end if;
  return found_id;
end $body$;
comment on function {schema}.register_group(text, text) is
  'Registers a group of a queue and returns its id. The first one takes over what was published before it.';

create function {schema}.remove_group(queue_ text, grp_ text) returns bigint language plpgsql as $body$
declare
  gone bigint := 0;
  old_id int;
begin
  perform pg_advisory_xact_lock(hashtextextended(queue_, 7377));
  select c.id into old_id from {schema}.consumer c where c.queue = queue_ and c.grp = grp_;
  if old_id is null then
    return null;
  end if;
  if (select count(*) from {schema}.consumer c where c.queue = queue_) = 1 then
    update {schema}.consumer c set grp = '', owner_token = 0, owner_until = '-infinity' where c.id = old_id;
  else
    delete from {schema}.consumer c where c.id = old_id;
  end if;
  delete from {schema}.message m where m.consumer = old_id;
  get diagnostics gone = row_count;
  return gone;
end $body$;
comment on function {schema}.remove_group(text, text) is
  'Forgets a group that nobody runs any more, with its messages; returns how many (null: there is no such group). '
  'A queue that loses its last group keeps what is published from then on for the next one.';

create function {schema}.publish(
  queue text, body bytea, key text default null, headers jsonb default null, message_id text default null,
  delay interval default null, priority int default 0
) returns text language plpgsql as $body$
declare
  new_id text := coalesce(publish.message_id, gen_random_uuid()::text);
begin
  if exists (select from jsonb_each(coalesce(publish.headers, '{}')) h where jsonb_typeof(h.value) <> 'string') then
    raise exception 'headers: an object of text values is needed, not %', publish.headers using errcode = '22023';
  end if;
  if not exists (select from {schema}.consumer c where c.queue = publish.queue) then
    perform {schema}.ensure_queue(publish.queue);
  end if;
  insert into {schema}.message (consumer, run_at, priority, message_id, key, headers, body)
  select c.id, case when publish.delay > interval '0' then now() + publish.delay end, publish.priority, new_id,
    publish.key, convert_to(publish.headers::text, 'UTF8'), publish.body
  from {schema}.consumer c where c.queue = publish.queue;
  return new_id;
end $body$;
comment on function {schema}.publish(text, bytea, text, jsonb, text, interval, int) is
  'Publishes from SQL, in the caller''s transaction, and returns the message id. Subscribers see it within their poll '
  '(a second or so). Example: select streamfw.publish(''orders'', convert_to(''{"id": 1}'', ''UTF8''), key => ''42'').';
"""

# Small, and all of it changes all the time.
_JOURNAL = """
create table {schema}.claim_journal (
  consumer int not null,
  token bigint not null,
  xid xid8 not null,
  ids bigint[] not null,
  primary key (consumer, token)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
comment on table {schema}.claim_journal is
  'One row a claim by row locks in progress: its transaction and the messages it holds. One whose transaction has ended
was abandoned; the next look at the queue counts a delivery for its messages and removes it.';
"""

MIGRATIONS: tuple[Migration, ...] = (
    Migration(1, "queues, groups and messages", 1, _CONSUMER + _MESSAGE + _FUNCTIONS),
    Migration(2, "the journal of claims by row locks", 1, _JOURNAL),
)

_BOOK = """create schema if not exists {schema};
create table if not exists {schema}.migration (
  version int primary key,
  title text not null,
  compatible_from int not null,
  applied_at timestamptz not null default clock_timestamp()
);"""
_EXISTS = """select exists (select from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
  where n.nspname = $1 and c.relname = 'migration')"""
_NOTE = "insert into {schema}.migration (version, title, compatible_from) values (%d, '%s', %d);"
# One number for all schemas of a database: migrations are rare, and waiting for another one costs nothing.
_LOCK = "select pg_advisory_xact_lock(7377, 1);"
# A migration that waits for a table's lock makes everybody behind it wait: it gives up soon and tries again.
_PATIENCE = "set local lock_timeout = '3s';"


def sql_of(migration: Migration, schema: str) -> str:
    """The SQL of one migration, its entry in the book included."""
    body = migration.sql.replace(PLACE, quoted(schema)).strip()
    note = _NOTE.replace(PLACE, quoted(schema)) % (
        migration.version,
        migration.title.replace("'", "''"),
        migration.compatible_from,
    )
    return f"{body}\n{note}"


def book_of(schema: str) -> str:
    """The SQL that makes the schema and its book of migrations, where they do not exist."""
    return _BOOK.replace(PLACE, quoted(schema))


async def current_version(connection: asyncpg.Connection, schema: str) -> tuple[int, int]:
    """The database's version and the lowest that works on it; ``(0, 0)`` when there is no schema of ours."""
    # By a query, not to_regclass: that may answer from before a lock that was waited for (a cached "no such schema").
    if not await connection.fetchval(_EXISTS, schema):
        return 0, 0
    row = await connection.fetchrow(
        f"select coalesce(max(version), 0), coalesce(max(compatible_from), 0) from {quoted(schema)}.migration"
    )
    return (int(row[0]), int(row[1])) if row else (0, 0)


def check_version(version: int, compatible_from: int, schema: str, known: int = MIGRATIONS[-1].version) -> None:
    """Raise `BrokerRefused` unless a release that knows schema version `known` can work on this database."""
    if version < known:
        have = f"is at version {version}" if version else "does not exist"
        raise BrokerRefused(
            f"schema {schema!r} {have}, this release needs version {known}: run `streamfw postgres migrate`, "
            "or set auto_migrate=true"
        )
    if compatible_from > known:
        raise BrokerRefused(
            f"schema {schema!r} is at version {version}, which works from version {compatible_from} on, and this "
            f"release knows {known}: upgrade streamfw"
        )


async def pending(
    connection: asyncpg.Connection, schema: str, migrations: Sequence[Migration] = MIGRATIONS
) -> list[Migration]:
    """The migrations that this database lacks."""
    version, _ = await current_version(connection, schema)
    return [m for m in migrations if m.version > version]


async def apply(
    connection: asyncpg.Connection, schema: str, migrations: Sequence[Migration] = MIGRATIONS, tries: int = 10
) -> list[Migration]:
    """Bring the database up to date and return what was applied; each migration is one transaction.

    Safe to run from many processes at once. Waits for locks 3 s at a time, `tries` times a migration.
    """
    applied: list[Migration] = []
    left = tries
    while True:
        try:
            step = await _step(connection, schema, migrations)
        except asyncpg.LockNotAvailableError:
            left -= 1
            if not left:
                raise
            await asyncio.sleep(0.5)  # those that waited behind us go first
            continue
        if step is None:
            return applied
        applied.append(step)
        left = tries


async def _step(connection: asyncpg.Connection, schema: str, migrations: Sequence[Migration]) -> Migration | None:
    async with connection.transaction(isolation="read_committed"):
        await connection.execute(_LOCK)
        todo = await pending(connection, schema, migrations)
        if not todo:
            return None
        await connection.execute(_PATIENCE)
        # Looked up first: `create schema if not exists` needs the right to create even where there is nothing to do.
        if todo[0].version == migrations[0].version:
            await connection.execute(book_of(schema))
        await connection.execute(sql_of(todo[0], schema))
        return todo[0]
