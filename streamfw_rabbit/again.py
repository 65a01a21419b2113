"""Taking single messages back for later: published again to the retry queues, confirmed, and then acknowledged."""

from __future__ import annotations

import math

from streamfw.errors import BrokerError, PublishError, Unavailable
from streamfw.message import Outgoing

from .channel import FieldValue
from .delivery import RabbitDelivery
from .epochs import Epochs
from .headers import ATTEMPT, FROM, LEFT, copied
from .publish import Publishing
from .retry import LONGEST, Ladder

__all__ = ["Again"]


class Again:
    """Publishes the copies of one subscription."""

    def __init__(self, ladder: Ladder, epochs: Epochs, publishing: Publishing) -> None:
        self._ladder, self._epochs, self._publishing = ladder, epochs, publishing

    async def send(self, delivery: RabbitDelivery, after: float, attempt: int) -> PublishError | None:
        """Publish a copy that comes `after` seconds from now, as that attempt. None: it is stored."""
        message = Outgoing(name=self._ladder.name, body=delivery.body, message_id=delivery.message_id)
        seconds = max(1, math.ceil(after))
        table: dict[str, FieldValue] = {ATTEMPT: attempt, FROM: [delivery.exchange, delivery.routing_key]}
        if seconds > LONGEST:
            table[LEFT] = seconds - LONGEST
        try:
            exchange, key = await self._ladder.way(self._epochs, seconds)
        except BrokerError as error:
            return Unavailable(str(error), name=message.name, message_id=message.message_id)
        failed = await self._publishing.send(exchange, key, message, copied(delivery.properties, table))
        if failed is not None:
            self._ladder.forget()  # it may be that somebody deleted it
        return failed
