"""A broker that pushes over channels, in process: the synthetic broker of the push kind."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from streamfw.broker import Broker, Capabilities, Connection, Delivery, Health, Settlement, Source, Subscription
from streamfw.errors import (
    BrokerClosed,
    BrokerRefused,
    BrokerUnavailable,
    PublishError,
    Rejected,
    SettleError,
    StaleDelivery,
    Unavailable,
    Unroutable,
    Unsupported,
)
from streamfw.message import Outgoing
from streamfw.outcome import RELEASE, Ack, Drop

from ._push_channel import Channel, Item, Queue

PARKED = ""
"""The queue that keeps dead letters until a group subscribes to them, and is adopted by the first that does."""


class PushBroker(Broker):
    """Fanout exchanges and a queue for each group; messages are pushed over channels, and acknowledged by tags.

    A channel has at most the subscription's `prefetch` messages out. Tags begin again at 1 with each channel, and
    acknowledgements are written once in a turn of the loop: what was not written when the channel broke was not
    said. A message that nobody has a queue for is `Unroutable`. It takes back single messages, but has no retry with
    a pause, counts no attempts, and holds no order over several consumers.
    """

    capabilities = Capabilities(settlement="sent", release=True, kept=False)

    def __init__(self, url: str = "push://") -> None:
        super().__init__(url)
        self.frames = 0
        """How many acknowledgements were written, for tests of how they are grouped."""
        self._exchanges: dict[str, dict[str, Queue]] = {}
        self._channels: list[Channel] = []
        self._seq = 0
        self._down = False

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        self.require_up()
        connection = PushConnection(self)
        try:
            yield connection
        finally:
            await connection.close()

    # What a test does to it

    def cut(self) -> None:
        """Break every channel, as a network does: what was not acknowledged goes back to its queue."""
        for channel in list(self._channels):
            channel.break_off()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Cut, and be out of reach until the context ends."""
        self._down = True
        self.cut()
        try:
            yield
        finally:
            self._down = False

    # The server's side

    @property
    def down(self) -> bool:
        return self._down

    def require_up(self) -> None:
        if self._down:
            raise BrokerUnavailable(f"{self.describe()} cannot be reached")

    def declare(self, name: str, group: str) -> Queue:
        """The queue of `group` bound to the exchange `name`; it takes over what was parked there."""
        queues = self._exchanges.setdefault(name, {})
        if group not in queues:
            queues[group] = queues.pop(PARKED) if PARKED in queues else Queue()
        return queues[group]

    def park(self, name: str) -> None:
        """Keep what is published to `name` even if nobody has subscribed."""
        if not self._exchanges.get(name):
            self.declare(name, PARKED)

    def route(self, message: Outgoing, stamp: float) -> bool:
        queues = self._exchanges.get(message.name)
        if not queues:
            return False
        self._seq += 1
        for queue in queues.values():
            queue.messages.append(Item(self._seq, message, stamp))
            queue.push()
        return True

    def channel(
        self, queue: Queue, window: int, receive: Callable[[int, Item], None], broken: Callable[[], None]
    ) -> Channel:
        channel = Channel(self, queue, window, receive, broken)
        self._channels.append(channel)
        queue.consumers.append(channel)
        queue.push()
        return channel

    def forget(self, channel: Channel) -> None:
        self._channels.remove(channel)


class PushConnection(Connection):
    """See `streamfw.broker.Connection`."""

    def __init__(self, broker: PushBroker) -> None:
        self._broker = broker
        self._sources: list[PushSource] = []
        self.closed = False

    def require_open(self) -> None:
        if self.closed:
            raise BrokerClosed("this connection to the push broker was closed")

    async def open(self, subscription: Subscription) -> Source:
        self.require_open()
        self._broker.require_up()
        for mistake in self._broker.mistakes(subscription):
            raise BrokerRefused(f"{subscription!r}: {mistake}")
        if subscription.ordered_by is not None:
            raise Unsupported(f"{subscription!r}: no order holds over several consumers of a queue")
        if subscription.dead_letter is not None:
            self._broker.park(subscription.dead_letter)
        source = PushSource(self, self._broker, subscription)
        self._sources.append(source)
        await source.reopen()
        return source

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        self.require_open()
        stamp = time.time()
        return [self._publish(message, stamp) for message in messages]

    def _publish(self, message: Outgoing, stamp: float) -> PublishError | None:
        where = {"name": message.name, "message_id": message.message_id}
        if self._broker.down:
            return Unavailable(f"{self._broker.describe()} cannot be reached", **where)
        if message.delay > 0:
            return Rejected(f"delay={message.delay}: this broker has no delayed publishing", **where)
        if any(value is None for _, value in message.headers.pairs):
            return Rejected("a header without a value cannot travel on this broker", **where)
        if not self._broker.route(message, stamp):
            return Unroutable("no group has subscribed, and this broker keeps nothing for later", **where)
        return None

    async def check(self) -> Health:
        self.require_open()
        return Health(False, "cannot be reached") if self._broker.down else Health(True)

    async def close(self) -> None:
        for source in self._sources:
            await source.close()
        self.closed = True


