"""Event loops by name."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

__all__ = ["run"]


def run(main: Coroutine[Any, Any, T], loop: str) -> T:
    """Run a coroutine on a new loop: ``asyncio`` or ``uvloop``."""
    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
