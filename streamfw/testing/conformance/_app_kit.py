"""What the tests at the level of an app stand on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from streamfw.app import App
from streamfw.broker import Broker
from streamfw.outcome import Backoff

from ._kit import ConformanceKit

AT_ONCE = Backoff(first=0.01, factor=1, max=0.01, jitter=False)
"""Retries that the tests need not wait for."""


class AppKit(ConformanceKit):
    def app(self, broker: Broker, *handlers: Callable[..., Any], **options: Any) -> App:
        """An app of these handlers over `broker`; without options, what an app is by default."""
        return App(*handlers, brokers={"default": broker}, **{"name": "shop", "drain_timeout": 10.0, **options})

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for what handlers bring about; fails with `what` and the condition's last value."""
        deadline = time.monotonic() + self.patience
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not within {self.patience} s: {what} ({value!r})"
            await asyncio.sleep(0.005)

    async def still(self, seen: list[Any], count: int) -> None:
        """Nothing more comes: what was seen stays as it is for `quiet` seconds."""
        await asyncio.sleep(self.quiet)
        assert len(seen) == count, f"{count} were expected and {len(seen)} came: {seen[count:]!r}"
