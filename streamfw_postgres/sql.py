"""The statements of the lease form, in one place.

Rules that all of them keep:

- "Now" is the database's ``now()``; a client sends only intervals. Never ``clock_timestamp()``: it is volatile, and
  no index serves it.
- A claim is a HOT update: it changes no column that an index or an index predicate names.
- Whoever ends a row proves with its token that the row is still its own.

The ordered forms differ in one thing: their subscription has one owner, so what is claimable is what *this* owner does
not have out (``token <> all(..)``), whatever lease another owner left on it.
"""

from __future__ import annotations

from .schema import DEFAULT_SCHEMA, PLACE, quoted

__all__ = ["ABANDONED", "BACK", "DEAD", "DONE", "LAST", "RETRY", "SETTLE_ODD", "Statements"]

# What becomes of a row, in SETTLE_ODD.
RETRY, BACK, DONE, DEAD = 1, 2, 3, 4
# The end of the last range of a claim: above every priority.
LAST = 2**40

# $1 consumer, $2 limit, $3 the claim's token, $4 lease in seconds, $5 largest body to return, $6..$8 the ranges
# (priority, after this id, up to this priority): see hints.py. The ranges come one after another, and so does what
# they yield: a nested loop with a limit inside.
_CLAIM = """
update {schema}.message m set token = $3, attempt = m.attempt + 1, recovered = m.recovered + (m.token <> 0)::int,
  lease_until = now() + $4::float8 * interval '1 s'
where m.id = any(array(
  select c.id from unnest($6::bigint[], $7::bigint[], $8::bigint[]) r (priority, low, until)
  cross join lateral (
    select q.id from {schema}.message q
    where q.consumer = {consumer} and q.run_at is null and (q.priority, q.id) > (r.priority, r.low)
      and q.priority < r.until and {free}
    order by q.priority, q.id limit $2 for no key update{skip}) c
  limit $2))
returning m.id, m.attempt, m.recovered, m.priority, date_part('epoch', m.created_at), m.message_id, m.key, m.headers,
  case when octet_length(m.body) <= $5 then m.body end"""

# $1 consumer. What is due becomes ready; for each priority its lowest claimable id, and seconds to the next due time.
# Each step of the recursion is one index probe, except that it walks over what is dead or leased before it.
_TICK = """
with recursive due as (
  update {schema}.message set run_at = null where id = any(array(
    select id from {schema}.message where consumer = $1 and run_at <= now()
    order by run_at limit 1000 for no key update skip locked))
  returning priority, id),
head as (
  (select q.priority, q.id from {schema}.message q where q.consumer = $1 and q.run_at is null and {free}
    order by q.priority, q.id limit 1)
  union all
  select n.priority, n.id from head h cross join lateral (
    select q.priority, q.id from {schema}.message q
    where q.consumer = $1 and q.run_at is null and q.priority > h.priority and {free}
    order by q.priority, q.id limit 1) n),
low as (
  select priority, min(id) as id from (select * from head union all select * from due) x group by priority)
select array(select priority from low order by priority), array(select id from low order by priority),
  (select count(*) from due),
  (select extract(epoch from min(run_at) - now())::float8 from {schema}.message
    where consumer = $1 and run_at > now())"""

# Whether the transaction of a claim's journal `j` has ended without deleting it. What is beyond our snapshot is of
# another server, whose dump was restored here; asking for its status would be an error.
ABANDONED = """case when j.xid < pg_snapshot_xmax(pg_current_snapshot())
  then pg_xact_status(j.xid) is distinct from 'in progress' else true end"""
# Of a subscription with a journal the tick also tells whether there is something to fold.
_TICK_JOURNAL = f"""{_TICK},
  exists (select from {{schema}}.claim_journal j where j.consumer = $1 and {ABANDONED})"""

_FREE = "q.lease_until < now()"
# $9 (claim) and $2 (tick): the tokens of what this owner has out.
_FREE_ORDERED = "q.token <> all(${n}::bigint[])"
# $10: the owner's token. The lock keeps a successor from taking over between this check and the claim's commit.
_OWNED = """(select o.id from {schema}.consumer o
    where o.id = $1 and o.owner_token = $10 and o.owner_until > now() for no key update)"""

