"""Claiming: rows to deliveries, within a budget of bytes, and the few that need care apart from the many."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import asyncpg
import msgspec

from streamfw.broker import Subscription

from .deliveries import Claim, Out, PostgresDelivery, new_token
from .hints import Hints
from .journal import Journal
from .ownership import Ownership
from .roles import Role
from .settling import Settler
from .sql import Statements
from .suspects import is_condemned, is_suspect, names

__all__ = ["Claimed", "Claimer", "by_priority"]

log = logging.getLogger("streamfw.postgres")
_by_id, by_priority = attrgetter("id"), attrgetter("priority", "id")
_UNSEEN = 64 * 1024


class Claimed(msgspec.Struct):
    """What a claim brought: deliveries, at most one suspect that must be alone, and whether there was anything."""

    deliveries: list[PostgresDelivery]
    suspect: tuple[PostgresDelivery, int] | None = None
    some: bool = True


class Claimer:
    """Claims for one source, on one connection, one claim at a time."""

    def __init__(
        self,
        role: Role,
        statements: Statements,
        out: Out,
        hints: Hints,
        settler: Settler,
        subscription: Subscription,
        lease: float,
    ) -> None:
        self._role = role
        self._sql = statements
        self._out = out
        self._hints = hints
        self._settler = settler
        self._name = subscription.name
        self._attempts = subscription.attempts
        self._ordered = subscription.ordered_by is not None
        self._lease = lease
        self.consumer = 0
        self.max_body = 0
        self.owning: Ownership | None = None
        # Four times the average body seen, so that few bodies are larger than their share of the budget.
        self._typical = float(_UNSEEN)
        # After a suspect, claims start small again: what a claim brings beside one is given back.
        self._caution: int | None = None
        self.journal: Journal | None = None

    @property
    def cautious(self) -> bool:
        """Whether claims are small, because suspects are about."""
        return self._caution is not None

    async def tick(self) -> tuple[bool, bool, float | None]:
        """Make ready what is due and correct the hints. Answers: is anything claimable, is more due, and the seconds
        to the next due time."""
        if self.journal is not None:
            row = await self._role.row(self._sql.tick_journal, self.consumer)
            if row[4]:
                await self.journal.fold()
        elif self.owning is None:
            row = await self._role.row(self._sql.tick, self.consumer)
        else:
            row = await self._role.row(self._sql.tick_ordered, self.consumer, self._out.tokens())
        priorities, lows, due, next_due = row[0], row[1], row[2], row[3]
        self._hints.ticked(priorities, lows)
        return bool(priorities), due >= 1000, next_due

    async def claim(self, limit: int, max_bytes: int) -> Claimed:
        """One claim. Everything it brings is registered as out, or given back before this returns."""
        want, inline = self.budget(limit, max_bytes)
        loop = asyncio.get_running_loop()
        claim = Claim(new_token(), loop.time() + self._lease)
        rows = await self._rows(want, claim, inline, loop.time())
        if not rows:
            self._hints.short()
            self._caution = None
            return Claimed([], some=False)
        name, ordered = self._name, self._ordered
        batch = [
            PostgresDelivery(
                name=name, body=b, message_id=m, key=k, attempt=a, timestamp=t, raw_headers=h,
                lane=k if ordered else None, id=i, claim=claim, priority=p,
            )
            for i, a, _, p, t, m, k, h, b in rows
        ]  # fmt: skip
        priorities = {d.priority for d in batch}
        batch.sort(key=_by_id if len(priorities) == 1 else by_priority)  # `returning` promises no order
        self._out.add(batch)
        self.claimed(batch, priorities, len(batch) == want)
        try:
            if None in [r[8] for r in rows]:
                batch = await self._within(batch, claim, max_bytes)
            else:
                self.learn(batch)
            if max([r[2] for r in rows]):
                return await self._with_care(batch, {r[0]: r[2] for r in rows})
        except BaseException:
            # Nobody has seen them: they must not be renewed. They come back when their lease ends.
            self._out.remove([r[0] for r in rows])
            raise
        self._grow()
        return Claimed(batch)

    def budget(self, limit: int, max_bytes: int) -> tuple[int, int]:
        """How many rows to ask for, and the largest body that may come with its row, in bytes."""
        want = min(limit, max(1, int(max_bytes // self._typical)))
        if self._caution is not None:
            want = min(want, self._caution)
        return want, min(self.max_body, max(max_bytes // want, 1))

    def claimed(self, batch: list[PostgresDelivery], priorities: set[int], full: bool) -> None:
        """Move the hints behind what was claimed, in order."""
        for priority in priorities:
            last = max([d.id for d in batch if d.priority == priority]) if len(priorities) > 1 else batch[-1].id
            self._hints.claimed(priority, last, full)

    def learn(self, batch: list[PostgresDelivery]) -> None:
        """How large bodies are."""
        average = sum([len(d.body) for d in batch]) / len(batch)
        self._typical = max(256.0, 0.75 * self._typical + average)

    def _grow(self) -> None:
        if self._caution is not None:
            self._caution = None if self._caution >= 64 else 4 * self._caution

    async def _rows(self, want: int, claim: Claim, inline: int, now: float) -> list[asyncpg.Record]:
        args: tuple[Any, ...] = (self.consumer, want, claim.token, self._lease, inline, *self._hints.ranges(now))
        if self.owning is None:
            return await self._role.fetch(self._sql.claim, *args)
        return await self._role.fetch(self._sql.claim_ordered, *args, self._out.tokens(), self.owning.token)

    # ------------------------------------------------------------ large bodies

    async def _within(self, batch: list[PostgresDelivery], claim: Claim, max_bytes: int) -> list[PostgresDelivery]:
        """Fetch the bodies that did not come with their claim, as far as the budget goes; give the rest back, and put
        aside what is larger than we ever take."""
        large = [d.id for d in batch if d.body is None]
        rows = await self._role.fetch(self._sql.sizes, large, claim.token)
        sizes: dict[int, int] = {row[0]: row[1] for row in rows}
        giants = [d for d in batch if d.body is None and sizes.get(d.id, 0) > self.max_body]
        if giants:
            await self._put_aside(giants, f"its body is larger than max_body={self.max_body}", "TooLarge")
            batch = [d for d in batch if not (d.body is None and sizes.get(d.id, 0) > self.max_body)]
        size, fits = 0, 0
        for d in batch:  # only a beginning of the batch: what follows must not overtake
            length = sizes.get(d.id, 0) if d.body is None else len(d.body)
            self._typical = max(self._typical, float(length))
            size += length
            if fits and size > max_bytes:
                break
            fits += 1
        batch, rest = batch[:fits], batch[fits:]
        if rest:
            await self.give_back(rest)
        missing = [d.id for d in batch if d.body is None]
        rows = await self._role.fetch(self._sql.bodies, missing, claim.token) if missing else []
        bodies: dict[int, bytes] = {row[0]: row[1] for row in rows}
        for d in batch:
            if d.body is None:
                d.body = bodies.get(d.id)
        self._out.lose([d for d in batch if d.body is None])  # lost between two statements: nobody has seen it
        return [d for d in batch if d.body is not None]

    # ---------------------------------------------------------------- suspects

    async def _with_care(self, batch: list[PostgresDelivery], recovered: dict[int, int]) -> Claimed:
        """Put aside what is condemned; deliver what comes before the first suspect. A suspect that comes first is to
        be alone. All else is given back."""
        dead = [d for d in batch if is_condemned(recovered[d.id], d.attempt, self._attempts)]
        if dead:
            reason = f"it killed its process when it was alone in it, and is beyond its {self._attempts} attempts"
            await self._put_aside(dead, reason, "ProcessDied")
            condemned = {d.id for d in dead}
            batch = [d for d in batch if d.id not in condemned]
        first = next(
            (n for n, d in enumerate(batch) if is_suspect(recovered[d.id], d.attempt, self._attempts)), len(batch)
        )
        if first == len(batch):
            self._grow()
            return Claimed(batch)
        self._caution = 1
        alone = batch[0] if first == 0 else None
        rest = batch[1:] if alone is not None else batch[first:]
        if rest:
            await self.give_back(rest)
        return Claimed(batch[:first], (alone, recovered[alone.id]) if alone is not None else None)

    async def _put_aside(self, deliveries: list[PostgresDelivery], reason: str, kind: str) -> None:
        log.error("%s of %r put aside: %s", names([d.message_id for d in deliveries]), self._name, reason)
        await self._settler.put_aside(deliveries, reason, kind, self._role)

    async def give_back(self, deliveries: Sequence[PostgresDelivery]) -> None:
        """Claimable again at once, the attempt not counted."""
        await self._settler.give_back(deliveries, self._role)

    async def give_back_all(self, claimed: Claimed) -> None:
        """All that a claim brought."""
        suspect = [claimed.suspect[0]] if claimed.suspect is not None else []
        await self.give_back([*claimed.deliveries, *suspect])
