"""Settling: acknowledgements in one statement, everything else in one more."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

from streamfw.broker import Settlement
from streamfw.errors import ArgumentError, LeaseLost, SettleError
from streamfw.message import Headers, dead_letter_headers
from streamfw.outcome import ACK, RELEASE, Ack, DeadLetter, Drop, Outcome, Retry

from . import headers
from .deliveries import Out, PostgresDelivery
from .hints import Hints
from .roles import Cut, Role
from .sql import BACK, DEAD, DONE, RETRY, Statements

__all__ = ["Settler", "lease_lost"]

log = logging.getLogger("streamfw.postgres")
# What a dead letter keeps of a headers column that could not be read.
RAW_HEADERS = "streamfw-raw-headers"


class Settler:
    """Settles the deliveries of one source. `owner` is (consumer, token) of an ordered one: it fences every settle."""

    def __init__(
        self, role: Role, statements: Statements, out: Out, hints: Hints, group: str, dead_letter: str | None
    ) -> None:
        self._role = role
        self._sql = statements
        self._out = out
        self._hints = hints
        self._group = group
        self._dead_letter = dead_letter
        self.owner: tuple[int, int] | None = None
        self.any_lost = False
        # Seconds until the first of what was given back is due again; whoever sees it resets it.
        self.soonest: float | None = None
        # Rows whose settlement was cut: when they are gone at the next try, the first one did it.
        self._ambiguous: set[int] = set()

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        """An error for each that was not ours. Raises `BrokerError`; then it may be called again with the same."""
        odd = [s for s in settlements if s.outcome is not ACK]
        if self.any_lost:  # those are asked one by one, in exact pairs
            odd += [s for s in settlements if s.outcome is ACK and s.delivery.lost]
        if not odd:
            return await self._acks(settlements)
        errors: list[SettleError] = []
        others = set(map(id, odd))
        acks = [s for s in settlements if id(s) not in others]
        if acks:
            errors += await self._acks(acks)
        errors += await self._odd(odd)
        return errors

    async def _acks(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        deliveries = cast("list[PostgresDelivery]", [s.delivery for s in settlements])
        ids = [d.id for d in deliveries]
        tokens = list({d.claim.token for d in deliveries})
        try:
            if self.owner is None:
                count = await self._role.count(self._sql.ack, ids, tokens)
            else:
                count = await self._role.count(self._sql.ack_ordered, ids, tokens, *self.owner)
        except Cut:
            self._ambiguous.update(ids)
            raise
        if count == len(ids):
            self._out.remove(ids)
            if self._ambiguous:
                self._ambiguous.difference_update(ids)
            return ()
        return await self._missed(deliveries, count)

    async def _missed(self, deliveries: list[PostgresDelivery], count: int) -> Sequence[SettleError]:
        """Fewer rows ended than asked. Those that still exist are another's; those that another ended cannot be told
        from ours any more, only counted."""
        ids = [d.id for d in deliveries]
        existing = {r[0] for r in await self._role.fetch(self._sql.exist, ids)}
        lost = [d for d in deliveries if d.id in existing]
        gone = len(ids) - count - len(lost) - len(self._ambiguous.intersection(ids))
        if gone > 0:
            log.warning("%d acknowledged messages had been ended by another owner before", gone)
        self._forget(deliveries)
        return [lease_lost(d) for d in lost]

    def _forget(self, deliveries: Sequence[PostgresDelivery]) -> None:
        # By identity: the same row may be out again, under a newer lease of ours.
        self._out.remove([d.id for d in deliveries if self._out.rows.get(d.id) is d])
        self._ambiguous.difference_update([d.id for d in deliveries])

    async def _odd(self, settlements: Sequence[Settlement], again: bool = False) -> list[SettleError]:
        deliveries = cast("list[PostgresDelivery]", [s.delivery for s in settlements])
        columns = [self.columns(d, s.outcome) for d, s in zip(deliveries, settlements, strict=True)]
        kinds, after, dead = [c[0] for c in columns], [c[1] for c in columns], [c[2] for c in columns]
        done = await self._odd_statement(self._role, deliveries, kinds, after, dead)
        self._returned(deliveries, kinds, after, done)
        missed = [s for s, d in zip(settlements, deliveries, strict=True) if d.id not in done]
        unknown = [s for s in missed if isinstance(s.outcome, DeadLetter)]
        if unknown and self._dead_letter is not None and not again:
            # The dead letters' queue was removed meanwhile? Make it known; what was lost is lost at the second try too.
            await self._role.fetch(self._sql.ensure_queue, self._dead_letter)
            errors = self._lost([s for s in missed if not isinstance(s.outcome, DeadLetter)])
            ids = {id(s) for s in unknown}
            self._forget([d for s, d in zip(settlements, deliveries, strict=True) if id(s) not in ids])
            return [*errors, *await self._odd(unknown, again=True)]
        errors = self._lost(missed)
        self._forget(deliveries)
        return errors

    def columns(self, delivery: PostgresDelivery, outcome: Outcome) -> tuple[int, float, bytes | None]:
        """What SETTLE_ODD is told of an outcome: its kind, the pause in seconds, the headers of a dead letter."""
        kind = self._kind(outcome)
        after = float(outcome.after or 0) if isinstance(outcome, Retry) else 0.0
        return kind, after, self._dead_headers(delivery, outcome) if kind == DEAD else None

    def _lost(self, missed: Sequence[Settlement]) -> list[SettleError]:
        lost = cast("list[PostgresDelivery]", [s.delivery for s in missed])
        return [lease_lost(d) for d in lost if d.id not in self._ambiguous]

    async def _odd_statement(
        self,
        role: Role,
        deliveries: Sequence[PostgresDelivery],
        kinds: list[int],
        after: list[float],
        dead: list[bytes | None],
        timeout: float | None = None,
    ) -> set[int]:
        ids = [d.id for d in deliveries]
        columns = (ids, [d.claim.token for d in deliveries], kinds, after, dead, self._dead_letter)
        try:
            if self.owner is None:
                return set(await role.value(self._sql.settle_odd, *columns, timeout=timeout))
            return set(await role.value(self._sql.settle_odd_ordered, *columns, *self.owner, timeout=timeout))
        except Cut:
            self._ambiguous.update(ids)
            raise

    def _returned(
        self, deliveries: Sequence[PostgresDelivery], kinds: list[int], after: list[float], done: set[int]
    ) -> None:
        """Claims must see what came back, at its time, though it lies below the hint."""
        for delivery, kind, seconds in zip(deliveries, kinds, after, strict=True):
            if kind in (RETRY, BACK) and delivery.id in done:
                self.returned(delivery.priority, delivery.id, seconds)

    def returned(self, priority: int, row_id: int, seconds: float) -> None:
        """This row came back, claimable in so many seconds."""
        self.soonest = seconds if self.soonest is None else min(seconds, self.soonest)
        if not seconds:
            self._hints.lower(priority, row_id)

    async def give_back(
        self, deliveries: Sequence[PostgresDelivery], role: Role | None = None, timeout: float | None = None
    ) -> None:
        """Release them: claimable at once, the attempt not counted. Raises `BrokerError`."""
        n = len(deliveries)
        kinds, after = [BACK] * n, [0.0] * n
        done = await self._odd_statement(role or self._role, deliveries, kinds, after, [None] * n, timeout)
        self._returned(deliveries, kinds, after, done)
        self._forget(deliveries)

    async def put_aside(self, deliveries: Sequence[PostgresDelivery], reason: str, kind: str, role: Role) -> None:
        """Dead letters that no handler has seen; discarded where the subscription has no dead letter."""
        outcome = DeadLetter(reason)
        outcome.error_type = kind
        end = self._kind(outcome)
        n = len(deliveries)
        if self._dead_letter is not None:
            await role.fetch(self._sql.ensure_queue, self._dead_letter)
        dead = [self._dead_headers(d, outcome) if end == DEAD else None for d in deliveries]
        await self._odd_statement(role, deliveries, [end] * n, [0.0] * n, dead)
        self._forget(deliveries)

    def _kind(self, outcome: Outcome) -> int:
        if isinstance(outcome, Retry):
            return RETRY
        if outcome is RELEASE:
            return BACK
        if isinstance(outcome, DeadLetter) and self._dead_letter is not None:
            return DEAD
        if isinstance(outcome, Ack | Drop | DeadLetter):
            return DONE
        raise TypeError(f"not an outcome that a source settles: {outcome!r}")

    def _dead_headers(self, delivery: PostgresDelivery, outcome: Outcome) -> bytes | None:
        try:
            original = delivery.headers
        except ArgumentError:
            original = Headers([(RAW_HEADERS, delivery.raw_headers)])
        reason = outcome.reason if isinstance(outcome, DeadLetter) else ""
        kind = getattr(outcome, "error_type", "")
        told = dead_letter_headers(original, reason, kind, delivery.name, self._group, delivery.attempt)
        return headers.encode(told)


def lease_lost(delivery: PostgresDelivery) -> LeaseLost:
    """The answer to a settlement that came too late."""
    return LeaseLost(delivery, "the lease was lost before the settlement came")
