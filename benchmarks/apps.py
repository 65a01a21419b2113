"""What the benchmarks ask a running app."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from streamfw import App
from streamfw.broker import Delivery, Settlement, Source
from streamfw.errors import SettleError

__all__ = ["Gate", "all_settled"]


class Gate:
    """Holds back what a source fetches, but for the first `passes` fetches, until it is opened. For an app whose pump
    has not run yet."""

    def __init__(self, source: Source, passes: int = 0) -> None:
        self._fetch, self._passes, self._opened = source.fetch, passes, asyncio.Event()
        source.fetch = self._through  # type: ignore[method-assign]

    def open(self) -> None:
        self._opened.set()

    async def _through(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        if self._passes:
            self._passes -= 1
        else:
            await self._opened.wait()
        return await self._fetch(limit, max_bytes)


async def all_settled(app: App, count: int) -> None:
    """Wait until `count` more are settled. Polling would be counted, so the source is asked to tell."""
    (pump,) = app.pumps
    source, settle, left = pump.source, pump.source.settle, count
    finished = asyncio.Event()

    async def settle_and_tell(group: Sequence[Settlement]) -> Sequence[SettleError]:
        nonlocal left
        errors = await settle(group)
        left -= len(group)
        if left <= 0:
            finished.set()
        return errors

    source.settle = settle_and_tell  # type: ignore[assignment, method-assign]
    await finished.wait()
    source.settle = settle  # type: ignore[method-assign]
