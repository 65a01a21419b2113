"""Records with names of headers that are not UTF-8, from producers that do not keep to the protocol.

The server takes them. aiokafka decodes names as it reads a batch, and raises `UnicodeDecodeError` out of ``getmany``:
each time anew, as the position stays before the batch, and what it had read of it before is thrown away. So one such
record stops its partition for good. After `tolerate` it is read with surrogate escapes, as keys are.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import decode_varint

__all__ = ["TolerantRecords", "tolerate"]

_LENGTH_AT: Final = 8  # a batch: its first offset (8 bytes), the length of what follows (4), what follows
_OVERHEAD: Final = 12


def tolerate() -> None:
    """Let every consumer of this process read such records from now on. To be called when one has raised; its next
    ``getmany`` reads on. It costs 0.04 us a record, which those who never meet one need not pay."""
    fetcher.MemoryRecords = TolerantRecords


class Record(msgspec.Struct, gc=False):
    """As aiokafka's own."""

    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    checksum: None = None


class TolerantRecords:
    """What a partition's part of a fetch response holds: in place of aiokafka's `MemoryRecords`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._records = MemoryRecords(data)
        self._at = 0

    def has_next(self) -> bool:
        """Whether there is another batch."""
        there: bool = self._records.has_next()
        return there

    def size_in_bytes(self) -> int:
        """Of all of it."""
        return len(self._data)

    def next_batch(self) -> Any:
        """The next batch; None if there is none."""
        batch = self._records.next_batch()
        if batch is None:
            return None
        (length,) = struct.unpack_from(">i", self._data, self._at + _LENGTH_AT)
        start, self._at = self._at, self._at + _OVERHEAD + length
        return _Batch(batch, memoryview(self._data)[start : self._at])


class _Batch:
    """A batch of aiokafka's, but for how its records are read."""

    def __init__(self, batch: Any, data: memoryview) -> None:
        self._batch, self._bytes = batch, data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __next__(self) -> Any:  # asked for on a control batch
        return next(self._batch)

    def __iter__(self) -> Iterator[Any]:
        read = 0
        try:
            for record in self._batch:
                yield record
                read += 1
        except UnicodeDecodeError:
            pass
        except CorruptRecordException as error:  # what aiokafka makes of it without its C extension
            if not isinstance(error.__cause__, UnicodeDecodeError):
                raise
        else:
            return
        yield from itertools.islice(_read(self._bytes), read, None)


def _read(data: memoryview) -> Iterator[Record]:
    """The records of a batch, in the format of Kafka's documentation ("Message Format"), names with escapes."""
    batch = _DefaultRecordBatchPy(data)
    batch._maybe_uncompress()
    buffer, at, count = batch._buffer, batch._pos, batch._num_records
    appended = batch.max_timestamp if batch.timestamp_type == batch.LOG_APPEND_TIME else None

    def number() -> int:
        nonlocal at
        value, at = decode_varint(buffer, at)
        return int(value)

    def some() -> bytes | None:
        nonlocal at
        length = number()
        if length < 0:
            return None
        start, at = at, at + length
        return bytes(buffer[start:at])

    for _ in range(count):
        number()  # its length
        number()  # attributes: none are in use
        time, offset, key, value = number(), number(), some(), some()
        headers = [((some() or b"").decode("utf-8", "surrogateescape"), some()) for _ in range(number())]
        stamp = batch.first_timestamp + time if appended is None else appended
        yield Record(batch.base_offset + offset, stamp, batch.timestamp_type, key, value, headers)
