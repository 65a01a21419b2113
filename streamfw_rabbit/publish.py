"""Publishing: what a message becomes, and an answer for each. `names` says where it goes; the routing key is the
message's key, or the name.

Everything is mandatory (no queue takes it: `Unroutable`) and confirmed, but replies to ``amq.rabbitmq.reply-to.*``:
for these, the server tells a mandatory message that it is unroutable also when it is not (see also `addresses`).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Final

import msgspec

from streamfw.errors import (
    Blocked,
    BrokerClosed,
    OutcomeUnknown,
    PublishError,
    Rejected,
    TooLarge,
    Unavailable,
    Unroutable,
)
from streamfw.message import NO_HEADERS, Outgoing

from ._frames import DoesNotFit
from .addresses import Addresses
from .channel import NACKED, Answer, Closed, Properties, Receipts, Returned
from .epochs import Epochs
from .errors import ChannelGone
from .headers import properties_of
from .lane import Lane, NotSent
from .names import REPLY_TO, Names, failure
from .settings import Settings

__all__ = ["Publishing"]

_SIZE: Final = re.compile(r"message size (\d+) is larger than configured max size (\d+)")
_EXCHANGE: Final = re.compile(r"exchange '([^']*)' in vhost")


class Call(msgspec.Struct):
    """One call of `Publishing.publish`. `began` and `deadline` are of the loop's clock, `stamp` is the time of day."""

    receipts: Receipts
    began: float
    deadline: float
    stamp: int


