"""Deliveries of a queue table, and the book of those that are out."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from typing import Any

from streamfw.broker import Delivery
from streamfw.message import Headers

from . import headers

__all__ = ["Claim", "Out", "PostgresDelivery", "new_token"]


def new_token() -> int:
    """A claim's token: 62 random bits, never 0 (nobody's)."""
    return secrets.randbits(62) | 1


class Claim:
    """What the deliveries of one claim share: the token, and until when the lease holds by our own clock.

    `until` is counted from before the claim was sent, so it ends before the database's own.
    """

    __slots__ = ("token", "until")

    def __init__(self, token: int, until: float) -> None:
        self.token = token
        self.until = until


class PostgresDelivery(Delivery, gc=False, kw_only=True):
    """A row in work. ``gc=False`` holds: it refers to text, bytes, numbers and its claim, which refers to no row."""

    id: int
    claim: Claim
    priority: int

    @staticmethod
    def decode_headers(raw: Any) -> Headers:
        """The headers column; decoded when first asked for."""
        return headers.decode(raw)


class Out:
    """The deliveries that are out: to renew, to release at the end, to wait for.

    `held` are those whose row a handler's own transaction has locked: an open transaction is its own lease.
    """

    __slots__ = ("held", "rows")

    def __init__(self) -> None:
        self.rows: dict[int, PostgresDelivery] = {}
        self.held: set[int] = set()

    def add(self, deliveries: Iterable[PostgresDelivery]) -> None:
        """Register what was claimed."""
        self.rows.update({d.id: d for d in deliveries})

    def remove(self, ids: Iterable[int]) -> None:
        """They are settled."""
        pop = self.rows.pop
        for row_id in ids:
            pop(row_id, None)

    def lose(self, deliveries: Iterable[PostgresDelivery]) -> list[PostgresDelivery]:
        """Mark those that are still out as lost, and forget them."""
        lost = []
        for delivery in deliveries:
            if self.rows.get(delivery.id) is delivery:
                del self.rows[delivery.id]
            if not delivery.lost:
                delivery.lost = True
                lost.append(delivery)
        return lost

    def overdue(self, now: float) -> list[PostgresDelivery]:
        """Those whose lease has ended by our own clock."""
        return [d for d in self.rows.values() if d.claim.until < now and d.id not in self.held]

    def soonest(self) -> float:
        """When the first lease ends by our own clock."""
        return min([d.claim.until for d in self.rows.values() if d.id not in self.held], default=math.inf)

    def tokens(self) -> list[int]:
        """The tokens of all that is out."""
        return list({d.claim.token for d in self.rows.values()})
