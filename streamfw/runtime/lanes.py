"""Lanes: deliveries that must go one after another, and deliveries that wait here to be tried again.

Theory of operation
    A lane exists while one of its messages is at work, parked or waiting: ``table[lane]`` is None, or the deque of
    those parked behind. A worker takes a lane late, when it takes the message, so a key that is alone among the
    running costs one dict entry and no queue. While something is parked, the lane stays with its worker. A
    message that is to be tried again keeps its lane: a timer opens it.

    The same timers serve sources that cannot take a single message back: then there is no lane to keep.
    What waits, and what is parked behind it, is `held`: it does not use up the prefetch, but has a limit of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from streamfw.broker import Delivery

__all__ = ["Lanes"]


class Lanes:
    """The lanes of one pump. `again` is called with a delivery whose time has come, by `clock`."""

    __slots__ = ("_again", "_clock", "_timers", "held", "table", "waiting")

    def __init__(self, again: Callable[[Delivery], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.table: dict[Hashable, deque[Delivery] | None] = {}
        self.waiting: set[Hashable] = set()  # lanes whose head waits for its timer
        self.held = 0
        self._timers: dict[int, tuple[asyncio.TimerHandle, Delivery]] = {}
        self._again, self._clock = again, clock

    def park(self, lane: Hashable, delivery: Delivery) -> None:
        """Put a delivery behind those of its lane."""
        parked = self.table[lane]
        if parked is None:
            parked = self.table[lane] = deque()
        parked.append(delivery)
        if lane in self.waiting:
            self.held += 1

    def put_first(self, lane: Hashable, deliveries: Sequence[Delivery]) -> None:
        """Put deliveries behind the one that has the lane, and before all that is parked in it."""
        parked = self.table[lane]
        if parked is None:
            parked = self.table[lane] = deque()
        parked.extendleft(reversed(deliveries))
        if lane in self.waiting:
            self.held += len(deliveries)

    def wait(self, delivery: Delivery, seconds: float) -> None:
        """Keep `delivery` (and its lane, if it has one) for `seconds`, then hand it to `again`."""
        lane = delivery.lane
        self.held += 1
        if lane is not None:
            self.waiting.add(lane)
            self.held += len(self.table.get(lane) or ())
        self._set_timer(delivery, self._clock() + seconds)

    def _set_timer(self, delivery: Delivery, due: float) -> None:
        pause = max(0.0, due - self._clock())
        timer = asyncio.get_running_loop().call_later(pause, self._due, delivery, due)
        self._timers[id(delivery)] = (timer, delivery)

    def _due(self, delivery: Delivery, due: float) -> None:
        if self._clock() < due:
            # uvloop counts whole milliseconds from where this turn of the loop began: its timers may be early.
            self._set_timer(delivery, due)
            return
        del self._timers[id(delivery)]
        self._unhold(delivery)
        self._again(delivery)

    def _unhold(self, delivery: Delivery) -> None:
        self.held -= 1
        if delivery.lane is not None:
            self.waiting.discard(delivery.lane)
            self.held -= len(self.table.get(delivery.lane) or ())

    def reopen(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Give up the lanes of `deliveries`, none of which waits; return what was parked in them, in order."""
        lanes = dict.fromkeys(delivery.lane for delivery in deliveries)
        return [parked for lane in lanes if lane is not None for parked in self.table.pop(lane, None) or ()]

    def take_parked(self) -> list[Delivery]:
        """Empty every lane's queue, leaving the lanes themselves to whom they belong; in order within each lane."""
        parked: list[Delivery] = []
        for lane, queue in self.table.items():
            if queue:
                parked.extend(queue)
                if lane in self.waiting:
                    self.held -= len(queue)
                queue.clear()
        return parked

    def cancel(self, drop: Callable[[Delivery], bool]) -> tuple[list[Delivery], list[Delivery]]:
        """Stop waiting for what `drop` names; return it, and what was parked behind it, whose lanes are given up."""
        gone = [delivery for _, delivery in self._timers.values() if drop(delivery)]
        for delivery in gone:
            self._timers.pop(id(delivery))[0].cancel()
            self._unhold(delivery)
        return gone, self.reopen(gone)

    @property
    def parked(self) -> int:
        """How many are parked. Counted now: no message pays for it."""
        return sum(len(queue) for queue in self.table.values() if queue)
