"""How the queues are, for an operator: plain SQL, and what it answers as structs."""

from __future__ import annotations

import msgspec

from .roles import Role
from .schema import PLACE, quoted

__all__ = ["QUEUES_SQL", "TABLE_SQL", "QueueStatus", "Status", "TableStatus", "read_status"]

QUEUES_SQL = """
select c.queue, c.grp,
  count(*) filter (where m.run_at is null and m.lease_until < now()) as ready,
  count(*) filter (where m.run_at is not null) as delayed,
  count(*) filter (where m.lease_until >= now()) as in_work,
  coalesce(extract(epoch from now() - min(m.created_at) filter (where m.run_at is null and m.lease_until < now())), 0)
    ::float8 as oldest,
  count(*) filter (where m.attempt > 1) as retried,
  count(*) filter (where m.recovered > 0) as recovered,
  (select count(*) from {schema}.consumer dc join {schema}.message dm on dm.consumer = dc.id
    where dc.queue = c.queue || '.dead') as dead,
  c.owner_until >= now() as owned
from {schema}.consumer c left join {schema}.message m on m.consumer = c.id
group by c.id order by c.queue, c.grp"""

TABLE_SQL = """
select (select max(version) from {schema}.migration) as version,
  pg_total_relation_size('{schema}.message'::regclass) as bytes,
  coalesce(s.n_live_tup, 0) as live_rows, coalesce(s.n_dead_tup, 0) as dead_rows,
  extract(epoch from now() - greatest(s.last_vacuum, s.last_autovacuum))::float8 as vacuumed,
  coalesce((select max(age(backend_xmin)) from pg_stat_activity where pid <> pg_backend_pid()), 0)::bigint as xmin_age,
  coalesce((select extract(epoch from now() - min(xact_start)) from pg_stat_activity
    where xact_start is not null and pid <> pg_backend_pid() and backend_type = 'client backend'), 0)::float8 as oldest
from (select 1) x left join pg_stat_user_tables s on s.relid = '{schema}.message'::regclass"""


class QueueStatus(msgspec.Struct, frozen=True):
    """One queue and group. `group` is empty for what waits for the first one; `oldest` is the age of the oldest ready
    message in seconds; `dead` counts the dead letters of the queue; `owned`: an ordered subscriber runs."""

    queue: str
    group: str
    ready: int
    delayed: int
    in_work: int
    oldest: float
    retried: int
    recovered: int
    dead: int
    owned: bool


class TableStatus(msgspec.Struct, frozen=True):
    """The table of messages: sizes in bytes and rows, `vacuumed` seconds ago (None: never).

    `xmin_age` (in transactions) and `oldest_transaction` (in seconds) tell whether a transaction somewhere keeps dead
    rows from being removed.
    """

    version: int
    bytes: int
    live_rows: int
    dead_rows: int
    vacuumed: float | None
    xmin_age: int
    oldest_transaction: float


class Status(msgspec.Struct, frozen=True):
    """All of it."""

    queues: tuple[QueueStatus, ...]
    table: TableStatus


async def read_status(role: Role, schema: str) -> Status:
    """Ask. Raises `BrokerError`."""
    place = quoted(schema)
    queues = await role.fetch(QUEUES_SQL.replace(PLACE, place))
    # Within a literal: the quotes of the identifier's text are doubled.
    table = await role.row(TABLE_SQL.replace("'{schema}.", "'" + place.replace("'", "''") + ".").replace(PLACE, place))
    return Status(tuple(QueueStatus(*row) for row in queues), TableStatus(*table))
