"""Whether an app does its work: every subscriber has a live source. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from streamfw.broker import Health

if TYPE_CHECKING:
    from streamfw.runtime.pump import Pump

__all__ = ["AppHealth", "health_of"]


class AppHealth(msgspec.Struct, frozen=True):
    """`ok` when every subscriber has a live source; otherwise `subscribers` says what each of them has, and `error`
    what has ended one for good."""

    ok: bool
    subscribers: dict[str, Health]
    error: str | None = None


def health_of(started: bool, failure: BaseException | None, pumps: Sequence[Pump]) -> AppHealth:
    """The health of an app that has `started`, with these pumps."""
    times = Counter(pump.plan.where for pump in pumps)
    subscribers: dict[str, Health] = {}
    for pump in pumps:
        where = pump.plan.where
        if times[where] > 1:  # one handler in several groups
            where += f" in group {pump.plan.subscription.group!r}"
        subscribers[where] = pump.health()
    ok = started and failure is None and all(one.ok for one in subscribers.values())
    return AppHealth(ok, subscribers, None if failure is None else f"{type(failure).__name__}: {failure}")
