"""A subscription to a queue: deliveries in, acknowledgements out, on one channel after another.

Theory of operation
    Each channel is an epoch of its own. Deliveries wait in the channel's inbox until `fetch` takes them; what is
    settled is told by as few acknowledgements as can be (`settling`), once a call. When a channel ends, all that was
    out on it is lost: it comes again, to somebody. The pump is told in the very call that saw the end, so that nothing
    more of it is begun; what is settled of it later is answered with `StaleDelivery`, and nothing is sent.

    `reopen` builds anew, in order: wait for the connection, declare, qos, consume. What is live has a ConsumeOk.

    A message to be tried again later is published to the retry queues first, in the background, and acknowledged when
    that is confirmed. As long as it is not, it is out like any other; if the channel ends meanwhile it comes twice.

    Where there is an order, the end is different. A consumer that is cancelled makes way for the next one at once,
    which would get messages that are behind those we still have. So a source of an order goes on consuming into its
    inbox until it closes; then all of it goes back together, in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from streamfw.broker import Delivery, Health, Settlement, Source, Subscription
from streamfw.ending import ended
from streamfw.errors import (
    BrokerClosed,
    BrokerError,
    BrokerUnavailable,
    SettleError,
    StaleDelivery,
    Unsupported,
)
from streamfw.outcome import ACK, Ack, Drop, Retry

from .again import Again
from .channel import Channel, Closed, RawDelivery
from .consumer import Consumer, Window, may_be_ours, try_apart
from .deadletters import keep_adopting
from .delivery import RabbitDelivery, maker_of
from .epochs import Epoch, Epochs
from .errors import ChannelGone
from .overdue import LOOKS, Overdue
from .publish import Publishing
from .settings import Settings
from .settling import Tags
from .topology import Plan, declare, declared, queue_ladder

__all__ = ["RabbitSource"]

log = logging.getLogger("streamfw.rabbit")

_PRECONDITION_FAILED: Final = 406
_TOO_MUCH: Final = 1.25  # times max_bytes, for which it is worth to begin anew
_FAR_TOO_MUCH: Final = 3.0  # times max_bytes, for which what runs is given up
_QUIET: Final = 5.0  # seconds for what runs to end before
_RENEWS: Final = 60.0  # seconds between two times
_GAP: Final = 0.05  # seconds that a gap may hold back acknowledgements
_LINGER: Final = 0.25  # seconds after which a quorum queue has surely got what its channel has read
_ADOPTS: Final = 2.0  # seconds for what is being taken over when the source closes
_SLICE: Final = 1.0  # seconds between two looks whether to wait for the server still


class RabbitSource(Source):
    """See `streamfw.broker.Source`."""

    def __init__(
        self,
        subscription: Subscription,
        plan: Plan,
        settings: Settings,
        consuming: Epochs,
        publishing: Publishing,
        retries: bool,
    ) -> None:
        self._subscription, self._plan, self._settings = subscription, plan, settings
        self._consuming, self._publishing = consuming, publishing
        source = plan.source
        self._ladder = queue_ladder(plan.queue) if retries else None
        self._again: Again | None = None
        if self._ladder is not None:
            self._again = Again(self._ladder, consuming, publishing, alive=self._is_alive, done=self._put_aside)
        self._overdue = Overdue(plan.where, settings.consumer_timeout)
        self._make = maker_of(subscription.name, subscription.ordered_by, plan.queue, source.key, self._ladder)
        self._window = Window(plan, subscription, settings.consumer_timeout)
        self._channel: Channel | None = None
        self._consumer: Consumer | None = None
        self._epoch = 0  # of the channel; 0: there is none
        self._live = False  # it consumes
        self._suspect = False  # a connection ended, it may be over this queue
        self._why = "not open yet"
        self._tags = Tags()
        self._settled = 0  # of this channel
        self._inbox: list[RawDelivery] = []
        self._taken_back: list[int] = []  # tags that the pump has not any more, and that are not given back yet
        self._last = 0  # the last tag that was taken from the channel
        self._waiter: asyncio.Future[None] | None = None
        self._gap_timer: asyncio.TimerHandle | None = None
        self._told_at = self._renewed_at = float("-inf")
        self._adopting: asyncio.Task[None] | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._stopped = self._closed = False
        self.late = 0

    # -- opening

    async def open(self) -> None:
        """Open for the first time; the server must be there. Raises a `BrokerError`."""
        await self._open(await self._consuming.connected(self._settings.connect_timeout))
        self._look()

    async def reopen(self) -> None:
        """See `Source.reopen`. Waits for the server, until the source is stopped."""
        self._require_open()
        await self._leave()
        while not self._stopped:
            try:
                epoch = await self._consuming.connected(_SLICE)
            except BrokerUnavailable:
                continue
            await self._open(epoch)
            return

    async def _open(self, epoch: Epoch) -> None:
        try:
            if self._suspect and not self._plan.source.exclusive:
                await try_apart(self._consuming, self._plan)
            await self._open_on(epoch)
        except ChannelGone as error:
            self._suspect = self._suspect or may_be_ours(error.closed)
            raise
        self._suspect = False

    async def _open_on(self, epoch: Epoch) -> None:
        await declare(self._consuming, self._plan, epoch.server_version)
        if self._ladder is not None:
            self._ladder.forget()  # who deleted the queue may have deleted more
        if self._plan.exchange is not None and self._plan.declare == "declare":
            self._publishing.learn(self._plan.exchange)
        channel = await epoch.channel(timeout=self._settings.connect_timeout)
        self._window.begin()
        try:
            with declared(self._plan):
                await self._consume(channel)
        except BaseException:
            if self._channel is channel:
                self._forget_channel()
            await channel.close()
            raise
        self._adopt()

    async def _consume(self, channel: Channel) -> None:
        self._channel, self._epoch, self._tags = channel, channel.epoch, Tags()
        self._consumer = consumer = Consumer(
            channel, self._plan, self._window, last=self._last_tag, untold=self._tags.untold, go_on=self._go_on
        )
        self._why = "the consumer starts"
        channel.on_closed = partial(self._ended, channel)
        channel.on_cancelled = partial(self._cancelled, channel)
        channel.on_delivery = self._wake
        if channel.closed is not None:
            raise ChannelGone(channel.closed, "opening")
        await consumer.begin()
        self._require_open()  # still
        if channel.closed is None:
            self._live = True

    def _adopt(self) -> None:
        """Take over what was kept of a dead letter before anybody subscribed to it."""
        if self._plan.exchange is None or self._plan.declare != "declare" or self._adopting is not None:
            return
        name, queue = self._plan.exchange, self._plan.queue
        adopting = keep_adopting(self._consuming, self._publishing, name, queue)
        self._adopting = asyncio.create_task(adopting, name=f"streamfw rabbit {queue} adopts")

    # -- what the channel calls: none of it may suspend or raise

    def _ended(self, channel: Channel, closed: Closed) -> None:
        if self._channel is not channel:
            return
        gone = self._epoch
        self._mind_time(closed.code == _PRECONDITION_FAILED and "timed out" in closed.text)
        self._forget_channel()
        self._why, self._suspect = str(closed), self._suspect or may_be_ours(closed)
        self._drop(gone)
        self._wake()

    def _cancelled(self, channel: Channel, tag: str) -> None:
        if self._channel is channel:
            self._live = False
            self._mind_time()
            self._why = (
                f"the server ended the consumer of queue {self._plan.queue!r}: it was deleted, or lost its leader, or "
                "(from 4.3 on) a message was here for longer than the server's consumer_timeout"
            )
            self._wake()

    def _forget_channel(self) -> None:
        self._channel, self._consumer, self._epoch, self._live = None, None, 0, False
        self._inbox.clear()
        self._taken_back.clear()
        self._overdue.forget()
        self._last = self._settled = 0
        if self._again is not None:
            self._again.trouble = None  # it was about what is lost now
        if self._gap_timer is not None:
            self._gap_timer.cancel()
            self._gap_timer = None

    def _drop(self, gone: int) -> None:
        """Let the pump go on without what was out on a channel that is gone."""
        self._subscription.pump.hold()  # or it would look at nothing
        self._subscription.pump.release(drop=lambda delivery: delivery.epoch == gone)  # type: ignore[attr-defined]

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- fetch

    async def fetch(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        """See `Source.fetch`."""
        while True:
            self._require_open()
            if self._stopped:
                return ()
            if found := self._take(limit, max_bytes):
                if not self._window.renews or self._window.excess < _TOO_MUCH or not await self._renew():
                    return found
                continue  # that goes back with the rest
            if not self._live:
                raise BrokerUnavailable(f"{self._plan.where}: {self._why}")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def _renew(self) -> bool:
        """Go on with a smaller prefetch, on another channel, if nothing is at work or it is high time."""
        loop, pump, window = asyncio.get_running_loop(), self._subscription.pump, self._window
        if loop.time() < self._renewed_at + _RENEWS:
            return False
        self._renewed_at = loop.time()
        epoch = self._epoch
        pump.hold()
        quiet = await pump.quiesce(_QUIET)
        if self._stopped or self._epoch != epoch or not (quiet or window.excess > _FAR_TOO_MUCH):
            pump.release()
            return self._epoch != epoch
        text = "%s: bodies are so large that a prefetch of %d holds %.1f times max_bytes; it begins anew with fewer%s"
        log.info(text, self._plan.where, window.size, window.excess, "" if quiet else ", and what runs comes again")
        await self.reopen()
        return True

    def _take(self, limit: int, max_bytes: int) -> list[RabbitDelivery]:
        if not self._inbox and self._channel is not None:
            self._inbox = self._channel.take()
            if self._inbox:
                self._last = self._inbox[-1].tag
                self._window.saw(len(self._inbox[-1].body))
            if self._consumer is not None and not self._stopped:
                self._consumer.look(not self._inbox, self._settled)
        inbox, epoch, make = self._inbox, self._epoch, self._make
        taken: list[RabbitDelivery] = []
        count = 0
        for raw in inbox:
            max_bytes -= len(raw.body)
            if count == limit or (max_bytes < 0 and count):
                break
            count += 1
            taken.append(make(raw, epoch))
        del inbox[:count]
        if self._again is not None and any(delivery.attempt > 1 for delivery in taken):
            return self._again.without_early(taken)
        return taken

    # -- settle

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        """See `Source.settle`. Sent: it is on its way when this returns."""
        self._require_open()
        errors: list[SettleError] = []
        epoch, settled = self._epoch, self._tags.settle
        retried: list[tuple[RabbitDelivery, float]] = []
        for settlement in settlements:
            if settlement.outcome is not ACK:
                retried = self._checked(settlements)
                settlements = [one for one in settlements if not isinstance(one.outcome, Retry)]
                break
        again = self._again if self._again is not None and self._again.busy else None
        for settlement in settlements:
            delivery: RabbitDelivery = settlement.delivery  # type: ignore[assignment]
            tag = delivery.tag
            if delivery.epoch != epoch or (again is not None and again.has(epoch, tag)) or not settled(tag):
                errors.append(self._stale(delivery))
        self._settled += len(settlements) - len(errors)
        for delivery, after in retried:
            if not self._take_back(delivery, after):
                errors.append(self._stale(delivery))
        self._tell()
        return errors

    def _checked(self, settlements: Sequence[Settlement]) -> list[tuple[RabbitDelivery, float]]:
        """The retries among them. Refuses what is not declared, before anything is done."""
        retried = []
        for settlement in settlements:
            delivery, outcome = settlement.delivery, settlement.outcome
            assert isinstance(delivery, RabbitDelivery)
            if isinstance(outcome, Retry) and self._again is not None:
                retried.append((delivery, outcome.after or 0.0))
            elif not isinstance(outcome, Ack | Drop):
                raise Unsupported(f"{self._plan.where}: RabbitMQ cannot settle with {outcome!r}")
        return retried

    def _stale(self, delivery: Delivery) -> SettleError:
        self.late += 1
        return StaleDelivery(delivery, "settled already, or its channel is gone")

    def _tell(self, step_over: bool = False) -> None:
        """Acknowledge what can be."""
        channel, tags, consumer = self._channel, self._tags, self._consumer
        if channel is None or consumer is None or consumer.holding:
            return
        frames = tags.frames(step_over)
        if frames:
            self._told_at = asyncio.get_running_loop().time()
            for tag, multiple in frames:
                channel.ack(tag, multiple)
            if consumer.paused:
                consumer.resume()
        if self._gap_timer is None and tags.gap is not None:
            self._mind(tags.gap)

    def _last_tag(self) -> int:
        """Of what came, be it taken or not."""
        channel = self._channel
        return channel.inbox[-1].tag if channel is not None and channel.inbox else self._last

    def _go_on(self) -> None:
        self._tell()
        self._wake()

    def _mind(self, gap: int) -> None:
        self._gap_timer = asyncio.get_running_loop().call_later(_GAP, self._step_over, gap)

    def _step_over(self, gap: int) -> None:
        self._gap_timer = None
        still = self._tags.gap
        if still == gap:
            self._tell(step_over=True)
        elif still is not None:
            self._mind(still)

    # -- again later

    def _take_back(self, delivery: RabbitDelivery, after: float) -> bool:
        epoch, tag, again = delivery.epoch, delivery.tag, self._again
        if again is None or epoch != self._epoch or again.has(epoch, tag) or not self._tags.is_out(tag):
            return False
        again.start(delivery, after, delivery.attempt + 1)
        return True

    def can_retry(self, delivery: Delivery) -> bool:
        """See `Source.can_retry`: its copy has headers of ours besides its own, and they must fit into a frame."""
        assert isinstance(delivery, RabbitDelivery)
        epoch = self._consuming.current
        return self._again is None or epoch is None or self._again.fits(delivery, epoch.frame_max)

    def _is_alive(self, epoch: int) -> bool:
        return epoch == self._epoch

    def _put_aside(self, delivery: RabbitDelivery) -> None:
        if self._tags.settle(delivery.tag):
            self._settled += 1
            self._tell()

    # -- who takes too long

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._watching = loop.call_later(self._settings.consumer_timeout / LOOKS, self._look)
        if self._channel is None or self._consumer is None:
            return
        self._overdue.look(loop.time(), self._tags.oldest(), self._last_tag())
        if self._stopped or not self._live or self._consumer.busy or not self._window.changes:
            return
        if self._wait_too_long():
            epoch, consumer = self._epoch, self._consumer
            consumer.shrink(lambda: self._give_back(epoch))

    def _wait_too_long(self) -> bool:
        """Whether something has not begun that has been here for almost half of the server's time. If so, it has been
        taken out of the pump."""
        late = self._overdue.waiting(asyncio.get_running_loop().time())
        if late < self._tags.oldest():
            return False
        self._take_out(self._epoch, late)
        return bool(self._taken_back) or bool(self._inbox and self._inbox[0].tag <= late)

    def _take_out(self, epoch: int, last: int) -> None:
        """Take out of the pump what has not begun, up to a tag."""

        def waits(delivery: Delivery) -> bool:
            assert isinstance(delivery, RabbitDelivery)
            return delivery.epoch == epoch and delivery.tag <= last

        self._taken_back += [one.tag for one in self._subscription.pump.take_back(waits)]  # type: ignore[attr-defined]

    def _give_back(self, epoch: int) -> None:
        """Let others have all that has not begun. No more comes, and nothing is held back."""
        channel = self._channel
        if channel is None or epoch != self._epoch:
            return
        last = self._last_tag()
        self._take_out(epoch, last)
        unread = (*self._inbox, *channel.take())
        self._inbox.clear()
        self._last = last
        self._tell(step_over=True)
        given = self._tags.give_back((*self._taken_back, *(raw.tag for raw in unread)), last)
        self._taken_back.clear()
        self._settled += len(given)
        for tag in given:
            channel.nack(tag, requeue=True)
        log.warning(
            "%s: %d messages have waited here for so long that RabbitMQ might take them back (consumer_timeout is %.0f "
            "s); they are given back, and fewer are asked for",
            self._plan.where,
            len(given),
            self._settings.consumer_timeout,
        )

    def _mind_time(self, told: bool = False) -> None:
        """The server ended this channel, or its consumer. If that was because its time was over, as it `told` us or as
        it seems, fewer must be here."""
        now = asyncio.get_running_loop().time()
        if told or self._overdue.waiting(now) >= self._tags.oldest():
            self._window.shrink()

    # -- the end

    async def flush(self, deadline: float) -> None:
        """See `Source.flush`. AMQP confirms no acknowledgement; a quorum queue has it soon after its channel does."""
        self._require_open()
        loop = asyncio.get_running_loop()
        if self._again is not None:
            await self._again.finished(max(0.0, deadline - loop.time()))
        channel, consumer = self._channel, self._consumer
        if channel is None or consumer is None:
            return
        await consumer.rest()
        self._tell(step_over=True)
        try:
            async with asyncio.timeout_at(deadline):
                await channel.flush()
                if (rest := self._told_at + _LINGER - loop.time()) > 0:
                    await consumer.heard()
                    await asyncio.sleep(rest)
        except (TimeoutError, BrokerError):
            pass  # what was not told comes again

    async def stop(self) -> None:
        """See `Source.stop`. What nobody has fetched goes back, so that others get it at once."""
        if self._stopped:
            return
        self._stopped = True
        self._wake()
        channel, consumer = self._channel, self._consumer
        if channel is None or consumer is None or self._subscription.ordered_by is not None:
            return
        try:
            await consumer.cancel()
        except BrokerError:
            return
        if self._channel is channel:
            # Never for a retry, which must count: from 4.3 on this does not. For giving back that is what is wanted.
            for raw in (*self._inbox, *channel.take()):
                channel.nack(raw.tag, requeue=True)
            self._inbox.clear()

    async def close(self) -> None:
        """See `Source.close`."""
        if self._closed:
            return
        await self.stop()
        self._closed = True
        self._wake()
        if self._again is not None:
            self._again.cancel()
        if self._adopting is not None:
            self._adopting.cancel()
        if self._watching is not None:
            self._watching.cancel()
        await self._leave()
        if self._adopting is not None:
            await ended((self._adopting,), timeout=_ADOPTS)

    async def _leave(self) -> None:
        """Close the channel: what is out on it goes back."""
        channel, consumer = self._channel, self._consumer
        if channel is None or consumer is None:
            return
        await consumer.rest()
        self._tell(step_over=True)
        gone = self._epoch
        self._forget_channel()
        self._drop(gone)
        await channel.close()

    def _require_open(self) -> None:
        if self._closed:
            raise BrokerClosed("this subscription to RabbitMQ was closed")

    def gauges(self) -> Mapping[str, float]:
        """See `Source.gauges`. ``open``: messages that came and are not settled; ``buffered``: those of them that wait
        here to be fetched; ``prefetch``: how many may be open."""
        channel = self._channel
        waiting = len(self._inbox) + (len(channel.inbox) if channel is not None else 0)
        return {"open": self._last_tag() - self._settled, "buffered": waiting, "prefetch": self._window.size}

    def health(self) -> Health:
        """See `Source.health`: live is who has the server's ConsumeOk."""
        if self._closed:
            return Health(False, "closed")
        if not self._live:
            return Health(False, self._why)
        trouble = self._again.trouble if self._again is not None else None
        return Health(trouble is None, trouble or "")
