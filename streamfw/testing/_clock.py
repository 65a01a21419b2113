"""A virtual clock for an event loop of asyncio's own.

Theory of operation
    `loop.time` is replaced, on the loop object, by real time plus an offset. Timers are compared with it, so raising
    the offset makes them due. Outside `standing` it flows as real time does: whoever sleeps, sleeps. Inside, it stands
    still and moves only by `move_to` and `move_past`, from one timer to the next: what happens at a timer takes no time
    at all, so a retry after 1 s, one after 2 s and one after 4 s are all within 7 s.

    asyncio calls a timer that is due within its clock's resolution. Whoever finds that he was called too early sets
    another one, for the rest: sums of floats are not exact. On a clock that stood still he would be called early again,
    at once and for ever. So it goes a little past each timer.

    A loop's time never goes back: what was added stays when the clock is given up, for the timers that are still set.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from streamfw.errors import Unsupported

__all__ = ["SLACK", "VirtualClock"]

SLACK = 1e-6
"""Seconds by which a timer may be later than asked and is still taken: sums of floats are not exact."""


class VirtualClock:
    """The clock of one loop; `of` gives it, and `give_up` ends one use of it."""

    def __init__(self, loop: asyncio.BaseEventLoop) -> None:
        self._loop = loop
        self._real: Callable[[], float] = loop.time
        self._resolution: float = getattr(loop, "_clock_resolution", 0.0)
        self._offset = 0.0
        self._standing: float | None = None
        self._users = 0

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> VirtualClock | None:
        """The clock of `loop`, put there if need be; None where the loop keeps its time elsewhere (uvloop)."""
        clock = getattr(loop.time, "__self__", None)
        if not isinstance(clock, cls):
            if not isinstance(loop, asyncio.BaseEventLoop) or not hasattr(loop, "_scheduled"):
                return None
            clock = cls(loop)
            vars(loop)["time"] = clock.time
        clock._users += 1
        return clock

    def give_up(self) -> None:
        """One user less. A clock that never moved is taken away with the last."""
        self._users -= 1
        if not self._users and not self._offset:
            vars(self._loop).pop("time", None)

    def time(self) -> float:
        """The loop's time, in seconds."""
        return self._real() + self._offset if self._standing is None else self._standing

    @contextmanager
    def standing(self) -> Generator[None, None, None]:
        """Let time stand still. Raises `Unsupported` when it does already: two cannot move it at once."""
        if self._standing is not None:
            raise Unsupported("advance() is under way already: await one before the next")
        self._standing = self.time()
        try:
            yield
        finally:
            self._offset = self._standing - self._real()
            self._standing = None

    def move_to(self, when: float) -> None:
        """Make it `when`; never earlier than now."""
        assert self._standing is not None, "only a standing clock is moved"
        self._standing = max(self._standing, when)

    def move_past(self, when: float) -> float:
        """Make it `when` and so much more that nobody was called too early; return how much that is."""
        margin = max(2 * self._resolution, 8 * math.ulp(when))
        before = self.time()
        self.move_to(when + margin)
        return self.time() - max(before, when)

    def _timers(self) -> list[asyncio.TimerHandle]:
        scheduled: list[asyncio.TimerHandle] = getattr(self._loop, "_scheduled")  # noqa: B009 - asyncio shows it nowhere
        return [timer for timer in scheduled if not timer.cancelled()]

    def next_timer(self, ignored: Callable[[Any], bool]) -> float | None:
        """When the earliest timer is due, except those whose callback is `ignored`; None when there is none."""
        return min((t.when() for t in self._timers() if not ignored(getattr(t, "_callback", None))), default=None)

    def sleepers(self) -> set[int]:
        """The ids of what timers will resolve: the futures behind `asyncio.sleep`."""
        return {id(argument) for timer in self._timers() for argument in getattr(timer, "_args", None) or ()}
