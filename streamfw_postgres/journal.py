"""The journal of attempts: what makes a row lock's delivery count when its process dies.

Theory of operation
    A row lock writes nothing on its row, and while it lasts nobody else can. So a claim whose process dies leaves no
    trace: its rows are as they were, and a row that kills its process would do so for ever. Therefore (where a
    subscription has ``attempts=``) each claim notes its rows in one row of ``claim_journal``, committed on *another*
    connection before the first handler starts, and deletes it in its own transaction.

    A journal is *abandoned* when its claim's transaction has ended and the journal is still there: it was rolled back.
    The transaction's own status says so, exactly when its row locks end: an advisory lock of its session would be
    given up some moments later. Folding an abandoned journal counts a delivery for each of its rows.

    The rows of a dead claim are free at once, and may be claimed again before anybody has folded. Noting a claim
    therefore answers the ids of all abandoned journals: if some of them are among the claim's own, it lets go of
    everything, folds, and claims again. So a handler always sees the attempt that it is.

    - *cut*: claims of this process whose connection was lost. They count a delivery, but nothing died of them.
    - *void*: claims that no handler has seen, whose journal may have been written. They count nothing.
    What another process folds first counts as if the process had died; that is on the safe side.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from .lock_sql import LockStatements
from .roles import Role

__all__ = ["Journal"]

log = logging.getLogger("streamfw.postgres")


class Journal:
    """The journal of one source's claims, on a connection that holds none of them."""

    def __init__(self, role: Role, statements: LockStatements, consumer: int) -> None:
        self._role = role
        self._sql = statements
        self.consumer = consumer
        self.cut: set[int] = set()
        self.void: set[int] = set()

    async def note(self, token: int, transaction: int, ids: Sequence[int]) -> Collection[int]:
        """Note a claim; answer those of its rows that an abandoned journal still holds. Raises `BrokerError`; then
        the claim is void."""
        try:
            abandoned = await self._role.value(self._sql.note, self.consumer, token, str(transaction), ids)
        except BaseException:
            self.void.add(token)
            raise
        return set(ids).intersection(abandoned) if abandoned else ()

    async def fold(self) -> None:
        """Count a delivery for each row of the abandoned journals. Raises `BrokerError`."""
        cut, void = list(self.cut), list(self.void)
        count, stay = await self._role.row(self._sql.fold, self.consumer, cut, void)
        if count:
            log.warning("%d messages were in the claims of connections that were lost: a delivery is counted", count)
        self.cut.difference_update(set(cut).difference(stay))
        self.void.difference_update(void)
