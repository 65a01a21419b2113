"""The row lock form's source: rows are ours by an open transaction, which their settlements end.

Theory of operation
    A few connections (two unless told otherwise) take turns: while the rows of one claim are handled, the next claim
    is on its way. The rows of a claim share its transaction. `settle` records what became of them, and when the last
    one is recorded the claim *ends*: one commit for all of it, which begins the connection's next transaction
    ("commit and chain"). With nothing to claim, it commits plainly: a transaction that stays open shows as one, and
    keeps the locks of the tables it has read.

    A claim ends after a second at the latest. What is unfinished then gets a lease in the same commit, and is from
    there on what a row of the lease form is: this source *is* a lease source for everything that takes long. So is
    whatever needs care (suspects, bodies beyond the budget): a claim that brings such rows lets go of them, and the
    lease form claims them.

    A claim whose connection is lost has lost its rows at that moment. Its deliveries are marked lost, and what was
    recorded and not committed is done again, by whoever comes next.

    A transactional handler's row is a claim of its own, on a connection of the handlers' pool: the handler runs in the
    transaction that holds the row (lock_unit.py). There are as many of them as workers, and no second ends them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, cast

import asyncpg

from streamfw.broker import Delivery, Settlement, Subscription, UnitOfWork
from streamfw.errors import BrokerError, BrokerUnavailable, SettleError
from streamfw.outcome import ACK

from .claiming import Claimed, by_priority
from .deliveries import PostgresDelivery
from .ending import Ending
from .holding import Anyone, HeldClaim, Holder, Holders, UnitHolder, nothing
from .journal import Journal
from .lease import LeaseSource
from .lock_unit import LeasedUnit, LockedUnit
from .settling import lease_lost
from .sql import BACK, DONE, RETRY
from .suspects import is_suspect

if TYPE_CHECKING:
    from .connection import PostgresConnection

__all__ = ["LONGEST_CLAIM", "RowLockSource"]

log = logging.getLogger("streamfw.postgres")
# Seconds that a claim may keep what is finished from being committed.
LONGEST_CLAIM = 1.0
# Seconds that a claim's session may be idle at least, whatever the lease: well beyond what its end may take.
IDLE = 5.0
# How often a claim gives way to the fold of its rows' journals.
_REFUSALS = 50


class RowLockSource(LeaseSource):
    """One subscription to a queue of the standard table, by row locks."""

    def __init__(
        self,
        connection: PostgresConnection,
        subscription: Subscription,
        consumer: int,
        lease: float,
        connections: int,
    ) -> None:
        super().__init__(connection, subscription, consumer, lease, apart=False)
        self._lease = lease
        self._locks = connection.lock_statements
        self._attempts = subscription.attempts
        self._journal = Journal(self._settles, self._locks, consumer) if self._attempts is not None else None
        self._claimer.journal = self._journal
        self.ending = Ending(self._sql, self._locks, self._journal, subscription.dead_letter, lease)
        # A batch is one transaction over rows of several claims: it is leased first, as in the lease form.
        self._for_handlers = subscription.workers if subscription.transactional and subscription.batch is None else 0
        holding = f"holding rows of {subscription.name!r}"
        # A claim ends within a second. A process that stands still (stopped, or its loop blocked) ends none; its kernel
        # goes on to answer keepalives, so the server ends the session, and others get the rows.
        session = {"idle_in_transaction_session_timeout": f"{max(lease, IDLE):.0f}s"}
        count = 0 if self._for_handlers else connections
        roles = [connection.role(holding, session=session) for _ in range(count)]
        self._holders = Holders(roles, self._lost_claim)
        self._held: set[HeldClaim] = set()
        self._ends: set[asyncio.Task[None]] = set()
        self._probes = 1
        self._refused = 0
        self._failure: BrokerError | None = None

    @property
    def sent(self) -> int:
        """How many statements its connections have sent (without those of handlers' transactions)."""
        return self._settles.statements + sum(holder.role.statements for holder in self._holders.all)

    @property
    def workers_of_pool(self) -> int:
        """How many connections of the handlers' pool it needs."""
        return self._for_handlers

    async def begin(self) -> None:
        """See `LeaseSource.begin`."""
        await super().begin()
        for holder in self._holders.all:
            await holder.role.connect()

    # ------------------------------------------------------------------ claim

    async def _claim(self, limit: int, max_bytes: int) -> Claimed:
        self._check_writable()
        claimed = None
        if not self._claimer.cautious:
            if not await self._holders.wait(self._has_idle_worker if self._for_handlers else None):
                return Claimed([], some=False)  # stopped meanwhile
            if self._for_handlers:
                claimed = await self._claim_for_handlers(limit, max_bytes)
            else:
                claimed = await self._claim_on(self._holders.take(), limit, max_bytes)
        if claimed is not None:
            return claimed
        # By the lease form, where suspects, the condemned and large bodies are at home.
        if self._journal is not None:
            await self._journal.fold()
        return await self._claimer.claim(limit, max_bytes)

    def _has_idle_worker(self) -> bool:
        return len(self._held) < self._for_handlers

    async def _claim_for_handlers(self, limit: int, max_bytes: int) -> Claimed | None:
        """A row each for workers that have none. As many at once as the last time there was something for all."""
        probes = min(self._probes, limit, self._for_handlers - len(self._held))
        holders = [UnitHolder(self.pool, self._lost_claim) for _ in range(probes)]
        found = await asyncio.gather(*(self._claim_on(h, 1, max_bytes) for h in holders), return_exceptions=True)
        claims = [one for one in found if isinstance(one, Claimed)]
        deliveries = [delivery for one in claims for delivery in one.deliveries]
        if not deliveries:
            if errors := [one for one in found if isinstance(one, BaseException)]:
                raise errors[0]
            if None in found:
                return None
        self._probes = 2 * probes if len(deliveries) == probes else 1
        return Claimed(deliveries, some=any(one.some for one in claims))

    async def _claim_on(self, holder: Holder, limit: int, max_bytes: int) -> Claimed | None:
        """One claim by row locks. What it does not deliver it lets go of; None: some of it needs care."""
        want, inline = self._claimer.budget(limit, max_bytes)
        claim = holder.claim = HeldClaim(holder)
        try:
            rows = await self._locked(holder, want, inline)
            if not rows or self._stopped or self._needs_care(rows):
                await holder.end(claim, nothing)
            elif not await self._noted(claim, rows):
                await self._conclude(claim)  # first of all: the fold skips what is locked
                await self._fold()
                return Claimed([])
            elif claim.lost:
                raise BrokerUnavailable("Postgres: the connection of a claim was lost while it was noted")
            else:
                batch = self._delivered(rows, claim)
                self._hold(claim, batch, len(batch) == want)
                return Claimed(batch)
        except BaseException as error:
            self._over(claim)
            await holder.drop()
            if isinstance(error.__cause__, asyncpg.SerializationError):
                return Claimed([])  # of a handler's transaction, where isolation= asks for it: the next one sees more
            raise
        self._over(claim)
        if rows and not self._stopped:
            return None
        self._hints.short()
        await self._holders.rest()
        return Claimed([], some=False)

    async def _locked(self, holder: Holder, want: int, inline: int) -> list[asyncpg.Record]:
        sql = self._locks.claim if self._journal is None else self._locks.claim_for_journal
        now = asyncio.get_running_loop().time()
        return await holder.fetch(sql, self._claimer.consumer, want, inline, *self._hints.ranges(now))

    def _needs_care(self, rows: list[asyncpg.Record]) -> bool:
        if None in [r[8] for r in rows]:
            return True
        # Beyond its attempts: who breaks the transaction that holds it is settled by a lease, which survives that.
        if self._attempts is not None and max([r[1] for r in rows]) > self._attempts:
            return True
        return bool(max([r[2] for r in rows])) and any(is_suspect(r[2], r[1], self._attempts) for r in rows)

    def _delivered(self, rows: list[asyncpg.Record], claim: HeldClaim) -> list[PostgresDelivery]:
        name = self._subscription.name
        batch = [
            PostgresDelivery(
                name=name, body=b, message_id=m, key=k, attempt=a, timestamp=t, raw_headers=h,
                id=i, claim=claim, priority=p,
            )
            for i, a, _, p, t, m, k, h, b, _ in rows
        ]  # fmt: skip
        batch.sort(key=by_priority)  # no join promises an order
        return batch

    async def _noted(self, claim: HeldClaim, rows: list[asyncpg.Record]) -> bool:
        """Write the journal. False when some of these rows are in an abandoned one, which must be folded first."""
        if self._journal is None:
            return True
        overlap = await self._journal.note(claim.token, rows[0][9], [r[0] for r in rows])
        if claim.lost:
            self._journal.void.add(claim.token)
        if not overlap:
            self._refused = 0
            return True
        self._refused += 1
        if self._refused > _REFUSALS:  # who folds it hangs; a count too low by one is no reason to wait any longer
            log.warning("%r: %d messages are handed out before their last delivery is counted", self, len(overlap))
            return True
        return False

    async def _fold(self) -> None:
        assert self._journal is not None
        if self._refused > 1:
            await asyncio.sleep(0.02)
        await self._journal.fold()

    def _hold(self, claim: HeldClaim, batch: list[PostgresDelivery], full: bool) -> None:
        claim.count = len(batch)
        self._holders.busy = True
        self.out.add(batch)
        self._held.add(claim)
        self._claimer.learn(batch)
        self._claimer.claimed(batch, {d.priority for d in batch}, full)
        if not self._for_handlers:
            claim.timer = asyncio.get_running_loop().call_later(LONGEST_CLAIM, self._overdue, claim)

    # ---------------------------------------------------------------- settle

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        """See `Source.settle`. Durable when the claim has ended, which is when its last row is settled or after a
        second; of rows that hold a lease by then, when it returns."""
        self._check_open()
        self._check_writable()
        late = self._record(settlements)
        errors = await self._settle_late(late) if late else ()
        if self._alone is not None or self._suspect is not None:
            self._after_settling()
        self._wake_for_returned()
        return errors

    def _record(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """Note the outcomes for the end of their claims; answer those whose claims are over."""
        pop = self.out.rows.pop
        late: list[Settlement] = []
        for settlement in settlements:
            delivery = cast(PostgresDelivery, settlement.delivery)
            claim = delivery.claim
            if type(claim) is not HeldClaim or not claim.open:
                late.append(settlement)
            elif pop(delivery.id, None) is not None:  # else it was recorded before
                if settlement.outcome is ACK:
                    claim.finished.append(delivery.id)
                else:
                    self._record_odd(claim, delivery, settlement)
                claim.count -= 1
                if not claim.count:
                    self._conclude_soon(claim)
        return late

    def _record_odd(self, claim: HeldClaim, delivery: PostgresDelivery, settlement: Settlement) -> None:
        kind, after, headers = self._settler.columns(delivery, settlement.outcome)
        if kind == DONE:
            claim.finished.append(delivery.id)
            return
        now = asyncio.get_running_loop().time()
        claim.odd.append((delivery.id, delivery.priority, kind, after, now, headers))

    async def _settle_late(self, late: list[Settlement]) -> Sequence[SettleError]:
        leased: list[Settlement] = []
        errors: list[SettleError] = []
        for settlement in late:
            delivery = cast(PostgresDelivery, settlement.delivery)
            claim = delivery.claim
            if type(claim) is HeldClaim:
                if not claim.over.is_set():
                    await claim.over.wait()  # for a commit, not for a delivery
                if claim.lost:
                    errors.append(lease_lost(delivery))
                    continue
            leased.append(settlement)
        if leased:
            errors += await self._settler.settle(leased)
        return errors

    # ------------------------------------------------------------ end of claim

    def _overdue(self, claim: HeldClaim) -> None:
        if claim.open:
            self._conclude_soon(claim)

    def _conclude_soon(self, claim: HeldClaim, give_back: bool = False) -> None:
        """End it in a task of its own: `settle` waits for no commit."""
        claim.close()
        task = asyncio.create_task(self._conclude(claim, give_back), name="streamfw claim")
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _conclude(self, claim: HeldClaim, give_back: bool = False) -> None:
        """Write what was recorded, and commit; what is unfinished gets a lease, or is let go."""
        claim.close()
        if claim.lost:
            return
        loop = asyncio.get_running_loop()
        rest = [d for d in self.out.rows.values() if d.claim is claim] if claim.count else []
        leased = [] if give_back else [d.id for d in rest]
        sent = loop.time()

        async def write(connection: Anyone) -> int:
            return await self.ending.write(connection, claim, leased)

        try:
            await claim.holder.end(claim, write, chain=self._holders.busy and not rest and not self._stopped)
        except BrokerError as error:
            log.warning("%r: a claim could not be ended: %s", self, error)
            if not error.transient:
                self._failure = error
            self._lost_claim(claim)
        except BaseException:
            self._lost_claim(claim)
            raise
        else:
            if leased:
                claim.until = sent + self._lease
            elif rest:
                self.out.remove([d.id for d in rest])
            for row_id, priority, kind, after, at, _ in claim.odd:
                if kind in (RETRY, BACK):
                    self._settler.returned(priority, row_id, max(0.0, at + after - loop.time()))
            self.ended(claim)
        finally:
            self._over(claim)
        self._wake_for_returned()
        if rest or not self._holders.busy:
            await self._holders.rest()

    def _check_writable(self) -> None:
        """Raise what a claim's end was refused with: nobody waited for it, and it would be refused for ever."""
        if self._failure is not None:
            raise self._failure

    def ended(self, claim: HeldClaim) -> None:
        """A claim was committed."""

    def _over(self, claim: HeldClaim) -> None:
        """Its transaction has ended, one way or the other: the holder is free. Twice is once."""
        if not claim.over.is_set():
            claim.close()
            claim.over.set()
            self._held.discard(claim)
            self._holders.give_back(claim.holder)

    def _lost_claim(self, claim: HeldClaim) -> None:
        """The connection of a claim was lost: its rows are free, and nothing that was recorded took effect."""
        if claim.lost or claim.over.is_set():
            return
        claim.lost = True
        claim.close()
        if claim not in self._held:  # nobody has seen it
            return
        rest = [d for d in self.out.rows.values() if d.claim is claim]
        done = len(claim.finished) + len(claim.odd)
        if done:
            log.warning("%r: the settlements of %d messages were lost with their connection", self, done)
        if self._journal is not None:
            self._journal.cut.add(claim.token)
        self._hints.clear()
        self._tick_at = 0.0
        self._over(claim)
        self.lost(self.out.lose(rest))
        self._signal.set()

    # ----------------------------------------------------------------- alone

    async def _enter_solo(self, patience: float) -> bool | None:
        """Before a suspect is alone, what is finished in this process is made durable."""
        quiet = await super()._enter_solo(patience)
        if quiet is not None:
            for source in self._connection.solo.sources:
                if isinstance(source, RowLockSource):
                    await source.end_claims()
        return quiet

    async def end_claims(self, give_back: bool = False) -> None:
        """End every claim that no handler's own transaction holds, and wait for it."""
        for claim in list(self._held):
            if claim.open and not (isinstance(claim.holder, UnitHolder) and claim.holder.entered):
                self._conclude_soon(claim, give_back)
        if self._ends:
            await asyncio.wait(set(self._ends))

    # ------------------------------------------------------------ transactions

    def transaction(self, deliveries: Sequence[Delivery]) -> AbstractAsyncContextManager[UnitOfWork]:
        """See `Source.transaction`. A row of a claim of its own is handled in the claim's transaction; rows of shared
        claims are leased first."""
        self._check_open()
        rows = cast("Sequence[PostgresDelivery]", deliveries)
        claim = rows[0].claim
        if type(claim) is HeldClaim and claim.open and isinstance(claim.holder, UnitHolder):
            return LockedUnit(self, rows[0], claim, claim.holder)
        return LeasedUnit(self, rows)

    async def lease(self, deliveries: Sequence[PostgresDelivery]) -> None:
        """End the claims of these, so that their rows hold a lease, or are lost."""
        for claim in {id(d.claim): d.claim for d in deliveries}.values():
            if type(claim) is HeldClaim:
                if claim.open:
                    self._conclude_soon(claim)
                await claim.over.wait()

    def committed(self, claim: HeldClaim, delivery: PostgresDelivery) -> None:
        """A handler's own transaction ended its row."""
        claim.close()
        claim.finished.append(delivery.id)
        self.ended(claim)
        self._over(claim)
        self.settled([delivery.id])

    async def broken(self, claim: HeldClaim) -> None:
        """A handler's transaction came to nothing, and the lock with it."""
        self._lost_claim(claim)
        await claim.holder.drop()

    # ------------------------------------------------------------------ end

    def _end(self) -> None:
        super()._end()
        self._holders.stop()

    async def flush(self, deadline: float) -> None:
        """End every claim; what is unfinished has a lease from then on."""
        self._check_open()
        try:
            async with asyncio.timeout_at(deadline):
                await self.end_claims()
        except TimeoutError:
            pass

    async def _give_back(self) -> None:
        some = bool(self._held)
        await self.end_claims(give_back=True)
        await super()._give_back()
        if some:
            self._connection.available(self._subscription.name)

    async def close(self) -> None:
        """See `Source.close`."""
        await super().close()
        for claim in list(self._held):  # a handler that did not end, or a server that does not answer
            self._lost_claim(claim)
            await claim.holder.drop()
        await asyncio.gather(*(holder.role.close() for holder in self._holders.all))

    async def reopen(self) -> None:
        """See `Source.reopen`. Rows of claims whose connection was lost are lost since then; leases hold."""
        await super().reopen()
        if self._journal is not None:
            self._journal.consumer = self._claimer.consumer
        for holder in self._holders.all:
            if holder.claim is None:
                await holder.role.connect()

    def __repr__(self) -> str:
        return f"RowLockSource({self._subscription!r})"