class Publishing:
    """Publishes for one connection. `asking` is the connection that consumes: what is looked up and declared there does
    not hang while the server blocks publishers."""

    def __init__(self, epochs: Epochs, asking: Epochs, settings: Settings) -> None:
        self._epochs, self._settings = epochs, settings
        self._lane = Lane(epochs, settings, ended=self._note_end)
        self._priorities = settings.priorities
        self._names = Names(asking, settings)
        self._routes = self._names.known
        self._inboxes: dict[str, Lane] = {}
        self._addresses = Addresses(settings)
        self.calls = 0
        """How many calls of `publish` wait for answers."""
        self._quiet: asyncio.Future[None] | None = None
        self._closed = False
        self._loop = asyncio.get_running_loop()
        epochs.blocked_changed = self._blocked_changed

    @property
    def lane(self) -> Lane:
        """Where all goes out but requests."""
        return self._lane

    def add_inbox(self, address: str, lane: Lane) -> None:
        """Publish what asks for replies at `address` on that lane, whose channel the replies come to."""
        self._inboxes[address] = lane

    def remove_inbox(self, address: str) -> None:
        self._inboxes.pop(address, None)

    def learn(self, exchange: str) -> None:
        """That exchange is there: we have just declared it."""
        self._names.learn(exchange)

    # Publishing

    def publish(self, messages: Sequence[Outgoing]) -> Coroutine[Any, Any, Sequence[PublishError | None]]:
        """See `Connection.publish`. The answer is there within `publish_timeout`."""
        return self._publish_one(messages[0]) if len(messages) == 1 else self._publish(messages)

    async def _publish_one(self, message: Outgoing) -> Sequence[PublishError | None]:
        """The same in a straight line, where nothing has to be waited for before it is sent."""
        if self._closed:
            self._check_open()
        began, body = self._loop.time(), message.body
        route = self._routes.get(message.name)
        if route is None or route.until < began or message.delay or not route.mandatory:
            return await self._publish((message,))
        small = len(body) <= self._settings.max_body or message.stored
        channel = self._lane.free(len(body)) if small else None
        if channel is None:
            return await self._publish((message,))
        receipts = Receipts(1, self._loop)
        try:
            if message.headers is NO_HEADERS and message.key is None and not self._priorities:
                key = message.name if route.key is None else route.key
                channel.publish_plain(route.exchange, key, message.message_id, int(time.time()), body, receipts)
            else:
                properties = properties_of(message, int(time.time()), self._priority(message))
                if properties.reply_to is not None:  # it may be one of ours, which has a lane of its own
                    return await self._publish((message,))
                key = _routing_key(message) if route.key is None else route.key
                channel.publish(route.exchange, key, properties, body, receipts)
        except (ValueError, TypeError) as error:
            return (_unfit(message, error),)
        except ChannelGone as error:
            return (_caused(Unavailable, message, error),)
        self.calls += 1
        self._lane.watch(receipts, began + self._settings.publish_timeout)
        try:
            if receipts.left:
                await receipts.waiting()
        finally:
            if receipts.left:
                receipts.abandon()
            self.calls -= 1
            if self._quiet is not None:
                self._look_whether_quiet()
        answer = receipts.answers[0]
        return () if answer is None else (self._error(message, answer),)

    async def _publish(self, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        self._check_open()
        if not messages:
            return ()
        call, receipts = self._begun(len(messages))
        errors: dict[int, PublishError] = {}
        try:
            for place, message in enumerate(messages):
                try:
                    await self._send(call, place, message)
                except PublishError as error:
                    errors[place] = error
                    receipts.answer(place, None)
            answers = await receipts.wait()
        finally:
            self._call_ended(receipts)
        if not errors and not any(answers):
            return ()
        return [errors.get(place) or self._error(messages[place], answer) for place, answer in enumerate(answers)]

    def _begun(self, count: int) -> tuple[Call, Receipts]:
        began = self._loop.time()
        call = Call(Receipts(count, self._loop), began, began + self._settings.publish_timeout, int(time.time()))
        self.calls += 1
        self._lane.watch(call.receipts, call.deadline)
        return call, call.receipts

    async def _send(self, call: Call, place: int, message: Outgoing) -> None:
        """Raises a `PublishError` when it was surely not sent."""
        body = message.body
        if len(body) > self._settings.max_body and not message.stored:
            text = f"its body of {len(body)} bytes is larger than max_body={self._settings.max_body}"
            raise failure(TooLarge, message, text)
        try:
            properties = properties_of(message, call.stamp, self._priority(message))
            route = self._routes.get(message.name)
            if route is None or route.until < call.began:
                route = await self._names.find(message, call.deadline)
            exchange, key = route.exchange, route.key
            if key is None:
                key = _routing_key(message)
            if message.delay > 0:
                exchange, key = await self._names.delayed(message, route, key, properties)
            if not route.mandatory and not self._addresses.knows(key):
                await self._reply(call, place, message, properties)
                return
            lane = self._lane
            if properties.reply_to is not None and (asking := self._inboxes.get(properties.reply_to)) is not None:
                lane = asking
                properties.reply_to = REPLY_TO
            channel = lane.free(len(body))
            if channel is not None:
                channel.publish(exchange, key, properties, body, call.receipts, place, mandatory=route.mandatory)
            else:
                await lane.send(
                    exchange,
                    key,
                    properties,
                    body,
                    call.receipts,
                    place,
                    mandatory=route.mandatory,
                    until=call.deadline,
                )
        except (ValueError, TypeError) as error:
            raise _unfit(message, error) from error
        except NotSent as error:
            raise failure(error.kind, message, str(error)) from error.__cause__
        except ChannelGone as error:
            raise _caused(Unavailable, message, error) from error

    async def _reply(self, call: Call, place: int, message: Outgoing, properties: Properties) -> None:
        error = await self._addresses.send(message, properties, call.deadline)
        if error is not None:
            raise error
        call.receipts.answer(place, None)

    def _priority(self, message: Outgoing) -> int | None:
        """AMQP's priority, of which the larger comes first: the middle of those there are is that of priority 0."""
        most = self._priorities
        return max(0, min(most, most // 2 - message.priority)) if most else None

    async def send(self, exchange: str, key: str, message: Outgoing, properties: Properties) -> PublishError | None:
        """Publish a body with these properties exactly, to that exchange. `message` is for its body, and for errors."""
        self._check_open()
        call, receipts = self._begun(1)
        try:
            await self._lane.send(exchange, key, properties, message.body, receipts, 0, until=call.deadline)
            (answer,) = await receipts.wait()
        except NotSent as error:
            return failure(error.kind, message, str(error))
        except (ValueError, TypeError) as error:
            return _unfit(message, error)
        finally:
            self._call_ended(receipts)
        return self._error(message, answer)

    # Answers

    def _error(self, message: Outgoing, answer: Answer) -> PublishError | None:
        if answer is None:
            return None
        if isinstance(answer, Returned):
            route = self._routes.get(message.name)
            if route is not None and not route.exchange:
                del self._routes[message.name]  # the exchange may be made any time
            return failure(Unroutable, message, f"no queue takes it, and nothing is kept for later ({answer.text})")
        if answer is NACKED:
            text = "the server did not take it: a queue is full, or has no leader (other queues may have it)"
            return failure(Blocked, message, text)
        if isinstance(answer, Closed):
            return self._closed_error(message, answer)
        return failure(OutcomeUnknown, message, "no answer came")

    def _closed_error(self, message: Outgoing, closed: Closed) -> PublishError:
        """Some of what ends a channel tells which message it was, and that it was not taken."""
        found = _SIZE.search(closed.text)
        if closed.code == 406 and found is not None and len(message.body) > int(found[2]):
            return failure(TooLarge, message, f"its body of {len(message.body)} bytes: {closed}")
        exchange = _EXCHANGE.search(closed.text)
        if closed.code == 403 and exchange is not None and exchange[1] == message.name:
            return failure(Rejected, message, str(closed))
        return failure(OutcomeUnknown, message, f"it may be stored: {closed}")

    def _note_end(self, closed: Closed) -> None:
        exchange = _EXCHANGE.search(closed.text)
        if closed.code == 404 and exchange is not None:
            self._routes.pop(exchange[1], None)
        self._addresses.forget()

    def _blocked_changed(self, blocked: bool, text: str) -> None:
        self._lane.wake()
        for lane in self._inboxes.values():
            lane.wake()

    # The end

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerClosed("the connection to RabbitMQ was closed")

    def _call_ended(self, receipts: Receipts) -> None:
        if receipts.left:
            receipts.abandon()
        self.calls -= 1
        self._look_whether_quiet()

    def _look_whether_quiet(self) -> None:
        if not self.calls and self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)

    async def close(self, deadline: float) -> None:
        """Take nothing more, and wait until `deadline` (of the loop's clock) for the answers to what is under way."""
        self._closed = True
        if self.calls:
            self._quiet = self._loop.create_future()
            await asyncio.wait({self._quiet}, timeout=max(0.0, deadline - self._loop.time()))
        for lane in (self._lane, *self._inboxes.values()):
            lane.close()
        await self._addresses.close()


def _routing_key(message: Outgoing) -> str:
    """The key, where it can be one: at most 255 bytes of text."""
    key = message.key
    if not key or len(key) > 255:
        return message.name
    if not key.isascii():
        try:
            return key if len(key.encode()) <= 255 else message.name
        except UnicodeEncodeError:  # it came as bytes that are no text, and travels as those in the header
            return message.name
    return key


def _unfit(message: Outgoing, cause: Exception) -> PublishError:
    """The error of what AMQP cannot carry."""
    if not isinstance(cause, DoesNotFit):
        return _caused(Rejected, message, cause)
    identity = message.message_id
    error = TooLarge(str(cause), name=message.name, message_id=identity, headers_over=cause.over)
    error.__cause__ = cause
    return error


def _caused(kind: type[PublishError], message: Outgoing, cause: Exception) -> PublishError:
    error = failure(kind, message, str(cause))
    error.__cause__ = cause
    return error
