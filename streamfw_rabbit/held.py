"""What came on one channel and is not settled. It ends with the channel.

What is settled is told by as few acknowledgements as can be; see `settling` for which.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from streamfw.broker import Delivery, Subscription

from .channel import Channel, RawDelivery
from .consumer import Consumer, Window
from .delivery import RabbitDelivery
from .overdue import Overdue
from .settling import Tags
from .topology import Plan

__all__ = ["Held"]

log = logging.getLogger("streamfw.rabbit")

_GAP: Final = 0.05  # seconds that a gap may hold back acknowledgements


class Held:
    """The deliveries of one channel, from its one consumer. `timeout`: after how many seconds the server takes back
    what is not settled. `go_on`: called when the consumer lets acknowledgements pass again.

    - `settled`: how many were; `told_at`: when it was last told (of the loop's clock).
    """

    __slots__ = (
        "_ended", "_gap_timer", "_inbox", "_last", "_overdue", "_subscription", "_taken_back", "_timeout", "_where",
        "_window", "channel", "consumer", "epoch", "settled", "tags", "told_at",
    )  # fmt: skip

    def __init__(
        self,
        channel: Channel,
        plan: Plan,
        window: Window,
        subscription: Subscription,
        timeout: float,
        go_on: Callable[[], None],
    ) -> None:
        self.channel, self.epoch = channel, channel.epoch
        self.tags = Tags()
        self.consumer = Consumer(channel, plan, window, last=self.last_tag, untold=self.tags.untold, go_on=go_on)
        self.settled = 0
        self.told_at = float("-inf")
        self._window, self._subscription = window, subscription
        self._where, self._timeout = plan.where, timeout
        self._overdue = Overdue(plan.where, timeout)
        self._ended = False
        self._taken_back: list[int] = []  # tags that the pump has not any more, and that are not given back yet
        self._inbox: list[RawDelivery] = []
        self._last = 0  # the last tag that was taken from the channel
        self._gap_timer: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """The channel is gone."""
        self._ended = True
        self._inbox.clear()
        if self._gap_timer is not None:
            self._gap_timer.cancel()
            self._gap_timer = None

    # -- what waits here

    @property
    def waiting(self) -> int:
        """How many wait to be taken."""
        return len(self._inbox) + len(self.channel.inbox)

    def last_tag(self) -> int:
        """Of what came, be it taken or not."""
        inbox = self.channel.inbox
        return inbox[-1].tag if inbox else self._last

    def take(self, limit: int, max_bytes: int, resize: bool) -> list[RawDelivery]:
        """At most `limit`, of `max_bytes` together; one at least, where there is one. `resize`: the prefetch may change
        now."""
        if not self._inbox:
            self._inbox = self.channel.take()
            if self._inbox:
                self._last = self._inbox[-1].tag
                self._window.saw(len(self._inbox[-1].body))
            if resize:
                self.consumer.look(not self._inbox, self.settled)
        inbox = self._inbox
        count = 0
        for raw in inbox:
            max_bytes -= len(raw.body)
            if count == limit or (max_bytes < 0 and count):
                break
            count += 1
        taken = inbox[:count]
        del inbox[:count]
        return taken

    # -- what is told

    def tell(self, step_over: bool = False) -> None:
        """Acknowledge what can be. `step_over`: also what a gap holds back."""
        consumer, tags = self.consumer, self.tags
        if consumer.holding:
            return
        frames = tags.frames(step_over)
        if frames:
            self.told_at = asyncio.get_running_loop().time()
            for tag, multiple in frames:
                self.channel.ack(tag, multiple)
            if consumer.paused:
                consumer.resume()
        if self._gap_timer is None and tags.gap is not None:
            self._mind(tags.gap)

    def _mind(self, gap: int) -> None:
        self._gap_timer = asyncio.get_running_loop().call_later(_GAP, self._step_over, gap)

    def _step_over(self, gap: int) -> None:
        self._gap_timer = None
        still = self.tags.gap
        if still == gap:
            self.tell(step_over=True)
        elif still is not None:
            self._mind(still)

    # -- what goes back

    def give_back(self) -> int:
        """Give back what nobody has taken, and what was taken back, while no more comes; return how many."""
        if self.consumer.holding:
            return 0
        self._last = self.last_tag()
        unread = [*self._inbox, *self.channel.take()]
        self._inbox.clear()
        self.tell(step_over=True)
        given = self.tags.give_back((*self._taken_back, *(raw.tag for raw in unread)), self._last)
        self._taken_back.clear()
        self.settled += len(given)
        # Never for a retry, which must count: from 4.3 on this does not. For giving back that is what is wanted.
        for tag in given:
            self.channel.nack(tag, requeue=True)
        return len(given)

    def look(self, now: float, shrinks: bool) -> None:
        """Warn of what is here for long; `shrinks`: give back what has not begun. `now`: of the loop's clock."""
        self._overdue.look(now, self.tags.oldest(), self.last_tag())
        if shrinks and not self.consumer.busy and self._waits_too_long(now):
            self.consumer.shrink(self._give_back_late)

    def is_late(self, now: float) -> bool:
        """Whether something is here that the server might take back before long."""
        return self._overdue.waiting(now) >= self.tags.oldest()

    def _waits_too_long(self, now: float) -> bool:
        """Whether something has not begun that has been here for almost half of the server's time. If so, it has been
        taken out of the pump."""
        late = self._overdue.waiting(now)
        if late < self.tags.oldest():
            return False
        self._take_out(late)
        return bool(self._taken_back) or bool(self._inbox and self._inbox[0].tag <= late)

    def _take_out(self, last: int) -> None:
        """Take out of the pump what has not begun, up to a tag."""

        def waits(delivery: Delivery) -> bool:
            assert isinstance(delivery, RabbitDelivery)
            return delivery.epoch == self.epoch and delivery.tag <= last

        self._taken_back += [one.tag for one in self._subscription.pump.take_back(waits)]  # type: ignore[attr-defined]

    def _give_back_late(self) -> None:
        """Let others have all that has not begun. No more comes, and nothing is held back."""
        if self._ended:
            return
        self._take_out(self.last_tag())
        given = self.give_back()
        log.warning(
            "%s: %d messages have waited here for so long that RabbitMQ might take them back (consumer_timeout is %.0f "
            "s); they are given back, and fewer are asked for",
            self._where,
            given,
            self._timeout,
        )