class PushDelivery(Delivery, gc=False, kw_only=True):
    """`tag` means something on the channel numbered `epoch` only."""

    epoch: int
    tag: int


class PushSource(Source):
    """See `streamfw.broker.Source`.

    `_out` holds every tag of the present channel that is not settled, whether it was fetched or still waits in
    `_buffer`, in rising order: all tags before its first are settled, which is what makes one multiple
    acknowledgement of many.
    """

    def __init__(self, connection: PushConnection, broker: PushBroker, subscription: Subscription) -> None:
        self._connection = connection
        self._broker = broker
        self._subscription = subscription
        self._queue = broker.declare(subscription.name, subscription.group)
        self._channel: Channel | None = None
        self._epoch = 0
        self._buffer: deque[PushDelivery] = deque()
        self._out: dict[int, PushDelivery] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._stopped = self._closed = False

    async def reopen(self) -> None:
        self._connection.require_open()
        self._broker.require_up()
        if self._channel is None and not self._stopped:
            self._epoch += 1
            # Pushing begins before `channel` returns, into a source that knows its epoch already.
            self._channel = self._broker.channel(
                self._queue, self._subscription.prefetch, self._received, self._channel_broke
            )

    # What the channel calls: neither may suspend or raise

    def _received(self, tag: int, item: Item) -> None:
        message = item.message
        delivery = PushDelivery(
            name=message.name,
            body=message.body,
            message_id=message.message_id,
            key=message.key,
            timestamp=item.timestamp,
            raw_headers=message.headers,
            epoch=self._epoch,
            tag=tag,
        )
        self._out[tag] = delivery
        self._buffer.append(delivery)
        self._wake()

    def _channel_broke(self) -> None:
        self._channel = None
        self._forget_out()
        self._wake()

    def _forget_out(self) -> None:
        for delivery in self._out.values():
            delivery.lost = True
        self._out.clear()
        self._buffer.clear()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Reading

    async def fetch(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        while True:
            self._connection.require_open()
            if self._stopped:
                return ()
            if self._buffer:
                return self._take(limit, max_bytes)
            if self._channel is None:
                raise BrokerUnavailable(f"{self._subscription!r}: the channel was closed by the server")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _take(self, limit: int, max_bytes: int) -> list[PushDelivery]:
        taken: list[PushDelivery] = []
        while self._buffer and len(taken) < limit:
            max_bytes -= len(self._buffer[0].body)
            if max_bytes < 0 and taken:
                break
            taken.append(self._buffer.popleft())
        return taken

    # Settling

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        self._connection.require_open()
        for settlement in settlements:
            if not isinstance(settlement.outcome, Ack | Drop) and settlement.outcome is not RELEASE:
                raise Unsupported(f"this broker cannot settle with {settlement.outcome!r}")
        errors: list[SettleError] = []
        done: list[int] = []
        for settlement in settlements:
            delivery = settlement.delivery
            assert isinstance(delivery, PushDelivery)
            if delivery.epoch != self._epoch or self._out.pop(delivery.tag, None) is None or self._channel is None:
                errors.append(StaleDelivery(delivery, "settled already, or its channel is gone"))
            elif settlement.outcome is RELEASE:
                self._channel.requeue(delivery.tag)
            else:
                done.append(delivery.tag)
        self._acknowledge(done)
        return errors

    def _acknowledge(self, tags: list[int]) -> None:
        """In one frame as far as nothing before them is open, and singly beyond."""
        if not tags or self._channel is None:
            return
        tags.sort()
        first_open = next(iter(self._out), tags[-1] + 1)
        together = [tag for tag in tags if tag < first_open]
        if together:
            self._channel.ack(together[-1], multiple=True)
        for tag in tags[len(together) :]:
            self._channel.ack(tag, multiple=False)

    async def flush(self, deadline: float) -> None:
        self._connection.require_open()
        if self._channel is not None:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._channel.written()
            except TimeoutError:
                pass  # what the contract asks: at most until the deadline

    # The end

    async def stop(self) -> None:
        """What was pushed and not fetched goes back at once: nobody here will handle it."""
        self._stopped = True
        if self._channel is not None:
            self._channel.cancel()
            for delivery in self._buffer:
                del self._out[delivery.tag]
                self._channel.requeue(delivery.tag)
        self._buffer.clear()
        self._wake()

    async def close(self) -> None:
        if self._closed:
            return
        await self.stop()
        self._closed = True
        channel, self._channel = self._channel, None
        self._forget_out()
        if channel is not None:
            channel.close()

    def health(self) -> Health:
        return Health(True) if self._channel is not None else Health(False, "no channel")
