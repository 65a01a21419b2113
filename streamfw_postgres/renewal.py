"""Keeping leases: one statement for all rows of a source, at half of the lease.

A row that could not be renewed is either locked (a handler's transaction, another session that looks at it) and still
ours, or lost. When the database cannot be reached until a lease has ended by our own clock, the row is lost as well:
somebody else may have it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from streamfw.ending import ended
from streamfw.errors import BrokerClosed, BrokerError

from .deliveries import Out, PostgresDelivery
from .roles import Role
from .sql import Statements

__all__ = ["Renewer"]

log = logging.getLogger("streamfw.postgres")


class Renewer:
    """Renews what is out. `lost` is called with the deliveries that were lost, already marked; `look` loses what has
    lapsed by our own clock, at every turn of `turn` seconds.

    `ownership` is what an ordered source has to renew besides; it is called at every turn of the renewal.
    """

    def __init__(
        self,
        role: Role,
        statements: Statements,
        out: Out,
        lease: float,
        lost: Callable[[Sequence[PostgresDelivery]], None],
        look: Callable[[], None],
        ownership: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._role = role
        self._sql = statements
        self._out = out
        self._lease = lease
        self._lost = lost
        self._look = look
        self.turn = max(0.1, lease / 10)
        self._ownership = ownership
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        self._look()
        self._tasks = [
            asyncio.create_task(self._renewing(), name="streamfw renew"),
            asyncio.create_task(self._watching(), name="streamfw leases"),
        ]

    async def close(self) -> None:
        """End; nothing is renewed any more."""
        tasks, self._tasks = self._tasks, []
        await ended(tasks)

    async def _renewing(self) -> None:
        # An ordered source renews its ownership too, with more margin: losing it costs much more.
        pause = self._lease / (2 if self._ownership is None else 3)
        wait = pause
        while True:
            await asyncio.sleep(wait)
            try:
                if self._ownership is not None:
                    await self._ownership()
                wait = pause if await self.renew() else self._lease / 10
            except BrokerClosed:
                return
            except BrokerError as error:
                wait = min(1.0, self._lease / 10)
                log.warning("leases could not be renewed, trying again: %s", error)

    async def renew(self) -> bool:
        """Renew all that has less than three quarters left. False when some were locked: try again soon."""
        loop = asyncio.get_running_loop()
        sent = loop.time()
        held = self._out.held
        old = [d for d in self._out.rows.values() if d.claim.until - sent < 0.75 * self._lease and d.id not in held]
        if not old:
            return True
        ids = [d.id for d in old]
        tokens = list({d.claim.token for d in old})
        timeout = self._lease / 4
        renewed = {r[0] for r in await self._role.fetch(self._sql.renew, ids, tokens, self._lease, timeout=timeout)}
        for delivery in old:
            if delivery.id in renewed:
                # A claim's rows share its object, so those still out are renewed together; a locked one of them is
                # found again below, at every turn, until it is unlocked or lost.
                delivery.claim.until = sent + self._lease
        missing = [d for d in old if d.id not in renewed and self._out.rows.get(d.id) is d]
        if not missing:
            return True
        ids = [d.id for d in missing]
        ours = {r[0] for r in await self._role.fetch(self._sql.ours, ids, tokens, timeout=timeout)}
        lost = [d for d in missing if d.id not in ours and d.id not in held]
        if lost:
            self._lost(self._out.lose(lost))
        return not any(d.id in ours for d in missing)

    async def _watching(self) -> None:
        """Apart from the renewal, which may hang on a dead connection for longer than the lease."""
        while True:
            await asyncio.sleep(self.turn)
            self._look()
