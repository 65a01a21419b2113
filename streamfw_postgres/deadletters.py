"""What a person does with dead letters: list them, put them back, discard them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import asyncpg

from streamfw.broker import DeadLetters
from streamfw.errors import ArgumentError
from streamfw.message import NO_HEADERS, ORIGIN, ORIGIN_GROUP, Headers, Message, original_headers

from . import headers
from .roles import Role
from .schema import PLACE, quoted

if TYPE_CHECKING:
    from .connection import PostgresConnection

__all__ = ["PostgresDeadLetters"]

_BATCH = 500
_MINE = "m.consumer in (select c.id from {schema}.consumer c where c.queue = $1)"
_LIST = f"""
select m.message_id, m.key, m.headers, m.body, date_part('epoch', m.created_at), m.attempt from {{schema}}.message m
where {_MINE} order by m.id limit $2"""
# Where a person's command ends: what fails again meanwhile, in a service that runs, is not for it.
_END = "select coalesce(max(id), 0) from {schema}.message"
# $2 message ids (null: all), $3 up to this id, $4 limit, $5 after this id. Not what a subscriber of the dead letters
# has in work.
_TAKE = f"""
select m.id, m.message_id, m.headers from {{schema}}.message m
where {_MINE} and m.id > $5 and m.id <= $3 and m.lease_until < now() and ($2::text[] is null or m.message_id = any($2))
order by m.id limit $4 for update skip locked"""
# $1 ids, $2 consumers (null: a copy of one that goes back already), $3 headers.
_REQUEUE = """
with u as (select * from unnest($1::bigint[], $2::int[], $3::bytea[]) u (id, consumer, headers)),
gone as (delete from {schema}.message m using u where m.id = u.id
  returning m.id, m.priority, m.message_id, m.key, m.body, u.consumer, u.headers)
insert into {schema}.message (consumer, priority, message_id, key, headers, body)
select consumer, priority, message_id, key, headers, body from gone where consumer is not null order by id"""
_PURGE = f"""
delete from {{schema}}.message where id = any(array(
  select m.id from {{schema}}.message m
  where {_MINE} and m.id <= $3 and m.lease_until < now() and ($2::text[] is null or m.message_id = any($2))
  order by m.id limit $4 for update skip locked))"""


class PostgresDeadLetters(DeadLetters):
    """The dead letters in one queue. After the connection was closed every method raises `BrokerClosed`."""

    def __init__(self, connection: PostgresConnection, role: Role, name: str) -> None:
        self._connection = connection
        self._role = role
        self._name = name
        place = quoted(connection.settings.schema)
        self._list, self._end, self._take, self._requeue, self._purge = (
            sql.replace(PLACE, place).strip() for sql in (_LIST, _END, _TAKE, _REQUEUE, _PURGE)
        )

    async def list(self, limit: int = 100) -> Sequence[Message]:
        """See `DeadLetters.list`."""
        self._connection.check_open()
        rows = await self._role.fetch(self._list, self._name, limit)
        return [
            Message(name=self._name, body=b, message_id=m, key=k, attempt=a, timestamp=t, raw_headers=_readable(h))
            for m, k, h, b, t, a in rows
        ]

    async def requeue(self, message_ids: Sequence[str] | None = None) -> int:
        """See `DeadLetters.requeue`. One transaction for 500 of them, so none goes back twice and none is lost. What
        was published here directly has no origin to go back to, and stays."""
        self._connection.check_open()
        wanted = None if message_ids is None else list(message_ids)
        end = await self._role.value(self._end)
        total = after = 0
        while True:
            moved, last = await self._role.run(partial(self._requeued, wanted, end, after))
            if last is None:
                return total
            total, after = total + moved, last

    async def _requeued(
        self, wanted: Sequence[str] | None, end: int, after: int, connection: asyncpg.Connection
    ) -> tuple[int, int | None]:
        """One batch; answers how many went back and the last id looked at (None: there was nothing)."""
        async with connection.transaction():
            rows = await connection.fetch(self._take, self._name, wanted, end, _BATCH, after)
            if not rows:
                return 0, None
            ids: list[int] = []
            consumers: list[int | None] = []
            restored: list[bytes | None] = []
            known: dict[tuple[str, str], int] = {}
            seen: set[tuple[str, str, str]] = set()
            for row_id, message_id, raw in rows:
                read = _readable(raw)
                origin, group = read.get(ORIGIN), read.get(ORIGIN_GROUP)
                if not origin or not group:
                    continue
                if (origin, group) not in known:  # the group may have been removed meanwhile
                    sql = self._connection.statements.register_group
                    known[origin, group] = await connection.fetchval(sql, origin, group)
                first = (message_id, origin, group) not in seen
                seen.add((message_id, origin, group))
                ids.append(row_id)
                consumers.append(known[origin, group] if first else None)
                restored.append(headers.encode(original_headers(read)))
            status = await connection.execute(self._requeue, ids, consumers, restored)
        for origin, _ in known:
            self._connection.available(origin)
        return int(status.rpartition(" ")[2]), rows[-1][0]

    async def purge(self, message_ids: Sequence[str] | None = None) -> int:
        """See `DeadLetters.purge`; 5,000 at a time."""
        self._connection.check_open()
        wanted = None if message_ids is None else list(message_ids)
        end = await self._role.value(self._end)
        total = 0
        while True:
            gone = await self._role.count(self._purge, self._name, wanted, end, 5000)
            total += gone
            if gone < 5000:
                return total


def _readable(raw: bytes | None) -> Headers:
    try:
        return headers.decode(raw)
    except ArgumentError:
        return NO_HEADERS
