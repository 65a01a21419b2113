"""Where a claim starts to look: a range start for each priority.

Theory of operation
    A claim reads the index ``(consumer, priority, id)`` from its beginning. Rows that are done are dead entries there
    until vacuum, and with a transaction open anywhere they stay: a drain then walks over all it has drained before,
    again and again (quadratic). So a claim starts after the last id known to be taken, for each priority.

    The hint is only a hint. Ids commit out of order, leases end, retries come back: such a row lies *below* the hint.
    The tick (once a second) reads from the very beginning and answers the lowest claimable id of every priority, and
    a hint moves down to it. That is the worst delay: one tick.

    A claim passes *ranges*: ``(priority, after id, up to priority)``. The first range starts below every priority and
    the last one has no end, so a priority that was never seen is found at once.

    Late commits are common where many publish at once, and a second is long for a queue that is nearly empty. So
    while claims come back short (the queue is drained, nobody walks far) the hint lags: it is the one of 0.1 to 0.2
    seconds ago. While claims come back full it is the newest one: then the row waits for those before it anyway.
"""

from __future__ import annotations

from collections.abc import Iterable

from .sql import LAST

__all__ = ["Hints"]

_FIRST = -LAST
_LAG = 0.1
# Beyond this many priorities a queue uses them as something else; the ranges would cost more than they save.
_MOST = 64


class Hints:
    """The hints of one source. Times are of any one monotonic clock, in seconds."""

    __slots__ = ("_aging", "_full", "_lagged", "_lows", "_turned")

    def __init__(self) -> None:
        self._lows: dict[int, int] = {}
        self._aging: dict[int, int] = {}
        self._lagged: dict[int, int] = {}
        self._turned = 0.0
        self._full = False

    def ranges(self, now: float) -> tuple[list[int], list[int], list[int]]:
        """Columns of the ranges to claim from: priorities, ids, ends."""
        self._turn(now)
        lows = self._lows if self._full else self._lagged
        if not lows:
            return [_FIRST], [0], [LAST]
        priorities = sorted(lows)
        return [_FIRST, *priorities], [0, *(lows[p] for p in priorities)], [*priorities, LAST]

    def _turn(self, now: float) -> None:
        if now - self._turned >= _LAG:
            self._lagged, self._aging, self._turned = self._aging, dict(self._lows), now

    def claimed(self, priority: int, last: int, full: bool) -> None:
        """A claim took rows up to id `last` of `priority`; `full` when it took as many as it asked for."""
        self._full = full
        if last > self._lows.get(priority, 0) and (priority in self._lows or len(self._lows) < _MOST):
            self._lows[priority] = last

    def short(self) -> None:
        """A claim found nothing."""
        self._full = False

    def ticked(self, priorities: Iterable[int], lows: Iterable[int]) -> None:
        """The lowest claimable ids, by priority, as read from the beginning."""
        for priority, low in zip(priorities, lows, strict=True):
            if priority in self._lows or len(self._lows) < _MOST:
                self._lows[priority] = low - 1
            for older in (self._aging, self._lagged):
                if older.get(priority, 0) >= low:
                    older[priority] = low - 1

    def lower(self, priority: int, row_id: int) -> None:
        """This row is claimable again."""
        for lows in (self._lows, self._aging, self._lagged):
            if lows.get(priority, 0) >= row_id:
                lows[priority] = row_id - 1

    def clear(self) -> None:
        """Look everywhere again."""
        self.__init__()  # type: ignore[misc]
