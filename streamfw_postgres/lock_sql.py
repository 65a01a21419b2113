"""The statements of the row lock form.

They run in transactions that are begun by the end of the one before (``commit and chain``), so ``now()`` is stale and
would hide what was published since: ``statement_timestamp()``, which is stable too, and served by an index as well.

A claim changes nothing, so whoever ends a row needs no token: it has locked the row. The attempt is counted where the
row is given back, leased, or (when the process dies) by the journal.
"""

from __future__ import annotations

from .schema import DEFAULT_SCHEMA, PLACE, quoted
from .sql import ABANDONED, SETTLE_ODD

__all__ = ["LockStatements"]

# $1 consumer, $2 limit, $3 largest body to return, $4..$6 the ranges, as in the lease form's claim. The last column
# is the transaction, for the journal.
_CLAIM = """
select c.id, c.attempt + 1, c.recovered + (c.token <> 0)::int, c.priority, date_part('epoch', c.created_at),
  c.message_id, c.key, c.headers, case when octet_length(c.body) <= $3 then c.body end, {transaction}
from unnest($4::bigint[], $5::bigint[], $6::bigint[]) r (priority, low, until)
cross join lateral (
  select q.* from {schema}.message q
  where q.consumer = $1 and q.run_at is null and (q.priority, q.id) > (r.priority, r.low)
    and q.priority < r.until and q.lease_until < statement_timestamp()
  order by q.priority, q.id limit $2 for update skip locked) c
limit $2"""

# $1 ids, $2 token, $3 seconds: what outlives its claim is ours by a lease from here on.
_LEASE = """
update {schema}.message set token = $2, attempt = attempt + 1, recovered = recovered + (token <> 0)::int,
  lease_until = statement_timestamp() + $3::float8 * interval '1 s'
where id = any($1::bigint[])"""

_LOCKED = {
    "attempt": "m.attempt + (u.what = 1)::int",
    "recovered": "(m.recovered + (m.token <> 0)::int)",
    "now": "statement_timestamp()",
    "ours": "u.token = 0",  # all of them: the caller holds the locks
    "fence": "",
}

# $1 consumer, $2 token, $3 transaction, $4 ids. Answers the ids of all abandoned journals. Not waiting for the disk is
# safe: what a crash of the *server* forgets is that a delivery was begun, and the delivery died with the session.
_NOTE = """
with hurry as materialized (select set_config('synchronous_commit', 'off', true)),
noted as (
  insert into {schema}.claim_journal (consumer, token, xid, ids) select $1, $2, $3::text::xid8, $4::bigint[] from hurry)
select coalesce(array_agg(i.id), '{}') from {schema}.claim_journal j cross join unnest(j.ids) i (id)
where j.consumer = $1 and {abandoned}"""

# $1 consumer, $2 tokens whose process lives (only the connection was lost), $3 tokens of claims that nobody saw.
# Counts a delivery for each row of the abandoned journals. A row that somebody has locked stays in the journal: it
# was claimed again meanwhile, by one who will look here before its handler starts. Answers how many were counted, and
# the tokens of the journals that stay.
_FOLD = """
with dead as materialized (
  select j.token, j.ids from {schema}.claim_journal j
  where j.consumer = $1 and {abandoned} for update skip locked),
taken as materialized (
  select i.id, count(*)::int as times, (count(*) filter (where d.token <> all($2::bigint[])))::int as deaths
  from dead d cross join unnest(d.ids) i (id) where d.token <> all($3::bigint[]) group by i.id),
free as materialized (
  select m.id from {schema}.message m where m.id = any(array(select id from taken)) for update skip locked),
counted as (
  update {schema}.message m set attempt = m.attempt + t.times, recovered = m.recovered + t.deaths
  from taken t where m.id = t.id and m.id = any(array(select id from free)) returning m.id),
locked as materialized (
  select m.id from {schema}.message m
  where m.id = any(array(select id from taken)) and m.id <> all(array(select id from free))),
later as (
  update {schema}.claim_journal j set ids = array(select unnest(d.ids) intersect select id from locked)
  from dead d where j.consumer = $1 and j.token = d.token and d.token <> all($3::bigint[])
    and d.ids && array(select id from locked) returning j.token),
over as (
  delete from {schema}.claim_journal j using dead d where j.consumer = $1 and j.token = d.token
    and (d.token = any($3::bigint[]) or not d.ids && array(select id from locked)))
select (select count(*) from counted), array(select token from later)"""


class LockStatements:
    """Every statement of the form, for one schema."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        def made(text: str, **more: str) -> str:
            for name, value in more.items():
                text = text.replace("{" + name + "}", value)
            return text.replace(PLACE, quoted(schema)).strip()

        self.claim = made(_CLAIM, transaction="null::bigint")
        self.claim_for_journal = made(_CLAIM, transaction="(select pg_current_xact_id()::text::bigint)")
        self.lease = made(_LEASE)
        self.odd = made(SETTLE_ODD, **_LOCKED)
        # $1 ids, all of them locked by this transaction.
        self.done = made("delete from {schema}.message where id = any($1::bigint[])")
        self.note = made(_NOTE, abandoned=ABANDONED)
        self.fold = made(_FOLD, abandoned=ABANDONED)
        # The same and the claim's journal: $2 consumer, $3 token.
        self.done_noted = made(
            "with over as (delete from {schema}.claim_journal where consumer = $2 and token = $3) "
            "delete from {schema}.message where id = any($1::bigint[])"
        )
