"""Records of partitions from one offset to another, read without a group: for people, not for handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from streamfw.errors import BrokerUnavailable

from .errors import translated
from .foreign import tolerate
from .nodes import diagnosed
from .settings import Settings, client_arguments

__all__ = ["Reader", "Spans", "reading", "record_at"]

Spans: TypeAlias = "Mapping[TopicPartition, tuple[int, int]]"
"""The offset to begin at in each partition, and the one to stop before."""

_MOST: Final = 500  # records at a time
_PATIENCE: Final = 500  # ms of one look
_CLOSE: Final = 5.0


class Reader:
    """Made by `reading`."""

    def __init__(self, consumer: AIOKafkaConsumer, spans: Spans, settings: Settings) -> None:
        self._consumer, self._spans = consumer, dict(spans)
        self._next = {tp: first for tp, (first, _) in spans.items()}
        self._timeout = 2 * settings.request_timeout

    def leave(self, tp: TopicPartition) -> None:
        """Read no more of this partition."""
        self._spans.pop(tp, None)

    async def some(self) -> list[Any]:
        """The next records (of aiokafka's kind), each partition in its order; none at the end.

        Raises a `BrokerError`, also when nothing comes for twice `request_timeout`.
        """
        try:
            async with asyncio.timeout(self._timeout):
                while left := [tp for tp in self._spans if await self._consumer.position(tp) < self._spans[tp][1]]:
                    found = await self._getmany(left)
                    if records := [r for tp, some in found.items() for r in some if r.offset < self._spans[tp][1]]:
                        return records
        except (KafkaError, TimeoutError) as error:
            topics = sorted({tp.topic for tp in self._spans})
            raise translated(error, f"reading {', '.join(map(repr, topics))}") from error
        return []

    async def _getmany(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, list[Any]]:
        try:
            found: dict[TopicPartition, list[Any]] = await self._consumer.getmany(
                *partitions, timeout_ms=_PATIENCE, max_records=_MOST
            )
        except UnicodeDecodeError:  # a header's name, once a process; what it had taken by then of others is lost
            tolerate()
            for tp in partitions:
                self._consumer.seek(tp, self._next[tp])
            return {}
        self._next |= {tp: some[-1].offset + 1 for tp, some in found.items()}
        return found


@asynccontextmanager
async def reading(settings: Settings, spans: Spans) -> AsyncIterator[Reader]:
    """Read these partitions. What was deleted is left out, also what is deleted meanwhile. Raises a `BrokerError`."""
    consumer = AIOKafkaConsumer(
        group_id=None,
        auto_offset_reset="earliest",
        isolation_level=settings.isolation,
        fetch_max_wait_ms=100,
        **client_arguments(settings),
    )
    try:
        try:
            async with asyncio.timeout(settings.connect_timeout):
                await consumer.start()
        except (KafkaError, OSError, TimeoutError) as error:
            raise await diagnosed(error, "connecting to read a topic", settings) from error
        consumer.assign(list(spans))
        for tp, (first, _) in spans.items():
            consumer.seek(tp, first)
        yield Reader(consumer, spans, settings)
    finally:
        await asyncio.wait([asyncio.ensure_future(consumer.stop())], timeout=_CLOSE)


async def record_at(settings: Settings, tp: TopicPartition, offset: int) -> Any | None:
    """One record; None where it cannot be had (any more)."""
    try:
        async with reading(settings, {tp: (offset, offset + 1)}) as reader:
            found = await reader.some()
    except BrokerUnavailable:
        return None
    return found[0] if found else None
