"""Long pauses, by way of a topic of their own.

A message that is to be tried again in an hour must not hold back its partition's position for an hour. So it is
published once more, to the retry topic of its group, with when it may run and which attempt it will be; when that is
confirmed, the original is settled. The group reads its retry topic as well, and keeps what comes too early in a heap,
held in the watermark like everything that is out: who takes the partition over reads it again. What has no room there
stays in the topic, and may so be late, but never early.

The headers count on that topic only: from a sender outside they would be forgeable.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable
from typing import Final

from streamfw.message import ORIGIN_OFFSET, ORIGIN_PARTITION, Headers, Outgoing

from .assignment import KafkaDelivery

__all__ = ["ADDED", "ATTEMPT", "NOT_BEFORE", "PUBLISHED", "Waiting", "again_later"]

ATTEMPT: Final = "streamfw-attempt"
NOT_BEFORE: Final = "streamfw-not-before"
PUBLISHED: Final = "streamfw-published"
ADDED: Final = 400
"""Bytes of the headers that a copy has more, at most."""
_OURS: Final = frozenset({ATTEMPT, NOT_BEFORE, PUBLISHED, ORIGIN_PARTITION, ORIGIN_OFFSET})


def again_later(delivery: KafkaDelivery, topic: str, after: float) -> Outgoing:
    """The message that `delivery` becomes on the retry topic: the same id, key, body and headers, and when, and which
    attempt it will be."""
    told = {
        ATTEMPT: str(delivery.attempt + 1),
        NOT_BEFORE: str(round((time.time() + after) * 1000)),
        PUBLISHED: str(delivery.published),
        **delivery.origin_place(),
    }
    return Outgoing(
        name=topic,
        body=delivery.body,
        message_id=delivery.message_id,
        key=delivery.key,
        headers=delivery.headers.merged(told),
        stored=True,
    )


def _number(headers: Headers, name: str, least: int) -> int:
    """A header's number; what cannot be read counts as the least: the topic is ours, but anybody may write to it."""
    value = headers.raw(name)
    return max(least, int(value)) if value is not None and value.isdigit() and len(value) < 19 else least


def _restored(delivery: KafkaDelivery, name: str) -> int:
    """Make it what it was on the topic `name`, but for the attempt; return when it may run, in ms since 1970."""
    headers = delivery.headers
    places = ((each, _number(headers, each, -1)) for each in (ORIGIN_PARTITION, ORIGIN_OFFSET))
    delivery.name = name
    delivery.attempt = _number(headers, ATTEMPT, 1)
    delivery.raw_headers = Headers.of(tuple(pair for pair in headers.pairs if pair[0] not in _OURS))
    delivery.published = _number(headers, PUBLISHED, 0) or delivery.published
    delivery.place = {each: str(number) for each, number in places if number >= 0}
    return _number(headers, NOT_BEFORE, 0)


class Waiting:
    """Deliveries from the retry topic whose time has not come, by their time. `name` is what they were published to at
    first. `bytes` is how large their bodies are together."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._heap: list[tuple[int, int, KafkaDelivery]] = []
        self._count = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._heap)

    def take(self, deliveries: Iterable[KafkaDelivery], now: float) -> list[KafkaDelivery]:
        """Take those that are held already; return only those that are due."""
        due: list[KafkaDelivery] = []
        for delivery in deliveries:
            when = _restored(delivery, self._name)
            if when <= now * 1000:
                due.append(delivery)
            else:
                self._count += 1
                self.bytes += len(delivery.body)
                heapq.heappush(self._heap, (when, self._count, delivery))
                heapq.heappush(delivery.part.due, when)
        return due

    def due(self, now: float) -> list[KafkaDelivery]:
        """Those whose time has come."""
        found: list[KafkaDelivery] = []
        while self._heap and self._heap[0][0] <= now * 1000:
            delivery = heapq.heappop(self._heap)[2]
            heapq.heappop(delivery.part.due)  # its own: what waits of a partition goes in the same order
            self.bytes -= len(delivery.body)
            if delivery.part.live:
                found.append(delivery)
        return found

    def forget_lost(self) -> None:
        """Partitions may have moved: what came out of them is somebody else's."""
        self._heap = [waiting for waiting in self._heap if waiting[2].part.live]
        heapq.heapify(self._heap)
        self.bytes = sum(len(delivery.body) for _, _, delivery in self._heap)

    def clear(self) -> None:
        """Forget them all."""
        self._heap.clear()
        self.bytes = 0
