"""A subscription to a stream: messages in, settlements in any order, one stored offset.

    reader (a channel) -> hold in the watermark -> deliveries -> ... -> settle -> watermark -> timer -> bookmark

That a message was taken from the reader, and that its offset is held, happen with nothing in between. So a message is
either held in a live watermark, or it will be read again. See `stream_readership` for who reads, and from where.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from streamfw.broker import Delivery, Health, Position, Settlement, Source, Subscription
from streamfw.ending import ended
from streamfw.errors import (
    BrokerClosed,
    BrokerError,
    BrokerRefused,
    PartitionRevoked,
    SettleError,
    StaleDelivery,
    Unsupported,
)
from streamfw.outcome import ACK, Ack, Drop
from streamfw.runtime.signal import Signal

from .channel import RawDelivery
from .epochs import Epochs
from .settings import Settings
from .stream_readership import Readership
from .streams import Reading, Stream, StreamDelivery, maker_of, start_of

__all__ = ["StreamSource"]

log = logging.getLogger("streamfw.rabbit")

STORE_AFTER: Final = 5000  # settled messages
_AGAIN: Final = 0.05  # seconds until a store that failed is tried again, while somebody waits for it
_CLOSE: Final = 2.0


class StreamSource(Source):
    """See `streamfw.broker.Source`. A connection that is lost is waited for, and no error of `fetch`."""

    def __init__(self, subscription: Subscription, stream: Stream, settings: Settings, consuming: Epochs) -> None:
        self._subscription, self._settings, self._consuming = subscription, settings, consuming
        self._make = maker_of(subscription, stream)
        self._wake = Signal()
        self._readership = Readership(subscription, stream, settings, consuming, self._wake)
        self._tasks: list[asyncio.Task[None]] = []
        self._settled = 0  # since the last store
        self._full = self._stopped = self._closed = False
        self._failure: BrokerError | None = None
        self.late = 0

    async def open(self) -> None:
        """Open for the first time; the server must be there. Raises a `BrokerError`."""
        await self._readership.begin(await self._consuming.connected(self._settings.connect_timeout))
        for keep in (self._readership.keep_reading, self._readership.keep_storing):
            task = asyncio.create_task(keep(), name=f"streamfw rabbit {self._subscription.name} {keep.__name__}")
            task.add_done_callback(self._task_ended)
            self._tasks.append(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, BrokerError):  # a mistake of ours; nobody may wait for what nobody does
            log.error("%r: %r", self._subscription, error, exc_info=error)
            error = BrokerRefused(f"{self._subscription!r}: {error!r}")
        self._failure = self._failure or error
        self._wake.set()

    async def reopen(self) -> None:
        """See `Source.reopen`: that happens by itself."""
        self._require_open()

    def _require_open(self) -> None:
        if self._closed:
            raise BrokerClosed("this subscription to RabbitMQ was closed")

    # -- fetch

    async def fetch(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        """See `Source.fetch`."""
        while not self._stopped:
            if self._failure is not None:
                raise self._failure
            if found := self._take(limit, max_bytes):
                return found
            await self._wake.wait()
        self._require_open()
        return ()

    def _take(self, limit: int, max_bytes: int) -> list[StreamDelivery]:
        readership = self._readership
        reader, reading = readership.reader, readership.reading
        found: list[StreamDelivery] = []
        if reader is None or reading is None or readership.entry.blocked:
            return found
        self._full = reading.full
        while not found and not self._full and (some := reader.take(limit, max_bytes)):
            if readership.entry.untried and not self._is_the_same(some, reading):
                return found
            mark, make = reading.mark, self._make
            for raw in some:
                delivery = make(raw, reading, mark.end)
                if delivery.offset >= mark.end:  # below: it was seen before
                    mark.hold(delivery.offset)
                    found.append(delivery)
        if found:
            reading.trail.saw(found[-1].seen())
        return found

    def _is_the_same(self, some: Sequence[RawDelivery], reading: Reading) -> bool:
        """Whether what a reader brings first is of the stream that was read before. Where it is not, or is not known,
        nothing of it is taken; it comes again."""
        at = self._readership.entry.asked_for
        for raw in some:
            delivery = self._make(raw, reading, at)
            if delivery.offset >= at:  # below: of the chunk in which that lies
                return self._readership.came(delivery)
        return True

    # -- settle

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        """See `Source.settle`. Positional: durable when the offset is stored."""
        self._require_open()
        offsets: dict[Reading, list[int]] = {}
        for settlement in settlements:
            if settlement.outcome is not ACK and not isinstance(settlement.outcome, Ack | Drop):
                raise Unsupported(f"{self._subscription!r}: a stream cannot settle with {settlement.outcome!r}")
            delivery: StreamDelivery = settlement.delivery  # type: ignore[assignment]
            offsets.setdefault(delivery.reading, []).append(delivery.offset)
        errors: list[SettleError] = []
        for reading, some in offsets.items():
            if wrong := reading.mark.resolve_all(some) if reading.live else some:
                errors += self._not_ours(settlements, reading, wrong)
        self._settled += len(settlements)
        if self._settled >= STORE_AFTER:
            self._settled = 0
            self._readership.tick.set()
        if self._full:
            self._wake.set()
        return errors

    def _not_ours(
        self, settlements: Sequence[Settlement], reading: Reading, offsets: Sequence[int]
    ) -> list[SettleError]:
        self.late += len(offsets)
        found = {
            d.offset: d for s in settlements if isinstance(d := s.delivery, StreamDelivery) and d.reading is reading
        }
        if reading.live:
            return [StaleDelivery(found[offset], "settled already") for offset in offsets]
        told = "it is not this process's any more"
        return [PartitionRevoked(found[offset], f"offset {offset}: {told}") for offset in offsets]

    # -- seek

    async def seek(self, to: Position) -> None:
        """See `Source.seek`. A stream is partition 0. Offsets that are not there become the nearest; a time begins at
        its chunk, so a little before."""
        self._require_open()
        start = start_of(to)
        await self._readership.move(await self._readership.resolve(start))

    # -- the end

    async def flush(self, deadline: float) -> None:
        """See `Source.flush`."""
        self._require_open()
        loop = asyncio.get_running_loop()
        while (left := deadline - loop.time()) > 0:
            storing = asyncio.create_task(self._store())
            await asyncio.wait({storing}, timeout=left)
            if storing.done() and storing.result():
                return
            await asyncio.sleep(min(_AGAIN, left))

    async def _store(self) -> bool:
        """Whether there is nothing to wait for any more."""
        try:
            return await self._readership.store()
        except BrokerError:  # it will not pass; whoever stores all the time has told
            return True

    async def stop(self) -> None:
        """See `Source.stop`. What nobody has taken from the reader is nobody's yet."""
        self._stopped = True
        self._wake.set()

    async def close(self) -> None:
        """See `Source.close`: what is unsettled is somebody else's at once."""
        if self._closed:
            return
        await self.stop()
        self._closed = True
        await ended(self._tasks)
        await self._readership.close(_CLOSE)

    def health(self) -> Health:
        """See `Source.health`."""
        if self._closed or self._failure is not None:
            return Health(False, "closed" if self._closed else str(self._failure))
        return self._readership.health()

    def gauges(self) -> Mapping[str, float]:
        """See `Source.gauges`. What another process reads is not ours to tell."""
        reader, reading = self._readership.reader, self._readership.reading
        if reader is None or reading is None:
            return {"lag": 0, "open": 0 if reading is None else reading.mark.open, "partitions": 0}
        end = max(self._readership.end, reading.mark.end + reader.waiting)
        return {"lag": end - reading.low, "open": reading.mark.open, "partitions": 1}
