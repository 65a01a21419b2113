"""What is written at the end of a claim by row locks, before its commit."""

from __future__ import annotations

import asyncio

from .holding import Anyone, HeldClaim, Odd
from .journal import Journal
from .lock_sql import LockStatements
from .sql import DEAD, Statements

__all__ = ["Ending"]


class Ending:
    """Writes the ends of one source's claims."""

    def __init__(
        self,
        statements: Statements,
        locks: LockStatements,
        journal: Journal | None,
        dead_letter: str | None,
        lease: float,
    ) -> None:
        self._sql = statements
        self._locks = locks
        self._journal = journal
        self._dead_letter = dead_letter
        self._lease = lease

    async def write(self, connection: Anyone, claim: HeldClaim, leased: list[int]) -> int:
        """Everything that was recorded, and a lease for what is unfinished; how many statements that took."""
        sent = await self._odd(connection, claim.odd) if claim.odd else 0
        if leased:
            await connection.execute(self._locks.lease, leased, claim.token, self._lease)
            sent += 1
        return sent + await self.done(connection, claim, claim.finished)

    async def done(self, connection: Anyone, claim: HeldClaim, ids: list[int]) -> int:
        """End these rows of a claim, and with them its journal."""
        if self._journal is not None:
            await connection.execute(self._locks.done_noted, ids, self._journal.consumer, claim.token)
        elif ids:
            await connection.execute(self._locks.done, ids)
        else:
            return 0
        return 1

    async def _odd(self, connection: Anyone, odd: list[Odd]) -> int:
        now = asyncio.get_running_loop().time()
        for again in (False, True):
            columns = (
                [o[0] for o in odd],
                [0] * len(odd),
                [o[2] for o in odd],
                [max(0.0, o[4] + o[3] - now) for o in odd],  # the pause began when it was recorded
                [o[5] for o in odd],
            )
            done = set(await connection.fetchval(self._locks.odd, *columns, self._dead_letter))
            odd = [o for o in odd if o[0] not in done and o[2] == DEAD]
            if not odd or again:
                break  # what has no place even now stays as it is, and comes again
            await connection.execute(self._sql.ensure_queue, self._dead_letter)
        return 1 + 2 * again
