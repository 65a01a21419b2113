"""What the benchmarks ask a running app."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from streamfw import App
from streamfw.broker import Settlement
from streamfw.errors import SettleError

__all__ = ["all_settled"]


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
