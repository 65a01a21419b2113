"""What keeps one handler's context, and one turn of the loop, apart from the next."""

from __future__ import annotations

import sys
import types
from collections.abc import Awaitable, Generator
from contextvars import Context, copy_context
from typing import Any

from streamfw.handler import Call

__all__ = ["apart", "clean_context", "one_turn"]


def clean_context() -> Context:
    """The context a worker starts from. The first Decimal operation sets a context variable: set it before we look."""
    if "decimal" in sys.modules:
        sys.modules["decimal"].getcontext()
    return copy_context()


@types.coroutine
def one_turn() -> Generator[None, None, None]:
    """Let the loop turn once."""
    yield


@types.coroutine
def apart(call: Call, message: Any, context: Context) -> Generator[Any, Any, Any]:
    """Call and await with each step in `context`; the task stays this one, so timeouts and cancellation work."""
    run = context.run
    awaitable = run(call, message)
    coroutine: Any = awaitable if hasattr(awaitable, "send") else _awaiting(awaitable)
    step, value = coroutine.send, None
    while True:
        try:
            awaited = run(step, value)
        except StopIteration as stop:
            return stop.value
        try:
            step, value = coroutine.send, (yield awaited)
        except BaseException as error:  # cancellation, and GeneratorExit from close()
            step, value = coroutine.throw, error


async def _awaiting(awaitable: Awaitable[Any]) -> Any:
    """A coroutine of what is only awaitable: middleware may return a task or a future."""
    return await awaitable
