"""The library's connection: without the records of what is told here, and reading on past what it cannot decode.

aiormq logs each connection that ends, as an error and with a traceback, each blocking, and each consumer that the
server ends. These are part of any service's life, and `epochs` and `source` say what is made of them. Other users of
aiormq in the process keep their records.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from weakref import WeakSet

import aiormq

from ._reading import FrameReader

__all__ = ["QuietConnection"]


class QuietConnection(aiormq.Connection):
    """A connection of ours."""

    async def _Connection__reader(self, frame_receiver: Any) -> None:
        _filter.readers.add(asyncio.current_task())
        await super()._Connection__reader(FrameReader(frame_receiver.reader))  # type: ignore[misc]

    def _on_reader_done(self, task: asyncio.Task[Any]) -> None:
        _filter.ours = True  # this record does not name its connection
        try:
            super()._on_reader_done(task)
        finally:
            _filter.ours = False


class _Filter(logging.Filter):
    TOLD = (
        'Unexpected connection close from remote "%s", Connection.Close(reply_code=%r, reply_text=%r)',
        "Connection %r was blocked by: %r",
        "Connection %r was unblocked",
        "Server connection %r was stuck. No frames were received in %d seconds.",
        "Consumer %r cancelled by the broker on %r",
    )

    LATE = "Got frame for closed channel %d: %r"  # what was under way to a channel that we have just closed

    ours = False

    def __init__(self) -> None:
        super().__init__()
        self.readers: WeakSet[asyncio.Task[Any] | None] = WeakSet()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg == self.LATE:
            return asyncio.current_task() not in self.readers
        if self.ours:
            return record.levelno < logging.WARNING
        return record.msg not in self.TOLD or not any(map(_is_ours, record.args or ()))


def _is_ours(argument: object) -> bool:
    return isinstance(getattr(argument, "connection", argument), QuietConnection)


_filter = _Filter()
for _module in ("connection", "channel"):
    logging.getLogger(f"aiormq.{_module}").addFilter(_filter)
