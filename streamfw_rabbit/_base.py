"""What both channels have in common: publishes and their answers, calls that outlive their callers, and the end."""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import aiormq

from . import _content, _frames
from .channel import (
    NACKED,
    OPEN,
    ChannelCounters,
    Closed,
    FieldTable,
    Properties,
    RawDelivery,
    Receipts,
    Returned,
    Transport,
)
from .errors import DRIVER_ERRORS, ChannelGone, closing_error, reason

if TYPE_CHECKING:
    from ._epoch import Epoch

__all__ = ["BaseChannel", "finished", "told"]

T = TypeVar("T")
log = logging.getLogger("streamfw.rabbit")
_epochs: Final = itertools.count(1)

# An acknowledgement that was written at once before the channel's close is lost now and then: a quorum queue gets it
# from the channel's process a little later (measured: none is lost after a quarter of a second).
_LINGER: Final = 0.25
_CLOSE_TIMEOUT: Final = 5.0


def told(callback: Callable[..., None] | None, *arguments: object) -> None:
    """Call whoever wants to know. What it raises must not come back: out of a protocol it costs the connection."""
    if callback is not None:
        try:
            callback(*arguments)
        except Exception:
            log.exception("a callback of a RabbitMQ channel failed: %r", callback)


async def finished(call: Coroutine[Any, Any, T], calls: set[asyncio.Task[Any]]) -> T:
    """Run a call of the library to its end, also when the caller is cancelled meanwhile.

    The library ends calls with a `CancelledError` of its own when its connection is closed; that is an error like any
    other here (`ConnectionError`), and no cancellation of the caller.
    """
    task = asyncio.create_task(call)
    calls.add(task)
    task.add_done_callback(calls.discard)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, also when nobody waits
    await asyncio.wait({task})
    if task.cancelled():
        raise ConnectionError("the connection was closed during the call")
    return task.result()


