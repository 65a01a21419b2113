"""Who serves an ordered subscription: one process at a time, the others stand by.

Theory of operation
    The row of the (queue, group) in ``consumer`` holds the owner's token and until when it is his. An owner renews
    it; a standby asks once a poll whether it has ended. Both go by the database's clock; by its own, an owner counts
    from before it asked, so it gives up before anybody can take over.

    A successor needs no clean-up. Its claims take every row that it does not have out itself, whatever lease a former
    owner left on it, so what that one had comes first, in order. The former owner's settlements are fenced by the
    ownership, and a claim holds the ownership's row lock until it commits, so that two owners never claim at once.
"""

from __future__ import annotations

import asyncio
import logging
import math

from .deliveries import new_token
from .roles import Role
from .sql import Statements

__all__ = ["Ownership"]

log = logging.getLogger("streamfw.postgres")


class Ownership:
    """The ownership of one (queue, group), as one source sees it."""

    def __init__(self, statements: Statements, consumer: int, lease: float) -> None:
        self._sql = statements
        self._lease = lease
        self.consumer = consumer
        self.token = 0
        self._until = 0.0

    @property
    def held(self) -> bool:
        """Whether it is ours, by our own clock."""
        return self.token != 0 and asyncio.get_running_loop().time() < self._until

    @property
    def until(self) -> float:
        """Until when it is ours, by our own clock; never while it is not."""
        return self._until if self.token else math.inf

    @property
    def due(self) -> bool:
        """Whether a third of the lease has passed since it was renewed."""
        return self._until - asyncio.get_running_loop().time() < self._lease * 2 / 3

    @property
    def owner(self) -> tuple[int, int]:
        """What fences statements."""
        return self.consumer, self.token

    async def acquire(self, role: Role) -> bool:
        """Take it, if it is free. One statement. Raises `BrokerError`."""
        token, sent = new_token(), asyncio.get_running_loop().time()
        if not await role.count(self._sql.own, self.consumer, token, self._lease):
            return False
        self.token, self._until = token, sent + self._lease
        return True

    async def renew(self, role: Role) -> bool:
        """Keep it; False when somebody else has it. Raises `BrokerError`."""
        sent = asyncio.get_running_loop().time()
        token = self.token
        kept = await role.count(self._sql.own_again, self.consumer, token, self._lease, timeout=self._lease / 4)
        if kept and self.token == token:
            self._until = sent + self._lease
        elif not kept:
            self.lose()
        return bool(kept)

    def lose(self) -> None:
        """It is not ours any more."""
        self.token, self._until = 0, 0.0

    async def release(self, role: Role, timeout: float) -> None:
        """Give it to whoever asks next. Raises `BrokerError`."""
        token, self.token = self.token, 0
        if token:
            await role.count(self._sql.disown, self.consumer, token, timeout=timeout)
