"""Long pauses, by way of a topic of their own.

A message that is to be tried again in an hour must not hold back its partition's position for an hour. So it is
published once more, to the retry topic of its group, with when it may run and which attempt it will be; when that is
confirmed, the original is settled. The group reads its retry topic as well, and keeps what comes too early in a heap,
held in the watermark like everything that is out: who takes the partition over reads it again.

The headers count on that topic only: from a sender outside they would be forgeable.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable
from typing import Any, Final

from streamfw.message import ORIGIN_OFFSET, ORIGIN_PARTITION, TOMBSTONE, Headers, Outgoing

from .assignment import KafkaDelivery, Part
from .wire import visible_headers

__all__ = ["ATTEMPT", "NOT_BEFORE", "Waiting", "again_later"]

ATTEMPT: Final = "streamfw-attempt"
NOT_BEFORE: Final = "streamfw-not-before"
_OURS: Final = frozenset({ATTEMPT, NOT_BEFORE, ORIGIN_PARTITION, ORIGIN_OFFSET})


def again_later(delivery: KafkaDelivery, topic: str, after: float) -> Outgoing:
    """The message that `delivery` becomes on the retry topic: the same id, key, body and headers, and when, and which
    attempt it will be."""
    told = {
        ATTEMPT: str(delivery.attempt + 1),
        NOT_BEFORE: str(round((time.time() + after) * 1000)),
        **delivery.origin_place(),
    }
    return Outgoing(
        name=topic,
        body=delivery.body,
        message_id=delivery.message_id,
        key=delivery.key,
        headers=delivery.headers.merged(told),
    )


def _number(headers: Headers, name: str, least: int) -> int:
    """A header's number; what cannot be read counts as the least: the topic is ours, but anybody may write to it."""
    value = headers.raw(name)
    return max(least, int(value)) if value is not None and value.isdigit() and len(value) < 19 else least


class Waiting:
    """Deliveries from the retry topic whose time has not come, by their time."""

    def __init__(self, name: str) -> None:
        self._name = name  # what they were published to at first
        self._heap: list[tuple[int, int, KafkaDelivery]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def take(self, part: Part, records: Iterable[Any], now: float) -> list[KafkaDelivery]:
        """Deliveries of records that are held already; only those that are due."""
        due: list[KafkaDelivery] = []
        for record in records:
            headers = visible_headers(record.headers)
            place = {name: headers[name] for name in (ORIGIN_PARTITION, ORIGIN_OFFSET) if name in headers}
            delivery = KafkaDelivery(
                name=self._name,
                body=TOMBSTONE if record.value is None else record.value,
                attempt=_number(headers, ATTEMPT, 1),
                raw_headers=Headers.of(tuple(pair for pair in headers.pairs if pair[0] not in _OURS)),
                record=record,
                part=part,
                place=place,
            )
            when = _number(headers, NOT_BEFORE, 0)
            if when <= now * 1000:
                due.append(delivery)
            else:
                self._count += 1
                heapq.heappush(self._heap, (when, self._count, delivery))
        return due

    def due(self, now: float, most: int) -> list[KafkaDelivery]:
        """Those whose time has come, at most so many; what is not ours any more is forgotten."""
        found: list[KafkaDelivery] = []
        while self._heap and self._heap[0][0] <= now * 1000 and len(found) < most:
            delivery = heapq.heappop(self._heap)[2]
            if delivery.part.live:
                found.append(delivery)
        return found

    def clear(self) -> None:
        self._heap.clear()