class BaseChannel(ABC):
    """A `Channel` over one of aiormq's, which does its calls (`library`). How frames come and go is the derived
    class's: it calls `_confirmed`, `_was_returned`, `_ended`, and writes in `_send`."""

    transport: ClassVar[Transport]

    def __init__(self, connection: Epoch, library: aiormq.Channel, confirms: bool) -> None:
        self.library = library
        self.number = library.number
        self.epoch = next(_epochs)
        self.closed: Closed | None = None
        self.on_closed: Callable[[Closed], None] | None = None
        self.counters = ChannelCounters()
        self.on_delivery: Callable[[], None] | None = None
        self.on_cancelled: Callable[[str], None] | None = None
        self.on_answers: Callable[[], None] | None = None
        self.unconfirmed_bytes = 0
        self._connection = connection
        self._frame_max = connection.frame_max
        self._loop = asyncio.get_running_loop()
        self._confirms = confirms
        self._sequence = 0
        # By sequence number, so in the order of publishing: whose place it is, and the size of its body.
        self._pending: dict[int, tuple[Receipts, int, int]] = {}
        self._returned: dict[int, Returned] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._settled_at = float("-inf")
        self._gone: asyncio.Future[None] = self._loop.create_future()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.number} epoch {self.epoch}{f' ({self.closed})' if self.closed else ''}>"

    # What the derived class does

    @property
    @abstractmethod
    def inbox(self) -> list[RawDelivery]: ...

    @abstractmethod
    def take(self) -> list[RawDelivery]: ...

    @abstractmethod
    def _send(self, data: bytes) -> None:
        """Write at the end of this turn of the loop."""

    @abstractmethod
    async def _flushed(self) -> None:
        """Write now, and wait until it has left."""

    # Calls

    async def open(self) -> None:
        await self._call("opening a channel", self.library.open())

    async def qos(self, prefetch: int) -> None:
        await self._call("setting the prefetch", self.library.basic_qos(prefetch_count=prefetch))

    async def consume(
        self,
        queue: str,
        consumer_tag: str,
        *,
        arguments: FieldTable | None = None,
        no_ack: bool = False,
        exclusive: bool = False,
    ) -> None:
        call = self.library.basic_consume(
            queue,
            _not_called,
            no_ack=no_ack,
            exclusive=exclusive,
            arguments=dict(arguments or {}),
            consumer_tag=consumer_tag,
        )
        doing = f"consuming from {queue!r}"
        try:
            await self._call(doing, call)
        except ValueError as error:  # pamqp has rules for names, which the server has not
            raise ValueError(f"{doing}: {error}") from error

    async def cancel(self, consumer_tag: str) -> None:
        await self._call("ending a consumer", self.library.basic_cancel(consumer_tag))

    async def _call(self, doing: str, call: Coroutine[Any, Any, object]) -> None:
        if self.closed is not None:
            call.close()
            raise ChannelGone(self.closed, doing)
        try:
            await finished(call, self._calls)
        except DRIVER_ERRORS as error:
            raise closing_error(self.closed or self._connection.closed or reason(error), doing) from error

    # Settling

    def ack(self, tag: int, multiple: bool = False) -> bool:
        return self._settle(_frames.ack_frame(self.number, tag, multiple))

    def nack(self, tag: int, multiple: bool = False, requeue: bool = True) -> bool:
        return self._settle(_frames.nack_frame(self.number, tag, multiple, requeue))

    def reject(self, tag: int, requeue: bool = True) -> bool:
        return self._settle(_frames.reject_frame(self.number, tag, requeue))

    def _settle(self, frame: bytes) -> bool:
        if self.closed is not None:
            self.counters.late += 1
            return False
        self.counters.acks += 1
        self._settled_at = self._loop.time()
        self._send(frame)
        return True

    # Publishing

    @property
    def unconfirmed(self) -> int:
        return len(self._pending)

    @property
    def blocked(self) -> bool:
        return self._connection.blocked_since is not None

    def publish(
        self,
        exchange: str,
        routing_key: str,
        properties: Properties,
        body: bytes,
        receipts: Receipts,
        place: int = 0,
        *,
        mandatory: bool = True,
    ) -> int:
        self._check_publish()
        if receipts.answers[place] is not OPEN:
            raise ValueError(f"place {place} of the receipts has its answer already")
        sequence = self._sequence + 1
        # Only a mandatory message can be returned.
        encoded = _content.encode(properties, sequence if mandatory else None)
        data = _frames.publish_frames(self.number, exchange, routing_key, encoded, body, self._frame_max, mandatory)
        self._publish(sequence, data, receipts, place, len(body))
        return sequence

    def publish_plain(
        self, exchange: str, routing_key: str, identity: str, stamp: int, body: bytes, receipts: Receipts
    ) -> int:
        if self.closed is not None or not self._confirms:
            self._check_publish()
        sequence = self._sequence + 1
        frames = _frames.plain_frames(
            self.number, exchange, routing_key, identity, stamp, sequence, body, self._frame_max
        )
        self._publish(sequence, frames, receipts, 0, len(body))
        return sequence

    def _check_publish(self) -> None:
        if self.closed is not None:
            raise ChannelGone(self.closed, "publishing")
        if not self._confirms:
            raise RuntimeError("publishing needs a channel that was opened with confirms=True")

    def _publish(self, sequence: int, frames: bytes, receipts: Receipts, place: int, size: int) -> None:
        self._sequence = sequence
        self._pending[sequence] = (receipts, place, size)
        self.unconfirmed_bytes += size
        self.counters.publishes += 1
        self._send(frames)

    def _was_returned(self, returned: Returned, sequence: int | None) -> None:
        """The confirm of a returned message follows it, and carries the answer."""
        self.counters.returns += 1
        if sequence in self._pending:
            self._returned[sequence] = returned

    def _confirmed(self, tag: int, multiple: bool, ok: bool) -> None:
        self.counters.confirms += 1
        pending = self._pending
        if not multiple:
            self._answer(tag, ok)
            return
        tags = []
        for sequence in pending:
            if sequence > tag > 0:  # 0 is all of them
                break
            tags.append(sequence)
        if self._returned or not ok:
            for sequence in tags:
                self._answer(sequence, ok)
            return
        for sequence in tags:  # as `_answer` does
            receipts, place, size = pending.pop(sequence)
            self.unconfirmed_bytes -= size
            receipts.answer(place, None)

    def _answer(self, sequence: int, ok: bool) -> None:
        found = self._pending.pop(sequence, None)
        if found is None:
            return
        receipts, place, size = found
        self.unconfirmed_bytes -= size
        returned = self._returned.pop(sequence, None) if self._returned else None
        receipts.answer(place, (returned if ok else NACKED))

    # The end

    def _ended(self, closed: Closed) -> None:
        """It is closed, as of now. See the head of `channel` for the order."""
        if self.closed is not None:
            return
        self.closed = closed
        self._gone.set_result(None)
        pending, self._pending = self._pending, {}
        self._returned.clear()
        self.unconfirmed_bytes = 0
        for receipts, place, _ in pending.values():
            receipts.answer(place, closed)
        told(self.on_closed, closed)

    async def flush(self) -> None:
        if self.closed is None:
            await self._flushed()

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.wait({self._closing})

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                if self.closed is None:
                    await self._flushed()
                recent = self._settled_at + _LINGER - self._loop.time()
                if self.closed is None and recent > 0:
                    await asyncio.wait({self._gone}, timeout=recent)
                if self.closed is None:
                    await finished(self.library.close(), self._calls)
        except DRIVER_ERRORS as error:
            log.debug("closing %r: %r", self, error)
        self._ended(Closed("local"))


async def _not_called(message: object) -> None:
    """The library wants a callback for each consumer; its deliveries never reach it."""
