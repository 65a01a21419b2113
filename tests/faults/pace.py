"""Publishing that keeps pace with faults, so that messages flow during all of them."""

from __future__ import annotations

import asyncio

__all__ = ["Pace"]


class Pace:
    """`messages` in as many portions as there are `faults`, and one more."""

    def __init__(self, messages: int, faults: int) -> None:
        self._portion = messages / max(faults, 1)
        self._done = 0
        self._changed = asyncio.Event()

    def fault_is_over(self) -> None:
        """The next portion may go."""
        self._done += 1
        self._changed.set()

    async def turn(self, number: int) -> None:
        """Wait until message `number`, of those from 0 on, may be published."""
        while number > (self._done + 1) * self._portion:
            self._changed.clear()
            await self._changed.wait()
