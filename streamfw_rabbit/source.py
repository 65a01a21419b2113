"""A subscription to a queue: deliveries in, acknowledgements out, on one channel after another.

Theory of operation
    Each channel is an epoch of its own. Deliveries are `Held` until `fetch` takes them; what is settled is told by as
    few acknowledgements as can be, once a call. When a channel ends, all that was out on it is lost: it comes again, to
    somebody. The pump is told in the very call that saw the end, so that nothing more of it is begun; what is settled
    of it later is answered with `StaleDelivery`, and nothing is sent.

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
from .channel import Channel, Closed
from .consumer import Window, may_be_ours, try_apart
from .deadletters import keep_adopting
from .delivery import RabbitDelivery, maker_of
from .epochs import Epoch, Epochs
from .errors import ChannelGone
from .held import Held
from .overdue import LOOKS
from .publish import Publishing
from .settings import Settings
from .topology import Plan, declare, declared, queue_ladder

__all__ = ["RabbitSource"]

log = logging.getLogger("streamfw.rabbit")

_PRECONDITION_FAILED: Final = 406
_TOO_MUCH: Final = 1.25  # times max_bytes, for which it is worth to begin anew
_FAR_TOO_MUCH: Final = 3.0  # times max_bytes, for which what runs is given up
_QUIET: Final = 5.0  # seconds for what runs to end before
_RENEWS: Final = 60.0  # seconds between two times
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
        self._make = maker_of(subscription.name, subscription.ordered_by, plan.queue, source.key, self._ladder)
        self._window = Window(plan, subscription, settings.consumer_timeout)
        self._held: Held | None = None  # on the present channel, if there is one
        self._live = False  # it consumes
        self._suspect = False  # a connection ended, it may be over this queue
        self._why = "not open yet"
        self._waiter: asyncio.Future[None] | None = None
        self._renewed_at = float("-inf")
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
            if self._has(channel):
                self._forget_channel()
            await channel.close()
            raise
        self._adopt()

    async def _consume(self, channel: Channel) -> None:
        timeout = self._settings.consumer_timeout
        self._held = held = Held(channel, self._plan, self._window, self._subscription, timeout, self._go_on)
        self._why = "the consumer starts"
        channel.on_closed = partial(self._ended, channel)
        channel.on_cancelled = partial(self._cancelled, channel)
        channel.on_delivery = self._wake
        if channel.closed is not None:
            raise ChannelGone(channel.closed, "opening")
        await held.consumer.begin()
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

    def _has(self, channel: Channel) -> bool:
        return self._held is not None and self._held.channel is channel

    def _ended(self, channel: Channel, closed: Closed) -> None:
        if not self._has(channel):
            return
        self._mind_time(closed.code == _PRECONDITION_FAILED and "timed out" in closed.text)
        self._forget_channel()
        self._why, self._suspect = str(closed), self._suspect or may_be_ours(closed)
        self._drop(channel.epoch)
        self._wake()

    def _cancelled(self, channel: Channel, tag: str) -> None:
        if self._has(channel):
            self._live = False
            self._mind_time()
            self._why = (
                f"the server ended the consumer of queue {self._plan.queue!r}: it was deleted, or lost its leader, or "
                "(from 4.3 on) a message was here for longer than the server's consumer_timeout"
            )
            self._wake()

    def _forget_channel(self) -> None:
        if self._held is not None:
            self._held.end()
        self._held, self._live = None, False
        if self._again is not None:
            self._again.trouble = None  # it was about what is lost now

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
        held = self._held
        pump.hold()
        quiet = await pump.quiesce(_QUIET)
        if self._stopped or self._held is not held or not (quiet or window.excess > _FAR_TOO_MUCH):
            pump.release()
            return self._held is not held
        text = "%s: bodies are so large that a prefetch of %d holds %.1f times max_bytes; it begins anew with fewer%s"
        log.info(text, self._plan.where, window.size, window.excess, "" if quiet else ", and what runs comes again")
        await self.reopen()
        return True

    def _take(self, limit: int, max_bytes: int) -> list[RabbitDelivery]:
        held, make = self._held, self._make
        if held is None:
            return []
        epoch = held.epoch
        taken = [make(raw, epoch) for raw in held.take(limit, max_bytes, not self._stopped)]
        if self._again is not None and any(delivery.attempt > 1 for delivery in taken):
            return self._again.without_early(taken)
        return taken

    # -- settle

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        """See `Source.settle`. Sent: it is on its way when this returns."""
        self._require_open()
        errors: list[SettleError] = []
        retried: list[tuple[RabbitDelivery, float]] = []
        for settlement in settlements:
            if settlement.outcome is not ACK:
                retried = self._checked(settlements)
                settlements = [one for one in settlements if not isinstance(one.outcome, Retry)]
                break
        held = self._held
        if held is None:
            return [self._stale(one.delivery) for one in settlements] + [self._stale(one) for one, _ in retried]
        epoch, settled = held.epoch, held.tags.settle
        again = self._again if self._again is not None and self._again.busy else None
        for settlement in settlements:
            delivery: RabbitDelivery = settlement.delivery  # type: ignore[assignment]
            tag = delivery.tag
            if delivery.epoch != epoch or (again is not None and again.has(epoch, tag)) or not settled(tag):
                errors.append(self._stale(delivery))
        held.settled += len(settlements) - len(errors)
        for delivery, after in retried:
            if not self._take_back(held, delivery, after):
                errors.append(self._stale(delivery))
        held.tell()
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

    def _go_on(self) -> None:
        if self._held is not None:
            self._held.tell()
        self._wake()

    # -- again later

    def _take_back(self, held: Held, delivery: RabbitDelivery, after: float) -> bool:
        epoch, tag, again = delivery.epoch, delivery.tag, self._again
        if again is None or epoch != held.epoch or again.has(epoch, tag) or not held.tags.is_out(tag):
            return False
        again.start(delivery, after, delivery.attempt + 1)
        return True

    def can_retry(self, delivery: Delivery) -> bool:
        """See `Source.can_retry`: its copy has headers of ours besides its own, and they must fit into a frame."""
        assert isinstance(delivery, RabbitDelivery)
        epoch = self._consuming.current
        return self._again is None or epoch is None or self._again.fits(delivery, epoch.frame_max)

    def _is_alive(self, epoch: int) -> bool:
        return self._held is not None and epoch == self._held.epoch

    def _put_aside(self, delivery: RabbitDelivery) -> None:
        held = self._held
        if held is not None and held.tags.settle(delivery.tag):
            held.settled += 1
            held.tell()

    # -- who takes too long

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._watching = loop.call_later(self._settings.consumer_timeout / LOOKS, self._look)
        if self._held is not None:
            shrinks = self._live and self._window.changes and not self._stopped
            self._held.look(loop.time(), shrinks)

    def _mind_time(self, told: bool = False) -> None:
        """The server ended this channel, or its consumer. If that was because its time was over, as it `told` us or as
        it seems, fewer must be here."""
        now = asyncio.get_running_loop().time()
        if told or (self._held is not None and self._held.is_late(now)):
            self._window.shrink()

    # -- the end

    async def flush(self, deadline: float) -> None:
        """See `Source.flush`. AMQP confirms no acknowledgement; a quorum queue has it soon after its channel does."""
        self._require_open()
        loop = asyncio.get_running_loop()
        if self._again is not None:
            await self._again.finished(max(0.0, deadline - loop.time()))
        held = self._held
        if held is None:
            return
        await held.consumer.rest()
        held.tell(step_over=True)
        try:
            async with asyncio.timeout_at(deadline):
                await held.channel.flush()
                if (rest := held.told_at + _LINGER - loop.time()) > 0:
                    await held.consumer.heard()
                    await asyncio.sleep(rest)
        except (TimeoutError, BrokerError):
            pass  # what was not told comes again

    async def stop(self) -> None:
        """See `Source.stop`. What nobody has fetched goes back, so that others get it at once."""
        if self._stopped:
            return
        self._stopped = True
        self._wake()
        held = self._held
        if held is None or self._subscription.ordered_by is not None:
            return
        try:
            await held.consumer.cancel()
        except BrokerError:
            return
        if self._held is held:
            held.give_back()

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
        held = self._held
        if held is None:
            return
        await held.consumer.rest()
        held.tell(step_over=True)
        self._forget_channel()
        self._drop(held.epoch)
        await held.channel.close()

    def _require_open(self) -> None:
        if self._closed:
            raise BrokerClosed("this subscription to RabbitMQ was closed")

    def gauges(self) -> Mapping[str, float]:
        """See `Source.gauges`. ``open``: messages that came and are not settled; ``buffered``: those of them that wait
        here to be fetched; ``prefetch``: how many may be open."""
        held = self._held
        found = (0, 0) if held is None else (held.last_tag() - held.settled, held.waiting)
        return {"open": found[0], "buffered": found[1], "prefetch": self._window.size}

    def health(self) -> Health:
        """See `Source.health`: live is who has the server's ConsumeOk."""
        if self._closed:
            return Health(False, "closed")
        if not self._live:
            return Health(False, self._why)
        trouble = self._again.trouble if self._again is not None else None
        return Health(trouble is None, trouble or "")
