"""Replies: RabbitMQ's direct reply-to. A reply goes from channel to channel, and is kept nowhere.

https://www.rabbitmq.com/docs/direct-reply-to: who consumes from the pseudo-queue ``amq.rabbitmq.reply-to`` on a
channel, without acknowledgements, and publishes on *that channel* with it for the reply address, gets the reply there.
The server writes an address into the request that leads to the channel, and it is good as long as the channel is open.
So an inbox has a lane of its own, which consumes before it publishes; and when its channel ends, what was asked on it
will not be answered any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from streamfw.broker import Delivery, Health, Settlement, Source
from streamfw.errors import BrokerClosed, BrokerUnavailable, SettleError

from .channel import Channel, Closed
from .delivery import maker_of
from .epochs import Epochs
from .lane import Lane
from .names import REPLY_TO
from .publish import Publishing
from .settings import Settings

__all__ = ["ReplySource"]


class ReplySource(Source):
    """The inbox at `address`: a request that names it for its reply address goes out, and comes back, on our lane."""

    def __init__(
        self, address: str, epochs: Epochs, settings: Settings, publishing: Publishing, closed: Callable[[], bool]
    ) -> None:
        self._address, self._epochs, self._publishing = address, epochs, publishing
        self._connection_closed = closed
        self._lane = Lane(epochs, settings, opened=self._consume, ended=self._ended)
        self._make = maker_of(address, None, REPLY_TO, "header", None)
        self._channel: Channel | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._stopped = self._closed = False
        publishing.add_inbox(address, self._lane)

    async def _consume(self, channel: Channel) -> None:
        channel.on_delivery = self._wake
        self._channel = channel
        await channel.consume(REPLY_TO, "replies", no_ack=True)

    def _ended(self, closed: Closed) -> None:
        self._channel = None
        if not self._closed and self.forgot is not None:
            self.forgot(BrokerUnavailable(f"the connection was lost before a reply came: {closed}"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def fetch(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        """See `Source.fetch`. A channel that ended brings nothing more, and is no error: the next request opens one."""
        while not self._stopped:
            self._require_open()
            if self._channel is not None and self._channel.inbox:
                # All at once, beyond any limit: a reply waits for nobody, and nothing of it could go back.
                return [self._make(raw, self._channel.epoch) for raw in self._channel.take()]
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._require_open()
        return ()

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        """See `Source.settle`. A reply ended when it was sent."""
        self._require_open()
        return []

    def _require_open(self) -> None:
        if self._closed or self._connection_closed():
            raise BrokerClosed("this inbox for replies was closed")

    async def flush(self, deadline: float) -> None:
        """See `Source.flush`."""
        self._require_open()

    async def stop(self) -> None:
        """See `Source.stop`."""
        self._stopped = True
        self._wake()

    async def close(self) -> None:
        """See `Source.close`."""
        if self._closed:
            return
        await self.stop()
        self._closed = True
        self._publishing.remove_inbox(self._address)
        self._lane.close()
        if self._channel is not None:
            await self._channel.close()

    def health(self) -> Health:
        """See `Source.health`."""
        if self._closed:
            return Health(False, "closed")
        up = self._epochs.current is not None
        return Health(up, "" if up else self._epochs.describe())