# $1 ids, $2 tokens: not pairs, for a join of pairs costs three times as much. A process that lost a row and has it
# again may end it by its older delivery's success: harmless, for an ack says "handled". What is no ack uses pairs.
_ACK = "delete from {schema}.message where id = any($1::bigint[]) and token = any($2::bigint[]){fence}"
_FENCE = " and exists (select from {schema}.consumer o where o.id = ${n} and o.owner_token = ${m})"

# $1 ids, $2 tokens, $3 what, $4 seconds, $5 headers of the dead letter, $6 its queue. Answers the ids that were ours.
# Given back, a row that was to be alone did not die of it: only how often it was recovered stays (% 100).
# A dead letter whose queue is not known (any more) stays what it is, unanswered: it is made known, and asked again.
SETTLE_ODD = """
with u as materialized (
  select * from unnest($1::bigint[], $2::bigint[], $3::int[], $4::float8[], $5::bytea[])
    u (id, token, what, after, headers)
  where true{fence}),
back as (
  update {schema}.message m set token = 0, lease_until = '-infinity', attempt = {attempt},
    recovered = case when u.what = 2 then {recovered} % 100 else 0 end,
    run_at = case when u.what = 1 and u.after > 0 then {now} + u.after * interval '1 s' end
  from u where m.id = u.id and {ours} and u.what in (1, 2) returning m.id),
gone as (
  delete from {schema}.message m using u where m.id = u.id and {ours}
    and (u.what = 3 or u.what = 4 and exists (select from {schema}.consumer c where c.queue = $6))
  returning m.id, u.what, u.headers, m.priority, m.message_id, m.key, m.body),
dead as (
  insert into {schema}.message (consumer, priority, message_id, key, headers, body)
  select c.id, g.priority, g.message_id, g.key, g.headers, g.body
  from gone g join {schema}.consumer c on c.queue = $6 where g.what = 4 order by g.id, c.id)
select array(select id from back union all select id from gone)"""

# A lease's claim has counted the attempt, and its token is the proof.
_LEASED = {
    "attempt": "m.attempt - (u.what = 2)::int",
    "recovered": "m.recovered",
    "now": "now()",
    "ours": "m.token = u.token",
}

# $1..$7 columns, one element a message; null for a column without any value. $8: the distinct queues; answered are
# those that are not known, whose messages were not stored: nothing is lost to a queue that was forgotten meanwhile.
_PUBLISH = """
with stored as (
  insert into {schema}.message (consumer, run_at, priority, message_id, key, headers, body)
  select c.id, case when u.delay > 0 then now() + u.delay * interval '1 s' end, coalesce(u.priority, 0),
    u.message_id, u.key, u.headers, u.body
  from unnest($1::text[], $2::text[], $3::text[], $4::bytea[], $5::bytea[], $6::int[], $7::float8[])
    with ordinality u (queue, message_id, key, headers, body, priority, delay, n)
  join {schema}.consumer c on c.queue = u.queue order by u.n)
select array(select q from unnest($8::text[]) q where not exists (select from {schema}.consumer c where c.queue = q))"""

# The same for what nobody keeps for groups that are yet to come: only where a group has subscribed.
_PUBLISH_UNKEPT = _PUBLISH.replace("on c.queue = u.queue order", "on c.queue = u.queue and c.grp <> '' order").replace(
    "c.queue = q)", "c.queue = q and c.grp <> '')"
)

# The same for one queue and no delay, which is most of what is published: $1 queue, $2..$6 columns.
_PUBLISH_ONE = """
insert into {schema}.message (consumer, priority, message_id, key, headers, body)
select c.id, coalesce(u.priority, 0), u.message_id, u.key, u.headers, u.body
from unnest($2::text[], $3::text[], $4::bytea[], $5::bytea[], $6::int[])
  with ordinality u (message_id, key, headers, body, priority, n)
cross join {schema}.consumer c where c.queue = $1 order by u.n"""

