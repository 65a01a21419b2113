"""What of a stream goes over a channel: who may read, where it begins and ends, and what is delivered.

Facts of the server (3.10.8, and but for what is noted 4.0.5 and 4.3.6, https://www.rabbitmq.com/docs/streams):

- A consumer needs a prefetch, and acknowledges. One without acknowledgements ends the whole *connection* (540); so did
  ``basic.nack`` before 4.0, and before 4.3 an offset that is none (541). An acknowledgement settles nothing: it is
  leave to send one message more.
- It sends whole chunks, so more than the prefetch; of the first one only what is not below the offset asked for.
- Offsets have gaps: the server notes other things in the log as well.
- A consumer that asks for an offset beyond the end waits for it, in silence.
- ``queue.declare`` answers a number of messages that is some seconds old: it does not tell where the end is, but one
  above 0 that there is something.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

import msgspec

from streamfw.errors import BrokerError, BrokerUnavailable

from .channel import Channel, Closed, FieldValue, RawDelivery
from .epochs import Epoch
from .errors import ChannelGone, NotFound
from .streams import LOCK_TAG, OFFSET, Start

__all__ = ["Reader", "Survey", "survey"]

_EMPTY: Final = 0.25  # seconds without an answer after which a stream that is said to be empty is so
_WHOLE: Final = 10_000  # more than a chunk has
_ACCESS_REFUSED, _LOCKED = 403, 405


class Survey(msgspec.Struct, frozen=True):
    """Where a stream begins and ends: the first offset that is kept, that of the last chunk, and the one behind the
    last message. `at` is where a time falls. All None: nothing is in it."""

    first: int | None = None
    last: int | None = None
    end: int | None = None
    at: int | None = None

    def resolve(self, start: Start) -> int:
        """The offset to begin at. Of a stream that seems empty it is 0: nothing that is there is left out by that."""
        if self.first is None or self.last is None or self.end is None:
            return 0
        if isinstance(start, int):
            return max(self.first, min(start, self.end))
        if isinstance(start, datetime):
            return self.end if self.at is None else self.at
        return {"first": self.first, "last": self.last, "next": self.end}[start]


async def survey(epoch: Epoch, stream: str, start: Start = "next", timeout: float = 10.0) -> Survey:
    """Look where a stream begins and ends, and (of a `start` that is a time) where that is. Raises a `BrokerError`."""
    async with epoch.declarations(f"looking at stream {stream!r}") as library:
        told = await library.queue_declare(stream, passive=True)
    patience = timeout if told is not None and told.message_count else _EMPTY
    channel = await epoch.channel(timeout=timeout)
    try:
        found = await _looked(channel, stream, start, patience)
    finally:
        await channel.close()
    if found["last"]:
        return Survey(
            first=min(found["first"], default=found["last"][0]),
            last=found["last"][0],
            end=found["last"][-1] + 1,
            at=min(found["at"], default=None),
        )
    if patience > _EMPTY:
        raise BrokerUnavailable(f"stream {stream!r}: nothing of it came within {timeout:g} s")
    return Survey()


async def _looked(channel: Channel, stream: str, start: Start, patience: float) -> dict[str, list[int]]:
    """The offsets that consumers bring who begin at different places. All of one channel are served in one go, so when
    the last chunk has come, so has what the others were to bring."""
    came = asyncio.Event()
    channel.on_delivery = came.set
    await channel.qos(1)
    await channel.consume(stream, "first", arguments={OFFSET: "first"})
    if isinstance(start, datetime):
        await channel.consume(stream, "at", arguments={OFFSET: start.replace(microsecond=0)})
    await channel.qos(_WHOLE)
    await channel.consume(stream, "last", arguments={OFFSET: "last"})
    found: dict[str, list[int]] = {"first": [], "at": [], "last": []}
    try:
        async with asyncio.timeout(patience):
            while not found["last"]:
                if not channel.inbox:
                    await came.wait()
                came.clear()
                await channel.qos(1)  # it is answered behind all that was sent before
                for raw in channel.take():
                    if (offset := offset_of(raw)) is not None:
                        found[raw.consumer_tag].append(offset)
    except TimeoutError:
        pass
    return found


def offset_of(raw: RawDelivery) -> int | None:
    """The offset of a message; None where it cannot be read."""
    try:
        offset = raw.properties.headers.get(OFFSET)
    except ValueError:
        return None
    return offset if type(offset) is int else None


class Reader:
    """The channel that reads a stream for a group. Made by `locked`; `begin` starts it.

    Its group is locked by a consumer on the same channel, which has an exclusive queue for itself: when the channel
    ends, whatever the reason, the next one can have it, at once.

    `ended` is called once when it reads no more, with why; `wake` when there is something to take. Both from within the
    call that saw it.
    """

    def __init__(self, channel: Channel, stream: str, prefetch: int) -> None:
        self.why: str | None = None
        """Why it has ended."""
        self.gone = False
        """The server has ended the consumer: the stream was deleted, or moved."""
        self.ended: Callable[[], None] = lambda: None
        self.wake: Callable[[], object] = lambda: None
        self._channel, self._stream, self._prefetch = channel, stream, prefetch
        self._tag = ""
        self._flows = False
        self._buffer: list[RawDelivery] = []
        self._taken = self._latest = 0  # messages since the last acknowledgement, and the last tag

    @classmethod
    async def locked(cls, epoch: Epoch, stream: str, lock: str, prefetch: int, timeout: float) -> Reader | None:
        """A reader; None: somebody else is. Raises a `BrokerError`."""
        doing = f"locking the group's reader by queue {lock!r}"
        try:
            async with epoch.declarations(doing) as library:
                await library.queue_declare(lock, exclusive=True, auto_delete=True)
        except ChannelGone as error:
            if error.closed.code == _LOCKED:
                return None
            raise
        channel = await epoch.channel(timeout=timeout)
        try:
            reader = cls(channel, stream, prefetch)
            await channel.consume(lock, LOCK_TAG, no_ack=True, exclusive=True)
        except BaseException as error:
            await channel.close()
            if isinstance(error, ChannelGone) and error.closed.code == _ACCESS_REFUSED:
                return None  # another source of this very connection
            if isinstance(error, NotFound):
                return None  # that one has just ended, and its queue with it
            raise
        channel.on_closed, channel.on_cancelled = reader._closed, reader._cancelled
        if channel.closed is not None:
            raise ChannelGone(channel.closed, doing)
        return reader

    async def begin(self, at: int) -> None:
        """Read from there on. Raises a `BrokerError`."""
        self._raise_if_ended()
        channel = self._channel
        self._tag = f"{self._stream[:100]}-{secrets.token_hex(4)}"
        channel.on_delivery = self._delivered
        await channel.qos(self._prefetch)
        arguments: dict[str, FieldValue] = {OFFSET: at}
        await channel.consume(self._stream, self._tag, arguments=arguments)
        self._raise_if_ended()
        self._flows = True

    async def pause(self) -> None:
        """Read no more, until `begin`. What was not taken is forgotten. Raises a `BrokerError`."""
        self._raise_if_ended()
        if self._flows:
            self._flows = False
            await self._channel.cancel(self._tag)
        self._buffer += self._channel.take()
        self._note(self._buffer)
        self._buffer.clear()
        self._acknowledge()

    def _raise_if_ended(self) -> None:
        if self.why is not None:
            raise BrokerUnavailable(f"reading stream {self._stream!r}: {self.why}")

    # What the channel calls

    def _delivered(self) -> None:
        self.wake()

    def _closed(self, closed: Closed) -> None:
        self._end(str(closed))

    def _cancelled(self, tag: str) -> None:
        if tag == self._tag:
            self.gone = True
            self._end(f"the server ended the consumer of stream {self._stream!r}: it was deleted, or moved")
        else:
            self._end("the server ended the group's lock")

    def _end(self, why: str) -> None:
        if self.why is None:
            self.why = why
            self._buffer.clear()
            self.ended()

    # Taking

    @property
    def waiting(self) -> int:
        """How many messages are here and were not taken."""
        return len(self._buffer) + (len(self._channel.inbox) if self.why is None else 0)

    @property
    def at_the_end(self) -> bool:
        """Whether there was nothing more to send, or it is on its way: the server might send more if it had any."""
        return self.waiting + self._taken < self._prefetch

    def take(self, limit: int, max_bytes: int) -> Sequence[RawDelivery]:
        """What was delivered, in order: at most `limit`, and about `max_bytes` of bodies, but one at least."""
        if self.why is not None or not self._flows:
            return ()
        if not self._buffer:
            self._buffer = self._channel.take()
        count = 0
        for raw in self._buffer[:limit]:
            max_bytes -= len(raw.body)
            if max_bytes < 0 and count:
                break
            count += 1
        taken = self._buffer[:count]
        del self._buffer[:count]
        if taken:
            self._note(taken)
            if not self._buffer or self._taken * 2 >= self._prefetch:
                self._acknowledge()
        return taken

    def _note(self, taken: Sequence[RawDelivery]) -> None:
        self._taken += len(taken)
        for raw in reversed(taken):
            if raw.consumer_tag == self._tag:  # not what somebody published to the lock: that has no acknowledgement
                self._latest = raw.tag
                break

    def _acknowledge(self) -> None:
        if self._taken:
            self._taken = 0
            self._channel.ack(self._latest, multiple=True)

    async def close(self, why: str = "closed by us") -> None:
        """End it, and the lock with it: that first, for a channel that acknowledges closes slowly. Never raises."""
        self._end(why)
        try:
            await self._channel.cancel(LOCK_TAG)
        except BrokerError:
            pass  # it has ended already
        await self._channel.close()
