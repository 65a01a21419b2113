"""Ending tasks that run until they are cancelled, and finishing what must not be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Final, TypeVar

__all__ = ["ended", "to_its_end"]

_T = TypeVar("_T")

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


async def to_its_end(step: Coroutine[Any, Any, _T]) -> _T:
    """Await it to its end, also when cancelled meanwhile; the cancellation goes on when it has ended. For what is
    bounded in time, and leaves something behind when it is broken off."""
    task = asyncio.ensure_future(step)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled and not task.exception():
        raise asyncio.CancelledError
    return task.result()
