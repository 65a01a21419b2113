"""Committed offsets as they are when every commit that was begun has ended.

The server answers the commit of a transaction before it has written its markers, and only they make the transaction's
offsets the group's. Who asks in between is told the offset before; on a quiet node that was so for six of ten who asked
right after a commit. To take a partition over from there would be to handle again what was committed. So whoever asks
may ask for stable offsets only (KIP-447), and is told to wait while one is pending. aiokafka speaks no version of the
request that can; this one is version 7, of Kafka 2.5.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from aiokafka import TopicPartition
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)

from .admin import by_topic
from .errors import response_error

__all__ = ["AGAIN", "StableOffsetFetchRequest", "stable_offsets_in"]

UNSTABLE: Final = 88  # UNSTABLE_OFFSET_COMMIT
AGAIN: Final = 0.01
"""Seconds until one asks again."""

_TEXT: Final = CompactString("utf-8")
_TAGS: Final = ("tags", TaggedFields)


class _Response(Response):  # type: ignore[misc, unused-ignore]  # no types in every version of aiokafka
    API_KEY = 9
    API_VERSION = 7
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("name", _TEXT),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", _TEXT),
                        ("error_code", Int16),
                        _TAGS,
                    ),
                ),
                _TAGS,
            ),
        ),
        ("error_code", Int16),
        _TAGS,
    )


class _Struct(RequestStruct):  # type: ignore[misc, unused-ignore]
    API_KEY = 9
    API_VERSION = 7
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _Response
    SCHEMA = Schema(
        ("group", _TEXT),
        ("topics", CompactArray(("name", _TEXT), ("partitions", CompactArray(Int32)), _TAGS)),
        ("require_stable", Boolean),
        _TAGS,
    )


class StableOffsetFetchRequest(Request[_Struct]):  # type: ignore[misc, unused-ignore]
    """Raises `NotImplementedError` when it is to be sent to a server before 2.5."""

    API_KEY = 9

    def __init__(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        self._group = group
        self._topics = by_topic((tp, tp.partition) for tp in partitions)

    def build(self, request_struct_class: type[_Struct]) -> _Struct:
        topics: list[tuple[str, list[int], dict[int, bytes]]] = [
            (name, partitions, {}) for name, partitions in self._topics
        ]
        return request_struct_class(self._group, topics, True, {})


def stable_offsets_in(response: Any) -> dict[TopicPartition, int] | None:
    """What the answer tells; None while something is not stable. Raises a `KafkaError`."""
    if response.error_code:
        raise response_error(response.error_code)
    found = {}
    for name, answers, _ in response.topics:
        for partition, offset, _, _, code, _ in answers:
            if code == UNSTABLE:
                return None
            if code:
                raise response_error(code, f"{name}-{partition}")
            if offset >= 0:
                found[TopicPartition(name, partition)] = offset
    return found
