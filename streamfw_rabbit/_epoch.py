"""One connection, from its handshake to its end: what `epochs` supervises. It never comes back either.

`library.LibraryEpoch` and `fastlane.FastEpoch` differ in how they learn what happens, and in the channels they make.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Final, TypeVar, cast

import aiormq
from aiormq.abc import ChannelFrame

from streamfw.errors import BrokerUnavailable

from . import _wire
from ._base import BaseChannel, finished, told
from ._gets import GettingChannel
from ._transport import SocketFactory
from .channel import Closed, Transport
from .errors import DRIVER_ERRORS, LIBRARY_ERRORS, ChannelGone, closing_error, reason

__all__ = ["Epoch", "WriteQueue"]

log = logging.getLogger("streamfw.rabbit")
_L = TypeVar("_L", bound=aiormq.Channel)

_CLOSE_TIMEOUT: Final = 5.0


class WriteQueue:
    """Stands in for a library channel's `write_queue`, which is the order on the wire.

    The library closes channels by itself, and shows it some turns of the loop later. A frame of ours behind its
    Channel.Close or CloseOk is an error of the *connection* (504), so `closing` is called at that very place. And it
    drops a CloseOk when the queue (of 10) is full; the server then takes the next channel of that number for an error
    of the connection as well. Here the CloseOk waits.
    """

    def __init__(self, queue: asyncio.Queue[ChannelFrame], closing: Callable[[], None] | None = None) -> None:
        self._queue = queue
        self._closing = closing
        self._late: asyncio.Task[None] | None = None

    async def put(self, frame: ChannelFrame) -> None:
        self._look(frame)
        await self._queue.put(frame)

    def put_nowait(self, frame: ChannelFrame) -> None:
        if self._look(frame) and self._queue.full():
            self._late = asyncio.get_running_loop().create_task(self._queue.put(frame))
        else:
            self._queue.put_nowait(frame)

    def _look(self, frame: ChannelFrame) -> bool:
        """Whether it is a CloseOk."""
        method = frame.payload[7:11]
        if method in (_wire.CHANNEL_CLOSE, _wire.CHANNEL_CLOSE_OK) and self._closing is not None:
            self._closing()
        return method == _wire.CHANNEL_CLOSE_OK


class Epoch(ABC):
    """One connection. `ended` resolves when it ends; `closed` says why.

    - `number`: 1 for the first of its `Epochs`. `where`: the host and port it goes to.
    - `server_version`: of RabbitMQ, for example ``(3, 10, 8)``; empty where the server does not tell.
    - `blocked_since`: by the loop's clock, from when on the server has said that it takes no publishes; None: it
      does. It says so only after this connection has published something.
    """

    transport: ClassVar[Transport]

    def __init__(
        self, connection: aiormq.Connection, factory: SocketFactory, *, number: int, where: str, heartbeat: float
    ) -> None:
        protocol, writer = factory.protocol, factory.writer
        assert protocol is not None
        assert writer is not None
        self.number = number
        self.where = where
        self.closed: Closed | None = None
        self.on_blocked: Callable[[bool, str], None] | None = None
        """Called with whether, and why, when it changes."""
        self.damaged = False
        """It ended because what came could not be read."""
        self.blocked_since: float | None = None
        self.blocked_text = ""
        self.library = connection
        self.writer = writer
        self.channels: dict[int, BaseChannel] = {}
        tune = connection.connection_tune
        self.frame_max = tune.frame_max or 131072  # 0: no limit
        self.channel_max = tune.channel_max or 65535
        properties = connection.server_properties or {}
        self.server_version = _version(properties.get("version"))
        self._protocol = protocol
        protocol.greeting = False
        self._last_number = 0
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Closed] = self._loop.create_future()
        self._calls: set[asyncio.Task[Any]] = set()
        self._heartbeat = heartbeat
        self._looks_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._watch()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.number} to {self.where}{f' ({self.closed})' if self.closed else ''}>"

    # Channels

    @abstractmethod
    def make_channel(self, number: int, confirms: bool) -> BaseChannel:
        """A channel of that number, registered for what will come for it; not open yet."""

    def is_free(self, number: int) -> bool:
        return number not in self.library.channels

    async def channel(self, *, confirms: bool = False, timeout: float = 10.0) -> BaseChannel:
        """A new open channel; with `confirms` one to publish on.

        Raises `BrokerUnavailable` when it is not open within `timeout` seconds: opening hangs while the server blocks
        publishers on this connection.
        """
        if self.closed is not None:
            raise ChannelGone(self.closed, "opening a channel")
        channel = self.make_channel(self._next_number(), confirms)
        self.channels[channel.number] = channel
        opening = asyncio.create_task(channel.open())
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(opening)
        except (asyncio.CancelledError, TimeoutError) as error:
            # Nobody will use it. It must not be broken off, so it is closed when it is open.
            self._keep(self._abandoned(opening, channel))
            if isinstance(error, asyncio.CancelledError):
                raise
            raise BrokerUnavailable(f"{self.where} did not open a channel within {timeout:g} s") from None
        return channel

    async def _abandoned(self, opening: asyncio.Task[None], channel: BaseChannel) -> None:
        await asyncio.wait({opening})
        if not opening.cancelled() and opening.exception() is None:
            await channel.close()

    def _keep(self, call: Any) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    @asynccontextmanager
    async def declarations(self, doing: str = "declaring") -> AsyncIterator[GettingChannel]:
        """A channel of the library to be thrown away, for declarations and the like: a refusal closes it, and no
        other. What the server refuses is raised as in `errors`."""
        if self.closed is not None:
            raise ChannelGone(self.closed, doing)
        channel = self._known(GettingChannel(self.library, self._next_number(), publisher_confirms=False))
        try:
            await channel.open()
            yield channel
        except LIBRARY_ERRORS as error:
            raise closing_error(self.closed or reason(error), doing) from error
        except (*DRIVER_ERRORS, asyncio.CancelledError) as error:
            # The caller's own, or (also a cancellation) the library's, of a connection that was closed meanwhile.
            if _is_cancelled() or not channel.is_closed:
                raise
            raise ChannelGone(self.closed or Closed("lost"), doing) from error
        finally:
            self._keep(self._thrown_away(channel))

    async def _thrown_away(self, channel: aiormq.Channel) -> None:
        try:
            await finished(channel.close(), self._calls)
        except DRIVER_ERRORS as error:
            log.debug("closing a channel for declarations on %r: %r", self, error)

    def library_channel(self, number: int, confirms: bool = False) -> aiormq.Channel:
        """A channel of the library, not open yet. With a number of ours: the library's own choice can fall on one
        whose close has not reached the server."""
        return self._known(aiormq.Channel(self.library, number, publisher_confirms=confirms))

    def _known(self, channel: _L) -> _L:
        """Have the library's connection pass on what comes for it."""
        channel.write_queue = cast("asyncio.Queue[ChannelFrame]", WriteQueue(self.library.write_queue))
        self.library.channels[channel.number] = channel
        return channel

    def _next_number(self) -> int:
        for _ in range(self.channel_max):
            self._last_number = self._last_number % self.channel_max + 1
            if self.is_free(self._last_number):
                return self._last_number
        raise BrokerUnavailable(f"{self.where}: all {self.channel_max} channels of the connection are in use")

    def forget(self, number: int, channel: BaseChannel) -> None:
        if self.channels.get(number) is channel:
            del self.channels[number]

    # Blocked

    def set_blocked(self, blocked: bool, text: str = "") -> None:
        if blocked == (self.blocked_since is not None):
            return
        self.blocked_since = self._loop.time() if blocked else None
        self.blocked_text = text if blocked else ""
        told(self.on_blocked, blocked, text)

    # Watching

    def _watch(self) -> None:
        """A peer that fell silent: its heartbeats come twice in the time agreed on, so nothing in twice that time is
        an end. The library alone would wait for three times as long."""
        now = self._loop.time()
        lag = now - self._looks_at if self._looks_at else 0.0
        if self.closed is not None:
            return
        self.look()
        silent = now - self._protocol.last_data
        # When this very loop was held up, what came is still unread.
        if self._heartbeat and lag < 1.0 and silent > 2 * self._heartbeat:
            self.lost(f"no sign of the server for {silent:.0f} s")
            self._protocol.abort()
            return
        if self._heartbeat and lag > self._heartbeat:
            log.warning(
                "the event loop stood still for %.1f s; RabbitMQ ends connections that are silent for about %.0f s",
                lag,
                2 * self._heartbeat,
            )
        pause = min(1.0, self._heartbeat / 4 or 1.0)
        self._looks_at = now + pause
        self._timer = self._loop.call_later(pause, self._watch)

    @abstractmethod
    def look(self) -> None:
        """Called about once a second."""

    # The end

    def lost(self, text: str) -> None:
        self.end(Closed("lost", 0, text))

    def end(self, closed: Closed) -> None:
        """It is closed, as of now, and so are its channels."""
        if self.closed is not None:
            return
        self.closed = closed
        self._protocol.on_lost = None
        if self._timer is not None:
            self._timer.cancel()
        for channel in list(self.channels.values()):
            channel._ended(closed)
        self.channels.clear()
        self.set_blocked(False, "the connection ended")
        self.ended.set_result(closed)

    async def close(self) -> None:
        """Close its channels, as `Channel.close` does, then the connection. Never raises, and takes a few seconds at
        most."""
        # A server that blocks publishers reads nothing from this connection: it would not see a channel's close.
        if self.closed is None and self.blocked_since is None:
            channels = [asyncio.create_task(channel.close()) for channel in list(self.channels.values())]
            if channels:
                await asyncio.wait(channels)
        self.end(Closed("local"))
        closing = asyncio.create_task(self._close_library())
        await asyncio.wait({closing})

    async def _close_library(self) -> None:
        try:
            await asyncio.wait_for(finished(self.library.close(), self._calls), _CLOSE_TIMEOUT)
        except DRIVER_ERRORS as error:
            log.debug("closing %r: %r", self, error)
        self._protocol.abort()
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=_CLOSE_TIMEOUT)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _version(text: object) -> tuple[int, ...]:
    parts = text.split("-")[0].split("+")[0].split(".") if isinstance(text, str) else []
    return tuple(int(part) for part in parts if part.isdigit())
