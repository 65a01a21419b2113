"""Cutting connections to Kafka, as a network does."""

from __future__ import annotations

import gc

from aiokafka.conn import AIOKafkaConnection

__all__ = ["cut_everything"]


def cut_everything() -> int:
    """Cut every connection to Kafka of this process, whoever has it, without a word to either side; how many there
    were."""
    found = [one for one in gc.get_objects() if isinstance(one, AIOKafkaConnection) and one.connected()]
    for connection in found:
        connection._writer.transport.abort()
    return len(found)