# $1 ids, $2 tokens, $3 seconds. skip locked: a handler's own transaction holds its row, and is a lease by itself.
_RENEW = """
update {schema}.message set lease_until = now() + $3::float8 * interval '1 s' where id = any(array(
  select id from {schema}.message where id = any($1::bigint[]) and token = any($2::bigint[])
  for no key update skip locked))
returning id"""


class Statements:
    """Every statement, for one schema."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        def made(text: str, **more: str) -> str:
            for name, value in more.items():
                text = text.replace("{" + name + "}", value)
            return text.replace(PLACE, quoted(schema)).strip()

        def fence(first: int) -> str:
            return _FENCE.replace("{n}", str(first)).replace("{m}", str(first + 1))

        self.claim = made(_CLAIM, consumer="$1", free=_FREE, skip=" skip locked")
        # Not `skip locked`: a locked row may be the head of its key, held by the former owner's open transaction; the
        # claim waits for it, or its successors would overtake it. Own rows are not looked at, so none of them waits.
        self.claim_ordered = made(_CLAIM, consumer=_OWNED, free=_FREE_ORDERED.replace("{n}", "9"), skip="")
        self.tick = made(_TICK, free=_FREE)
        self.tick_ordered = made(_TICK, free=_FREE_ORDERED.replace("{n}", "2"))
        self.tick_journal = made(_TICK_JOURNAL, free=_FREE)
        self.ack = made(_ACK, fence="")
        self.ack_ordered = made(_ACK, fence=fence(3))
        self.settle_odd = made(SETTLE_ODD, **_LEASED, fence="")
        self.settle_odd_ordered = made(SETTLE_ODD, **_LEASED, fence=fence(7))
        self.renew = made(_RENEW)
        self.publish = made(_PUBLISH)
        self.publish_one = made(_PUBLISH_ONE)
        self.publish_unkept = made(_PUBLISH_UNKEPT)
        self.ensure_queue = made("select {schema}.ensure_queue($1)")
        self.remove_group = made("select coalesce({schema}.remove_group($1, $2), 0)")
        # A reply inbox leaves no trace; what was published to it while it went is dropped like any late reply. Others'
        # inboxes whose process died without a word go with it, an hour after their owner's last sign of life.
        self.sweep_replies = made(
            "with gone as (delete from {schema}.consumer where starts_with(queue, $1) and (queue = $2 and grp = '' "
            "or queue <> $2 and owner_until < now() - interval '1 hour' "
            "and created_at < now() - interval '1 hour') returning id) "
            "delete from {schema}.message where consumer in (select id from gone)"
        )
        self.register_group = made("select {schema}.register_group($1, $2)")
        # $1 ids: which of them still exist, for the report of what was lost.
        self.exist = made("select id from {schema}.message where id = any($1::bigint[])")
        # $1 ids, $2 tokens: which of them are ours and only locked.
        self.ours = made("select id from {schema}.message where id = any($1::bigint[]) and token = any($2::bigint[])")
        self.mark = made("update {schema}.message set recovered = $3 where id = $1 and token = $2")
        # $1 ids, $2 tokens: bodies that were too large to come with their claim.
        self.sizes = made(
            "select id, octet_length(body) from {schema}.message where id = any($1::bigint[]) and token = $2"
        )
        self.bodies = made("select id, body from {schema}.message where id = any($1::bigint[]) and token = $2")
        # $1 consumer, $2 token, $3 seconds.
        self.own = made(
            "update {schema}.consumer set owner_token = $2, owner_until = now() + $3::float8 * interval '1 s' "
            "where id = $1 and owner_until < now() and owner_token <> $2"
        )
        self.own_again = made(
            "update {schema}.consumer set owner_until = now() + $3::float8 * interval '1 s' "
            "where id = $1 and owner_token = $2"
        )
        self.disown = made(
            "update {schema}.consumer set owner_token = 0, owner_until = '-infinity' where id = $1 and owner_token = $2"
        )
