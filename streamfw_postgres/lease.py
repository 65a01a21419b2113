"""The lease form's source: rows are ours until a time, by a token, and the time is renewed while they are.

One connection claims, one settles and renews. While claims return rows the source claims on; when one comes back
empty it waits to be woken (notify.py), for the poll, or for the next due time. The poll is one statement, the tick:
it makes ready what is due and says where the claims should start (hints.py); only when it finds something a claim
follows.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, cast

from streamfw.broker import Delivery, Health, PumpControl, Settlement, Source, Subscription, UnitOfWork
from streamfw.errors import BrokerClosed, BrokerError, SettleError

from .claiming import Claimed, Claimer
from .deliveries import Out, PostgresDelivery
from .hints import Hints
from .ownership import Ownership
from .renewal import Renewer
from .settling import Settler
from .suspects import ALONE, PATIENCE, SURVIVED, Alone, mark
from .unit import Unit

if TYPE_CHECKING:
    from .connection import PostgresConnection
    from .pool import UnitPool

__all__ = ["LeaseSource"]

log = logging.getLogger("streamfw.postgres")
# Seconds that closing may take where the server does not answer.
_CLOSING = 4.0


class LeaseSource(Source):
    """One subscription to a queue of the standard table."""

    def __init__(
        self,
        connection: PostgresConnection,
        subscription: Subscription,
        consumer: int,
        lease: float,
        apart: bool = True,
    ) -> None:
        """`apart`: claims have a connection of their own."""
        self._connection = connection
        self._subscription = subscription
        self.statements = self._sql = sql = connection.statements
        self._poll = connection.settings.poll
        self._settles = connection.role(f"settling for {subscription.name!r}")
        self._claims = connection.role(f"claiming from {subscription.name!r}") if apart else self._settles
        self._hints = Hints()
        self.out = Out()
        self._owning = Ownership(sql, consumer, lease) if subscription.ordered_by else None
        self._settler = Settler(self._settles, sql, self.out, self._hints, subscription.group, subscription.dead_letter)
        self._claimer = Claimer(self._claims, sql, self.out, self._hints, self._settler, subscription, lease)
        self._claimer.consumer = consumer
        self._claimer.max_body = connection.settings.max_body
        self._claimer.owning = self._owning
        self._renewer = Renewer(
            self._settles,
            sql,
            self.out,
            lease,
            self.lost,
            self._lose_what_lapsed,
            self._keep_ownership if self._owning else None,
        )
        self._signal = asyncio.Event()
        self._look = True
        self._tick_at = self._tick_rest = self._own_at = 0.0
        self._suspect: tuple[PostgresDelivery, int] | None = None
        self._alone: Alone | None = None
        self._watch: asyncio.Task[None] | None = None
        self._entering: asyncio.Task[bool] | None = None
        self._stopped = self._closed = False

    @property
    def pool(self) -> UnitPool:
        """Connections for the handlers' transactions."""
        return self._connection.pool

    @property
    def name(self) -> str:
        """The queue."""
        return self._subscription.name

    @property
    def pump(self) -> PumpControl:
        """The pump that feeds on this source."""
        return self._subscription.pump

    @property
    def sent(self) -> int:
        """How many statements its two connections have sent."""
        return self._claims.statements + self._settles.statements

    async def begin(self) -> None:
        """Connect, and take part. Called once, by `Connection.open`."""
        await self._settles.connect()
        await self._claims.connect()
        self._renewer.start()

    # ------------------------------------------------------------------ fetch

    async def fetch(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        """See `Source.fetch`."""
        self._check_open()
        while not self._stopped:
            batch = await self._step(limit, max_bytes)
            if batch:
                return batch
            self._check_open()
        return ()

    async def _step(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        """At most one claim. ``()``: nothing yet; what to wait for was waited for."""
        loop = asyncio.get_running_loop()
        if self._alone is not None:
            return await self._beside(self._alone)
        if self._suspect is not None:
            return await self._hand_out_alone()
        if self._owning is not None and not await self._is_owner(self._owning):
            return ()
        if loop.time() >= self._tick_at:
            await self._tick()
        if not self._look:
            await self._idle(self._tick_at)
            return ()
        # What wakes us from here on may be too late for this claim, and makes us look again.
        self._look = False
        self._signal.clear()
        claimed = await self._claim(limit, max_bytes)
        if self._stopped and (claimed.deliveries or claimed.suspect):
            await self._claimer.give_back_all(claimed)
            return ()
        self._suspect = claimed.suspect
        self._look = self._look or claimed.some
        return claimed.deliveries

    async def _claim(self, limit: int, max_bytes: int) -> Claimed:
        return await self._claimer.claim(limit, max_bytes)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        found, more, next_due = await self._claimer.tick()
        self._look = self._look or found
        now = loop.time()
        # What it walks over costs, so it gets a twentieth of the time at most.
        self._tick_rest = now + max(0.02, 20 * (now - began))
        self._tick_at = now + self._poll * random.uniform(1.0, 1.3)
        if next_due is not None:
            self._tick_in(next_due)
        self._tick_at = max(self._tick_at, self._tick_rest)
        if more:
            self._tick_at = now

    def _tick_in(self, seconds: float) -> None:
        """Tick then at the latest; 1 ms later, for a timer may fire a little early."""
        wanted = asyncio.get_running_loop().time() + seconds + 0.001
        self._tick_at = max(self._tick_rest, min(self._tick_at, wanted))

    async def _idle(self, until: float) -> None:
        timer = asyncio.get_running_loop().call_at(until, self._signal.set)
        try:
            await self._signal.wait()
        finally:
            timer.cancel()
            self._signal.clear()

    def wake(self, after: float = 0.0, rescan: bool = False) -> None:
        """There is something, in `after` seconds; `rescan`: perhaps below where claims start to look."""
        if after > 0 or rescan:
            self._tick_in(after)
            self._own_at = 0.0
        else:
            self._look = True
        self._signal.set()

    # -------------------------------------------------------------- ownership

    async def _is_owner(self, owning: Ownership) -> bool:
        """Own an ordered subscription, or wait for the next time to ask. One statement a poll."""
        now = asyncio.get_running_loop().time()
        if owning.held:
            if not owning.due or await owning.renew(self._claims):
                return True
            self._ownership_lost()
            return False
        if now < self._own_at:
            await self._idle(self._own_at)
            return False
        self._own_at = now + self._poll * random.uniform(1.0, 1.3)
        if owning.token:  # ours, but we could not say so for too long: everything that is out may be another's
            owning.lose()
            self._ownership_lost()
        if not await owning.acquire(self._claims):
            return False
        self._settler.owner = owning.owner
        self._hints.clear()
        self._look, self._tick_at = True, 0.0
        return True

    async def _keep_ownership(self) -> None:
        """While nothing is fetched: the pump is full, or its handlers are slow."""
        owning = self._owning
        if owning is not None and owning.held and owning.due and not await owning.renew(self._settles):
            self._ownership_lost()

    def _ownership_lost(self) -> None:
        log.warning("%r has another owner now; what is out is lost", self._subscription)
        self.lost(self.out.lose(list(self.out.rows.values())))

    def _lose_what_lapsed(self) -> None:
        """By our own clock: others may have it. What is left is vouched for until two turns from now."""
        now = time.monotonic()  # not the loop's: that of uvloop stands still within a turn
        owning = self._owning
        if owning is not None and owning.until < now:
            owning.lose()
            self._ownership_lost()
        elif overdue := self.out.overdue(now):
            self.lost(self.out.lose(overdue))
        until = min(self.out.soonest(), math.inf if owning is None else owning.until)
        self.pump.vouch(min(2 * self._renewer.turn, until - now), self._lose_what_lapsed)

    def lost(self, deliveries: Sequence[PostgresDelivery]) -> None:
        """These were marked lost: what of them is queued is dropped, and never starts."""
        if not deliveries:
            return
        log.warning("%r: %d messages in work were lost to another owner", self._subscription, len(deliveries))
        self._settler.any_lost = True
        self._after_settling()
        self.pump.hold()
        self.pump.release(drop=_is_lost)
        if self._connection.solo.holds(self.pump):
            self.pump.hold()  # another source's suspect is still alone

    # ----------------------------------------------------------------- alone

    async def _hand_out_alone(self) -> Sequence[Delivery]:
        """Deliver the suspect when nothing else runs in this process (or after a while all the same)."""
        assert self._suspect is not None
        delivery, recovered = self._suspect
        loop = asyncio.get_running_loop()
        patience_ends = loop.time() + PATIENCE
        while (
            self.out.rows.keys() - {delivery.id}
            and loop.time() < patience_ends
            and not self._stopped
            and not delivery.lost
        ):
            await self._idle(patience_ends)
        quiet = await self._enter_solo(patience_ends - loop.time())
        if quiet is None or delivery.lost:
            if quiet is not None:
                self._connection.solo.leave()
            self._suspect, self._look = None, True
            await self._claimer.give_back([delivery])
            return ()
        quiet = quiet and not self.out.rows.keys() - {delivery.id}
        alone = Alone(self._connection.solo, delivery.id, recovered)
        if quiet:
            try:
                await self._mark(delivery, mark(recovered, ALONE))
            except BaseException:
                alone.end()  # it is still our suspect: its turn comes when the source is open again
                raise
        self._alone, self._suspect = alone, None
        self._watch = asyncio.create_task(self._survive(delivery, alone, quiet), name="streamfw suspect")
        log.warning(
            "message %s of %r may have killed its process %d times: it is handled alone",
            delivery.message_id,
            self._subscription,
            recovered % ALONE,
        )
        return (delivery,)

    async def _enter_solo(self, patience: float) -> bool | None:
        """Hold all other pumps; whether they rest. None: stopped meanwhile, nothing is held."""
        if self._stopped:
            return None
        self._entering = asyncio.create_task(self._connection.solo.enter(self, max(0.0, patience)))
        await asyncio.wait({self._entering})
        return None if self._entering.cancelled() else self._entering.result()

    async def _mark(self, delivery: PostgresDelivery, recovered: int) -> None:
        await self._settles.count(self._sql.mark, delivery.id, delivery.claim.token, recovered)

    async def _survive(self, delivery: PostgresDelivery, alone: Alone, quiet: bool) -> None:
        """Let the others go on when the suspect has lived for long enough, unless it did so before."""
        if alone.recovered >= SURVIVED and quiet:
            return
        try:
            await asyncio.wait_for(alone.over.wait(), PATIENCE)
        except TimeoutError:
            try:
                if quiet:
                    await self._mark(delivery, mark(alone.recovered, SURVIVED))
                alone.end()
            except BrokerError as error:  # the mark says "alone", so alone it stays
                log.warning("a suspect stays alone: %s", error)

    async def _beside(self, alone: Alone) -> Sequence[Delivery]:
        """Nothing is fetched while a suspect is out alone."""
        while not alone.over.is_set() and not self._stopped:
            await self._idle(asyncio.get_running_loop().time() + PATIENCE)
        if alone.over.is_set():
            self._alone, self._look = None, True
        return ()

    def _after_settling(self) -> None:
        """Somebody may wait for what is out to end: a suspect's turn, or what comes after one."""
        if self._alone is not None and self._alone.row_id not in self.out.rows:
            self._alone.end()
            self._signal.set()
        elif self._suspect is not None and len(self.out.rows) <= 1:
            self._signal.set()

    # ---------------------------------------------------------------- settle

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        """See `Source.settle`; durable when it returns."""
        self._check_open()
        errors = await self._settler.settle(settlements)
        if self._alone is not None or self._suspect is not None:
            self._after_settling()
        self._wake_for_returned()
        return errors

    def _wake_for_returned(self) -> None:
        if self._settler.soonest is not None:
            after, self._settler.soonest = self._settler.soonest, None
            self.wake(after)

    def settled(self, ids: Sequence[int]) -> None:
        """A handler's own transaction ended these."""
        self.out.remove(ids)
        self._after_settling()

    def unit_ack(self) -> tuple[str, tuple[Any, ...]]:
        """The statement that ends a row in a handler's transaction, and its arguments after ids and tokens."""
        owner = self._settler.owner
        return (self._sql.ack, ()) if owner is None else (self._sql.ack_ordered, owner)

    def transaction(self, deliveries: Sequence[Delivery]) -> AbstractAsyncContextManager[UnitOfWork]:
        """See `Source.transaction`."""
        self._check_open()
        return Unit(self, cast("Sequence[PostgresDelivery]", deliveries))

    # ------------------------------------------------------------------ end

    async def stop(self) -> None:
        """See `Source.stop`. A claim on its way is waited for by its fetch, and given back."""
        self._end()

    def _end(self) -> None:
        self._stopped = True
        if self._entering is not None:
            self._entering.cancel()
        self._signal.set()

    async def flush(self, deadline: float) -> None:
        """Nothing is left to do: what `settle` returned from is durable."""
        self._check_open()

    async def close(self) -> None:
        """See `Source.close`."""
        if self._closed:
            return
        self._closed = True
        self._end()
        self._connection.forget(self)
        await self._renewer.close()
        if self._watch is not None:
            self._watch.cancel()
        if self._alone is not None:
            self._alone.end()
        try:
            async with asyncio.timeout(_CLOSING):
                await self._give_back()
        except (BrokerError, TimeoutError) as error:
            log.warning("%r: what is out could not be given back, its leases end by themselves: %s", self, error)
        await asyncio.gather(self._claims.close(), self._settles.close())

    async def _give_back(self) -> None:
        # What a handler's own transaction still holds cannot be touched; its lease ends by itself.
        rows = [d for d in self.out.rows.values() if d.id not in self.out.held]
        if rows:
            await self._settler.give_back(rows, timeout=_CLOSING / 2)
        if self._owning is not None:
            await self._owning.release(self._settles, timeout=_CLOSING / 2)
        if rows or self._owning is not None:
            self._connection.available(self._subscription.name)

    async def reopen(self) -> None:
        """See `Source.reopen`. The rows are ours as long as their leases hold: only time loses them."""
        self._check_open()
        await self._settles.connect()
        await self._claims.connect()
        # The group may be new to this server (another one, restored or failed over), and so may be its ids.
        name, group = self._subscription.name, self._subscription.group
        consumer = await self._claims.value(self._sql.register_group, name, group)
        self._claimer.consumer = consumer
        if self._owning is not None:
            self._owning.consumer = consumer
        self._hints.clear()
        self._look, self._tick_at, self._own_at = True, 0.0, 0.0
        self.lost(self.out.lose(self.out.overdue(asyncio.get_running_loop().time())))

    def health(self) -> Health:
        """See `Source.health`."""
        if self._closed:
            return Health(False, "closed")
        if self._owning is not None and not self._owning.held:
            return Health(True, "standing by: another process owns this ordered subscription")
        return Health(True)

    def _check_open(self) -> None:
        if self._closed or self._connection.closed:
            raise BrokerClosed(f"the source of {self._subscription!r} was closed")

    def __repr__(self) -> str:
        return f"LeaseSource({self._subscription!r})"


def _is_lost(delivery: Delivery) -> bool:
    return delivery.lost
