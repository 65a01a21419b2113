"""Ending tasks that run until they are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["ended"]

AGAIN: Final = 2.0  # seconds; longer than any task of ours takes to clean up


async def ended(tasks: Iterable[asyncio.Task[Any]], *, timeout: float | None = None) -> None:
    """Cancel tasks, and wait until they have ended; `timeout` seconds at most. What they raised is theirs to tell.

    They are cancelled more than once if need be: a cancellation that meets the end of what it was to break off may be
    lost. On Python 3.11 `asyncio.wait_for` returns the result instead (bpo-37658), and drivers that clean up behind a
    call drop what arrives meanwhile. A task that goes round in a loop would go on for ever, and who ends it with it.
    """
    loop = asyncio.get_running_loop()
    end = None if timeout is None else loop.time() + timeout
    left = {task for task in tasks if not task.done()}
    again = [task for task in left if not task.cancelling()]  # who was cancelled just now cleans up
    while left and (end is None or loop.time() < end):
        for task in again:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN if end is None else min(AGAIN, end - loop.time()))
        again = list(left)
