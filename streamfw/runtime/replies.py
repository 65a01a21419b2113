"""Requests that wait for a reply, and the inbox their replies come to.

Theory of operation
    An app that asks for something opens one inbox a broker, when it first asks: an ordinary subscription to a name of
    its own, on an ordinary pump. A request is a publish with that name as ``reply-to`` and a correlation id; whoever
    handles it publishes its return value there. A reply that finds nobody waiting (the deadline has passed) is counted
    and dropped. Nobody keeps a reply for an inbox that is gone: it is published with ``kept=False``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from streamfw.broker import REPLY_PREFIX, Capabilities, Connection, Order, Subscription
from streamfw.errors import ArgumentError, BrokerError, NotRunning, ReplyTimeout, Unroutable, Unsupported
from streamfw.handler import Call
from streamfw.message import CORRELATION_ID, NO_HEADERS, REPLY_TO, Headers, Message, Outgoing, new_message_id
from streamfw.observe.logs import about
from streamfw.outcome import Policy, is_outcome

from .plan import Plan
from .pump import Pump

__all__ = ["Inbox", "allowed", "replying"]

logger = logging.getLogger("streamfw")
GROUP = "replies"


class Inbox:
    """The inbox of one app on one `broker`. `late` counts replies that came when nobody waited for them any more."""

    def __init__(
        self,
        broker: str,
        connection: Connection,
        capabilities: Capabilities,
        member: str,
        failed: Callable[[BaseException], None],
    ) -> None:
        self.broker, self.address = broker, f"{REPLY_PREFIX}{member}"
        self.late = 0
        self._connection, self._capabilities, self._failed = connection, capabilities, failed
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        self._opening = asyncio.Lock()
        self._pump: Pump | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many requests are in flight."""
        return len(self._waiting)

    async def ask(
        self, send: Callable[[Outgoing], Awaitable[object]], message: Outgoing, timeout: float, where: str
    ) -> Message:
        """Publish `message` by `send` and return its reply. Raises `ReplyTimeout` after `timeout` seconds, a
        `PublishError`, a `BrokerError` when the reply was lost with the connection, or `Unsupported` where the broker
        carries no replies."""
        await self._open()
        identity = message.headers.get(CORRELATION_ID) or new_message_id()
        if identity in self._waiting:
            raise ValueError(f"correlation_id={identity!r}: a request with it is in flight")
        message.headers = message.headers.merged({REPLY_TO: self.address, CORRELATION_ID: identity})
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Message] = loop.create_future()
        self._waiting[identity] = reply
        timer = loop.call_later(timeout, self._expire, reply, f"{where} was not answered within {timeout:g} s")
        try:
            await send(message)
            return await reply
        finally:
            timer.cancel()
            self._waiting.pop(identity, None)
            if reply.done() and not reply.cancelled():
                reply.exception()  # looked at: it may have expired while the publish failed

    @staticmethod
    def _expire(reply: asyncio.Future[Message], text: str) -> None:
        if not reply.done():
            reply.set_exception(ReplyTimeout(text))

    async def _open(self) -> None:
        async with self._opening:
            if self._closed:
                raise NotRunning("the app is ending, so no reply could come")
            if self._pump is not None:
                return
            if not self._capabilities.replies:
                raise Unsupported("the broker carries no replies")
            # Where a group can be owned it is: an owner's lease tells others that the inbox lives.
            order: Order | None = "key" if "key" in self._capabilities.ordered_by else None
            subscription = Subscription(self.address, GROUP, ordered_by=order, dead_letter=None)
            pump = Pump(
                Plan(
                    where=f"replies({self.address!r})",
                    subscription=subscription,
                    capabilities=self._capabilities,
                    call=self._arrived,
                    policy=Policy(1, dead_letter=False),
                ),
                self._failed,
            )
            await pump.open(self._connection)
            pump.source.forgot = self._forgotten
            pump.start()
            self._pump = pump

    async def _arrived(self, message: Message) -> None:
        reply = self._waiting.get(message.correlation_id or "")
        if reply is None or reply.done():
            self.late += 1
        else:
            reply.set_result(message)

    def _forgotten(self, error: BrokerError) -> None:
        """Fail what waits: its replies went to a connection that is gone."""
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(error)

    async def close(self) -> None:
        """Fail what still waits, and withdraw the inbox."""
        async with self._opening:
            self._closed = True
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(NotRunning("the app ended before the reply came"))
        if self._pump is not None:
            await self._pump.drain(asyncio.get_running_loop().time() + 1.0)
            with suppress(BrokerError, Unsupported):
                await self._connection.withdraw(self.address, GROUP)


class Answers(msgspec.Struct):
    """Counts of one subscriber: `refused` addresses, and `unclaimed` replies whose inbox was gone."""

    refused: int = 0
    unclaimed: int = 0


def allowed(address: str, patterns: tuple[str, ...]) -> bool:
    """Whether a reply may go to `address`: it comes from the sender, and must not be a way to write into any queue."""
    return any(fnmatchcase(address, pattern) for pattern in patterns)


def replying(call: Call, reply: Callable[[str, object, Headers], Any], patterns: tuple[str, ...], where: str) -> Call:
    """`call`, whose value goes to the sender's reply address, when it names one that is allowed."""
    answers = Answers()

    async def call_and_reply(message: Any, address: str) -> Any:
        result = await call(message)
        if is_outcome(result):
            return result
        if not allowed(address, patterns):
            answers.refused += 1
            if answers.refused == 1:
                text = "%s: no reply to %r, which replies_to= %r does not allow"
                logger.warning(text, where, address, patterns, extra=about(message))
            return result
        correlation = message.headers.get(CORRELATION_ID)
        try:
            await reply(address, result, Headers({} if correlation is None else {CORRELATION_ID: correlation}))
        except Unroutable:
            answers.unclaimed += 1  # whoever asked is gone
        return result

    def call_or_reply(message: Any) -> Any:
        """Almost no message asks for a reply, so those that do not pay no coroutine, and no look at headers."""
        raw = message.raw_headers
        if raw is NO_HEADERS or raw is None:
            return call(message)
        try:
            address = message.headers.get(REPLY_TO)
        except ArgumentError:  # headers that cannot be read ask for nothing
            address = None
        return call(message) if address is None else call_and_reply(message, address)

    return call_or_reply
