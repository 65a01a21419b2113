"""Small things that many tests use."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

__all__ = ["eventually", "eventually_blocking"]

T = TypeVar("T")

_POLL = 0.005


@overload
async def eventually(condition: Callable[[], Awaitable[T]], deadline: float = ..., message: str = ...) -> T: ...
@overload
async def eventually(condition: Callable[[], T], deadline: float = ..., message: str = ...) -> T: ...
async def eventually(condition: Callable[[], object], deadline: float = 10.0, message: str = "") -> object:
    """Wait until `condition` (a function or a coroutine function) is true, and return what it returned.

    Fails after `deadline` seconds, with `message` or the condition's source, and with what it returned last. What the
    condition raises is not caught.
    """
    end = time.monotonic() + deadline
    while True:
        value = condition()
        result = await value if inspect.isawaitable(value) else value
        if result:
            return result
        if time.monotonic() > end:
            raise AssertionError(_failure(condition, deadline, message, result))
        await asyncio.sleep(_POLL)


def eventually_blocking(condition: Callable[[], T], deadline: float = 10.0, message: str = "") -> T:
    """The same for a test without an event loop."""
    end = time.monotonic() + deadline
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > end:
            raise AssertionError(_failure(condition, deadline, message, result))
        time.sleep(_POLL)


def _failure(condition: Callable[[], object], deadline: float, message: str, last: object) -> str:
    if not message:
        try:
            message = inspect.getsource(condition).strip()
        except (OSError, TypeError):
            message = repr(condition)
    return f"not within {deadline:g} s: {message} (last: {last!r})"
