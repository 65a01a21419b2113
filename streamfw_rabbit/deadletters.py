"""What a person does with dead letters that nobody subscribes to, and what the first group that does takes over.

AMQP can only look at a message by taking it: what is looked at is out for that time, and goes back to its place when
the channel closes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeVar

import aiormq.exceptions

from streamfw.broker import DeadLetters
from streamfw.ending import to_its_end
from streamfw.errors import BrokerClosed, BrokerError, BrokerRefused, BrokerUnavailable, Unroutable
from streamfw.message import (
    DEAD_LETTER_HEADERS,
    NO_HEADERS,
    ORIGIN,
    ORIGIN_GROUP,
    ORIGIN_OFFSET,
    Headers,
    Message,
    Outgoing,
)
from streamfw.runtime.settler import backoff
from streamfw.texts import one_line

from ._gets import GettingChannel
from ._reading import properties_of
from .channel import Properties
from .epochs import Epochs
from .errors import ChannelGone
from .headers import copied, key_of, malformed, put_aside_by, told_by_server, visible_headers
from .publish import Publishing
from .topology import group_queue, is_kept

if TYPE_CHECKING:
    from aiormq.abc import DeliveredMessage

__all__ = ["RabbitDeadLetters", "adopt", "keep_adopting"]

log = logging.getLogger("streamfw.rabbit")
T = TypeVar("T")

_BATCH: Final = 100
# What is given back to a quorum queue, or acknowledged, is a command of it each. Beyond so many under way the server
# keeps them back, and then sends them in no order (rabbit_fifo_client, its soft limit; seen on 3.10 from the 34th on).
_IN_ORDER: Final = 32
# How often, and after how many seconds, to look whether what was given back is there.
_LOOKS: Final = 100
_PAUSE: Final = 0.01
_NOT_IMPLEMENTED: Final = 540


class Taken:
    """A message that was taken from a queue, to be looked at."""

    __slots__ = ("body", "properties", "tag")

    def __init__(self, message: DeliveredMessage) -> None:
        self.tag = message.delivery_tag or 0
        self.body = bytes(message.body)
        try:
            self.properties = properties_of(message.header)
            _ = self.properties.headers  # the table is decoded when it is asked for: here, and not by each who reads it
        except ValueError as error:  # the sender's mistake: the message is there all the same
            self.properties = Properties(raw_headers=dict(malformed(error).pairs))


class Table:
    """A channel that takes messages from one queue.

    What it gives back counts as delivered once more (before RabbitMQ 4.3, where it is given back by a nack), however
    it was taken: so only those are taken that are meant. The queue of dead letters that nobody subscribes to has a
    limit that no person reaches; any other has the limit that it was declared with.
    """

    def __init__(self, channel: GettingChannel, queue: str) -> None:
        self._channel = channel
        self._queue = queue

    async def waiting(self) -> int:
        """How many can be taken."""
        found = await self._channel.queue_declare(self._queue, passive=True)
        return found.message_count or 0 if found is not None else 0

    async def take(self, most: int) -> list[Taken]:
        """Up to so many; fewer when there are no more. In pages, each in a round trip (after another, for how many
        there may be: on a quorum queue an empty answer costs as much as a message)."""
        taken: list[Taken] = []
        while len(taken) < most:
            page = max(1, min(most - len(taken), _BATCH, await self.waiting()))
            came = [Taken(message) for message in await self._channel.get_many(self._queue, page)]
            taken += came
            if len(came) < page:
                break
        return taken

    async def end(self, message: Taken) -> None:
        await self._channel.basic_ack(message.tag)
        self._channel.out.remove(message.tag)

    async def purge(self) -> int:
        gone = await self._channel.queue_purge(self._queue)
        return gone.message_count or 0 if gone is not None else 0

    async def give_back(self) -> None:
        """What was taken and has not ended; in its place and order, which a channel that just closes would mix up.

        So many at a time as the server keeps in order. A quorum queue does it a moment later, and who looks again at
        once would find nothing: so each time it is waited for, unless somebody else takes them meanwhile.
        """
        await self._channel.rested()
        tags = sorted(self._channel.out)
        if not tags or self._channel.is_closed:
            return
        alone, expected = True, await self.waiting()
        for begin in range(0, len(tags), _IN_ORDER):
            group = tags[begin : begin + _IN_ORDER]
            await self._channel.basic_nack(group[-1], multiple=True, requeue=True)
            expected += len(group)
            alone = alone and await self._there(expected)

    async def _there(self, expected: int) -> bool:
        """Wait until so many can be taken. False: somebody else takes them."""
        for _ in range(_LOOKS):
            if await self.waiting() >= expected:
                return True
            await asyncio.sleep(_PAUSE)
        return False


@asynccontextmanager
async def looking(epochs: Epochs, queue: str, *, apart: bool = False) -> AsyncIterator[Table | None]:
    """The messages of a queue; None when there is no such queue. What is taken and not ended goes back, also of who is
    cancelled. `apart`: on a connection of its own, for a queue that may be any."""
    on = epochs.apart if apart else epochs.declarations
    async with on(f"looking into queue {queue!r}") as channel:
        table: Table | None = Table(channel, queue)
        try:
            await Table(channel, queue).waiting()
        except aiormq.exceptions.ChannelNotFoundEntity:
            table = None
        try:
            yield table
        finally:
            if table is not None:
                await table.give_back()


async def adopt(epochs: Epochs, publishing: Publishing, name: str, queue: str) -> int:
    """Move what was kept of `name`, while no group had subscribed, to the queue of one; return how many that were.

    Raises a `BrokerError`. What was not moved stays where it is.
    """
    moved = 0
    if not await is_kept(epochs, name):
        return 0  # a queue of that name is somebody else's, and so are its messages
    async with looking(epochs, name) as table:
        while table is not None and (taken := await table.take(_IN_ORDER)):
            # Broken off, what was published would be there twice.
            moved += await to_its_end(_moved(table, taken, publishing, name, queue))
    return moved


async def _moved(table: Table, taken: Sequence[Taken], publishing: Publishing, name: str, queue: str) -> int:
    """Move them together, in the time of one: they are published in this order, whoever waits first goes first."""

    async def move(one: Taken) -> bool:
        return await _passed_on(publishing, one, queue, copied(one.properties, {}), name)

    results = await asyncio.gather(*map(move, taken), return_exceptions=True)
    for one, result in zip(taken, results, strict=True):
        if result is True:
            await table.end(one)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    if not all(results):
        raise BrokerUnavailable(f"queue {queue!r} is gone")
    return len(taken)


async def keep_adopting(epochs: Epochs, publishing: Publishing, name: str, queue: str) -> None:
    """`adopt`, again and again until it has worked, or been refused. To be cancelled when the queue's source closes."""
    attempt = 0
    while True:
        try:
            await adopt(epochs, publishing, name, queue)
            return
        except BrokerError as error:
            level = logging.INFO if error.transient else logging.WARNING
            log.log(level, "taking over %r for %r: %s", name, queue, error)
            if not error.transient:
                return
        await asyncio.sleep(backoff(attempt))
        attempt += 1


