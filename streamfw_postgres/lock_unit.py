"""Handlers' own transactions in the row lock form.

A row that was claimed for its handler alone is held by the very transaction that the handler runs in: lock, run,
delete, commit, on one connection. The handler's writes are below a savepoint, so that what it wrote can be rolled back
while the row stays ours: a retry or a dead letter is settled in the same transaction, fenced by the lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from asyncpg.transaction import Transaction

from streamfw.broker import Settlement, UnitOfWork
from streamfw.errors import BrokerRefused, LeaseLost
from streamfw.outcome import Ack, Outcome

from .deliveries import PostgresDelivery
from .errors import DRIVER_ERRORS, translated
from .holding import HeldClaim, UnitHolder, nothing
from .pool import Pooled
from .unit import Unit

if TYPE_CHECKING:
    from .rowlock import RowLockSource

__all__ = ["LeasedUnit", "LockedUnit"]


class LeasedUnit(Unit):
    """The transaction of rows whose claim others share: they are leased first, and then as in the lease form."""

    def __init__(self, source: RowLockSource, deliveries: Sequence[PostgresDelivery]) -> None:
        super().__init__(source, deliveries)
        self._locks = source

    async def __aenter__(self) -> Unit:
        """See `Unit.__aenter__`."""
        await self._locks.lease(self._deliveries)
        return await super().__aenter__()


class LockedUnit(UnitOfWork):
    """The transaction that holds one row, with its handler inside."""

    connection: Pooled  # from __aenter__ on

    def __init__(self, source: RowLockSource, delivery: PostgresDelivery, claim: HeldClaim, holder: UnitHolder) -> None:
        self._source = source
        self._delivery = delivery
        self._claim = claim
        self._holder = holder
        self._savepoint: Transaction | None = None

    async def __aenter__(self) -> LockedUnit:
        """Begin the handler's part. Raises `LeaseLost` when the connection was lost, and the row with it."""
        if self._claim.lost:
            raise LeaseLost(self._delivery, "its connection was lost before its handler began")
        self.connection = self._holder.connection
        self._holder.entered = True
        savepoint = self.connection.transaction()
        try:
            with self._holder.deadline():
                await savepoint.start()
        except DRIVER_ERRORS as error:
            await self._broken()
            raise translated(error, "beginning a handler's transaction") from error
        self._savepoint = savepoint
        return self

    async def finish(self, outcome: Outcome) -> None:
        """Commit, or roll back and settle. Raises `BrokerError` when it came to nothing. What is refused (a deferred
        constraint) is the handler's failure, and the row stays ours; of anything else the row is free again."""
        if not isinstance(outcome, Ack):
            await self._leave()
            errors = await self._source.settle([Settlement(self._delivery, outcome)])
            if errors:
                raise errors[0]
            return
        try:
            if not self.connection.is_in_transaction():
                await self._broken()
                raise BrokerRefused("Postgres: a handler said commit or rollback itself, which let go of its message")
            with self._holder.deadline():
                # Deferred constraints first: their failure at the commit would take the row's lock with it.
                await self.connection.execute("set constraints all immediate")
                await self._source.ending.done(self.connection, self._claim, [self._delivery.id])
        except DRIVER_ERRORS as error:
            known = translated(error, "ending a handler's transaction")
            if known.transient:  # a serialization failure: this snapshot can never be committed
                await self._broken()
            raise known from error
        self._savepoint = None
        try:
            await self._holder.end(self._claim, nothing)
        except BaseException:
            await self._broken()
            raise
        self._holder.entered = False
        self._source.committed(self._claim, self._delivery)

    async def _broken(self) -> None:
        self._savepoint = None
        self._holder.entered = False
        await self._source.broken(self._claim)

    async def _leave(self) -> None:
        """Roll the handler's writes back; the row stays locked."""
        savepoint, self._savepoint = self._savepoint, None
        if savepoint is None:
            return
        self._holder.entered = False
        try:
            with self._holder.deadline():
                await savepoint.rollback()
        except DRIVER_ERRORS:
            await self._broken()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaving without `finish` rolls the handler's writes back; the delivery stays out, and ours."""
        await self._leave()
