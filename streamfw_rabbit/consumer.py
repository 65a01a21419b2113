"""One consumer on one channel, and how many messages may be on their way to it.

Theory of operation
    RabbitMQ pushes up to the prefetch, whoever could do the work, and however large the messages are. So it begins with
    few, and grows fourfold when the pump has taken all there was, and either much of it is out, or as many as the
    prefetch has came within half a second. A quick handler has its thousand after three steps, and a slow one does not
    hoard what others could do. It never asks for more than fits the subscription's bytes, by the average of the bodies
    that came.

    A prefetch holds for the consumers that begin after it (AMQP has one for a whole channel as well, but not on quorum
    queues). So the consumer is cancelled, and another begins on the same channel; what is out stays out. Two things
    would lose the order:

    - Both at a time: the queue would serve them in turn.
    - A cancel while deliveries are under way: a quorum queue takes these back, and gives them again in any order (seen
      on 3.10.8). None are under way when as many are out as the prefetch allows. So acknowledgements are held back
      until that is so, and until the next consumer is there. If it does not come to that (the queue is empty) all stays
      as it is.

    For the same reason it stays where the queue would go elsewhere in between: to the next one in an order, or away,
    with its last consumer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Final

from streamfw.broker import Subscription
from streamfw.errors import BrokerError

from .channel import Channel, Closed, FieldTable
from .epochs import Epochs
from .errors import NotFound
from .topology import Plan

__all__ = ["Consumer", "Window", "may_be_ours", "try_apart"]

log = logging.getLogger("streamfw.rabbit")

_INTERNAL_ERROR: Final = 541
_FIRST: Final = 32
_GROWTH: Final = 4
_MOST: Final = 65535  # AMQP's prefetch has 16 bits
_WEIGHT: Final = 0.1  # of the newest body in the average
_PATIENCE: Final = 0.1  # seconds for the prefetch to be all out
_ANSWER: Final = 2.0  # seconds for the server to answer
_QUICK: Final = 0.5  # seconds in which who is quick gets as many as the prefetch has


def may_be_ours(closed: Closed) -> bool:
    """Whether the server may have ended the connection over the queue of one of its consumers. A quorum queue whose
    data are gone (seen on 3.10.8, killed when the queue had just been made) is declared as if it were well, but to
    consume from it ends the connection, with everybody's consumers on it."""
    return closed.kind == "connection" and closed.code == _INTERNAL_ERROR


async def try_apart(epochs: Epochs, plan: Plan) -> None:
    """See on a connection of its own whether its queue can be consumed from. Raises a `BrokerError`: it cannot."""
    try:
        async with epochs.apart(f"{plan.where}: trying queue {plan.queue!r}, over which a connection ended") as channel:
            await channel.basic_qos(prefetch_count=1)
            await channel.basic_consume(plan.queue, _given_back)
    except NotFound:
        pass  # it is declared next


async def _given_back(message: object) -> None:
    """What came goes back with the connection."""


class Window:
    """The prefetch of a subscription, now and as it should be. It outlives channels."""

    def __init__(self, plan: Plan, subscription: Subscription) -> None:
        source = plan.source
        self.most = min(source.prefetch or subscription.prefetch, _MOST)
        alone = subscription.ordered_by is not None or source.single_active or source.exclusive_consumer
        self.fixed = source.prefetch is not None or alone or not source.lasting
        least = 2 * subscription.workers * (subscription.batch or 1)
        self.size = self.most if self.fixed else min(self.most, max(_FIRST, least))
        self._least = min(self.most, max(2, least))
        self._max_bytes = subscription.max_bytes
        self._average = 0.0
        self._came, self._since, self._quick = 0, 0.0, False

    def saw(self, size: int) -> None:
        """A body of so many bytes came."""
        self._average += (size - self._average) * (_WEIGHT if self._average else 1.0)

    def wanted(self, empty: bool, out: int, came: int, now: float) -> int:
        """What it should be. `empty`: nothing waits to be taken. `out`: how many are not settled. `came`: how many came
        on this channel. `now`: in seconds, of any clock."""
        if self.fixed:
            return self.size
        if not self._came <= came < self._came + self.size:
            self._quick = came > self._came and now - self._since <= _QUICK
            self._came, self._since = came, now
        fitting = int(self._max_bytes / self._average) if self._average else self.most
        limit = max(self._least, min(self.most, fitting))
        if self.size > limit + limit // 2:
            return limit
        if empty and (2 * out >= self.size or self._quick):
            self._quick = False
            return max(self.size, min(limit, self.size * _GROWTH))
        return self.size


class Consumer:
    """The consumer of `plan`'s queue on a channel. While it is `holding`, nothing may be acknowledged; `go_on` is
    called when that is over. `last` is the last tag that came, `untold` how many between two are not acknowledged."""

    def __init__(
        self,
        channel: Channel,
        plan: Plan,
        window: Window,
        *,
        last: Callable[[], int],
        untold: Callable[[int, int], int],
        go_on: Callable[[], None],
    ) -> None:
        self._channel, self._plan, self._window = channel, plan, window
        self._last, self._untold, self._go_on = last, untold, go_on
        self._tag = ""
        self._before = 0  # the last tag that is not its own
        self._resizing: asyncio.Task[None] | None = None
        self._ended = False
        self.holding = False

    async def begin(self) -> None:
        """Returns with the server's ConsumeOk. Raises a `BrokerError`."""
        source = self._plan.source
        tag = f"{self._plan.queue[:100]}-{secrets.token_hex(4)}"
        arguments: FieldTable = {"x-priority": source.consumer_priority} if source.consumer_priority else {}
        await self._channel.qos(self._window.size)
        self._before = self._last()
        await self._channel.consume(self._plan.queue, tag, arguments=arguments, exclusive=source.exclusive_consumer)
        self._tag = tag

    def look(self, empty: bool, out: int, came: int) -> None:
        """Another prefetch may be due; see `Window.wanted`."""
        if self._resizing is not None or self._ended:
            return
        wanted = self._window.wanted(empty, out, came, asyncio.get_running_loop().time())
        if wanted != self._window.size:
            self.holding = True
            resizing = self._resize(wanted)
            self._resizing = asyncio.create_task(resizing, name=f"streamfw rabbit {self._plan.queue} prefetch")

    async def _resize(self, wanted: int) -> None:
        try:
            if await self._all_out():
                self._window.size = wanted
                await self._channel.cancel(self._tag)
                await self.begin()
        except BrokerError as error:  # it ended the channel, and who reopens begins with the new size
            log.debug("%s: changing the prefetch: %s", self._plan.where, error)
        self._resizing = None
        self.holding = False
        self._go_on()

    async def _all_out(self) -> bool:
        end = asyncio.get_running_loop().time() + _PATIENCE
        while self._untold(self._before + 1, self._last()) < self._window.size:
            if self._ended or self._channel.closed is not None or asyncio.get_running_loop().time() > end:
                return False
            await asyncio.sleep(0.001)  # what comes is not told one by one
        return True

    async def cancel(self) -> None:
        """Returns when no more deliveries come. Raises a `BrokerError`."""
        self._ended = True
        await self.rest()
        await self._channel.cancel(self._tag)

    async def rest(self) -> None:
        """Returns when nothing is held back, or the server does not answer."""
        if self._resizing is not None:
            await asyncio.wait({self._resizing}, timeout=_ANSWER)

    async def heard(self) -> None:
        """Returns when the server has read all that was sent on the channel before. Raises a `BrokerError`."""
        await self._channel.qos(self._window.size)
