"""A delivery's (or a batch's) own transaction: the handler's writes and the end of its messages are one.

The fenced delete of the rows is the transaction's first statement. It proves the leases, and from then on the open
transaction *is* the lease: nobody else can lock the rows, however long the handler takes.
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
from .pool import Pooled, end, is_ended

if TYPE_CHECKING:
    from .lease import LeaseSource

__all__ = ["Unit"]


class Unit(UnitOfWork):
    """The transaction of some deliveries, on a connection of the handlers' pool."""

    connection: Pooled  # from __aenter__ on; after the end it refuses to be used

    def __init__(self, source: LeaseSource, deliveries: Sequence[PostgresDelivery]) -> None:
        self._source = source
        self._deliveries = deliveries
        self._ids = [d.id for d in deliveries]
        self._transaction: Transaction | None = None
        self._open = False

    async def __aenter__(self) -> Unit:
        """Begin. Raises `LeaseLost` when a row is not ours, `BrokerError` when there is no connection."""
        source = self._source
        self.connection = await source.pool.acquire()
        self._open = True
        source.out.held.update(self._ids)
        try:
            await self._begin()
        except BaseException as error:
            await self._leave()
            if isinstance(error, DRIVER_ERRORS):
                raise translated(error, "beginning a handler's transaction") from error
            raise
        return self

    async def _begin(self) -> None:
        source, ids = self._source, self._ids
        deadline = source.pool.deadline(self.connection)
        try:
            self._transaction = self.connection.transaction(isolation=source.pool.isolation)
            await self._transaction.start()
            sql, more = source.unit_ack()
            status = await self.connection.execute(sql, ids, list({d.claim.token for d in self._deliveries}), *more)
            if status == f"DELETE {len(ids)}":
                return
            # Deleted are those that were ours: in this transaction, another's rows are still there.
            existing = {r[0] for r in await self.connection.fetch(source.statements.exist, ids)}
        finally:
            deadline.cancel()
        gone = [d for d in self._deliveries if d.id in existing] or list(self._deliveries)
        source.lost(source.out.lose(gone))
        raise LeaseLost(gone[0], "the lease was lost before its transaction began")

    async def finish(self, outcome: Outcome) -> None:
        """Commit, or roll back and settle. Raises `SettleError` when a row was not ours, `BrokerError` when the commit
        failed: a serialization failure, or a connection that broke (then it may have been committed); `BrokerRefused`
        when there was nothing to commit any more, by the handler's doing."""
        if not isinstance(outcome, Ack):
            await self._leave()
            errors = await self._source.settle([Settlement(d, outcome) for d in self._deliveries])
            if errors:
                raise errors[0]
            return
        transaction, self._transaction = self._transaction, None
        assert transaction is not None, "finish() is called once, inside the transaction"
        deadline = self._source.pool.deadline(self.connection)
        try:
            open_until_now = self.connection.is_in_transaction()
            await transaction.commit()
            if not open_until_now or getattr(self.connection, "answered", "COMMIT") != "COMMIT":
                raise BrokerRefused(
                    "Postgres: a handler's transaction was rolled back, or ended, within the handler: a statement of "
                    "it failed and the handler went on (try it below a savepoint, db.transaction()), or it said commit "
                    "or rollback itself"
                )
        except DRIVER_ERRORS as error:
            raise translated(error, "committing a handler's transaction") from error
        finally:
            deadline.cancel()
            await self._leave()
        self._source.settled(self._ids)

    async def _leave(self) -> None:
        """Roll back what is open, and give the connection back."""
        if not self._open:
            return
        self._open = False
        transaction, self._transaction = self._transaction, None
        connection = self.connection
        try:
            if transaction is not None and not is_ended(connection):
                deadline = self._source.pool.deadline(connection)
                try:
                    await transaction.rollback()
                finally:
                    deadline.cancel()
        except DRIVER_ERRORS:
            end(connection)  # which rolls back
        finally:
            self._source.out.held.difference_update(self._ids)
            await self._source.pool.release(connection)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaving without `finish` rolls back; the deliveries stay out, and ours."""
        await self._leave()
