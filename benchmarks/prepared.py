"""A broker whose messages are prepared in memory: fetching is a slice, settling a subtraction.

What it costs to dispatch a message is what is left. A thousand messages go round: what a broker has just decoded is in
the processor's cache, and so are these.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from streamfw.broker import Broker, Capabilities, Connection, Delivery, Health, Settlement, Source, Subscription
from streamfw.errors import PublishError, SettleError
from streamfw.message import Outgoing

__all__ = ["PreparedBroker", "PreparedSource"]


class PreparedSource(Source):
    """Hands out `count` deliveries in full batches, from the moment that `begin` is called; `finished` is set when all
    are settled. `ring` is gone through again and again; its length is a multiple of the batch."""

    def __init__(self, ring: list[Delivery], count: int) -> None:
        self._ring, self._at, self._out = ring, 0, 0
        self.count = self.left = count
        self.finished = asyncio.Event()
        self._begun, self._stopped = asyncio.Event(), asyncio.Event()

    def begin(self) -> None:
        self._begun.set()

    async def fetch(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        if not self._out:
            await self._begun.wait()
        elif self._out == self.count:
            await self._stopped.wait()
            return ()
        at = self._at
        batch = self._ring[at : at + min(limit, self.count - self._out)]
        self._out += len(batch)
        self._at = (at + len(batch)) % len(self._ring)
        return batch

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        self.left -= len(settlements)
        if not self.left:
            self.finished.set()
        return ()

    async def stop(self) -> None:
        self._stopped.set()

    async def flush(self, deadline: float) -> None: ...

    async def close(self) -> None: ...


class PreparedConnection(Connection):
    def __init__(self, source: PreparedSource) -> None:
        self._source = source

    async def open(self, subscription: Subscription) -> Source:
        return self._source

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        raise AssertionError("nothing is published here")

    async def check(self) -> Health:
        return Health(True)


class PreparedBroker(Broker):
    """A broker with one source."""

    capabilities = Capabilities(retry=True, release=True, dead_letter=True, ordered_by=frozenset(["key"]))

    def __init__(self, source: PreparedSource) -> None:
        super().__init__("prepared://")
        self._source = source

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        yield PreparedConnection(self._source)
