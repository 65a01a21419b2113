"""A confirm channel that is kept up, and how much may be under way on it.

Theory of operation
    What is published and not confirmed fills a window, of messages and of bytes: beyond it a publish waits, for what is
    written to a socket is memory of ours. Who waits does so in a queue of its own (`_turn`), so that nobody passes by;
    who finds nobody waiting, and room, does not wait at all.

    A channel that ended is followed by another when somebody next publishes. While the server blocks publishers nothing
    more is sent: what is in the socket by then may be stored when the block ends, so nobody can say what became of it;
    of what was not sent it is sure.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from streamfw.errors import Blocked, BrokerClosed, BrokerError, PublishError, Unavailable

from .channel import Channel, Closed, Properties, Receipts
from .epochs import Epochs
from .errors import ChannelGone
from .settings import Settings

__all__ = ["Lane", "NotSent"]

_PACE: Final = 0.05  # seconds between two attempts to open a channel
_LOOK: Final = 0.25  # seconds between two looks for what took too long
_FEW: Final = 1000  # of those that are watched: not worth to be sorted out


class NotSent(Exception):
    """A message was surely not sent; `kind` is the error to answer with."""

    def __init__(self, kind: type[PublishError], text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Lane:
    """See the head of this module. `opened` is awaited for each new channel, before anything is published on it;
    `ended` is called with why one ended."""

    def __init__(
        self,
        epochs: Epochs,
        settings: Settings,
        *,
        opened: Callable[[Channel], Awaitable[None]] | None = None,
        ended: Callable[[Closed], None] | None = None,
    ) -> None:
        self.channel: Channel | None = None
        self._epochs, self._settings = epochs, settings
        self._opened, self._on_ended = opened, ended
        self._turn = asyncio.Lock()
        self._change: asyncio.Future[None] | None = None
        self._watched: deque[tuple[float, Receipts]] = deque()
        self._watching: asyncio.TimerHandle | None = None
        self._closed = False

    def free(self, size: int) -> Channel | None:
        """The channel, when a body of `size` bytes can go out at once, without passing by anybody."""
        channel = self.channel
        if channel is None or self._turn.locked() or channel.blocked:
            return None
        under_way = channel.unconfirmed
        if under_way:  # as in `_has_room`
            settings = self._settings
            if under_way >= settings.window or channel.unconfirmed_bytes + size > settings.window_bytes:
                return None
        return channel

    def _has_room(self, channel: Channel, size: int) -> bool:
        """An empty window takes any message, so that none waits for room that can never be."""
        under_way = channel.unconfirmed
        if not under_way:
            return True
        settings = self._settings
        return under_way < settings.window and channel.unconfirmed_bytes + size <= settings.window_bytes

    async def send(
        self,
        exchange: str,
        key: str,
        properties: Properties,
        body: bytes,
        receipts: Receipts,
        place: int,
        *,
        mandatory: bool = True,
        until: float,
    ) -> None:
        """Publish when it is our turn and there is room, at most `until` then (of the loop's clock).

        Raises `NotSent`, `BrokerClosed`, and `ValueError` or `TypeError` for what AMQP cannot carry.
        """
        async with self._turn:
            while True:
                channel = await self._until_free(len(body), until)
                try:
                    channel.publish(exchange, key, properties, body, receipts, place, mandatory=mandatory)
                except ChannelGone:
                    continue
                return

    async def _until_free(self, size: int, deadline: float) -> Channel:
        while True:
            if self._closed:
                raise BrokerClosed("the connection to RabbitMQ was closed")
            channel = self.channel
            blocked = self._epochs.blocked_since
            if blocked is not None:
                await self._until_unblocked(blocked, deadline)
            elif channel is None or channel.closed is not None:
                await self._open(deadline)
            elif self._has_room(channel, size):
                return channel
            elif not await self._changed(deadline):
                raise NotSent(Unavailable, f"the server has not confirmed {channel.unconfirmed} messages before this")

    async def _until_unblocked(self, since: float, deadline: float) -> None:
        bound = since + self._settings.blocked_timeout
        if not await self._changed(min(bound, deadline)):
            took = asyncio.get_running_loop().time() - since
            raise NotSent(Blocked, f"the server takes no publishes, for {took:.1f} s now: {self._epochs.describe()}")

    async def _open(self, deadline: float) -> None:
        """Open a channel. Returns also when that did not work, but may work soon."""
        try:
            async with asyncio.timeout_at(deadline):
                channel = await self._epochs.channel(confirms=True)
        except TimeoutError:
            raise NotSent(Unavailable, self._epochs.describe()) from self._epochs.last_error
        except BrokerClosed:
            raise
        except BrokerError as error:
            if not error.transient or asyncio.get_running_loop().time() + _PACE > deadline:
                raise NotSent(Unavailable, str(error)) from error
            await asyncio.sleep(_PACE)
            return
        channel.on_answers = self.wake
        channel.on_closed = lambda closed: self._ended(channel, closed)
        try:
            if self._opened is not None:
                await self._opened(channel)
        except BrokerError as error:
            await channel.close()
            if not error.transient:
                raise NotSent(Unavailable, str(error)) from error
            return
        if channel.closed is None:
            self.channel = channel

    def _ended(self, channel: Channel, closed: Closed) -> None:
        if self.channel is channel:
            self.channel = None
        if self._on_ended is not None:
            self._on_ended(closed)
        self.wake()

    # Waiting

    def wake(self) -> None:
        """Something changed: let who waits look again."""
        change, self._change = self._change, None
        if change is not None and not change.done():
            change.set_result(None)

    async def _changed(self, deadline: float) -> bool:
        """Wait for a change; False when there was none by `deadline`."""
        change = self._change = asyncio.get_running_loop().create_future()  # of one task at a time: whose turn it is
        try:
            async with asyncio.timeout_at(deadline):
                await change
        except TimeoutError:
            return False
        finally:
            self._change = None
        return True

    def watch(self, receipts: Receipts, deadline: float) -> None:
        """Answer what is still open at `deadline`, or a quarter of a second later. Deadlines come in rising order."""
        self._watched.append((deadline, receipts))
        if self._watching is None:
            self._watching = asyncio.get_running_loop().call_later(_LOOK, self._look)

    @property
    def watched(self) -> int:
        """How many groups of receipts are kept: those without all their answers, and a few more."""
        return len(self._watched)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now, watched = loop.time(), self._watched
        while watched and (not watched[0][1].left or watched[0][0] <= now):
            _, receipts = watched.popleft()
            if receipts.left:
                self._give_up(receipts)
        if len(watched) > _FEW:
            # One that has no answer yet must not keep all those behind it that have theirs.
            self._watched = watched = deque([one for one in watched if one[1].left])
        self._watching = loop.call_later(_LOOK, self._look) if watched else None

    def _give_up(self, receipts: Receipts) -> None:
        blocked = self._epochs.blocked_since is not None
        why = "the server takes no publishes" if blocked else f"no answer in {self._settings.publish_timeout:g} s"
        for place in range(len(receipts.answers)):
            receipts.answer(place, Closed("local", 0, why))

    # The end

    def close(self) -> None:
        """Send nothing more. The channel is its connection's to close."""
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
        self.wake()
