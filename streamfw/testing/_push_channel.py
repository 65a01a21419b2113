"""The queues and channels of the push broker, both ends."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from streamfw.message import Outgoing

if TYPE_CHECKING:
    from ._push import PushBroker


class Item(msgspec.Struct, frozen=True, gc=False):
    """One message in one queue."""

    seq: int
    message: Outgoing
    timestamp: float


class Queue:
    """Messages in order of their numbers, and the channels that consume them in turn."""

    def __init__(self) -> None:
        self.messages: deque[Item] = deque()
        self.consumers: deque[Channel] = deque()

    def push(self) -> None:
        """Push what the consumers' windows have room for."""
        while self.messages:
            channel = next((c for c in self.consumers if len(c.unacked) < c.window), None)
            if channel is None:
                return
            self.consumers.remove(channel)
            self.consumers.append(channel)
            channel.deliver(self.messages.popleft())

    def requeue(self, items: Sequence[Item]) -> None:
        for item in items:
            insort(self.messages, item, key=lambda i: i.seq)
        self.push()


class Channel:
    """Both ends of one channel: tags from 1, a window, and a writer that writes once in a turn of the loop."""

    def __init__(
        self,
        broker: PushBroker,
        queue: Queue,
        window: int,
        receive: Callable[[int, Item], None],
        broken: Callable[[], None],
    ) -> None:
        self.window = window
        self.unacked: dict[int, Item] = {}
        self.open = True
        self._broker = broker
        self._queue = queue
        self._receive = receive
        self._broken = broken
        self._tag = 0
        self._frames: list[Callable[[], None]] = []

    def deliver(self, item: Item) -> None:
        self._tag += 1
        self.unacked[self._tag] = item
        self._receive(self._tag, item)

    # The client's frames

    def ack(self, tag: int, *, multiple: bool) -> None:
        """Acknowledge `tag`, with `multiple` all before it as well. Never one that is not out: that is a protocol
        error, and ends a real channel."""
        self._broker.frames += 1
        self._write(lambda: self._acked(tag, multiple))

    def requeue(self, tag: int) -> None:
        self._write(lambda: self._requeued(tag))

    async def written(self) -> None:
        """Until the server has read all that was written before."""
        read = asyncio.Event()
        self._write(read.set)
        await read.wait()

    def _write(self, frame: Callable[[], None]) -> None:
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._serve)
        self._frames.append(frame)

    # The server's reading of them

    def _serve(self) -> None:
        frames, self._frames = self._frames, []
        for frame in frames:
            frame()
        if self.open:
            self._queue.push()

    def _acked(self, tag: int, multiple: bool) -> None:
        for each in [t for t in self.unacked if t <= tag] if multiple else [tag]:
            del self.unacked[each]

    def _requeued(self, tag: int) -> None:
        self._queue.requeue([self.unacked.pop(tag)])

    def cancel(self) -> None:
        """Push nothing more; what is out stays out."""
        if self in self._queue.consumers:
            self._queue.consumers.remove(self)

    def close(self) -> None:
        """The end in good order: what was written is read first."""
        if self.open:
            self._serve()
            self._end()

    def break_off(self) -> None:
        """The end by a cut: what was written and not read is gone with the connection."""
        if self.open:
            self._end()
            self._broken()

    def _end(self) -> None:
        self.open = False
        self.cancel()
        self._broker.forget(self)
        items, self.unacked = list(self.unacked.values()), {}
        self._frames.clear()
        self._queue.requeue(items)