async def _passed_on(publishing: Publishing, one: Taken, queue: str, properties: Properties, name: str) -> bool:
    """Publish it to a queue. False: there is no such queue. Raises a `BrokerError` when it is not known to be there."""
    message = Outgoing(name=queue, body=one.body, message_id=one.properties.message_id or "")
    failed = await publishing.send("", queue, message, properties)
    if failed is not None and not isinstance(failed, Unroutable):
        raise BrokerUnavailable(f"moving a message from queue {name!r}: {failed}") from failed
    return failed is None


class RabbitDeadLetters(DeadLetters):
    """The dead letters that nobody has subscribed to. After the connection was closed every method raises
    `BrokerClosed`."""

    def __init__(self, epochs: Epochs, publishing: Publishing, name: str, is_closed: Callable[[], bool]) -> None:
        self._epochs, self._publishing, self._name = epochs, publishing, name
        self._is_closed = is_closed

    def _check_open(self) -> None:
        if self._is_closed():
            raise BrokerClosed("the connection to RabbitMQ was closed")

    @asynccontextmanager
    async def _looking(self) -> AsyncIterator[Table | None]:
        try:
            async with looking(self._epochs, self._name, apart=True) as table:
                yield table
        except ChannelGone as error:
            if error.closed.code != _NOT_IMPLEMENTED:
                raise
            raise BrokerRefused(
                f"{self._name!r} is a stream: it keeps its messages, and nothing can be taken from it; subscribe to it"
            ) from error

    async def list(self, limit: int = 100) -> Sequence[Message]:
        """See `DeadLetters.list`. A subscriber cannot get them while they are looked at."""
        self._check_open()
        async with self._looking() as table:
            taken = [] if table is None else await table.take(limit)
        return [self._message(one) for one in taken]

    def _message(self, one: Taken) -> Message:
        properties = one.properties
        headers = visible_headers(properties)
        if more := [pair for pair in told_by_server(properties.headers) if pair[0] not in headers]:
            headers = Headers.of((*headers.pairs, *more))
        return Message(
            name=self._name,
            body=one.body,
            message_id=properties.message_id or "",
            key=key_of(properties.headers),
            timestamp=properties.timestamp or 0.0,
            raw_headers=headers if headers else NO_HEADERS,
        )

    async def requeue(self, message_ids: Sequence[str] | None = None) -> int:
        """See `DeadLetters.requeue`. One that has no origin, or whose queue is gone, stays. Each is published first and
        then acknowledged here: what ends in between leaves both.

        Raises `BrokerRefused` at one that came from a stream: there every group would get it again.
        """
        return await self._each(message_ids, self._put_back)

    async def purge(self, message_ids: Sequence[str] | None = None) -> int:
        """See `DeadLetters.purge`."""
        if message_ids is not None:
            return await self._each(message_ids, _nothing)
        self._check_open()
        async with self._looking() as table:
            return 0 if table is None else await table.purge()

    async def _each(self, message_ids: Sequence[str] | None, end: Callable[[Taken], Awaitable[bool]]) -> int:
        """End those that are meant; return how many. What fails again meanwhile, and comes back, is not among them."""
        self._check_open()
        wanted = None if message_ids is None else frozenset(message_ids)
        ended = 0
        async with self._looking() as table:
            left = 0 if table is None else await table.waiting()
            while table is not None and left > 0 and (taken := await table.take(min(left, _IN_ORDER))):
                left -= len(taken)
                for one in taken:
                    if (wanted is None or one.properties.message_id in wanted) and await end(one):
                        await table.end(one)
                        ended += 1
        return ended

    async def _put_back(self, one: Taken) -> bool:
        properties = copied(one.properties, {})
        table = properties.raw_headers
        assert isinstance(table, dict)
        if ORIGIN_OFFSET in table:
            identity = one_line(properties.message_id or "")
            raise BrokerRefused(
                f"message {identity} in {self._name!r} came from a stream, where every group would get it again; "
                "subscribe to the dead letters to handle it"
            )
        properties.raw_headers = {name: value for name, value in table.items() if name not in DEAD_LETTER_HEADERS}
        for queue in _origins(one):
            if await _passed_on(self._publishing, one, queue, properties, self._name):
                return True
        return False


def _origins(one: Taken) -> list[str]:
    """The queues that it may come from: of a group, or of a `RabbitQueue`; or where the server itself put it aside."""
    headers = visible_headers(one.properties)
    origin, group = headers.get(ORIGIN), headers.get(ORIGIN_GROUP)
    found = [group_queue(origin, group), origin] if origin and group else []
    put_aside = put_aside_by(one.properties.headers)
    return found if put_aside is None else [*found, put_aside[0]]


async def _nothing(one: Taken) -> bool:
    return True
