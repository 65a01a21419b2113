"""One consumer on one channel, and how many messages may be on their way to it.

Theory of operation
    RabbitMQ pushes up to the prefetch, whoever could do the work, and however large the messages are. What waits here
    is kept from others. And its time runs: a server whose ``consumer_timeout`` is over takes it back and counts a
    delivery, also of what was never begun. So it begins with what the workers can begin at once, and as many again,
    and grows only by what was *settled*: eightfold at a time, to a second of work at the measured pace (never to more
    than a quarter of the server's time). A quick handler has its thousand after three steps. And it never asks for more
    than fits the subscription's bytes, by the average of the bodies that came.

    A pace may change. What has waited for almost half of the server's time, and is not begun, goes back, with all that
    came behind it; there is no consumer until the workers have room, and then one with only what they can begin. It
    grows again by the pace.

    A prefetch holds for the consumers that begin after it (AMQP has one for a whole channel as well, but not on quorum
    queues). So the consumer is cancelled, and another begins on the same channel; what is out stays out. Two things
    would lose the order:

    - Both at a time: the queue would serve them in turn.
    - A cancel while deliveries are under way: a quorum queue takes these back, and gives them again in any order (seen
      on 3.10.8). None are under way when as many are out as the prefetch allows. So acknowledgements are held back
      until that is so, and until the next consumer is there. If it does not come to that (the queue is empty) all stays
      as it is.

    For the same reason it stays where the queue would go elsewhere in between: to the next one in an order, or away,
    with its last consumer. There it is not large, and smaller on the next channel when the server's time was over.
    Where the bodies turn out too large for it, that next channel comes at once, when nothing is at work: what is out
    goes back together, in order.

    A consumer counts only what came to it. So where the next one is to have less, it has to wait until enough of what
    came before it is settled, and begins with what is left.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, Final

from streamfw.broker import Subscription
from streamfw.errors import BrokerError

from .channel import Channel, Closed, FieldTable
from .epochs import Epochs
from .errors import NotFound
from .topology import Plan

__all__ = ["Consumer", "Window", "may_be_ours", "try_apart"]

log = logging.getLogger("streamfw.rabbit")

_INTERNAL_ERROR: Final = 541
_FIXED: Final = 100  # where it cannot be changed while it is in use
_GROWTH: Final = 8
_SAMPLE: Final = 8  # settled messages, at least, by which a pace is measured
_AHEAD: Final = 1.0  # seconds of work that may wait here
_MOST: Final = 65535  # AMQP's prefetch has 16 bits
_WEIGHT: Final = 0.1  # of the newest body in the average
_PATIENCE: Final = 0.1  # seconds for the prefetch to be all out
_REST: Final = 1.0  # seconds until that is tried again
_ANSWER: Final = 2.0  # seconds for the server to answer


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
    """The prefetch of a subscription, now and as it should be. It outlives channels. `timeout`: after how many seconds
    the server takes back what is not settled."""

    def __init__(self, plan: Plan, subscription: Subscription, timeout: float) -> None:
        source = plan.source
        alone = subscription.ordered_by is not None or source.single_active or source.exclusive_consumer
        self.changes = source.lasting and not alone
        """Whether a consumer may make way for the next one."""
        self.fixed = source.prefetch is not None or not self.changes
        self.renews = alone and source.lasting and not source.exclusive_consumer and source.prefetch is None
        """Whether another channel may be begun for another prefetch."""
        self.most = min(source.prefetch or subscription.prefetch, _MOST)
        at_once = subscription.workers * (subscription.batch or 1)
        self._least = min(self.most, at_once)
        self.size = self.most
        if source.prefetch is None:
            self.size = min(self.most, max(2 if self.changes else _FIXED, 2 * at_once))
        self._whole = self.size  # for small bodies, where it renews
        self._ahead = min(_AHEAD, timeout / 4)
        self._max_bytes = subscription.max_bytes
        self._average = 0.0
        self._pace = 0.0  # settled in a second
        self._settled, self._since = 0, 0.0  # where the present sample began
        self._rests_until = float("-inf")

    def saw(self, size: int) -> None:
        """A body of so many bytes came."""
        self._average += (size - self._average) * (_WEIGHT if self._average else 1.0)

    @property
    def fitting(self) -> int:
        """How many fit the bytes; two at least, so that one can be fetched while one is handled."""
        return max(2, int(self._max_bytes / self._average)) if self._average else self.most

    def begin(self) -> None:
        """Another channel begins."""
        if self.renews:
            self.size = min(self._whole, self.fitting)

    @property
    def excess(self) -> float:
        """How many times the bytes that may be here would be, if all came that may. 0: fewer cannot be asked for."""
        return self.size * self._average / self._max_bytes if self.size > self.fitting else 0.0

    def wanted(self, empty: bool, settled: int, now: float) -> int:
        """What it should be. `empty`: nothing waits to be taken. `settled`: how many were, on this channel. `now`: in
        seconds, of any clock."""
        self._measure(settled, now)
        if self.fixed or now < self._rests_until:
            return self.size
        limit = min(self.most, self.fitting)
        if self.size > limit + limit // 2:
            return limit
        enough = min(limit, self.size * _GROWTH, int(self._pace * self._ahead))
        worth = enough >= 2 * self.size or enough == limit
        return max(self.size, enough) if empty and worth else self.size

    def _measure(self, settled: int, now: float) -> None:
        count = settled - self._settled
        if count < 0 or not self._since:  # another channel
            self._settled, self._since = settled, now
        elif count >= max(self.size, _SAMPLE):
            self._pace = count / max(now - self._since, 1e-6)
            self._settled, self._since = settled, now

    def rest(self, now: float) -> None:
        """It could not be changed now."""
        self._rests_until = now + _REST

    def shrink(self) -> None:
        """Messages waited here for too long. Where it changes it is as low as can be at once, and grows again by the
        pace; where it does not, it has to be content with one step for each channel that ended."""
        self.fixed = self.fixed and not self.changes
        self.size = self._least if self.changes else max(self._least, self.size // 4)
        self._whole = self.size
        self._pace, self._since = 0.0, 0.0


class Consumer:
    """The consumer of `plan`'s queue on a channel. While it is `holding`, nothing may be acknowledged; `go_on` is
    called when that is over. While it is `paused`, `resume` is to be called when something was. `last` is the last tag
    that came, `untold` how many between two are not acknowledged."""

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
        self._prefetch = window.size
        self._resizing: asyncio.Task[None] | None = None
        self._ended = False
        self.holding = False
        self.paused = False

    async def begin(self, prefetch: int | None = None) -> None:
        """Returns with the server's ConsumeOk. `prefetch`: other than the window's. Raises a `BrokerError`."""
        source = self._plan.source
        tag = f"{self._plan.queue[:100]}-{secrets.token_hex(4)}"
        arguments: FieldTable = {"x-priority": source.consumer_priority} if source.consumer_priority else {}
        self._prefetch = prefetch or self._window.size
        await self._channel.qos(self._prefetch)
        self._before = self._last()
        await self._channel.consume(self._plan.queue, tag, arguments=arguments, exclusive=source.exclusive_consumer)
        self._tag = tag

    @property
    def busy(self) -> bool:
        """Whether it is being changed, or ends."""
        return self._resizing is not None or self._ended

    def look(self, empty: bool, settled: int) -> None:
        """Another prefetch may be due; see `Window.wanted`."""
        if self.busy or self.paused:
            return
        window = self._window
        wanted = window.wanted(empty, settled, asyncio.get_running_loop().time())
        if wanted != window.size or (self._prefetch < wanted and self._prefetch < wanted - self._older()):
            self._start(self._resize(wanted))

    def shrink(self, then: Callable[[], None]) -> None:
        """Let nothing more come, call `then`, and begin with as few as can be when there is room. Not while `busy`."""
        self._start(self._shrink(then))

    def resume(self) -> None:
        """Something was acknowledged: it may be time to begin again."""
        if self.paused and not self.busy and (room := self._room()) > 0:
            self.paused = False
            self._start(self.begin(room))

    def _room(self) -> int:
        return self._window.size - self._untold(1, self._last())

    def _older(self) -> int:
        """How many are out that did not come to the present consumer."""
        last = self._last()
        return self._untold(1, last) - self._untold(self._before + 1, last)

    def _start(self, change: Coroutine[Any, Any, None]) -> None:
        name = f"streamfw rabbit {self._plan.queue} prefetch"
        self._resizing = asyncio.create_task(self._changed(change), name=name)

    async def _changed(self, change: Coroutine[Any, Any, None]) -> None:
        try:
            await change
        except BrokerError as error:  # it ended the channel, and who reopens begins with the new size
            log.debug("%s: changing the prefetch: %s", self._plan.where, error)
        self._resizing = None
        self.holding = False
        self._go_on()
        self.resume()

    async def _resize(self, wanted: int) -> None:
        self.holding = True
        if not await self._all_out():
            self._window.rest(asyncio.get_running_loop().time())
            return
        grows = wanted > self._window.size
        self._window.size = wanted
        await self._end()
        if grows:
            await self.begin()
        else:
            self.paused = True

    async def _shrink(self, then: Callable[[], None]) -> None:
        self.holding = True
        await self._all_out()  # if not, it may cost the order, but what waits is worth more
        if self._ended:
            return
        self._window.shrink()
        await self._end()
        self.holding = False
        self.paused = True
        then()

    async def _end(self) -> None:
        tag, self._tag = self._tag, ""
        if tag:
            await self._channel.cancel(tag)

    async def _all_out(self) -> bool:
        end = asyncio.get_running_loop().time() + _PATIENCE
        while self._tag and self._untold(self._before + 1, self._last()) < self._prefetch:
            if self._ended or self._channel.closed is not None or asyncio.get_running_loop().time() > end:
                return False
            await asyncio.sleep(0.001)  # what comes is not told one by one
        return True

    async def cancel(self) -> None:
        """Returns when no more deliveries come. Raises a `BrokerError`."""
        self._ended = True
        await self.rest()
        await self._end()

    async def rest(self) -> None:
        """Returns when nothing is held back, or the server does not answer."""
        if self._resizing is not None:
            await asyncio.wait({self._resizing}, timeout=_ANSWER)

    async def heard(self) -> None:
        """Returns when the server has read all that was sent on the channel before. Raises a `BrokerError`."""
        await self._channel.qos(self._window.size)
