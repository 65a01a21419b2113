"""Middleware: functions around a handler, composed once.

    async def audit(message: Message, call_next: Next) -> object:
        started = time.monotonic()
        try:
            return await call_next(message)
        finally:
            log(message.message_id, time.monotonic() - started)

What `call_next` returns or raises is the handler's result; what the middleware returns or raises takes its place. A
middleware never settles. One that has nothing to do afterwards may be a plain function that returns
``call_next(message)``: the same type, with no frame. A batch subscriber's middleware sees a `MessageBatch`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

__all__ = ["Middleware", "Next", "compose"]

Next: TypeAlias = Callable[[Any], Awaitable[object]]
Middleware: TypeAlias = Callable[[Any, Next], Awaitable[object]]


def compose(call: Next, middleware: Sequence[Middleware]) -> Next:
    """`call` inside `middleware`, the first outermost. Closures: a `partial` with a keyword costs twice as much."""
    for layer in reversed(middleware):
        call = _around(layer, call)
    return call


def _around(layer: Middleware, inner: Next) -> Next:
    def call(message: Any) -> Awaitable[object]:
        return layer(message, inner)

    return call
