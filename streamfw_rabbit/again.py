"""Taking single messages back for later: published again to the retry queues, confirmed, and then acknowledged."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Final

from streamfw.errors import BrokerClosed, BrokerError, PublishError, Unavailable
from streamfw.message import Outgoing
from streamfw.runtime.settler import backoff

from . import _content
from ._frames import fits
from .channel import FieldValue, Properties
from .delivery import RabbitDelivery, left_of
from .epochs import Epochs
from .headers import ATTEMPT, FROM, LEFT, copied
from .publish import Publishing
from .retry import LONGEST, Ladder

__all__ = ["Again"]

log = logging.getLogger("streamfw.rabbit")

_DEATHS: Final = 8192  # bytes that ``x-death`` may have in the end: about 300 for each of the rungs


class Again:
    """Takes back messages of one subscription, in the background. Until its copy is confirmed a message is out like any
    other: `alive` tells whether the channel that it came on is still there, `done` is called when it may be ended."""

    def __init__(
        self,
        ladder: Ladder,
        epochs: Epochs,
        publishing: Publishing,
        *,
        alive: Callable[[int], bool],
        done: Callable[[RabbitDelivery], None],
    ) -> None:
        self._ladder, self._epochs, self._publishing = ladder, epochs, publishing
        self._alive, self._done = alive, done
        self._moving: dict[tuple[int, int], asyncio.Task[None]] = {}  # by epoch and tag
        self.trouble: str | None = None
        """Why something cannot be put aside at present."""

    @property
    def busy(self) -> bool:
        return bool(self._moving)

    def has(self, epoch: int, tag: int) -> bool:
        """Whether that delivery is being taken back."""
        return (epoch, tag) in self._moving

    def fits(self, delivery: RabbitDelivery, frame_max: int) -> bool:
        """Whether its copy would fit into frames of that size, also with what the server adds on each rung."""
        if not delivery.properties.raw_headers:
            return True
        try:
            # The largest numbers that there may be.
            properties = self._copy(delivery, 2 * LONGEST, LONGEST)
            return fits(_content.encode(properties, LONGEST), frame_max - min(_DEATHS, frame_max // 4))
        except (ValueError, TypeError):
            return False

    def _copy(self, delivery: RabbitDelivery, seconds: int, attempt: int) -> Properties:
        table: dict[str, FieldValue] = {ATTEMPT: attempt, FROM: [delivery.exchange, delivery.routing_key]}
        if seconds > LONGEST:
            table[LEFT] = seconds - LONGEST
        return copied(delivery.properties, table)

    def start(self, delivery: RabbitDelivery, after: float, attempt: int) -> None:
        """Let it come again `after` seconds from now, as that attempt."""
        place = (delivery.epoch, delivery.tag)
        task = self._moving[place] = asyncio.create_task(self._move(delivery, after, attempt))
        task.add_done_callback(lambda _: self._moving.pop(place))

    def without_early(self, taken: list[RabbitDelivery]) -> list[RabbitDelivery]:
        """Those whose whole pause was longer than the retry queues can do go there once more; the others."""
        ready = []
        for delivery in taken:
            left = left_of(delivery, self._ladder) if delivery.attempt > 1 else 0.0
            if left > 0:
                self.start(delivery, left, delivery.attempt)
            else:
                ready.append(delivery)
        return ready

    async def _move(self, delivery: RabbitDelivery, after: float, attempt: int) -> None:
        tries = 0
        while self._alive(delivery.epoch):
            try:
                failed = await self._send(delivery, after, attempt)
            except BrokerClosed:
                return
            if not self._alive(delivery.epoch):
                return
            if failed is None:
                self.trouble = None
                self._done(delivery)
                return
            self.trouble = f"a message cannot be put aside for later: {failed}"
            log.log(logging.DEBUG if tries else logging.WARNING, "%s: %s", self._ladder.name, self.trouble)
            await asyncio.sleep(backoff(tries))
            tries += 1

    async def _send(self, delivery: RabbitDelivery, after: float, attempt: int) -> PublishError | None:
        message = Outgoing(name=self._ladder.name, body=delivery.body, message_id=delivery.message_id, stored=True)
        seconds = max(1, math.ceil(after))
        try:
            exchange, key = await self._ladder.way(self._epochs, seconds)
        except BrokerClosed:
            raise
        except BrokerError as error:
            return Unavailable(str(error), name=message.name, message_id=message.message_id)
        failed = await self._publishing.send(exchange, key, message, self._copy(delivery, seconds, attempt))
        if failed is not None:
            self._ladder.forget()  # it may be that somebody deleted it
        return failed

    async def finished(self, timeout: float) -> None:
        """Wait for all of them, so many seconds at most."""
        if self._moving:
            await asyncio.wait(set(self._moving.values()), timeout=timeout)

    def cancel(self) -> None:
        """Let be: the originals come again."""
        for task in self._moving.values():
            task.cancel()
